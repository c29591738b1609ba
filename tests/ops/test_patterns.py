"""Sparse patterns as data: published layouts, and what must hold for every pattern whatever its parameters."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention

from hasten.errors import ConfigError
from hasten.ops.attention.block_mask import BlockMask, dense_blocks, seen_blocks
from hasten.ops.attention.patterns import (
    PATTERNS,
    Atrous,
    BigBird,
    BSLongformer,
    Causal,
    Dense,
    Fixed,
    Local,
    SlidingWindow,
    Strided,
    Variable,
)

small = st.integers(0, 3)
sizes = st.integers(1, 5)
causal_or_not = st.booleans()
shared = {"block": st.sampled_from([1, 16, 64]), "seed": small, "per_head": st.booleans()}


@st.composite
def ranges(draw):
    starts = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    if draw(st.booleans()):
        return {"global_indices": starts}
    return {"global_indices": starts, "global_ends": tuple(s + draw(sizes) for s in starts)}


@st.composite
def fixed(draw):
    local = draw(sizes)
    blocks = draw(st.integers(1, local))
    causal = draw(causal_or_not)
    options = {"causal": causal, "horizontal": not causal and draw(st.booleans())}
    options |= {"local_blocks": local, "global_blocks": blocks}
    return Fixed(
        global_patterns=draw(st.integers(1, local // blocks)), **options, **draw(st.fixed_dictionaries(shared))
    )


@st.composite
def variable(draw):
    causal = draw(causal_or_not)
    options = {"causal": causal, "horizontal": not causal and draw(st.booleans()), "random_blocks": draw(small)}
    windows = tuple(draw(st.lists(sizes, min_size=1, max_size=3)))
    return Variable(windows=windows, **options, **draw(ranges()), **draw(st.fixed_dictionaries(shared)))


@st.composite
def longformer(draw):
    options = {"causal": draw(causal_or_not), "window": draw(sizes)}
    return BSLongformer(**options, **draw(ranges()), **draw(st.fixed_dictionaries(shared)))


patterns = st.one_of(
    st.builds(Dense, causal=causal_or_not, **shared),
    st.builds(Causal, **shared),
    st.builds(Local, causal=causal_or_not, radius=small, **shared),
    st.builds(SlidingWindow, causal=causal_or_not, window=sizes, **shared),
    st.builds(Atrous, causal=causal_or_not, stride=sizes, **shared),
    st.builds(Strided, causal=causal_or_not, radius=small, stride=sizes, **shared),
    st.builds(BigBird, causal=causal_or_not, random_blocks=small, window=sizes, global_blocks=small, **shared),
    fixed(),
    variable(),
    longformer(),
)


def rows(text):
    return tuple(text.split())


def test_published_layouts():
    assert Fixed().layout(8).strings() == rows(
        "10000000 11000000 11100000 11110000 00011000 00011100 00011110 00011111"
    )
    assert BSLongformer(window=3, global_indices=(0,)).layout(8).strings() == rows(
        "10000000 11000000 11100000 10110000 10011000 10001100 10000110 10000011"
    )
    assert Variable(causal=False, windows=(1, 2), global_indices=(0,)).layout(8).strings() == rows(
        "10000000 11100000 11100000 10011000 10011000 10000110 10000110 10000001"
    )


def test_definitions():
    assert Local(radius=1, causal=False).layout(4).strings() == rows("1100 1110 0111 0011")
    assert Local(radius=1).layout(4).strings() == rows("1000 1100 0110 0011")
    assert Atrous(stride=3, causal=False).layout(5).strings() == rows("10010 01001 00100 10010 01001")
    assert Strided(radius=1, stride=3).layout(6).strings() == rows("100000 110000 011000 101100 010110 001011")
    assert Strided(radius=2, stride=4, causal=False).layout(6).strings() == rows(
        "111010 111101 111110 011111 101111 010111"
    )
    for window, radius in ((1, 0), (2, 1), (3, 1), (4, 2), (7, 3)):
        for causal in (True, False):
            local = Local(radius=radius, causal=causal).layout(12)
            assert SlidingWindow(window=window, causal=causal).layout(12).strings() == local.strings()
    assert Dense().layout(2).strings() == rows("11 11")
    assert Causal().layout(3).strings() == rows("100 110 111")
    assert BigBird(random_blocks=0, causal=False).layout(5).strings() == rows("11111 11100 11110 10111 10011")


def test_sizes_that_are_not_given_are_the_published_ones():
    assert (Local().radius, SlidingWindow().window, Atrous().stride) == (1, 3, 4)
    assert (Strided().radius, Strided().stride) == (1, 4)
    assert (Fixed().local_blocks, Fixed().global_blocks, Fixed().global_patterns) == (4, 1, 1)
    assert (Variable().windows, Variable().random_blocks, Variable().global_indices) == ((4,), 0, (0,))
    assert (BigBird().random_blocks, BigBird().window, BigBird().global_blocks) == (1, 3, 1)
    assert (BSLongformer().window, BSLongformer().global_indices) == (3, (0,))


def test_fixed_takes_another_global_block_for_each_head_in_turn():
    layout = Fixed(global_patterns=2).layout(8, heads=3)
    assert layout.strings(0)[4] == "00011000"
    assert layout.strings(1)[4] == "00101000"
    assert layout.strings(2) == layout.strings(0)


def test_horizontal_rows_see_everything():
    layout = Fixed(causal=False, horizontal=True).layout(6)
    assert layout.strings() == rows("111101 111101 111101 111111 000111 111111")
    assert Variable(causal=False, horizontal=True, windows=(1,)).layout(3).strings() == rows("111 110 101")


@given(patterns, st.integers(1, 20), st.integers(0, 20), st.integers(1, 3), small)
def test_causal_patterns_never_see_the_future_and_all_see_themselves(pattern, queries, before, heads, layer):
    layout = pattern.layout(queries, queries + before, heads=heads, layer=layer)
    assert layout.blocks_q == queries
    assert layout.first_row == before
    for head in layout.heads:
        for place, row in enumerate(head, before):
            assert place in row
            assert list(row) == sorted(set(row))
            assert row[0] >= 0
            assert row[-1] <= (place if pattern.causal else queries + before - 1)


@given(patterns, st.integers(1, 12), st.integers(0, 12), small)
def test_a_causal_row_stays_what_it_is_when_the_sequence_grows(pattern, blocks, more, layer):
    short, long = (pattern.layout(n, heads=2, layer=layer) for n in (blocks, blocks + more))
    if pattern.causal:
        assert all(a == b[:blocks] for a, b in zip(short.heads, long.heads, strict=True))
    last = pattern.layout(1, blocks + more, heads=2, layer=layer)
    assert all(a[0] == b[-1] for a, b in zip(last.heads, long.heads, strict=True))


@given(
    st.one_of(st.builds(Local, radius=small, **shared), st.builds(SlidingWindow, window=sizes, **shared)),
    st.integers(1, 20),
)
def test_a_bounded_pattern_stays_within_its_reach(pattern, blocks):
    keys = blocks * pattern.block
    seen = BlockMask.of(pattern, keys).dense(keys, keys, torch.device("cpu"))[0]
    first = seen.int().argmax(-1)
    assert ((torch.arange(keys) - first) < pattern.reach).all()


@pytest.mark.parametrize(
    ("pattern", "repeats"),
    [
        (Local(radius=2), True),
        (SlidingWindow(window=5, block=16), True),
        (Atrous(stride=3), True),
        (BigBird(), False),
        (Strided(radius=1, stride=5), False),
    ],
)
def test_blocks_of_a_cycle_are_those_of_every_row_within_its_reach(pattern, repeats):
    full = dense_blocks(pattern.layout(20))[0]
    seen = seen_blocks(pattern, 20)[0]
    assert (len(seen) < 10) == repeats
    reach = 20 * pattern.block if pattern.reach is None else pattern.reach
    for row in range(20):
        first = max(0, row - (reach - 1) // pattern.block)
        for column in range(first, row + 1):
            assert seen[row % len(seen), column % seen.shape[1]] == full[row, column]


def test_random_blocks_are_clipped_where_there_are_fewer_candidates():
    layout = BigBird(random_blocks=2).layout(6)
    assert layout.strings()[:5] == rows("100000 110000 111000 111100 111110")
    assert sum(map(int, layout.strings()[5])) == 5


def test_randomness_depends_on_seed_layer_and_head_and_on_nothing_else():
    pattern = BigBird(random_blocks=2, per_head=True)
    first = pattern.layout(30, heads=2)
    torch.manual_seed(7)
    assert pattern.layout(30, heads=2) == first
    assert first.heads[0] != first.heads[1]
    assert pattern.layout(30, heads=2, layer=1).heads[0] != first.heads[0]
    assert BigBird(random_blocks=2, seed=1).layout(30).heads[0] != BigBird(random_blocks=2).layout(30).heads[0]
    # Another process, with another hash seed, as another rank would be.
    code = "from hasten.ops.attention.patterns import BigBird; "
    code += "print(BigBird(random_blocks=2, per_head=True).layout(30, heads=2).heads)"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == repr(first.heads)


def test_one_head_is_laid_out_unless_more_are_asked_for():
    pattern = BigBird(random_blocks=2, per_head=True)
    assert pattern.layout(30).heads == pattern.layout(30, heads=2).heads[:1]


def test_blocks_of_the_usual_size_are_tiles_of_the_native_kernel():
    tiles = BlockMask.of(Local(radius=0), 190).tiles()
    assert tiles.starts.tolist() == [[0, 1, 2, 3]]
    assert tiles.columns.tolist() == [0, 1, 2]


def test_layout_leaves_the_global_generators_alone():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    BigBird(random_blocks=3).layout(20)
    assert torch.equal(torch.rand(1), expected)


def test_density_is_counted_against_dense_attention_of_the_same_kind():
    assert Causal().layout(5).density == 1
    assert Dense().layout(5).density == 1
    assert Local(radius=0).layout(4).density == pytest.approx(4 / 10)
    assert Local(radius=0).layout(2, 4).density == pytest.approx(2 / 7)


def test_rendering():
    assert Local(block=16).render(3) == "Local(block=16), 83% of the blocks\n■ · ·\n■ ■ ·\n· ■ ■"
    shown = BigBird(random_blocks=1, window=3, global_blocks=1).render(8).splitlines()
    page = (Path(__file__).parents[2] / "docs" / "sparse-attention.md").read_text()
    assert all(f"    {line}\n" in page for line in shown)
    assert Fixed(global_patterns=2).render(8, head=1).splitlines()[5] == "· · ■ · ■ · · ·"
    assert set(PATTERNS) == {
        *("causal", "dense", "local", "sliding-window", "atrous"),
        *("strided", "fixed", "variable", "bigbird", "bslongformer"),
    }


@pytest.mark.parametrize(
    "make",
    [
        lambda: Local(block=0),
        lambda: Local(radius=-1),
        lambda: Local(radius=True),
        lambda: Local(first_head=-1),
        lambda: Atrous(stride=0),
        lambda: Causal(causal=False),
        lambda: Fixed(global_patterns=5),
        lambda: Fixed(horizontal=True),
        lambda: Variable(windows=()),
        lambda: Variable(windows=(0,)),
        lambda: Variable(horizontal=True),
        lambda: BSLongformer(global_indices=(3,), global_ends=(3,)),
        lambda: BSLongformer(global_indices=(3,), global_ends=()),
        lambda: BSLongformer(global_indices=(-1,)),
        lambda: BSLongformer(global_indices=("a",)),
        lambda: BSLongformer(window=0),
        lambda: BigBird(random_blocks=-1),
        lambda: BigBird(window=0),
        lambda: BigBird(global_blocks=-1),
        lambda: SlidingWindow(window=0),
        lambda: Strided(stride=0),
        lambda: Strided(radius=-1),
        lambda: Variable(random_blocks=-1),
        lambda: Fixed(global_blocks=0),
        lambda: Local().layout(0),
        lambda: Local().layout(4, 3),
        lambda: Local().layout(4, heads=0),
    ],
)
def test_sizes_that_mean_nothing_are_refused(make):
    with pytest.raises(ConfigError, match=r"found|drop|use|fit"):
        make()


@settings(max_examples=50)
@given(patterns, st.integers(1, 200), st.data())
def test_dense_mask_is_the_layout_spelled_out(pattern, keys, data):
    queries = data.draw(st.integers(1, keys))
    mask = BlockMask.of(pattern, keys, queries=queries, heads=2, layer=1)
    seen = mask.dense(queries, keys, torch.device("cpu"))
    full = pattern.layout(-(-keys // pattern.block), heads=2, layer=1)
    for h, head in enumerate(full.heads):
        for i in range(queries):
            at = keys - queries + i
            expected = {j for j in range(keys) if j // pattern.block in head[at // pattern.block]}
            if pattern.causal:
                expected = {j for j in expected if j <= at}
            assert set(seen[h, i].nonzero().flatten().tolist()) == expected


@pytest.mark.slow  # compiles
def test_flex_attention_takes_the_layout_as_block_numbers():
    # Compiled, because the eager form on the CPU ignores the blocks; forward only, as flex has no backward there.
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, 68, 16, generator=generator)
    k, v = (torch.randn(1, 2, 100, 16, generator=generator) for _ in range(2))
    mask = BlockMask.of(BigBird(block=16, per_head=True), 100, queries=68, heads=2)
    found = compiled(q, k, v, block_mask=mask.flex(68, q.device))
    seen = mask.dense(68, 100, q.device)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    torch.testing.assert_close(found, expected)


@settings(max_examples=30)
@given(patterns, st.integers(1, 300), st.integers(0, 150))
def test_flex_sees_what_the_layout_shows(pattern, queries, before):
    """Its function says it of every pair, and its tiles of 128 are those of which anything, and all, is seen."""
    mask = BlockMask.of(pattern, queries + before, queries=queries, heads=2)
    expected = mask.dense(queries, queries + before, torch.device("cpu"))
    flex = mask.flex(queries, torch.device("cpu"))
    heads, own, keys = (torch.arange(size) for size in expected.shape)
    found = flex.mask_mod(0, heads[:, None, None], own[:, None], keys)
    assert torch.equal(found.expand_as(expected), expected)
    padding = (0, -expected.shape[2] % 128, 0, -expected.shape[1] % 128)
    tiles = torch.nn.functional.pad(expected, padding).unflatten(1, (-1, 128)).unflatten(3, (-1, 128))
    some, whole = tiles.any(4).any(2), tiles.all(4).all(2)
    for seen, counts, columns in (
        (some & ~whole, flex.kv_num_blocks, flex.kv_indices),
        (whole, flex.full_kv_num_blocks, flex.full_kv_indices),
    ):
        for place in itertools.product(*map(range, counts[0].shape)):
            named = columns[0][place][: counts[0][place]].tolist()
            assert named == seen[place].nonzero().flatten().tolist()


def test_masks_of_other_lengths_are_refused():
    cpu = torch.device("cpu")
    with pytest.raises(ConfigError, match="100 keys; found 101"):
        BlockMask.of(Local(block=16), 100).dense(10, 101, cpu)
    with pytest.raises(ConfigError, match="last 20 positions; found 21"):
        BlockMask.of(Local(block=16), 100, queries=10).dense(21, 100, cpu)
    with pytest.raises(ConfigError, match="cannot be the mask of 65 keys"):
        BlockMask(Local(block=16).layout(4), 65)
    with pytest.raises(ConfigError, match="at least one; found 0"):
        BlockMask.of(Local(), 10, queries=0)
    with pytest.raises(ConfigError, match="its blocks have 48 positions"):
        BlockMask.of(Local(block=48), 100).tiles()

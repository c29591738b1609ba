"""Cached keys and values in int8 and int4: their bytes, and attention over them, on every instruction set."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.errors import ConfigError
from hasten.model.fused_linear import packed
from hasten.ops.attention import AttentionRequest, AttentionSpec
from hasten.ops.attention.cache_rows import RowFormat, turn
from hasten.ops.attention.paged import PAGED_KERNELS, gathered, groups_of
from hasten.ops.attention.reference import reference
from hasten.ops.attention.view import AttentionMetadata, KVView
from hasten.ops.native import library
from hasten.ops.picker import explain, pick
from instruction_sets import ISAS
from layer_attention import layer_of

native = pytest.mark.skipif(library() is None, reason="the native kernels cannot be built here (no C++ compiler)")

INT8, INT4, TURNED = RowFormat(8), RowFormat(4), RowFormat(4, rotated=True)
SMALL = (INT8, RowFormat(8, rotated=True), INT4, TURNED)
SIZES = [64, 80, 96, 128, 256, 512, 100, 20, 7]


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def hadamard(size):
    """The matrix of `turn`, by its definition: blocks of the largest power of two that divides the size."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while size % (2 * len(matrix)) == 0:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    return torch.block_diag(*[matrix / len(matrix) ** 0.5] * (size // len(matrix)))


@pytest.mark.parametrize("size", SIZES)
def test_a_turn_is_the_hadamard_matrix_and_its_own_inverse(size):
    x = draw(size, 5, size).double()
    torch.testing.assert_close(turn(x), x @ hadamard(size), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(turn(turn(x)), x, rtol=1e-12, atol=1e-12)


@given(st.integers(0, 999), st.integers(1, 256), st.floats(-30, 30), st.sampled_from(SMALL))
def test_what_is_read_is_within_a_step_of_what_was_written(seed, size, exponent, rows):
    x = draw(seed, 3, 2, size) * 10**exponent
    kept = rows.write(x)
    assert kept.dtype == (torch.int8 if rows.bits == 8 else torch.uint8)
    assert kept.shape == (3, 2, rows.length(size))
    assert rows.bytes(size, torch.bfloat16) == rows.length(size)
    found, x = rows.read(kept, size, torch.float64), x.double()
    if rows.rotated:
        found, x = turn(found), turn(x)
    if rows.bits == 8:
        limit = 0.5001 * x.abs().amax(-1, keepdim=True) / 127
    else:
        padded = torch.nn.functional.pad(x, (0, -size % 32)).unflatten(-1, (-1, 32))
        step = (padded.abs().amax(-1) / 8).repeat_interleave(32, -1)[..., :size]
        if size >= 32:
            assert (found - x).square().sum() <= (step / 2).square().sum()
        limit = 24 / 17 * step  # a scale is up to a 17th too small, and 7 of it all that the other sign has
    assert ((found - x).abs() <= limit + 1e-6 * x.abs().max()).all()


def test_int4_takes_72_bytes_for_a_head_of_128_and_a_turn_spreads_outliers():
    assert [INT4.length(size) for size in (64, 80, 96, 128, 256)] == [36, 54, 54, 72, 144]
    x = draw(0, 500, 128)
    x[:, 5] *= 20
    errors = [(rows.read(rows.write(x), 128, torch.float32) - x).square().mean() for rows in (INT4, TURNED)]
    assert errors[1] < errors[0] / 2


def test_one_row_of_an_odd_size_is_read():
    x = torch.randn(1, 65, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(INT8.read(INT8.write(x), 65, torch.float32), x, rtol=0, atol=0.02)


@pytest.mark.parametrize("rows", SMALL, ids=str)
def test_zeros_and_what_is_no_number(rows):
    x = torch.zeros(4, 8)
    x[1, 3], x[2, 4], x[3, 5] = 1e-36, torch.inf, torch.nan
    found = rows.read(rows.write(x), 8, torch.float32)
    assert not found[:2].any()
    assert found[2:].isnan().all()


@native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("size", SIZES)
def test_the_fused_step_writes_the_bytes_of_the_reference(isa, size):
    """Without rotary turn and head norms its values are those of the product alone."""
    kv_heads, tokens, k = 2, 9, 40
    layer = torch.nn.Linear(k, (1 + 2 * kv_heads) * size, bias=False).bfloat16()
    with torch.no_grad():
        layer.weight.copy_(draw(size, *layer.weight.shape))
    x = draw(1, tokens, k)
    x[4], x[5], x[6, 0] = 0, 1e-30, torch.nan
    p = packed(layer)
    weight = {**p.packed._asdict(), "bias": p.bias, "group_size": p.format.group_size, "planes": p.planes}
    norm = {"norm_weight": None, "norm_bias": None, "eps": 0.0, "offset": 0.0, "centred": False}
    none = dict.fromkeys(("q_norm", "k_norm", "cos", "sin"))
    ops = library(isa).ops
    slots = torch.tensor([3, 0, 8, 5, 7, -1, 9, 1, 2])
    rows_of = {"out_features": layer.out_features}
    plan = [ops.plan_weight(**rows_of, in_features=k, **weight, lora_a=None, lora_b=None)]
    values = ops.norm_linear(x=x, **norm, **weight, **rows_of).unflatten(-1, (-1, size))
    for rows in SMALL:
        caches = [torch.full((12, kv_heads, rows.length(size)), 99, dtype=rows.element(x.dtype)) for _ in range(2)]
        own = {"weights": plan, "heads": 1, "head_dim": size, "k": caches[0], "v": caches[1]}
        ops.attention_input(x=x, **norm, **none, **own, slot_mapping=slots, rotated=rows.rotated)
        for cache, part in zip(caches, values.split([1, kv_heads, kv_heads], dim=1)[1:], strict=True):
            expected = torch.full_like(cache, 99)
            expected[slots] = rows.write(part)
            assert torch.equal(cache, expected), rows


def run(isa, q, view, spec):
    scores = (spec.scale, spec.window or 0, spec.softcap or 0.0)
    return library(isa).ops.attention(q, view.k, view.v, *view.metadata.to_read, *scores)


def case(seed, counts, *, heads, size, block, window=None, softcap=None, rows=INT8):
    """A ragged step: counts, [(tokens before, new tokens)]; blocks in random order, garbage where nobody may look."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [before + new for before, new in counts]
    needed = [-(-length // block) for length in lengths]
    order = torch.randperm(sum(needed), generator=generator).tolist()
    table = torch.zeros(len(counts), max(needed), dtype=torch.int64)
    shape = (2, sum(needed) * block + 1, heads[1], size)
    k, v = rows.write(torch.randn(shape, generator=generator) * torch.rand(*shape[:3], 1, generator=generator))
    for own, length, count in zip(table, lengths, needed, strict=True):
        for i in range(count):
            own[i] = order.pop()
        past = own[count - 1] * block + torch.arange((length - 1) % block + 1, block)
        k[past] = v[past] = rows.write(torch.full((size,), torch.nan))
    starts = torch.tensor([0, *(new for _, new in counts)]).cumsum(0)
    view = KVView(k, v, AttentionMetadata(starts, starts, torch.tensor(lengths), None, table, block, rows))
    q = torch.randn(int(starts[-1]), heads[0], size, generator=generator)
    options = {"window": window, "softcap": softcap}
    return q, view, AttentionSpec(heads=heads[0], kv_heads=heads[1], head_dim=size, scale=size**-0.5, **options)


@native
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=15)
@given(
    st.integers(0, 1000),
    st.lists(st.tuples(st.integers(0, 600), st.sampled_from([1, 1, 2, 7, 40])), min_size=1, max_size=3),
    st.sampled_from([(1, 1), (4, 4), (4, 2), (8, 1), (6, 2)]),
    st.sampled_from(SIZES),
    st.sampled_from([1, 4, 16, 64]),
    st.sampled_from([None, 5, 100]),
    st.sampled_from([None, 20.0]),
    st.sampled_from(SMALL),
)
def test_error_is_at_most_twice_the_references(isa, seed, counts, heads, size, block, window, softcap, rows):
    errors, allowed = [], []
    for draws in range(8):  # a single tiny draw can be lucky for either side
        options = {"window": window, "softcap": softcap, "rows": rows}
        q, view, spec = case(8 * seed + draws, counts, heads=heads, size=size, block=block, **options)
        _, starts, lengths, _, table, *_ = view.metadata
        groups = groups_of(starts.numpy(), lengths.numpy(), table.numpy(), block)
        exact = gathered(
            q.double(), view, spec=spec, groups=lambda found=groups: found, dense=layer_of(reference, spec)
        )
        plain = gathered(
            q.bfloat16(), view, spec=spec, groups=lambda found=groups: found, dense=layer_of(explicit_bfloat16, spec)
        )
        errors.append((run(isa, q, view, spec).double() - exact).flatten())
        allowed.append((plain.double() - exact).flatten())
    error, limit = torch.cat(errors).abs(), torch.cat(allowed).abs()
    assert error.square().mean().sqrt() <= 2 * limit.square().mean().sqrt() + 1e-7
    assert error.max() <= 2 * limit.max() + 1e-6


def explicit_bfloat16(q, k, v, spec, inputs):
    """softmax(q·kᵀ)·v of (B, T, H, D) and (B, S, Hkv, D) with every intermediate result in bfloat16."""
    k, v = (t.repeat_interleave(spec.heads // spec.kv_heads, 2) for t in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * spec.scale
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    mask = inputs.mask
    if mask is None:
        distance = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
        mask = ((distance >= 0) & (distance < (spec.window or 1 << 30)))[None]
    return torch.einsum("bhts,bshd->bthd", scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1), v)


@native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("size", "rows"), [(64, INT8), (80, INT8), (80, INT4), (64, TURNED)], ids=str)
def test_a_query_gets_the_same_bits_alone_and_in_company(isa, size, rows):
    counts = [(613, 1), (100, 90), (0, 33), (5, 1)]
    q, view, spec = case(1, counts, heads=(4, 2), size=size, block=16, rows=rows)
    together = run(isa, q, view, spec)
    for b, (before, new) in enumerate(counts):
        for t in {0, new // 2, new - 1}:
            row = int(view.metadata.query_start_loc[b]) + t
            step = view.metadata._replace(
                query_start_loc=torch.tensor([0, 1]),
                seq_lens=torch.tensor([before + t + 1]),
                block_table=view.metadata.block_table[b : b + 1],
            )
            alone = view._replace(metadata=step)
            assert torch.equal(run(isa, q[row : row + 1], alone, spec)[0], together[row])


@native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("size", [64, 80])
def test_bfloat16_holds_int4_values_exactly(isa, size):
    q, view, spec = case(4, [(70, 3), (9, 1)], heads=(4, 2), size=size, block=16, rows=INT4)
    k, v = (INT4.read(t, size, torch.bfloat16) for t in (view.k, view.v))
    torch.testing.assert_close(k.float(), INT4.read(view.k, size, torch.float32), rtol=0, atol=0, equal_nan=True)
    plain = KVView(k, v, view.metadata._replace(rows=RowFormat()))
    assert torch.equal(run(isa, q, view, spec), run(isa, q, plain, spec))


@native
def test_caches_that_do_not_fit_are_refused():
    q, view, spec = case(2, [(9, 1)], heads=(2, 1), size=16, block=4)
    narrow, other = view.k[..., :-1].contiguous(), torch.zeros(view.k.shape[0], 1, 16, dtype=torch.bfloat16)
    for changes, reason in (
        ({"k": narrow, "v": narrow}, "does not fit heads of 16"),
        ({"v": other}, "of one dtype"),
        ({"k": other.float()}, "bfloat16, int8 or int4"),
        ({"k": view.k.view(torch.uint8)}, "of one dtype"),
        ({"k": view.k.view(torch.uint8), "v": view.v.view(torch.uint8)}, "does not fit heads of 16"),
        ({"v": view.v[:-1]}, "must lie alike"),
    ):
        with pytest.raises(RuntimeError, match=reason):
            run(None, q, view._replace(**changes), spec)


@native
def test_opcheck():
    q, view, spec = case(3, [(9, 1), (0, 3)], heads=(2, 1), size=16, block=4)
    checks = ("test_schema", "test_faketensor")
    arguments = (q, view.k, view.v, *view.metadata.to_read, spec.scale, 0, 0.0)
    torch.library.opcheck(library().ops.attention.default, arguments, test_utils=checks)


def request(*, device="cpu", dtype=torch.bfloat16, head_dim=64, rows=INT8):
    spec = AttentionSpec(heads=8, kv_heads=2, head_dim=head_dim, scale=0.125)
    return AttentionRequest(spec=spec, device=torch.device(device), dtype=dtype, cache_bits=rows.bits)


@native
def test_which_kernel_reads_them(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert pick(PAGED_KERNELS, request()).name == "native"
    assert pick(PAGED_KERNELS, request(device="cuda")).name == "triton"
    exact = explain(PAGED_KERNELS, request(dtype=torch.float32))
    assert exact.kernel == "gathered"
    assert dict(exact.others)["native"] == "it takes bfloat16, not float32"
    odd = explain(PAGED_KERNELS, request(device="cuda", head_dim=70))
    assert odd.kernel == "gathered"
    assert "over an int8 cache it must be a multiple of 4" in dict(odd.others)["triton"]
    assert pick(PAGED_KERNELS, request(rows=TURNED)).name == "native"
    on_cuda = explain(PAGED_KERNELS, request(device="cuda", rows=TURNED))
    assert on_cuda.kernel == "gathered"
    assert dict(on_cuda.others)["triton"] == "it reads caches in bfloat16 and int8, not int4"
    with pytest.raises(ConfigError, match="multiple of 4"):
        pick(PAGED_KERNELS, request(device="cuda", head_dim=70), forced="triton")

"""The paged cache: blocks in any order, ragged steps and chunks of any size change nothing of what a model says."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hasten
from hasten.engine import cache as caches
from hasten.engine import cache_shapes
from hasten.engine.block_table import Rows
from hasten.engine.cache import KVCache
from hasten.engine.given_texts import GivenTexts
from hasten.errors import ConfigError
from hasten.model.wide import narrow
from hasten.ops.attention.cache_rows import PLAIN, RowFormat
from hasten.ops.native import library
from references import make_reference

FAMILIES = ("gpt2", "llama", "llama-mqa", "mistral", "qwen3", "gemma2", "gemma3_text", "mixtral", "phi3", "qwen2_moe")
FAMILIES += ("olmo3", "exaone4", "ministral3", "cohere2", "glm4", "gpt_oss")
BLOCKS, SIZE = 40, 4
INT8, INT4 = RowFormat(8), RowFormat(4, rotated=True)
native = pytest.mark.skipif(library() is None, reason="the native kernels cannot be built here (no C++ compiler)")


def load(family, fused):
    model = hasten.load(make_reference(family), dtype="float32").eval()
    return hasten.fuse(model.to(torch.bfloat16)) if fused else model


class Paged:
    """Sequences over a paged cache whose blocks lie in a random order."""

    def __init__(self, model, seed=0, **options):
        self.model = model
        self.cache = KVCache(
            model.config, blocks=BLOCKS, block_size=SIZE, dtype=model.dtype, device=model.device, **options
        )
        self.order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(seed)).tolist()
        self.tables, self.lengths = {}, {}

    @torch.inference_mode()
    def step(self, news):
        """news: {sequence: its next tokens}; returns the logits after each of them."""
        rows = []
        for name, tokens in news.items():
            start = self.lengths.get(name, 0)
            table = self.tables.setdefault(name, [])
            while len(table) * SIZE < start + len(tokens):
                table.append(self.order.pop())
            rows.append(Rows(table, start, len(tokens)))
            self.lengths[name] = start + len(tokens)
        context = self.cache.step(rows)
        flat = torch.tensor([[t for tokens in news.values() for t in tokens]])
        logits = self.model(flat, context.positions, context)[0].split([len(tokens) for tokens in news.values()])
        ends = torch.tensor([len(part) for part in logits]).cumsum(0)
        assert context.metadata.query_start_loc.tolist() == [0, *ends.tolist()]
        return dict(zip(news, logits, strict=True))


def alone(model, prompt, count):
    """Greedy tokens of a prompt and the logits they were taken from, over a static cache."""
    decoder = GivenTexts(model, batch=1, capacity=len(prompt) + count)
    found = [decoder.prefill([prompt])]
    for _ in range(count - 1):
        found.append(decoder.decode(found[-1].argmax(-1)))
    return [int(logits.argmax()) for logits in found], torch.cat(found)


def prompts_of(seed, *lengths):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 100, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=native)])
@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_steps_say_what_each_sequence_says_alone(family, fused):
    """Chunks of two prompts beside the decodes of a third: bit for bit where the kernels are batch-invariant."""
    model = load(family, fused)
    prompts = prompts_of(1, 5, 19, 11)
    expected = [alone(model, prompt, 6) for prompt in prompts]
    paged = Paged(model)
    todo = [list(prompt) for prompt in prompts]
    said = [[], [], []]
    chunks = [5, 7, 3]  # of each prompt a step
    while any(len(logits) < 6 for logits in said):
        news = {i: own[: chunks[i]] for i, own in enumerate(todo) if own}
        for i, logits in paged.step(news).items():
            del todo[i][: chunks[i]]
            if not todo[i]:
                said[i].append(logits[-1])
                if len(said[i]) < 6:
                    todo[i].append(int(logits[-1].argmax()))
    for logits, (tokens, before) in zip(said, expected, strict=True):
        logits = torch.stack(logits)
        assert logits.argmax(-1).tolist() == tokens
        if fused:
            assert torch.equal(logits, before)
        else:
            torch.testing.assert_close(logits, before, atol=2e-4, rtol=1e-4)


MODELS = {}


@native
@settings(max_examples=25)
@given(
    st.integers(0, 99),
    st.lists(st.integers(1, 30), min_size=1, max_size=3),
    st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(any),
)
def test_any_chunks_in_any_company_and_order_of_blocks(seed, lengths, sizes):
    if not MODELS:
        MODELS.update({fused: load("gemma3_text", fused) for fused in (False, True)})
    prompts = prompts_of(seed, *lengths)
    for fused, model in MODELS.items():
        expected = []
        for prompt in prompts:
            whole = Paged(model).step({0: prompt})[0]
            if fused:
                decoder = GivenTexts(model, batch=1, capacity=len(prompt))
                assert torch.equal(whole[-1:], decoder.prefill([prompt]))
            expected.append(whole)
        paged = Paged(model, seed=seed)
        todo, found = [list(prompt) for prompt in prompts], [[] for _ in prompts]
        chunk = itertools.cycle(sizes)
        while any(todo):
            news = {i: own[: next(chunk)] for i, own in enumerate(todo) if own}
            news = {i: own for i, own in news.items() if own}
            for i, logits in paged.step(news).items() if news else ():
                found[i].append(logits)
                del todo[i][: len(news[i])]
        for logits, before in zip(found, expected, strict=True):
            if fused:
                assert torch.equal(torch.cat(logits), before)
            else:
                torch.testing.assert_close(torch.cat(logits), before, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("rows", "limit"), [(INT8, 0.02), (INT4, 0.3)], ids=["int8", "int4"])
def test_small_rows_say_nearly_the_same_and_exactly_in_float32(rows, limit):
    """The readable layers in float32: what they read is what `RowFormat.write` wrote, in any chunks."""
    model = load("qwen3", False)
    [prompt] = prompts_of(4, 23)
    paged = Paged(model, row_format=rows)
    assert paged.cache.kernel.name == "gathered"
    whole, exact = paged.step({0: prompt})[0], Paged(model).step({0: prompt})[0]
    error = (whole - exact).square().mean().sqrt()
    assert 0 < error < limit * exact.square().mean().sqrt()  # a step of 1/127, or 1/8, of the largest value
    chunked = Paged(model, seed=3, row_format=rows)
    parts = [chunked.step({0: prompt[:8]})[0], chunked.step({0: prompt[8:]})[0]]
    torch.testing.assert_close(torch.cat(parts), whole, atol=2e-4, rtol=1e-4)


@native
@pytest.mark.parametrize(
    ("family", "rows"), [("gpt2", INT8), ("llama-mqa", INT4), ("gemma2", RowFormat(8, rotated=True)), ("mixtral", INT4)]
)
def test_fused_steps_over_small_rows_give_the_same_bits_in_any_company(family, rows):
    model = load(family, True)
    prompts = prompts_of(5, 5, 19, 11)
    expected = [Paged(model, row_format=rows).step({0: prompt})[0] for prompt in prompts]
    paged = Paged(model, seed=1, row_format=rows)
    todo, found = [list(prompt) for prompt in prompts], [[], [], []]
    while any(todo):
        news = {i: own[: (4, 7, 1)[i]] for i, own in enumerate(todo) if own}
        for i, logits in paged.step(news).items():
            found[i].append(logits)
            del todo[i][: len(news[i])]
    for logits, before in zip(found, expected, strict=True):
        assert torch.equal(torch.cat(logits), before)
    exact = Paged(load(family, False)).step({0: prompts[1]})[0]
    rounded = Paged(model).step({0: prompts[1]})[0]
    assert not torch.equal(expected[1], rounded)
    if rows.bits == 8:
        assert (expected[1] - exact).square().mean() <= 4 * (rounded - exact).square().mean()


@native
@pytest.mark.parametrize("rows", [PLAIN, INT8, INT4], ids=str)
def test_readable_bfloat16_layers_read_the_blocks_through_the_native_kernel(rows):
    model = hasten.load(make_reference("gemma2")).to(torch.bfloat16)
    model.bind()
    narrow(model)  # where bfloat16 is emulated, readable layers would compute in float32
    paged = Paged(model, row_format=rows)
    assert paged.cache.kernel.name == "native"
    [prompt] = prompts_of(2, 21)
    whole = paged.step({0: prompt})[0]
    exact = Paged(load("gemma2", False)).step({0: prompt})[0]
    plain = model(torch.tensor([prompt]), torch.arange(21)[None], training(model))[0]
    if rows.bits != 4:
        assert (whole - exact).square().mean() <= 4 * (plain - exact).square().mean()
    chunked = Paged(model, seed=3, row_format=rows)
    parts = [chunked.step({0: prompt[:8]})[0], chunked.step({0: prompt[8:]})[0]]
    torch.testing.assert_close(torch.cat(parts), whole, atol=0.1, rtol=0.1)


def training(model):
    from hasten.model.context import TrainingContext

    return TrainingContext([layer.window for layer in model.config.layers])


def test_copies_happen_one_after_the_other():
    model = load("llama", False)
    cache = KVCache(model.config, blocks=5, block_size=2, dtype=torch.float32, device="cpu")
    for tensor in (*cache.k, *cache.v):
        tensor.copy_(torch.arange(11.0)[:, None, None].expand_as(tensor))
    cache.copy([(0, 1), (2, 0), (1, 3), (4, 3)])
    for tensor in (*cache.k, *cache.v):
        assert tensor[:, 0, 0].tolist() == [4, 5, 0, 1, 4, 5, 8, 9, 8, 9, 10]
    cache.copy([])


@pytest.mark.parametrize("rows", [PLAIN, INT8, INT4], ids=str)
def test_copied_blocks_go_on_as_the_original(rows):
    model = load("llama", False)
    paged = Paged(model, row_format=rows)
    [prompt] = prompts_of(3, 10)
    paged.step({0: prompt})
    new = paged.order.pop()
    paged.cache.copy([(paged.tables[0][-1], new)])
    paged.tables[1], paged.lengths[1] = [*paged.tables[0][:-1], new], 10
    views = [t[:-1].unflatten(0, (BLOCKS, SIZE)) for t in (*paged.cache.k, *paged.cache.v)]
    assert all(torch.equal(blocks[new], blocks[paged.tables[0][-1]]) for blocks in views)
    assert all(blocks[new, :2].any() for blocks in views)
    logits = paged.step({0: [7], 1: [8]})
    assert torch.allclose(logits[0], Paged(model, row_format=rows).step({0: [*prompt, 7]})[0][-1:], atol=1e-4)
    assert torch.allclose(logits[1], Paged(model, row_format=rows).step({0: [*prompt, 8]})[0][-1:], atol=1e-4)


def test_the_size_is_told_before_it_is_allocated():
    model = load("llama", False)
    cache = KVCache(model.config, blocks=7, block_size=8, dtype=torch.float32, device="cpu")
    each = KVCache.bytes_per_block(model.config, block_size=8, dtype=torch.float32)
    assert each == 4 * 2 * 8 * 2 * 16 * 4  # layers, keys and values, tokens, heads, head size, bytes
    spare = 4 * 2 * 2 * 16 * 4  # a row of padding
    assert cache.bytes == 7 * each + spare
    small = KVCache(model.config, blocks=7, block_size=8, dtype=torch.float32, device="cpu", row_format=INT8)
    each = KVCache.bytes_per_block(model.config, block_size=8, dtype=torch.float32, row_format=INT8)
    assert each == 4 * 2 * 8 * 2 * (16 + 4)  # a float32 scale beside 16 values
    assert small.bytes == 7 * each + each // 8


def test_layers_may_keep_keys_of_different_shapes(monkeypatch):
    model = load("llama", False)
    shapes = [caches.LayerShape(2, 16), caches.LayerShape(1, 24), caches.LayerShape(2, 16), caches.LayerShape(1, 8)]
    for module in (caches, cache_shapes):
        monkeypatch.setattr(module, "layer_shapes", lambda config: shapes)
    make = {"block_size": 4, "dtype": torch.float32, "device": "cpu"}
    own = KVCache(model.config, blocks=3, **make)
    assert [(*k.shape,) for k in own.k] == [(*v.shape,) for v in own.v] == [(13, *shape[:2]) for shape in shapes]
    each = KVCache.bytes_per_block(model.config, block_size=4, dtype=torch.float32)
    assert own.bytes == 3 * each + each // 4
    assert len({t.untyped_storage().data_ptr() for t in (*own.k, *own.v)}) == 1, "one allocation"
    for value, tensor in enumerate((*own.k, *own.v), start=1):
        assert not tensor.any()
        tensor[4:8] = value
    own.copy([(1, 0), (0, 2)])
    for value, tensor in enumerate((*own.k, *own.v), start=1):
        assert tensor[:12].eq(value).all()
        assert not tensor[12].any()


def test_no_blocks_and_too_short_tables_are_refused():
    model = load("llama", False)
    with pytest.raises(ConfigError, match="at least 1 block of 1 token"):
        KVCache(model.config, blocks=0, dtype=torch.float32, device="cpu")
    cache = KVCache(model.config, blocks=4, block_size=4, dtype=torch.float32, device="cpu")
    with pytest.raises(AssertionError, match="9 tokens in 2 blocks of 4"):
        cache.step([Rows([0, 1], 8, 1)])

"""The fused steps: for every family no worse than plain bfloat16, the same bits in any company, and undone exactly."""

import copy
import gc
import pickle
import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hasten
from hasten.engine.block_table import Rows
from hasten.engine.cache import KVCache
from hasten.engine.given_texts import GivenTexts
from hasten.engine.speculation.build import first_layers
from hasten.errors import ConfigError, HastenWarning
from hasten.model.binding import explain, kernels
from hasten.model.context import TrainingContext
from hasten.model.families import read_config
from hasten.model.fused import FusedBlock, fuse, fuse_where_it_fits, refusal, unfuse
from hasten.model.fused_block import unknown_parts
from hasten.model.fused_native import native_shape_refusal
from hasten.model.initialize import initialize
from hasten.ops.native import library
from references import CASES, decided, make_reference, tiny_llama, values_of

pytestmark = pytest.mark.skipif(library() is None, reason="the native kernels cannot be built here (no C++ compiler)")

TOKENS = torch.randint(3, 100, (2, 40), generator=torch.Generator().manual_seed(0))


# Layers that keep states, by the beginnings of their cases' names.
STATES = {"qwen3_next": "Gated DeltaNet", "qwen3_5": "Gated DeltaNet", "lfm2": "short convolution"}
STATES |= {"granitemoehybrid": "Mamba-2"}
WITH_STATES = [case for case in CASES if case.startswith(tuple(STATES)) and case != "granitemoehybrid-attention"]
ONE_HALF = [case for case in CASES if case.startswith("nemotron_h")]
fused_cases = pytest.mark.parametrize("case", [case for case in CASES if case not in ONE_HALF])


def logits(model, tokens=TOKENS):
    context = TrainingContext([layer.window for layer in model.config.layers])
    with torch.no_grad():
        return model(tokens, torch.arange(tokens.shape[1]).expand(len(tokens), -1), context)


@fused_cases
def test_error_is_at_most_twice_that_of_plain_bfloat16(case):
    reference = make_reference(case)
    exact = logits(decided(hasten.load(reference)))  # whose weights are the reference's own
    plain = logits(hasten.load(reference, dtype="bfloat16")) - exact
    fused = logits(fuse(hasten.load(reference, dtype="bfloat16"))) - exact
    assert fused.square().mean().sqrt() <= 2 * plain.square().mean().sqrt()
    assert fused.abs().max() <= 2 * plain.abs().max()


@fused_cases
def test_unfused_is_what_it_was(case):
    model = hasten.load(make_reference(case), dtype="bfloat16")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    # GPT-2's files hold transposed matrices, and loading makes views of them. Where bfloat16 is emulated (AVX2),
    # PyTorch sums a product with such a view in another order. Unfused weights are contiguous: compare with such.
    for weight in model.parameters():
        weight.data = weight.contiguous()
    expected = logits(model)
    assert unfuse(fuse(model)) is model
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert torch.equal(logits(model), expected)


BATCHED = fuse(tiny_llama().to(torch.bfloat16)) if library() is not None else None
OTHERS_BATCHED = ["qwen3_5_text", "lfm2", "granitemoehybrid-dense", "gemma4_text-shared"]
OTHER_BATCHED = [
    fuse(hasten.load(make_reference(case), dtype="bfloat16")) if library() is not None else None
    for case in OTHERS_BATCHED
]


@pytest.mark.parametrize("model", [BATCHED, *OTHER_BATCHED], ids=["llama", *OTHERS_BATCHED])
@settings(max_examples=25)
@given(st.lists(st.lists(st.integers(0, 100), min_size=1, max_size=90), min_size=1, max_size=4), st.data())
def test_logits_are_bit_for_bit_the_same_alone_in_a_batch_and_however_the_prompt_is_cut(model, prompts, data):
    together = GivenTexts(model, batch=len(prompts), capacity=128).prefill(prompts)
    for row, prompt in enumerate(prompts):
        cut = data.draw(st.integers(0, len(prompt) - 1))
        alone = GivenTexts(model, batch=1, capacity=100)
        if cut:
            alone.prefill([prompt[:cut]])
        assert torch.equal(alone.prefill([prompt[cut:]])[0], together[row])
        one_by_one = GivenTexts(model, batch=1, capacity=100)
        one_by_one.prefill([prompt[:1]])
        last = None
        for token in prompt[1:12]:
            last = one_by_one.decode(torch.tensor([token]))
        if last is not None and len(prompt) <= 12:
            assert torch.equal(last[0], together[row])


def test_long_contexts_cross_tiles_and_spans_alike():
    model = fuse(tiny_llama(max_position_embeddings=2048).to(torch.bfloat16))
    prompt = torch.randint(3, 250, (1400,), generator=torch.Generator().manual_seed(1)).tolist()
    whole = GivenTexts(model, batch=1, capacity=1500).prefill([prompt])
    parts = GivenTexts(model, batch=1, capacity=1500)
    for start, end in ((0, 63), (63, 64), (64, 511), (511, 513), (513, 1399)):
        parts.prefill([prompt[start:end]])
    assert torch.equal(parts.decode(torch.tensor(prompt[-1:])), whole)


def test_greedy_text_is_the_same_in_a_batch():
    prompts = [[5, 6, 7], list(range(10, 60)), [9]]
    params = hasten.SamplingParams(temperature=0, max_new_tokens=16, ignore_eos=True)
    for prompt, output in zip(prompts, hasten.generate(BATCHED, prompts, params), strict=True):
        assert hasten.generate(BATCHED, prompt, params)[0].tokens == output.tokens


def test_what_cannot_be_fused_says_why():
    model = tiny_llama()
    assert "float32" in refusal(model)
    with pytest.raises(ConfigError, match="float32"):
        fuse(model)
    assert not any(isinstance(block, FusedBlock) for block in model.blocks)


def test_kernels_take_a_fused_model_apart_for_a_while():
    model = fuse(tiny_llama().to(torch.bfloat16))
    before = logits(model)
    with kernels(model, linear="reference"):
        assert not any(isinstance(block, FusedBlock) for block in model.blocks)
        assert {b.kernel for b in explain(model) if b.operator.startswith("linear")} == {"reference"}
        assert (logits(model) - before).abs().max() < 0.3
    assert all(isinstance(block, FusedBlock) for block in model.blocks)
    assert torch.equal(logits(model), before)
    with kernels(model, block="readable"):
        assert {b.kernel for b in explain(model) if b.operator == "block"} == {"readable"}
    assert {b.kernel for b in explain(model) if b.operator == "block"} == {"fused"}


@pytest.mark.parametrize("scheme", [hasten.Int8(), hasten.Int4(group_size=32), hasten.Int4(symmetric=False)])
def test_quantized_models_fuse_and_stay_the_same_function(scheme):
    model = hasten.quantize(tiny_llama().to(torch.bfloat16), scheme)
    plain = logits(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fused = logits(fuse(model))
    assert (fused - plain).abs().max() <= 0.1 * plain.abs().max()
    unfuse(model)
    after = model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


@fused_cases
def test_every_quantized_family_fuses(case):
    model = decided(hasten.load(make_reference(case), dtype="bfloat16"))
    hasten.quantize(model, hasten.Int8())
    exact, plain = logits(copy.deepcopy(model).float()), logits(model)
    assert refusal(model) is None
    fused = logits(fuse(model))
    differs = (fused - plain).abs().amax(-1) > 0.1 * plain.abs().max()
    # A router's near tie gives a position another expert, by any rounding: one of 20 at most.
    close = differs.float().mean() <= 0.05 if model.config.experts else not differs.any()
    # OLMoE's 16 bits differ by more where a processor multiplies bfloat16; elsewhere plain products are in float32.
    assert close or (fused - exact).abs().max() <= 2 * (plain - exact).abs().max()


PARTS = [
    ("olmo2", "no blocks without norms before their halves"),
    ("exaone4", "no blocks without norms before their halves"),
    ("hunyuan_v1_dense", "no norms of queries and keys after their rotary turn"),
    ("granite", "no scaled residual branches"),
    ("smollm3", "no layers without rotary positions beside others"),
    ("glm", "no rotary turn of neighbouring elements"),
    ("arcee", "no squared ReLU"),
    ("nemotron", "no layer norms stored minus one or without biases"),
    ("ministral3", "no scaling of queries by their position"),
    ("apertus", "no xIELU"),
    ("gemma4_text", "no layers with heads of several sizes"),
    ("gemma4_text-shared", "no layers that use the keys and values of others"),
    ("gemma4_text-experts", "no layers with heads of several sizes"),
]


@pytest.mark.parametrize(("family", "words"), PARTS)
def test_a_part_that_fused_steps_have_not_is_named(family, words):
    config = read_config(values_of(family))
    assert unknown_parts(config) == words
    assert native_shape_refusal(config) is None


def test_a_part_that_fused_steps_have_not_beside_experts_is_named():
    config = read_config(values_of("cohere2"))
    assert native_shape_refusal(config) is None
    sizes = {"experts": 4, "experts_per_token": 2, "expert_size": 48}
    config = replace(config, layers=tuple(replace(layer, experts=True) for layer in config.layers), **sizes)
    words = "the fused steps of blocks with experts know no blocks whose attention and MLP read the same stream"
    assert native_shape_refusal(config) == words
    with pytest.raises(ConfigError, match="read the same stream"):
        fuse(initialize(config, seed=0, dtype=torch.bfloat16))


def test_heads_that_the_native_steps_do_not_take_are_named():
    config = replace(read_config(values_of("llama")), head_dim=584)
    assert native_shape_refusal(config) == "the head size is 584; the fused steps go up to 576"
    config = replace(config, head_dim=64, layers=(replace(config.layers[0], head_dim=584), *config.layers[1:]))
    assert native_shape_refusal(config) == "the head size is 584; the fused steps go up to 576"


def test_limits_of_a_gated_mlp_are_run_in_experts_only():
    config = read_config(values_of("gpt_oss"))
    assert unknown_parts(config) == "no attention sinks"
    assert native_shape_refusal(config) is None
    dense = replace(read_config(values_of("llama")), swiglu_limit=7.0)
    assert unknown_parts(dense) == "no limits or offsets in gated MLPs"
    assert native_shape_refusal(dense) == "the fused steps know no limits or offsets in gated MLPs"
    with pytest.raises(ConfigError, match="no limits"):
        fuse(initialize(dense, seed=0, dtype=torch.bfloat16))


def test_sinks_of_blocks_without_experts():
    model = hasten.load(make_reference("llama"), dtype="bfloat16")
    without = logits(fuse(copy.deepcopy(model)))
    model.config = replace(model.config, attention_sinks=True)
    for block in model.blocks:
        block.attention.sinks = torch.nn.Parameter(torch.randn(model.config.heads).bfloat16() * 2)
    model.bind()
    plain = logits(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert (logits(fuse(model)) - plain).abs().max() <= 0.03 * plain.abs().max()
    assert (without - plain).abs().max() > 0.2 * plain.abs().max()
    after = unfuse(model).state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("case", WITH_STATES)
def test_layers_with_states_are_fused_on_a_cpu_only(case):
    config = read_config(values_of(case))
    name = next(name for start, name in STATES.items() if case.startswith(start))
    assert unknown_parts(config) == f"no layers with {name}"
    assert native_shape_refusal(config) is None
    model = fuse_where_it_fits(hasten.load(make_reference(case), dtype="bfloat16"))
    assert model.stack is not None
    assert [block.mixer is not None for block in model.blocks] == [layer.keeps_state for layer in config.layers]


@pytest.mark.parametrize("case", ONE_HALF)
def test_layers_of_one_half_are_fused_nowhere(case):
    config = read_config(values_of(case))
    assert native_shape_refusal(config).endswith("know no layers of one half")
    with pytest.warns(HastenWarning, match="without the fused steps, .* know no layers of one half; --quantize int8"):
        model = fuse_where_it_fits(hasten.load(make_reference(case), dtype="bfloat16"))
    assert model.readable


def test_every_other_family_runs_in_all_fused_steps(case):
    assert (unknown_parts(read_config(values_of(case))) is None) == (case.partition("-")[0] not in OTHERS)


OTHERS = (
    {family for family, _ in PARTS} | {"olmo3", "glm4", "ernie4_5", "cohere2", "gpt_oss"} | {"nemotron_h", *WITH_STATES}
)
OTHERS |= {"olmoe", "minimax_m2", "granitemoe", "ernie4_5_moe", "nanochat"}
OTHERS |= {"deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4", "youtu"}


@pytest.mark.parametrize("scheme", [None, hasten.Int8(), hasten.Int4(group_size=32)])
def test_a_fused_model_is_saved_as_a_readable_one(scheme, tmp_path):
    model = tiny_llama().to(torch.bfloat16)
    model.bind()  # as `load` does: what it computes in follows the new dtype
    if scheme is not None:
        hasten.quantize(model, scheme)
    expected = logits(model)
    fused = logits(fuse(model))
    hasten.save(model, tmp_path)
    assert torch.equal(logits(model), fused), "it goes on fused"
    assert torch.equal(logits(hasten.load(tmp_path, dtype="stored")), expected)


SCHEMES = pytest.mark.parametrize("scheme", [None, hasten.Int8(), hasten.Int4(group_size=32)])


def fused_of(scheme):
    model = tiny_llama().to(torch.bfloat16)
    return fuse(model if scheme is None else hasten.quantize(model, scheme))


@SCHEMES
@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_weights_of_its_own(scheme, again):
    model = fused_of(scheme)
    expected = logits(model)
    other = again(model)
    assert torch.equal(logits(other), expected)
    other.blocks[0].output.data.zero_()
    other.blocks[0].mlp_norm.weight.data.zero_()
    assert not torch.equal(logits(other), expected)
    assert torch.equal(logits(model), expected)
    del model
    hasten.unfuse(other)
    logits(other)


@SCHEMES
def test_tensors_that_get_other_memory_or_values_are_what_is_computed_with(scheme):
    model = fused_of(scheme)
    expected = logits(model)
    model.share_memory()
    model.to("cpu", torch.bfloat16)
    filler = [torch.full((64,), 7.0, dtype=torch.bfloat16) for _ in range(1000)]  # takes what was freed
    assert torch.equal(logits(model), expected)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["blocks.0.mlp_norm.weight"].zero_()
    copied = copy.deepcopy(model)
    copied.load_state_dict(state)
    model.load_state_dict(state, assign=True)
    assert torch.equal(logits(model), logits(copied))
    assert not torch.equal(logits(model), expected)
    del filler


def test_a_last_norm_and_a_head_that_are_replaced_are_what_scores():
    model = fused_of(None)
    before = logits(model)
    model.norm.weight = torch.nn.Parameter(model.norm.weight * 2)
    assert torch.equal(logits(model), before * 2)
    model.head.data = model.head.data * 2
    assert torch.equal(logits(model), before * 4)
    model.norm.weight.data = model.norm.weight / 2
    assert torch.equal(logits(model), before * 2)


@SCHEMES
def test_a_fused_model_is_gone_as_soon_as_nothing_refers_to_it(scheme):
    model = fused_of(scheme)
    hasten.generate(model, [[1, 2, 3]], max_new_tokens=4)
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("move", [lambda m: m.half(), lambda m: m.float(), lambda m: m.to("meta")])
def test_what_a_fused_block_cannot_become_is_refused(move):
    model = fuse(tiny_llama().to(torch.bfloat16))
    expected = logits(model)
    with pytest.raises(ConfigError, match="unfuse"):
        move(model.blocks)
    assert torch.equal(logits(model), expected)
    with pytest.raises(ConfigError, match="unfuse"):
        move(model)


def test_positions_may_be_strided():
    context = TrainingContext([layer.window for layer in BATCHED.config.layers])
    positions = torch.arange(TOKENS.shape[1]).expand(2, -1).t().contiguous().t()
    with torch.no_grad():
        assert torch.equal(BATCHED(TOKENS, positions, context), logits(BATCHED))


@fused_cases
def test_all_layers_in_one_call_are_the_layers_one_after_the_other(case):
    model = hasten.fuse(hasten.load(make_reference(case), dtype="bfloat16"))
    tokens = torch.arange(3, 11).view(2, 4)
    positions = torch.arange(4).expand(2, 4)

    @torch.no_grad()
    def two_steps():
        cache = KVCache.of_texts(model.config, batch=2, capacity=8, dtype=torch.bfloat16, device="cpu")
        first = model(tokens, positions, cache.step_of_texts(positions, fresh=True, masks=False))
        after = model(tokens, positions + 4, cache.step_of_texts(positions + 4, masks=False))
        return torch.stack([first, after])

    together = two_steps()
    assert model.stack is not None
    seen = []
    hook = model.blocks[1].register_forward_hook(lambda *arguments: seen.append(arguments))
    assert torch.equal(two_steps(), together)
    assert len(seen) == 2  # a hook on a block is called
    hook.remove()
    seen.clear()
    block = model.blocks[0]
    block.forward = lambda *own, **more: (seen.append(own), type(block).forward(block, *own, **more))[1]
    assert torch.equal(two_steps(), together)
    assert len(seen) == 2  # and so is what a compiler put in the place of its forward pass


@fused_cases
def test_the_turns_of_all_positions_are_those_of_each_token(case, monkeypatch):
    monkeypatch.setattr("hasten.model.fused_stack._FEWEST_POSITIONS", 4)
    model = hasten.fuse(hasten.load(make_reference(case), dtype="bfloat16"))
    table = torch.randperm(40, generator=torch.Generator().manual_seed(0)).tolist()

    @torch.no_grad()
    def steps():
        cache = KVCache(model.config, blocks=40, block_size=4, dtype=torch.bfloat16, device="cpu")
        for start, count in ((0, 5), (5, 1), (6, 90), (96, 1)):  # the last two need more positions than the others
            step = cache.step([Rows(table, start, count)])
            yield model((torch.arange(start, start + count)[None] % 90) + 3, step.positions, step)

    together = [*steps()]
    assert model.stack is not None
    hook = model.blocks[0].register_forward_hook(lambda *arguments: None)  # each block is called with its own angles
    assert all(map(torch.equal, steps(), together))
    hook.remove()
    assert all(map(torch.equal, steps(), together))


def stepped(model):
    """Logits of a step over a cache, in the call of all blocks."""
    cache = KVCache(model.config, blocks=4, block_size=16, dtype=torch.bfloat16, device="cpu")
    step = cache.step([Rows(list(range(4)), 0, TOKENS.shape[1])])
    with torch.no_grad():
        return model(TOKENS[:1], step.positions, step)


def test_a_block_that_is_bound_again_is_so_in_the_call_of_all():
    model = hasten.fuse(tiny_llama().to(torch.bfloat16))
    before = stepped(model)
    for block in model.blocks:
        norm = copy.deepcopy(block.mlp_norm)
        norm.weight.data *= 2
        block.mlp_norm = norm
        block.bind()
    after = stepped(model)
    assert not torch.equal(after, before)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(stepped(other), after)
    model.blocks[0] = copy.deepcopy(model.blocks[1])
    swapped = stepped(model)
    assert not torch.equal(swapped, after)
    assert torch.equal(stepped(copy.deepcopy(model)), swapped)


@pytest.mark.parametrize("first", [True, False])
def test_models_that_share_blocks_both_see_a_change(first):
    model = hasten.fuse(tiny_llama().to(torch.bfloat16))
    short, seen = first_layers(model, 1), []
    models = (model, short) if first else (short, model)
    before = [stepped(each) for each in models]
    hook = model.blocks[0].register_forward_hook(lambda *arguments: seen.append(arguments))
    assert all(map(torch.equal, map(stepped, models), before))
    assert len(seen) == 2
    hook.remove()
    assert all(map(torch.equal, map(stepped, models), before))
    assert len(seen) == 2


def test_a_block_that_was_replaced_is_let_go():
    model = hasten.fuse(tiny_llama().to(torch.bfloat16))
    stepped(model)
    old = weakref.ref(model.blocks[0])
    model.blocks[0] = unfuse(copy.deepcopy(model)).blocks[0]
    stepped(model)
    gc.collect()
    assert old() is None


def test_a_block_over_a_cache_is_one_graph():
    model = hasten.fuse(tiny_llama().to(torch.bfloat16))
    cache = KVCache(model.config, blocks=4, block_size=16, dtype=torch.bfloat16, device="cpu")
    step = cache.step([Rows(list(range(4)), 0, 5)])
    x, rope = torch.randn(1, 5, model.config.hidden_size), model.rotations(step.positions, None)[0]
    with torch.no_grad():
        expected = model.blocks[0](x, rope, step.layers[0])
        compiled = torch.compile(model.blocks[0].forward, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x, rope, step.layers[0]), expected)

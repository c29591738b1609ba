"""A GPU's fused block with Triton interpreted on a CPU; run by test_fused_cuda.py in a process of its own."""

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch

import hasten
from captured_steps import Capturer
from fused_cases import FAMILIES, decoded, errors, paged_logits, whole
from hasten.engine import captures, following
from hasten.engine.cache import KVCache
from hasten.engine.given_texts import GivenTexts
from hasten.errors import ConfigError, HastenWarning
from hasten.model.binding import ONE_ROW, explain, kernels
from hasten.model.fused import CudaBlock, fuse, is_fused, refusal, unfuse
from references import make_reference
from tiny_model import tiny_llama
from triton_cases import no_room, raised_by_triton


@pytest.fixture(autouse=True)
def multiplies_bfloat16(processor):
    """As the GPUs do, for which the interpreter stands: elsewhere a readable model computes in float32."""
    processor("avx2", "avx512f", "avx512_bf16")


def small(scheme=None, **changes):
    model = tiny_llama(**changes).to(torch.bfloat16)
    model.bind()
    return model if scheme is None else hasten.quantize(model, scheme)


# All parts of those left out are among the others': gemma2's norms; gpt2's layer norms, biases, rotary turns, windows.
PARTS_ELSEWHERE = ("gemma", "starcoder2", "mistral-plain", "qwen2-window", "mixtral", "dots1", "glm4_moe")


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in PARTS_ELSEWHERE])
def test_errs_at_most_twice_what_the_readable_block_errs(family):
    for name, (fused, plain) in errors(family, device="cpu").items():
        assert fused <= 2 * plain, name


@pytest.mark.parametrize("family", ["gpt2", "llama-biases", "gemma3_text", "phi3", "qwen3_moe"])
def test_unfused_is_what_it_was(family):
    model = hasten.load(make_reference(family), dtype="bfloat16")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert is_fused(fuse(model))
    assert all(isinstance(block, CudaBlock) for block in model.blocks)
    assert unfuse(model) is model
    assert model.readable
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


FLOAT = {"activations": "float"}
SCHEMES = [
    hasten.Int8(**FLOAT),
    hasten.Int4(group_size=32, **FLOAT),
    hasten.Int4(group_size=32, symmetric=False, **FLOAT),
]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized_models(scheme):
    model = small(scheme)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain = decoded(model)
    with kernels(model, linear="reference", attention="reference"):
        exact = decoded(model)
    found = decoded(fuse(model))
    assert (found - exact).square().mean() <= 4 * (plain - exact).square().mean()
    after = unfuse(model).state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


EXPERTS = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_of_every_format(scheme):
    """All experts take part: a choice between two that score alike may turn out otherwise in 16 bits."""
    model = small(scheme, **EXPERTS | {"num_experts_per_tok": 4})
    plain = whole(model)
    with kernels(model, linear="reference", attention="reference"):
        assert {row.kernel for row in explain(model) if row.operator == "experts"} == {"readable"}
        exact = whole(model)
    fuse(model)
    assert {row.kernel for row in explain(model) if row.operator == "experts"} == {"triton"}
    assert (whole(model) - exact).square().mean() <= 4 * (plain - exact).square().mean()


def test_float16():
    model = tiny_llama()
    exact = whole(model)
    half = fuse(copy.deepcopy(model).to(torch.float16))
    assert (whole(half) - exact).abs().max() < 0.02 * exact.abs().max()


def test_steps_over_blocks_are_those_over_rows():
    model = fuse(small())
    prompts = [[5, 9, 40, 3, 77, 8, 21], [8, 90], [3] * 20]
    static = GivenTexts(model, batch=3, capacity=64).prefill(prompts)
    paged = paged_logits(model, prompts)
    assert (paged - static).abs().max() < 0.05 * static.abs().max()


@pytest.mark.parametrize("changes", [{}, EXPERTS], ids=["dense", "experts"])
def test_a_captured_step_is_the_plain_one(changes, monkeypatch):
    """The same step, whose operations alone run again, and whose Python does, too."""
    model, capturer = fuse(small(**changes)), Capturer()
    monkeypatch.setattr(following, "capture_refusal", lambda model: None)
    plain, captured = (GivenTexts(model, batch=2, capacity=64) for _ in range(2))
    for texts in (plain, captured):
        texts.prefill([[5, 9, 40], [8]])

    def again(step, reset, **_):
        reset()
        step()
        return step

    def both(step):
        found = []
        for texts, capture in ((plain, again), (captured, capturer)):
            monkeypatch.setattr(captures, "cuda_graph", capture)
            found.append(step(texts).clone())
        return found

    for i in range(1 if changes else 4):
        assert torch.equal(*both(lambda texts, i=i: texts.decode(torch.tensor([i, i + 9]))))
    for _ in range(1 if changes else 2):
        assert torch.equal(*both(lambda texts: texts.verify([[4, 5, 6], [7]])))
    assert len(capturer.recordings) >= (1 if changes else 2)


@pytest.fixture
def launches(monkeypatch):
    """The launches of all blocks, on a GPU of 8 multiprocessors; the kernel's values come from `gluon_on_torch`."""
    from gluon_on_torch import launch_blocks
    from hasten.model import fused_cuda, fused_decode
    from hasten.ops.block import decode

    launches = []

    def launch(self, *arguments, **known):
        launch_blocks(self, *arguments, **known)
        launches.append((self.sizes.biased, self.sizes.normed))

    monkeypatch.setattr(fused_decode, "multiprocessors_for", lambda device: 8)
    monkeypatch.setattr(decode.DecodeLayers, "launch", launch)
    monkeypatch.setattr(fused_cuda.CudaStack, "one_launch", True)
    return launches


SERVED = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}  # by the launch of all blocks


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_all_blocks_in_one_launch_are_the_blocks_one_by_one(launches, family):
    """tests/ops/test_decode_layers.py has more of them."""
    size = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": None} if family == "qwen2" else {}
    model = small(model_type=family, **SERVED | size)
    exact = states(copy.deepcopy(model).float())
    plain, found = states(model), states(fuse(model))
    assert launches == [(family == "qwen2", family == "qwen3")] * 3
    assert (found - exact).norm() <= 2 * (plain - exact).norm()


def test_rows_that_are_no_multiple_of_16_bytes_have_launches_of_their_own(launches):
    model = small(**SERVED | {"hidden_size": 132})
    plain, found = states(model), states(fuse(model))
    assert not launches
    assert (found - plain).norm() <= 0.02 * plain.norm()


def test_explain_names_the_one_launch_of_a_decode_step(launches):
    (found,) = {one.kernel for one in explain(fuse(small(**SERVED))) if one.operator == ONE_ROW}
    assert found == "one launch for all blocks"


@pytest.mark.parametrize(
    ("changes", "scheme", "why"),
    [
        ({}, hasten.Int8(), "its kernel multiplies weights in 16 bits"),
        ({"hidden_size": 132}, None, "its kernel reads rows 16 bytes at a time, in the model's dtype"),
        ({"head_dim": 32}, None, "its kernel knows heads of 64, 128, 256; this model's have 32"),
        ({"model_type": "gemma2", "head_dim": 64}, None, "its kernel knows no norms behind attention and MLP"),
        ({"model_type": "gpt2"}, None, "its kernel computes gated MLPs; this model's have no gate"),
        ({"model_type": "mistral", "sliding_window": 9}, None, "its kernel knows rotary positions, and no windows"),
    ],
)
def test_explain_says_why_a_decode_step_has_more_launches(launches, changes, scheme, why):
    model = fuse(small(scheme, **SERVED | changes))
    found = [one for one in explain(model) if one.operator == ONE_ROW]
    assert [one.layer for one in found] == list(range(len(model.blocks)))
    assert {one.kernel for one in found} == {"a few launches for each block"}
    (other,) = {one for binding in found for one in binding.others}
    assert other.kernel == "one launch for all blocks"
    assert other.reason.startswith(why)


def test_explain_names_the_processor_that_one_launch_is_for():
    (found,) = {one.others[0].reason for one in explain(fuse(small())) if one.operator == ONE_ROW}
    assert found == "its kernel is for Hopper GPUs (compute capability 9.0)"


def test_buffers_of_one_launch_live_as_long_as_the_weights(launches):
    """A captured step has their addresses, and is run again after weights were replaced in place."""
    model = fuse(small(**SERVED))
    states(model)
    made = model.stack._decode
    model.load_state_dict(model.state_dict())
    assert torch.equal(states(model), states(model))
    assert model.stack._decode is made
    model.blocks[0].down.weight.data = model.blocks[0].down.weight.data.clone()
    model.blocks[0].bind()
    states(model)
    assert model.stack._decode is not made


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_no_weights_but_its_own(launches, again):
    model = fuse(small(**SERVED))
    expected = states(model)
    other = again(model)
    assert (other.stack._decode, other.stack._bound_to) == (None, [])
    assert torch.equal(states(other), expected)


def test_all_blocks_go_on_one_by_one_where_the_launch_of_all_is_refused(launches, monkeypatch):
    from hasten.model.fused_cuda import CudaStack
    from hasten.ops.block.decode import DecodeLayers

    model = fuse(small(**SERVED))
    expected = states(model)

    def mistaken(self, *arguments, **known):
        raise RuntimeError("a caller's mistake")

    monkeypatch.setattr(DecodeLayers, "launch", mistaken)
    with pytest.raises(RuntimeError, match="a caller's mistake"):
        states(model)
    assert CudaStack.one_launch
    monkeypatch.setattr(DecodeLayers, "launch", lambda *_, **__: raised_by_triton(no_room()))
    with pytest.warns(HastenWarning, match="one launch for all failed: .*too many blocks in cooperative launch"):
        found = states(model)
    assert not CudaStack.one_launch
    assert (found - expected).norm() <= 0.02 * expected.norm()


def test_attention_goes_on_in_two_launches_where_one_is_refused(monkeypatch):
    model = fuse(small())
    expected = states(model)
    monkeypatch.setattr(CudaBlock, "one_launch", True)

    def mistaken(*given):
        raise RuntimeError("a caller's mistake")

    for block in model.blocks:
        monkeypatch.setattr(block._bound, "decode_step", mistaken)
    monkeypatch.setattr(CudaBlock, "bind", lambda self: None)  # which would take the kernel again
    with pytest.raises(RuntimeError, match="a caller's mistake"):
        states(model)
    for block in model.blocks:
        monkeypatch.setattr(block._bound, "decode_step", lambda *_: raised_by_triton(no_room()))
    with pytest.warns(HastenWarning, match="one launch more in each layer: .*too many blocks"):
        found = states(model)
    assert not CudaBlock.one_launch
    assert (found - expected).norm() <= 0.02 * expected.norm()


def test_a_fused_model_is_gone_as_soon_as_nothing_refers_to_it(launches):
    model = fuse(small(**SERVED))
    states(model)
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_a_profile_counts_one_launch_as_the_blocks(launches):
    from hasten.profiling.meter import Meter

    model = fuse(small(**SERVED))
    with Meter(model) as meter:
        states(model)
        spent = meter.spent()
    assert len(launches) == 3
    assert spent["model.blocks", "forward"] > sum(spent.values()) / 2


def states(model):
    """What comes out of the last block for three tokens, one after the other."""
    model.bind()
    cache = KVCache.of_texts(model.config, batch=1, capacity=64, dtype=model.compute_dtype, device="cpu")
    found = []
    with torch.inference_mode():
        for position, token in enumerate((5, 60, 7)):
            where = torch.tensor([[position]])
            context = cache.step_of_texts(where, masks=not is_fused(model))
            found.append(model.states(torch.tensor([[token]]), where, context).double())
    return torch.stack(found)


@pytest.mark.parametrize("cache", ["int8", "int8-plain", "int4"])
def test_rounded_caches(cache):
    model = small(head_dim=32)
    exact = decoded(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HastenWarning)  # of int4, said below
        plain = decoded(model, kv_cache_dtype=cache) - exact
        found = decoded(fuse(model), kv_cache_dtype=cache) - exact
    assert found.square().mean() <= 4 * plain.square().mean()
    if cache == "int4":
        with pytest.warns(HastenWarning, match="no kernel for int4 caches"):
            decoded(model, kv_cache_dtype=cache)


def test_what_cannot_be_fused_says_why(tmp_path):
    assert "bfloat16 or float16; the model is float32" in refusal(tiny_llama())
    experts = hasten.load(make_reference("gpt_oss"), dtype="bfloat16")
    why = "no kernel of a GPU computes all experts at once: it computes silu, gelu, gelu_tanh, relu, not quick_gelu"
    with pytest.raises(ConfigError, match=why):
        fuse(experts)
    assert {other.reason for row in explain(experts) if row.operator == "block" for other in row.others} == {why}
    assert {row.kernel for row in explain(experts) if row.operator == "experts"} == {"readable"}
    kinds = {"qwen3_next": "Gated DeltaNet", "qwen3_5_text": "Gated DeltaNet", "lfm2": "short convolution"}
    for family, name in kinds.items():
        states = hasten.load(make_reference(family), dtype="bfloat16")
        with pytest.raises(ConfigError, match=f"the fused steps of a GPU know no layers with {name}"):
            fuse(states)
    scaled = hasten.load(make_reference("granite"), dtype="bfloat16")
    assert refusal(scaled) == "the fused steps of a GPU know no scaled residual branches"
    odd = small(intermediate_size=100)
    assert "no multiple of 32" in refusal(odd)


def test_explain_and_kernels():
    model = fuse(small())
    assert {row.kernel for row in explain(model) if row.operator == "block"} == {"fused"}
    before = whole(model)
    with kernels(model, block="readable"):
        assert model.readable
        assert model.stack is None
    assert torch.equal(whole(model), before)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("changes", [{}, EXPERTS], ids=["dense", "experts"])
def test_a_copy_has_weights_of_its_own(changes, again):
    model = fuse(small(**changes))
    expected = whole(model)
    other = again(model)
    assert torch.equal(whole(other), expected)
    other.blocks[0].output.weight.data.zero_()
    assert not torch.equal(whole(other), expected)
    assert torch.equal(whole(model), expected)


def test_what_a_fused_block_cannot_become_is_refused():
    model = fuse(small())
    for move in (lambda m: m.float(), lambda m: m.to("meta")):
        with pytest.raises(ConfigError, match="unfuse"):
            move(model.blocks)

"""16-bit weights whose products the processor only emulates: readable layers multiply in float32 from them."""

import copy

import pytest
import torch
from safetensors import safe_open

import hasten
from hasten.errors import HastenError
from hasten.machine import precision
from hasten.model.context import training_context
from hasten.model.families import read_config
from hasten.model.fused import fuse
from hasten.model.wide import precision_of, product_dtype
from hasten.ops.linear import wide
from hasten.ops.linear.modules import PackedLinear
from hasten.ops.linear.wide import WideLinear, wide_linear
from instruction_sets import needs_native
from references import tiny_llama, values_of

TOKENS = torch.arange(3, 15)[None]


@pytest.fixture
def slow_halves(monkeypatch):
    monkeypatch.setattr(precision, "_flags", lambda: ("avx2", "fma"))


@pytest.fixture
def fast_halves(monkeypatch):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(precision, "_flags", lambda: ("avx512_bf16", "avx512_fp16"))


def folder_in(dtype, tmp_path):
    model = tiny_llama()
    hasten.save(model.to(dtype), tmp_path / "model")
    return tmp_path / "model"


def logits(model, tokens=TOKENS):
    with torch.inference_mode():
        positions = torch.arange(tokens.shape[1])[None]
        return model(tokens, positions, training_context(model, tokens.shape[1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_model_computes_as_its_weights_do_in_float32(dtype, tmp_path, slow_halves):
    folder = folder_in(dtype, tmp_path)
    model, exact = hasten.load(folder, dtype="stored"), hasten.load(folder, dtype="float32")
    model.auto_fuse = False
    assert {p.dtype for p in model.parameters()} == {dtype} == {model.dtype}
    assert model.compute_dtype == torch.float32
    assert precision_of(model).dtype == "float32"
    assert "is emulated by this processor" in precision_of(model).reason
    torch.testing.assert_close(logits(model), logits(exact), rtol=1e-5, atol=1e-5)
    loss = [m(TOKENS, torch.arange(12)[None], training_context(m, 12), targets=TOKENS.roll(-1)) for m in (model, exact)]
    torch.testing.assert_close(*loss)
    prompts = [[1, 2, 3], [4, 5]]
    found = [[o.tokens for o in hasten.generate(m, prompts, temperature=0, max_new_tokens=6)] for m in (model, exact)]
    assert found[0] == found[1]
    served = hasten.LLM(model).generate(prompts, hasten.SamplingParams(temperature=0, max_new_tokens=6))
    assert [answer.tokens for answer in served] == found[1]


def test_where_products_are_fast_nothing_changes(tmp_path, fast_halves):
    model = hasten.load(folder_in(torch.bfloat16, tmp_path), dtype="auto")
    assert model.compute_dtype == model.dtype == torch.bfloat16
    assert not any(isinstance(module, WideLinear) for module in model.modules())
    assert str(precision_of(model)) == "bfloat16: the dtype of its weights"


def test_a_float32_checkpoint_is_narrowed_only_for_the_fused_steps(tmp_path, slow_halves, monkeypatch):
    monkeypatch.setenv("HASTEN_ISA", "none")
    model = hasten.load(folder_in(torch.float32, tmp_path), dtype="auto")
    assert model.dtype == model.compute_dtype == torch.float32
    assert type(model.head) is torch.nn.Linear


def test_binding_again_follows_the_dtype(tmp_path, slow_halves):
    model = hasten.load(folder_in(torch.bfloat16, tmp_path))
    names = [name for name, _ in model.named_parameters()]
    model.float().bind()
    assert type(model.head) is torch.nn.Linear
    assert model.compute_dtype == torch.float32
    model.bfloat16().bind()
    assert isinstance(model.head, WideLinear)
    assert [name for name, _ in model.named_parameters()] == names
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin), logits(model))


def test_what_is_saved_is_what_was_stored(tmp_path, slow_halves):
    model = hasten.load(folder_in(torch.bfloat16, tmp_path))
    hasten.save(model, tmp_path / "again")
    for one, two in zip(*(sorted((tmp_path / n).glob("*.safetensors")) for n in ("model", "again")), strict=True):
        with safe_open(one, framework="pt") as a, safe_open(two, framework="pt") as b:
            assert all(torch.equal(a.get_tensor(name), b.get_tensor(name)) for name in a.keys())  # noqa: SIM118


@needs_native
def test_fused_steps_take_the_weights_and_give_them_back(tmp_path, slow_halves):
    model = hasten.load(folder_in(torch.bfloat16, tmp_path))
    before = logits(model)
    hasten.fuse(model)
    assert model.compute_dtype == torch.bfloat16
    assert "native fused steps" in precision_of(model).reason
    logits(model)
    hasten.unfuse(model)
    assert model.compute_dtype == torch.float32
    assert torch.equal(logits(model), before)
    with hasten.kernels(model, linear="reference"):
        logits(model)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("scheme", [hasten.Int8(), hasten.Int4(group_size=32)])
def test_quantized_layers_get_float32_activations(scheme, tmp_path, slow_halves):
    model = hasten.quantize(hasten.load(folder_in(torch.bfloat16, tmp_path)), scheme)
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    assert {layer.request.dtype for layer in packed} == {torch.float32}
    hasten.save(model, tmp_path / "quantized")
    loaded = hasten.load(tmp_path / "quantized", dtype="stored")
    torch.testing.assert_close(logits(loaded), logits(model))


def test_explain_names_the_reason(tmp_path, slow_halves, monkeypatch):
    monkeypatch.setenv("HASTEN_ISA", "none")
    found = next(b for b in hasten.explain(hasten.load(folder_in(torch.bfloat16, tmp_path))) if "linear" in b.operator)
    assert found.kernel == "float32"
    assert ("pytorch", "bfloat16 is emulated by this processor") in [(o.kernel, o.reason) for o in found.others]


def test_bfloat16_activations_of_a_packed_layer_go_through_float32(slow_halves, monkeypatch):
    monkeypatch.setenv("HASTEN_ISA", "none")
    layer = PackedLinear.from_linear(torch.nn.Linear(64, 40))
    assert layer.kernel == "float32"
    x = torch.randn(5, 64).bfloat16()
    exact = x.double() @ layer.dequantize(torch.float64).T + layer.bias.double()
    with torch.inference_mode():
        assert (layer(x).double() - exact).abs().max() < 0.02
        assert layer(x).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize("rows", [(1,), (7,), (2, 3), (0,)])
def test_pieces_of_a_weight_give_the_whole_product(kind, rows, monkeypatch):
    monkeypatch.setattr(wide, "PIECE", 4 * 48 * 5)  # five rows at a time, three in the last piece
    weight = (3 * torch.randn(33, 48)).to(kind)
    bias = None if kind == torch.int8 else torch.randn(33).to(kind)
    x = torch.randn(*rows, 48)
    expected = torch.nn.functional.linear(x, weight.float(), None if bias is None else bias.float())
    with torch.inference_mode():
        found = wide_linear(x, weight, bias)
    assert found.dtype == torch.float32
    loose = x.numel() == 48 and kind != torch.int8  # one row is rounded to the weight's dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0.3 if loose else 1e-4)


def test_gradients_pass_through(slow_halves):
    layer = torch.nn.Linear(8, 6).bfloat16()
    layer.__class__ = WideLinear
    layer(torch.randn(3, 8)).sum().backward()
    assert layer.weight.grad.dtype == torch.bfloat16


def test_an_unknown_dtype_is_still_refused(tmp_path):
    with pytest.raises(HastenError, match="dtype 'half' is not known"):
        hasten.load(folder_in(torch.float32, tmp_path), dtype="half")


@needs_native
def test_products_are_of_the_dtype_of_most_weights():
    """Fused DeltaNet layers keep two small matrices in 16 bits beside their int8 ones."""
    model = hasten.initialize(read_config(values_of("qwen3_5_text")), seed=0, dtype=torch.bfloat16)
    hasten.quantize(model.requires_grad_(False), hasten.Int8())
    assert product_dtype(fuse(model)) == "int8"

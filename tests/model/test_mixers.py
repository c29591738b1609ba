"""Models whose layers keep states: trained, adapted, quantized and explained, and read in the layouts published."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import hasten
from hasten.checkpoints.adapter_files import save_adapter
from hasten.checkpoints.adapters import load_adapters, place_adapter
from hasten.errors import CheckpointError, ConfigError, HastenWarning
from hasten.model.binding import explain
from hasten.model.context import TrainingContext, training_context
from hasten.model.delta import GatedDeltaNet
from hasten.model.families import read_config
from hasten.model.initialize import initialize
from hasten.model.lora import LoRALinear, attach, layer_size, new_adapter
from hasten.ops.linear import PackedLinear
from hasten.ops.native import library
from hasten.training.patterns import with_pattern
from hasten.training.recipe import Shape
from hasten.training.whole import why_not_whole
from instruction_sets import needs_native
from parity import PROMPTS, assert_same, our_logits, reference_logits
from references import decided, make_reference, values_of

FAMILIES = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "lfm2-biases", "lfm2_moe"]
FAMILIES += ["granitemoehybrid", "granitemoehybrid-dense", "nemotron_h", "nemotron_h-dense"]
FUSED_DENSE = ["qwen3_5_text", "lfm2", "lfm2-biases", "granitemoehybrid-dense"]
DENSE = [*FUSED_DENSE, "nemotron_h-dense"]
# Where transformers has parameters of the first layer that keeps a state, by our names: of all rows, or of these.
GRADIENTS = {
    "qwen3_5_text": {
        "log_rate": "linear_attn.A_log",
        "rate_bias": "linear_attn.dt_bias",
        "conv.weight": "linear_attn.conv1d.weight",
        "z.weight": "linear_attn.in_proj_z.weight",
        "out.weight": "linear_attn.out_proj.weight",
        "value_norm.weight": "linear_attn.norm.weight",
    },
    "granitemoehybrid-dense": {
        "log_rate": "mamba.A_log",
        "step_bias": "mamba.dt_bias",
        "skip": "mamba.D",
        "conv.weight": "mamba.conv1d.weight",
        "z.weight": "mamba.in_proj.weight",
        "z.bias": "mamba.in_proj.bias",
        "out.weight": "mamba.out_proj.weight",
        "value_norm.weight": "mamba.norm.weight",
    },
    "nemotron_h-dense": {
        "log_rate": "mixer.A_log",
        "step_bias": "mixer.dt_bias",
        "skip": "mixer.D",
        "conv.weight": "mixer.conv1d.weight",
        "z.weight": "mixer.in_proj.weight",
        "z.bias": "mixer.in_proj.bias",
        "out.weight": "mixer.out_proj.weight",
        "value_norm.weight": "mixer.norm.weight",
    },
    "lfm2-biases": {
        "conv.weight": "conv.conv.weight",
        "conv.bias": "conv.conv.bias",
        "out.weight": "conv.out_proj.weight",
        "out.bias": "conv.out_proj.bias",
        "key.weight": "conv.in_proj.weight",
    },
}
TOKENS = torch.randint(3, 100, (2, 150), generator=torch.Generator().manual_seed(0))


def loss_of(model, tokens):
    positions = torch.arange(tokens.shape[1] - 1).expand(len(tokens), -1)
    context = training_context(model, tokens.shape[1] - 1)
    return model(tokens[:, :-1], positions, context, targets=tokens[:, 1:])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_over_chunks_is_that_of_transformers(family):
    reference = make_reference(family)
    model = hasten.load(reference)
    found = loss_of(model, TOKENS)
    expected = sum(
        torch.nn.functional.cross_entropy(reference_logits(reference, row[:-1].tolist()), row[1:], reduction="sum")
        for row in TOKENS
    )
    torch.testing.assert_close(found.detach(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("family", list(GRADIENTS))
def test_gradients_are_those_of_transformers(family):
    reference = make_reference(family)
    model = hasten.load(make_reference(family))
    loss_of(model, TOKENS).backward()
    logits = reference(TOKENS[:, :-1]).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten(), reduction="sum").backward()
    expected = dict(reference.named_parameters())
    number, ours = next((i, block.mixer) for i, block in enumerate(model.blocks) if block.mixer is not None)
    for own, theirs in GRADIENTS[family].items():
        parameter = ours.get_parameter(own)
        wanted = expected[f"model.layers.{number}.{theirs}"].grad[: len(parameter)]
        assert wanted.abs().max() > 0
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_in_a_row_do_not_see_each_other(family):
    model = hasten.load(make_reference(family))
    lengths = [[70, 1, 79], [150]]
    documents = torch.stack([torch.arange(len(own)).repeat_interleave(torch.tensor(own)) for own in lengths])
    with torch.no_grad():
        positions = torch.arange(150).expand(2, -1)
        together = model.states(TOKENS, positions, training_context(model, 150, documents))
        for row, own in enumerate(lengths):
            start = 0
            for length in own:
                part = TOKENS[row : row + 1, start : start + length]
                places = torch.arange(start, start + length)[None]  # rotary positions go on along the row
                alone = model.states(part, places, training_context(model, length))
                torch.testing.assert_close(together[row, start : start + length], alone[0], rtol=1e-4, atol=1e-4)
                start += length


@pytest.mark.parametrize("family", DENSE)
def test_a_new_model_trains_every_parameter(family):
    model = initialize(read_config(values_of(family)), seed=1)
    loss = loss_of(model, TOKENS)
    assert loss.isfinite()
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name
    for layer in (block.mixer for block in model.blocks if isinstance(block.mixer, GatedDeltaNet)):
        assert (layer.log_rate > -5).all()
        assert (layer.log_rate <= 3).all()


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3_5_text", "Gated DeltaNet"),
        ("lfm2", "short convolution"),
        ("granitemoehybrid-dense", "Mamba-2"),
        ("nemotron_h-dense", "Mamba-2"),
    ],
)
def test_it_is_trained_block_by_block(family, name):
    model = initialize(read_config(values_of(family)), seed=1)
    assert why_not_whole(model) == f"it has layers with {name}"


@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h-latent", *DENSE])
def test_all_linear_layers_may_have_an_adapter(family):
    model = hasten.load(make_reference(family))
    before = our_logits(model, PROMPTS[0])
    adapter = new_adapter(model.config, rank=2, alpha=4.0, targets=("all-linear",))
    linears = {name for name, one in model.named_modules() if isinstance(one, nn.Linear)}
    expected = {name for name in linears if name != "head" and ".experts." not in name}
    assert set(adapter) == {n for n in expected if not n.endswith(("router", "shared_gate"))}
    for name in adapter:
        layer = model.get_submodule(name)
        assert layer_size(model.config, name) == (layer.in_features, layer.out_features)
    attach(model, [adapter])
    assert torch.equal(our_logits(model, PROMPTS[0]), before)
    for layer in model.modules():
        if isinstance(layer, LoRALinear):
            for b in layer.b:
                nn.init.normal_(b, std=0.3)
    assert not torch.allclose(our_logits(model, PROMPTS[0]), before)
    loss_of(model, TOKENS).backward()
    assert all(a.grad is not None for layer in model.modules() if isinstance(layer, LoRALinear) for a in layer.a)


@pytest.mark.filterwarnings("ignore:hasten reads this quantized model")  # 48 features of an expert are no whole groups
@pytest.mark.parametrize("scheme", [hasten.Int8(), hasten.Int4(group_size=32)])
@pytest.mark.parametrize(
    "family", ["qwen3_next", "qwen3_5_text", "lfm2", "lfm2_moe", "granitemoehybrid-dense", "nemotron_h-dense"]
)
def test_quantized_it_is_saved_and_generates_the_same(family, scheme, tmp_path):
    model = hasten.load(make_reference(family), dtype="float32")
    hasten.quantize(model, scheme)
    mixer = next(block.mixer for block in model.blocks if block.mixer is not None)
    for name, one in mixer.named_children():
        assert isinstance(one, PackedLinear) == (name in ("query", "key", "value", "z", "step", "out")), name
    params = hasten.SamplingParams(temperature=0, max_new_tokens=12, min_new_tokens=12)
    expected = [answer.tokens for answer in hasten.generate(model, PROMPTS, params)]
    hasten.save(model, tmp_path)
    again = hasten.load(tmp_path, dtype="float32")
    assert [answer.tokens for answer in hasten.generate(again, PROMPTS, params)] == expected


def test_experts_may_be_stored_in_stacks(tmp_path):
    """As the published Qwen 3.5 has them, and not one by one as transformers writes them."""
    reference = make_reference("qwen3_5_moe_text")
    reference.save_pretrained(tmp_path)
    state = {name: tensor.contiguous().clone() for name, tensor in reference.state_dict().items()}
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in state)
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_same(hasten.load(tmp_path, dtype="float32"), reference)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_a_head_for_further_tokens_is_skipped_in_one_line(family, tmp_path):
    reference = make_reference(family)
    reference.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    more = {"mtp.fc.weight": torch.zeros(4, 8), "mtp.norm.weight": torch.zeros(4)}
    save_file(state | more, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(HastenWarning, match="without 2 tensors of the multi-token prediction head"):
        model = hasten.load(tmp_path, dtype="float32")
    assert_same(model, reference)


@pytest.mark.parametrize(
    ("family", "operator", "attending"),
    [
        ("qwen3_5_text", "gated delta rule", 3),
        ("lfm2", "short convolution", 2),
        ("granitemoehybrid-dense", "Mamba-2's scan", 2),
    ],
)
def test_explain_names_both_kinds_of_layers(family, operator, attending):
    model = hasten.load(make_reference(family), dtype="bfloat16")
    rows, layers = explain(model), [number for number in range(4) if number != attending]
    assert [row.layer for row in rows if row.operator == operator] == layers
    assert {row.kernel for row in rows if row.operator == operator} == {"pytorch"}
    assert {row.layer for row in rows if row.operator == "attention"} == {attending}
    with hasten.kernels(model, attention="reference"):
        assert {row.kernel for row in explain(model) if row.operator == "attention"} == {"reference"}
    if library() is not None:
        fused = explain(hasten.fuse(model))
        assert [(row.layer, row.kernel) for row in fused if row.operator == operator] == [
            (number, "fused") for number in layers
        ]
        assert [row.layer for row in fused if row.operator == "attention"] == [attending]


@pytest.mark.parametrize("family", DENSE)
def test_half_precision_errs_little(family):
    reference = make_reference(family)
    exact = our_logits(hasten.load(reference), PROMPTS[0])
    model = hasten.load(reference, dtype="bfloat16")
    found = our_logits(model, PROMPTS[0])
    theirs = reference.to(torch.bfloat16)(torch.tensor([PROMPTS[0]])).logits[0].float()
    assert (found - exact).square().mean().sqrt() <= 2 * (theirs - exact).square().mean().sqrt()


@pytest.mark.parametrize(
    ("family", "name", "kind"),
    [
        ("qwen3_5_text", "Gated DeltaNet", "linear_attention"),
        ("lfm2", "short convolution", "conv"),
        ("granitemoehybrid-dense", "Mamba-2", "mamba"),
    ],
)
def test_what_it_cannot_have_is_refused(family, name, kind):
    values = values_of(family)
    config = read_config(values)
    pattern = {"attention_pattern": {"name": "bigbird"}}
    with pytest.raises(ConfigError, match=f"a {config.family} keeps states, which have no sparse pattern"):
        with_pattern(config, Shape(attention_pattern="bigbird"))
    with pytest.raises(CheckpointError, match=f"hasten.attention_pattern: layers with {name} have no sparse pattern"):
        read_config(values | {"hasten": pattern})
    with pytest.raises(CheckpointError, match="none of the 4 layers is full_attention"):
        read_config(values | {"layer_types": [kind] * 4})


@pytest.mark.parametrize("family", DENSE)
def test_the_context_of_a_pass_without_a_cache_takes_any_layers(family):
    model = hasten.load(make_reference(family))
    context = TrainingContext([layer.window for layer in model.config.layers])
    positions = torch.arange(150).expand(2, -1)
    with torch.no_grad():
        found = model(TOKENS, positions, context)
        expected = model(TOKENS, positions, training_context(model, 150))
    assert torch.equal(found, expected)


def test_an_export_says_what_it_came_from(tmp_path):
    hasten.save(hasten.load(make_reference("qwen3_5_moe_text")), tmp_path)
    values = json.loads((Path(tmp_path) / "config.json").read_text())
    assert values["architectures"] == ["Qwen3_5MoeForCausalLM"]
    assert "intermediate_size" not in values


@needs_native
@pytest.mark.parametrize(
    "scheme", [hasten.Int8(), hasten.Int4(group_size=32), hasten.Int4(group_size=32, symmetric=False)]
)
@pytest.mark.parametrize("family", FUSED_DENSE)
def test_its_native_steps_take_every_format(family, scheme):
    model = hasten.quantize(decided(hasten.load(make_reference(family), dtype="bfloat16")), scheme)
    plain = our_logits(model, PROMPTS[0])
    found = our_logits(hasten.fuse(model), PROMPTS[0])
    assert model.stack is not None
    assert (found - plain).abs().max() <= 0.1 * plain.abs().max()


@needs_native
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "granitemoehybrid-dense"])
def test_adapters_join_its_native_steps(family, tmp_path):
    reference = make_reference(family)
    exact = decided(hasten.load(reference, dtype="float32"))
    adapter = new_adapter(exact.config, rank=2, alpha=4.0, targets=("all-linear",))
    for number, own in enumerate(adapter.values()):
        nn.init.normal_(own.b, std=0.3, generator=torch.Generator().manual_seed(number))
    save_adapter(tmp_path, adapter, exact.config)
    attach(exact, [adapter])
    readable = decided(hasten.load(reference, dtype="bfloat16"))
    attach(readable, [adapter])
    expected = our_logits(exact, PROMPTS[0])
    model = decided(hasten.load(reference, dtype="bfloat16"))
    load_adapters(model, [tmp_path])
    assert (model.stack is not None) == (family != "qwen3_next"), "one with experts is taken apart"
    found, plain = (our_logits(one, PROMPTS[0]) - expected for one in (model, readable))
    assert found.square().mean().sqrt() <= 2 * plain.square().mean().sqrt()
    if family == "qwen3_next":
        fused = hasten.fuse(hasten.load(reference, dtype="bfloat16"))
        words = r"changes blocks\.0\.mlp\.shared\.\w+, for which the fused blocks have no place"
        with pytest.raises(ConfigError, match=words):
            place_adapter(fused, 0, adapter)

"""Nemotron-H's layers of one half: what a block has, what a cache keeps of it, and how its files are named."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import hasten
from hasten.distributed.tensor_training import check_split
from hasten.engine.cache import KVCache
from hasten.errors import CheckpointError, ConfigError
from hasten.model.binding import explain
from hasten.model.config import LayerConfig
from hasten.model.families import read_config
from hasten.model.fused_block import unknown_parts
from hasten.model.initialize import initialize
from hasten.model.multi_token import head_config
from hasten.planning.memory import (
    InferenceUse,
    TrainingUse,
    calibration_memory,
    inference_memory,
    training_memory,
)
from hasten.training.whole import why_not_whole
from parity import PROMPTS, TOLERANCE, assert_same, our_logits, reference_logits
from references import CASES, make_reference, values_of

KINDS = {"M": {"attention_norm", "mixer"}, "*": {"attention_norm", "attention"}}
KINDS |= {"-": {"mlp_norm", "mlp"}, "E": {"mlp_norm", "mlp"}}
PATTERNS = {"nemotron_h": "MEM*EE-M", "nemotron_h-dense": "-MM-*--M"}
case = pytest.mark.parametrize("case", list(PATTERNS))


@case
def test_a_block_has_the_parameters_of_its_half_alone(case):
    model = hasten.load(make_reference(case))
    for block, kind in zip(model.blocks, PATTERNS[case], strict=True):
        assert {name.partition(".")[0] for name, _ in block.named_parameters()} == KINDS[kind]


@case
def test_what_a_block_adds_is_its_half_of_the_normalised_stream(case):
    model = hasten.load(make_reference(case))
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    for block, kind in zip(model.blocks, PATTERNS[case], strict=True):
        if kind in "-E":
            torch.testing.assert_close(block(x, None, None), x + block.mlp(block.mlp_norm(x)))


@case
def test_a_cache_keeps_nothing_of_an_mlp(case):
    config = read_config(values_of(case))
    cache = KVCache(config, blocks=3, sequences=2, dtype=torch.float32, device="cpu")
    kept = {"M": {"inputs", "matrix"}, "-": set(), "E": set()}
    for own, kind in zip(cache.states, PATTERNS[case], strict=True):
        assert own is None if kind == "*" else set(own) == kept[kind]
    assert len(cache.k) == len(cache.v) == len(cache.windows) == 1


def test_explain_names_what_each_layer_has():
    rows = explain(hasten.load(make_reference("nemotron_h"), dtype="bfloat16"))

    def layers(operator):
        return [row.layer for row in rows if row.operator == operator]

    assert layers("Mamba-2's scan") == [0, 2, 7]
    assert layers("attention") == [3]
    assert layers("experts") == [1, 4, 5]
    assert layers("block") == list(range(8))
    assert {row.layer for row in rows if row.operator.startswith("linear")} == {*range(8), -1}


def test_files_are_read_with_the_names_of_both_versions(tmp_path):
    """NVIDIA's files say "backbone." and have each expert apart; a model in memory says "model." and stacks them."""
    reference = make_reference("nemotron_h")
    reference.save_pretrained(tmp_path)
    hasten.save(hasten.load(reference), tmp_path / "ours")
    names = set(load_file(tmp_path / "ours" / "model.safetensors"))
    assert {name.partition(".")[0] for name in names} == {"backbone", "lm_head"}
    assert "backbone.layers.1.mixer.experts.3.up_proj.weight" in names
    assert "backbone.layers.1.mixer.gate.e_score_correction_bias" in names
    state = {name: tensor.contiguous().clone() for name, tensor in reference.state_dict().items()}
    assert "model.layers.1.mixer.experts.up_proj" in state
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_same(hasten.load(tmp_path, dtype="float32"), reference)


def test_layers_that_predict_further_tokens_stay_unread(tmp_path, recwarn):
    reference = make_reference("nemotron_h-dense")
    hasten.save(hasten.load(reference), tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    more = {"mtp.layers.0.norm.weight": torch.zeros(64)}
    save_file(state | more, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_same(hasten.load(tmp_path, dtype="float32"), reference)
    assert not [warning for warning in recwarn if "tensors are not part" in str(warning.message)]


def test_steps_have_no_least_length(monkeypatch):
    """transformers raises those of a prompt to time_step_min, and computes the same without."""
    values = {name: value for name, value in CASES["nemotron_h-dense"][2].items() if name != "time_step_min"}
    monkeypatch.setitem(CASES, "nemotron_h-dense", (*CASES["nemotron_h-dense"][:2], values))
    reference = make_reference("nemotron_h-dense")
    assert reference.config.time_step_min == 1e-3
    model = hasten.load(reference)
    found, limited = our_logits(model, PROMPTS[0]), reference_logits(reference, PROMPTS[0])
    assert (found - limited).abs().max() > 10 * TOLERANCE
    for block in reference.model.layers:
        block.mixer.time_step_limit = (0.0, float("inf"))
    assert_same(model, reference)


def test_what_has_no_layers_of_one_half_says_so():
    config = read_config(values_of("nemotron_h-dense"))
    assert unknown_parts(config, known=("mixer",)) == "no layers of one half"
    with pytest.raises(ConfigError, match=r"parallel\.tensor does not support a model with Mamba-2"):
        check_split(replace(config, padded_vocab_size=104), 2)
    whole = read_config(values_of("granitemoehybrid-dense"))
    assert not whole.has_single_halves
    first = replace(config, layers=config.layers[:1])  # as a plan times them: no state, which would be the reason
    assert unknown_parts(first) == "no layers of one half"
    assert why_not_whole(initialize(first, seed=0)) == "it has layers of one half"
    with pytest.raises(ConfigError, match="layers of one half"):
        check_split(replace(first, padded_vocab_size=104, activation="silu"), 2)
    assert [config.norms_of(layer) for layer in config.layers] == [1] * 8
    assert [whole.norms_of(layer) for layer in whole.layers] == [2] * 4


def test_a_plan_counts_activations_of_the_halves_that_there_are():
    config = read_config(values_of("nemotron_h-dense"))
    use = TrainingUse(batch_size=2, length=32, dtype="float32")
    parts = training_memory(config, use).parts
    halved = read_config(values_of("nemotron_h-dense") | {"layers_block_type": ["mamba", "mlp", "attention"]})
    fewer = training_memory(halved, use).parts
    assert parts["activations: MLP"] == 4 * fewer["activations: MLP"] > 0
    assert parts["activations: attention"] > fewer["activations: attention"] > 0
    use = InferenceUse(length=80, step=80, weights=0, dtype="float32", row_bytes=4 * config.head_dim)
    assert inference_memory(config, use).parts["cache"] > 0


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("count", [1, 8])
def test_a_plan_computes_the_largest_block_again(recompute, count):
    config = read_config(values_of("nemotron_h-dense"))
    config = replace(config, layers=config.layers[:count])
    kept = {"batch_size": 2, "length": 512, "dtype": "float32", "loss": "torch", "compiled": False, "keeps_freed": True}
    largest = max(
        sum(_of_blocks(replace(config, layers=(layer,)), TrainingUse(**kept)).values()) for layer in config.layers
    )
    use = TrainingUse(**kept, recompute=recompute)
    of_each_block = sum(_of_blocks(config, use).values()) // count
    again = training_memory(config, use).parts["activations computed again"]
    assert again == max(0, largest - of_each_block)
    assert again > 0


def _of_blocks(config, use):
    """What blocks keep, without the stream of the embedding and of the last norm."""
    parts = training_memory(config, use).parts
    found = {name: size for name, size in parts.items() if name.startswith("activations: ")}
    found["activations: norms and residual stream"] -= 2 * use.batch_size * use.length * 4 * config.hidden_size
    return found


def test_calibration_counts_the_width_and_the_numbers_of_mamba():
    config = read_config(values_of("nemotron_h-dense"))
    wide = replace(config, mixer=replace(config.mixer, heads=64))

    def parts(config):
        return calibration_memory(config, states=24, walks=1, step=4, squares=3.0, spill=False).parts

    assert parts(wide)["sums over the samples"] == 4 * 3 * (64 * 16) ** 2 > parts(config)["sums over the samples"]
    numbers = wide.mixer.working_numbers(kept=False)
    assert parts(wide)["passes"] == 4 * (6 * 64 + 3 * config.intermediate_size + numbers)


def test_a_new_model_scales_what_is_added_by_the_number_of_halves():
    config = read_config(values_of("nemotron_h-dense"))
    config = replace(config, layers=config.layers * 4, hidden_size=256)
    block = next(block for block in initialize(config, seed=0).blocks if block.mixer is not None)
    assert float(block.mixer.out.weight.detach().std()) == pytest.approx(0.02 / 32**0.5, rel=0.03)
    whole = read_config(values_of("granitemoehybrid-dense"))
    output = initialize(replace(whole, hidden_size=256), seed=0).blocks[0].mlp.down.weight.detach()
    assert float(output.std()) == pytest.approx(0.02 / 8**0.5, rel=0.03)


def test_a_layer_has_no_experts_or_state_without_that_half():
    for fields in ({"experts": True, "mlp": False}, {"keeps_state": True, "mixes": False}):
        with pytest.raises(ConfigError, match=r"experts=True needs mlp=True, and keeps_state=True needs mixes=True"):
            LayerConfig(**fields)
    (layer,) = head_config(read_config(values_of("nemotron_h"))).layers
    assert layer.attends
    assert layer.mlp
    assert layer.experts


def test_older_files_are_read_with_their_spellings():
    values = values_of("nemotron_h")
    config = read_config(values)
    older = {name: value for name, value in values.items() if name != "head_dim"} | {"attention_head_dim": 32}
    found = read_config(older | {"moe_latent_size": 0, "time_step_limit": [0, 1e10]})
    assert found == config
    assert (found.head_dim, found.expert_latent) == (32, 0)
    with pytest.raises(CheckpointError, match=r"time_step_limit must be \[0\.0, Infinity\]"):
        read_config(values | {"time_step_limit": [0.0, 1e9]})

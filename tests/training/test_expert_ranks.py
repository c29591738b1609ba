"""Ranks that divide each layer's experts compute what one process does, and their checkpoints hold every expert."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

import hasten
import ranks
from hasten.checkpoints.export import export_model
from hasten.distributed.expert_parallel import check_experts
from hasten.distributed.ranks import Ranks
from hasten.errors import ConfigError
from hasten.model.families import read_config
from hasten.model.initialize import initialize
from hasten.quantization import Int4, quantize
from hasten.training.journal import read
from hasten.training.rank_checks import check_ranks, check_shares
from hasten.training.recipe import Lora, Qat
from hasten.training.session import train
from rank_runs import assert_same, stop_after
from references import values_of
from tiny_model import tiny_llama

pytestmark = pytest.mark.slow(minutes=4)  # trains fifty runs, which its tests share

QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "head_dim": 16,
    "initializer_range": 0.05,
}
SHORT = {"steps": 8, "validate_every": 4, "validation_batches": 1, "accumulation": 2}
FEW = {"steps": 4, "validate_every": 4, "validation_batches": 1}
TWO = {"experts": 2}
# What one process computes, and in which ways two do.
CASES = {
    "adamw": (
        SHORT,
        [{"zero": zero} for zero in range(4)]
        + [{"zero": 0, "offload": "optimizer"}, {"zero": 3, "offload": "optimizer"}]
        + [{"zero": 0, "checkpointing": "full"}, {"zero": 0, "checkpointing": "selective"}]
        + [{"zero": 3, "checkpointing": "full"}, {"zero": 3, "checkpointing": "offload"}],
    ),
    "lamb": ({"kind": "lamb", **FEW}, [{"zero": 0}, {"zero": 1}, {"zero": 1, "fused_optimizer": False}]),
    "muon": ({"kind": "muon", **FEW}, [{"zero": 0}, {"zero": 3}]),
    "drop": ({"layer_drop": 0.5, "layer_drop_decay": 1000.0, **FEW}, [{"zero": 0}, {"zero": 2}]),
    "half": ({"precision": "float16", **FEW}, [{"zero": 0}, {"zero": 3}]),
    "bf16": ({"precision": "bfloat16", **FEW}, [{"zero": 0}, {"zero": 3}]),
    "masters": ({"policy": "float32-masters", "precision": "bfloat16", **FEW}, [{"zero": 0}, {"zero": 3}]),
    "lora": ({"lora": Lora(rank=4), "learning_rate": 3e-2, **FEW}, [{"zero": zero} for zero in (0, 2, 3)]),
    "lora-int4": ({"lora": Lora(rank=4), "learning_rate": 3e-2, **FEW}, [{"zero": 0}, {"zero": 3}]),
    "qat": ({"qat": Qat(bits=4), **FEW}, [{"zero": 0}, {"zero": 3}]),
    "compiled": (FEW, [{"zero": 0, "compile": True}, {"zero": 3, "compile": True, "checkpointing": "full"}]),
    "shared": (FEW, [{"zero": 0}, {"zero": 3}]),  # an MLP beside the experts, and a bias that chooses among them
}
HALF = ("half", "bf16", "masters", "qat")


def named(name, way):
    return "-".join([name, *(f"{key}={value}" for key, value in way.items())])


@pytest.fixture(scope="module")
def runs(recipe_of_module):
    """The folder of all runs, trained: by one process, and by two that divide the experts."""
    folder = Path(recipe_of_module().run.folder)
    base = tiny_llama()
    for name, values in {"experts": QWEN3_MOE, "shared-experts": values_of("glm4_moe")}.items():
        keep = {key: base.config.source[key] for key in ("hidden_size", "vocab_size")}
        made = initialize(read_config((base.config.source | values) | keep), seed=1)
        made.tokenizer = base.tokenizer
        export_model(made, folder / name)
        if name == "experts":
            export_model(quantize(made, Int4(group_size=32)), folder / "int4-experts")
    cases, inits = [], {"shared": "shared-experts", "lora-int4": "int4-experts"}
    for name, (fields, ways) in CASES.items():
        fields = {"init": str(folder / inits.get(name, "experts")), **fields}
        train(recipe_of_module(name=name, **fields), progress=False)
        cases += [recipe_of_module(name=named(name, way), **(fields | TWO | way)).to_json() for way in ways]
    ranks.train_all(cases, folder.parent)
    return folder


def lines(runs, name):
    return read(runs / name / "train.jsonl")


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_with_half_of_the_experts_each_compute_what_one_does(runs, name):
    for way in CASES[name][1]:
        assert_same(lines(runs, named(name, way)), lines(runs, name), *((2e-3, ("loss",)) if name in HALF else ()))
        one, two = (load_file(*(runs / run).glob("*/*model.safetensors")) for run in (name, named(name, way)))
        assert {key: (t.shape, t.dtype) for key, t in one.items()} == {
            key: (t.shape, t.dtype) for key, t in two.items()
        }
        if name == "adamw":
            assert max(float((one[key] - two[key]).abs().max()) for key in one) < 1e-4
            assert any(".experts.7." in key for key in two)


def test_four_ranks_in_pairs_or_all_together(runs, recipe_of_module):
    fields = SHORT | {"init": str(runs / "experts")}
    ways = [{"zero": zero, "experts": count} for zero in (0, 3) for count in (2, 4)]
    made = [recipe_of_module(name=named("four", way), **(fields | way)) for way in ways]
    ranks.train_all([one.to_json() for one in made], runs.parent, ranks=4)
    for one in made:
        assert_same(lines(runs, one.name), lines(runs, "adamw"))


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (None, (2, {"zero": 0, "experts": 2})),
        (None, (4, {"zero": 3, "experts": 4})),
        ((2, {"zero": 0, "experts": 2}), None),
        ((2, {"zero": 3, "experts": 2}), (4, {"zero": 1, "experts": 4})),
        ((4, {"zero": 2, "experts": 2, "background_checkpoints": True, "checkpoint_every": 3}), (2, {"zero": 0})),
    ],
)
def test_any_number_of_ranks_goes_on_from_what_any_has_written(runs, recipe_of_module, first, then):
    fields = SHORT | {"init": str(runs / "experts"), "name": f"continued-{first}-{then}".translate({32: 95, 39: 95})}
    if first is None:
        stop_after(recipe_of_module(**fields), 5)
    else:
        count, way = first
        ranks.train_all([recipe_of_module(**(fields | way)).to_json() | {"stop_after": 5}], runs.parent, ranks=count)
    if then is None:
        train(recipe_of_module(**fields), progress=False, resume="must")
    else:
        count, way = then
        ranks.train_all([recipe_of_module(**(fields | way)).to_json()], runs.parent, ranks=count)
    assert_same(lines(runs, fields["name"]), lines(runs, "adamw"))
    model, whole = (hasten.load(runs / name / "model", dtype="stored") for name in (fields["name"], "adamw"))
    assert all((a - b).abs().max() < 1e-4 for a, b in zip(model.parameters(), whole.parameters(), strict=True))


def refused(config, made, several):
    made.check()
    check_ranks(made, several)
    check_shares(config, made.parallel)


def test_what_experts_cannot_be_divided_with_is_refused(recipe):
    two, config = Ranks(size=2, joined=True), read_config(values_of("qwen3_moe") | {"num_experts": 8})
    curved = Qat(bits=4, learned_scales=False, start_bits=8, eigenvalue_steps=2)
    refused(config, recipe(experts=2), two)
    for fields, said in (
        ({"zero": 1, "replicas": 2}, "supports neither parallel.replicas nor parallel.tensor"),
        ({"zero": 1, "tensor": 2}, "supports neither parallel.replicas nor parallel.tensor"),
        ({"zero": 3, "offload": "all"}, "set parallel.offload optimizer"),
        ({"kind": "onebit-adam", "beta2": 0.999}, "averages whole models, which parallel.experts divides"),
        ({"qat": curved}, "qat.eigenvalue_steps measures whole blocks, which parallel.experts divides"),
    ):
        with pytest.raises(ConfigError, match=said):
            refused(config, recipe(experts=2, **fields), two)
    with pytest.raises(ConfigError, match=r"parallel.experts is 3, which does not divide the number of processes .2."):
        refused(config, recipe(experts=3), two)
    with pytest.raises(ConfigError, match=r"number of processes .1.; start a multiple of it with .* --processes"):
        train(recipe(experts=2), progress=False)
    with pytest.raises(ConfigError, match="the model has no experts; leave it at 1"):
        check_experts(tiny_llama().config, 2)
    with pytest.raises(ConfigError, match=r"does not divide the model's 8 experts; choose a divisor of 8"):
        check_experts(config, 3)

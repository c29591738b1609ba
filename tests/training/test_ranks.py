"""Two processes compute what one computes: the same losses, gradient norms and validation losses, whoever has what."""

import json
import warnings
from pathlib import Path

import pytest
import transformers
from safetensors.torch import load_file

import hasten
import ranks
from hasten.checkpoints.export import export_model
from hasten.distributed.ranks import Ranks
from hasten.errors import ConfigError
from hasten.model.families import read_config
from hasten.model.initialize import initialize
from hasten.quantization import Int4, Int8, quantize
from hasten.training.checkpoint_state import find
from hasten.training.journal import read
from hasten.training.recipe import Lora, Qat
from hasten.training.session import train
from rank_runs import assert_same, stop_after
from tiny_model import tiny_llama

pytestmark = pytest.mark.slow(minutes=2)  # trains 50 runs, which its tests share

SHAPE = {"hidden_size": 40, "feed_forward": 51}  # rows that two ranks cannot share evenly
HARD = {"accumulation": 2, "separate_documents": True, "steps": 20, "validate_every": 10, **SHAPE}
SHORT = {"steps": 10, "validate_every": 5, "validation_batches": 1, **SHAPE}
DROP = {"layer_drop": 0.5, "layers": 4, "accumulation": 2, **SHORT}
PATTERN = "bigbird:block=16,window=1,random-blocks=1"
MASTERS = {"policy": "float32-masters", "precision": "bfloat16", **SHORT}

# What one process computes, and in which ways two do.
CASES = {
    "adamw": (
        HARD,
        [{"zero": zero} for zero in range(4)] + [{"zero": 2, "offload": "optimizer"}, {"zero": 3, "offload": "all"}],
    ),
    "lamb": ({"kind": "lamb", **SHORT}, [{"zero": 1}, {"zero": 3}]),
    "muon": ({"kind": "muon", **SHORT}, [{"zero": 1}, {"zero": 3, "prefetch": 1}]),
    "drop": (DROP, [{"zero": 0}, {"zero": 1}, {"zero": 3}]),
    "sparse": (
        {"attention_pattern": PATTERN, "context": 64, "checkpointing": "full", **SHORT},
        [{"zero": 2}, {"zero": 3, "checkpointing": "offload"}],
    ),
    "half": ({"precision": "float16", **SHORT}, [{"zero": 0}, {"zero": 3}]),
    "lora": (
        {"lora": Lora(rank=4, targets=("q_proj", "down_proj")), "learning_rate": 3e-2, **SHORT},
        [{"zero": 0}, {"zero": 2}, {"zero": 3, "offload": "optimizer"}],
    ),
    "lora-plain": (
        {"lora": Lora(rank=4, targets=("q_proj", "down_proj")), "learning_rate": 3e-2, "init": "taken-model", **SHORT},
        [{"zero": 2}, {"zero": 3}, {"zero": 3, "checkpointing": "full", "offload": "optimizer"}],
    ),
    "lora-int4": (
        {"lora": Lora(rank=4, targets=("all-linear",)), "learning_rate": 3e-2, **SHORT},
        [{"zero": 0}, {"zero": 3}],
    ),
    "qat": (
        {"qat": Qat(bits=4), **SHORT, "hidden_size": 32, "feed_forward": 64},
        [{"zero": zero} for zero in range(4)],
    ),
    "qat-lora": (
        {"qat": Qat(bits=3), "lora": Lora(rank=4, targets=("q_proj", "down_proj")), "init": "taken-model", **SHORT},
        [{"zero": 0}, {"zero": 2}, {"zero": 3}],
    ),
    "lora-masters": (
        {"lora": Lora(rank=4, base="bfloat16"), "init": "taken-model", "learning_rate": 3e-2, **MASTERS},
        [{"zero": 0}, {"zero": 2}, {"zero": 3, "offload": "optimizer"}],
    ),
    "taken": (SHORT, [{"zero": 0}, {"zero": 3}]),  # a model of transformers
    "taught": (
        {"teacher": "taken-model", "tokenizer": "taken-model", **SHORT},
        [{"zero": 0}, {"zero": 2}, {"zero": 3}],
    ),
    "experts": (SHORT, [{"zero": 0}, {"zero": 1}, {"zero": 2}, {"zero": 3}]),
    "untied": (SHORT, [{"zero": 3}]),  # though its config ties head and embedding
    "masters": (MASTERS, [{"zero": 0}, {"zero": 3, "offload": "optimizer"}]),
    "bf16": ({"precision": "bfloat16", **SHORT}, [{"zero": 0}, {"zero": 3}, {"zero": 3, "checkpointing": "full"}]),
    "compiled": (SHORT, [{"zero": 0, "compile": True}, {"zero": 3, "compile": True}]),  # beside what was not
}
# Stopped after step 7 by the first, gone on by the second; 1 process: no ranks.
CONTINUED = [
    ({"zero": 3}, None),
    ({"zero": 0}, {"zero": 3}),
    ({"zero": 1, "background_checkpoints": True, "checkpoint_every": 3}, {"zero": 2, "offload": "optimizer"}),
    (None, {"zero": 3}),
]


def named(name, way):
    return "-".join([name, *(f"{key}={value}" for key, value in way.items())])


@pytest.fixture(scope="module")
def runs(recipe_of_module):
    """The folder of all runs, trained: by one process, by two, and those of `CONTINUED` up to step 7."""
    folder = Path(recipe_of_module().run.folder)
    cases = []
    base = tiny_llama()
    theirs = hasten.load(transformers.LlamaForCausalLM(transformers.LlamaConfig(**base.config.source)))
    theirs.tokenizer = base.tokenizer
    export_model(theirs, folder / "taken-model")
    export_model(quantize(base, Int8()), folder / "lora-model")  # what the adapter stands beside: packed weights
    routed = base.config.source | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    experts = initialize(read_config(routed), seed=1)
    experts.tokenizer = base.tokenizer
    export_model(tiny_llama(), folder / "untied-model")
    config = json.loads((folder / "untied-model/config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "untied-model/config.json").write_text(json.dumps(config))
    export_model(experts, folder / "experts-model")  # of eight experts two ranks reach others with few tokens
    export_model(quantize(tiny_llama(), Int4(group_size=32)), folder / "lora-int4-model")
    for name, (fields, ways) in CASES.items():
        if (init := folder / f"{name}-model").exists():
            fields = fields | {"init": str(init)}
        places = [key for key in ("init", "teacher", "tokenizer") if fields.get(key) == "taken-model"]
        fields = fields | dict.fromkeys(places, str(folder / "taken-model"))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "hasten runs")  # an attention pattern that transformers does not know
            train(recipe_of_module(name=name, **fields), progress=False)
        cases += [recipe_of_module(name=named(name, way), **(fields | way)).to_json() for way in ways]
    cases.append(recipe_of_module(name="overflow", precision="float16", zero=2, steps=8).to_json() | {"overflow": 5})
    for number, (first, _) in enumerate(CONTINUED):
        made = recipe_of_module(name=f"continued-{number}", **(HARD | (first or {})))
        if first is None:
            stop_after(made, 7)
        else:
            cases.append(made.to_json() | {"stop_after": 7})
    ranks.train_all(cases, folder.parent)
    return folder


def lines(runs, name):
    return read(runs / name / "train.jsonl")


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_compute_what_one_does(runs, name):
    # Gradients are summed in another order: in 16 bits, or before activations that are rounded to 8.
    half = name in ("half", "masters", "bf16", "lora", "lora-int4", "lora-masters", "qat", "qat-lora")
    for way in CASES[name][1]:
        ours = lines(runs, named(name, way))
        assert_same(ours, lines(runs, name), *((2e-3, ("loss",)) if half else ()))
        one, two = (load_file(*(runs / run).glob("*/*model.safetensors")) for run in (name, named(name, way)))
        assert {key: (t.shape, t.dtype) for key, t in one.items()} == {
            key: (t.shape, t.dtype) for key, t in two.items()
        }


def test_an_adapter_learns_the_same_whoever_has_what_of_it(runs):
    whole, *shared = (lines(runs, named("lora", way)) for way in CASES["lora"][1])
    for one in shared:
        assert_same(one, whole)


def test_four_ranks_and_two_replicas_of_two(runs, recipe_of_module):
    ways = {"adamw": {"zero": 2, "replicas": 2}, "muon": {"zero": 3}, "lamb": {"zero": 1, "replicas": 2}}
    made = [recipe_of_module(name=f"four-{name}", **(CASES[name][0] | way)) for name, way in ways.items()]
    ranks.train_all([one.to_json() for one in made], runs.parent, ranks=4)
    for name in ways:
        assert_same(lines(runs, f"four-{name}"), lines(runs, name))


def test_what_overflows_on_one_rank_is_skipped_on_all(runs):
    told = lines(runs, "overflow")
    assert [line["step"] for line in told if line["skipped"]] == [5]
    assert [line["scale"] for line in told[3:6]] == [65536.0, 32768.0, 32768.0]
    assert told[-1]["loss"] < told[0]["loss"]


def test_any_number_of_ranks_goes_on_from_what_any_has_written(runs, recipe_of_module):
    cases = []
    for number, (_, then) in enumerate(CONTINUED):
        made = recipe_of_module(name=f"continued-{number}", **(HARD | (then or {})))
        stored = find(runs / made.name / "checkpoints/last")
        assert stored.step == 7
        if then is None:
            train(made, progress=False, resume="must")
        else:
            cases.append(made.to_json())
    ranks.train_all(cases, runs.parent)
    for number in range(len(CONTINUED)):
        assert_same(lines(runs, f"continued-{number}"), lines(runs, "adamw"))
    model = hasten.load(runs / "continued-1/model", dtype="stored")
    whole = hasten.load(runs / "adamw/model", dtype="stored")
    assert all((a - b).abs().max() < 1e-4 for a, b in zip(model.parameters(), whole.parameters(), strict=True))


def test_rows_that_do_not_divide_are_refused(recipe):
    with pytest.raises(ConfigError, match=r"data.batch_size is 4, which 3 processes"):
        Ranks(size=3).rows(recipe().data.batch_size)


def test_what_only_several_processes_share_is_refused_in_one_before_a_text_is_read(recipe):
    with pytest.raises(ConfigError, match=r"parallel\.zero 1 is for several processes: .*--processes"):
        train(recipe(zero=1, offload="all", source="no-such-text"), progress=False)

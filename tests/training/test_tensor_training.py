"""Two processes that split every block and every row of tokens compute what one process does."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import ranks
import split_steps
from hasten.distributed.ranks import Ranks
from hasten.distributed.tensor_training import apply_tensor_parallel
from hasten.errors import ConfigError
from hasten.model.families import read_config
from hasten.model.transformer import Transformer
from hasten.training.journal import read
from hasten.training.session import train
from hasten.training.setup import set_up
from rank_runs import assert_same, stop_after
from references import make_reference, values_of
from tiny_model import tiny_llama

pytestmark = pytest.mark.slow(minutes=4)  # trains ten runs, which its tests share

SPLIT = {"zero": 2, "tensor": 2}
SHAPE = {"heads": 4, "kv_heads": 2, "feed_forward": 68, "vocab_size": 310, "pad_vocabulary_to": 4}
SHORT = {"steps": 10, "validate_every": 5, "validation_batches": 1, "accumulation": 2, **SHAPE}
CASES = {
    "llama": (SHORT, {}),
    "gpt2": ({**SHORT, "family": "gpt2", "kv_heads": None}, {"zero": 3}),
    "lamb": ({**SHORT, "kind": "lamb"}, {"zero": 1}),
    "documents": ({**SHORT, "separate_documents": True, "checkpointing": "full"}, {"offload": "optimizer"}),
    "masters": ({**SHORT, "policy": "float32-masters", "precision": "bfloat16"}, {}),
}


@pytest.fixture(scope="module")
def runs(recipe_of_module):
    folder = Path(recipe_of_module().run.folder)
    cases = []
    for name, (fields, way) in CASES.items():
        train(recipe_of_module(name=name, **fields), progress=False)
        cases.append(recipe_of_module(name=f"split-{name}", **fields | SPLIT | way).to_json())
    stop_after(recipe_of_module(name="continued", **SHORT), 4)
    cases.append(recipe_of_module(name="continued", **SHORT | SPLIT).to_json())
    cases.append(recipe_of_module(name="stopped", **SHORT | SPLIT).to_json() | {"stop_after": 4})
    ranks.train_all(cases, folder.parent)
    train(recipe_of_module(name="stopped", **SHORT), progress=False, resume="must")
    return folder


def lines(runs, name):
    return read(runs / name / "train.jsonl")


@pytest.mark.parametrize("name", CASES)
def test_what_is_split_computes_what_one_process_does(runs, name):
    half = name == "masters"
    assert_same(lines(runs, f"split-{name}"), lines(runs, name), *((2e-3, ("loss",)) if half else ()))


def test_split_blocks_compile(runs, recipe_of_module):
    ranks.train_all([recipe_of_module(name="compiled", **SHORT | SPLIT, compile=True).to_json()], runs.parent)
    assert_same(lines(runs, "compiled"), lines(runs, "llama"))


def test_four_ranks_as_two_pairs(runs, recipe_of_module):
    lamb = recipe_of_module(name="four-lamb", **SHORT | SPLIT, kind="lamb")
    pairs = recipe_of_module(name="four-pairs", **SHORT | SPLIT, replicas=2)
    stopped = recipe_of_module(name="four-stopped", **SHORT | SPLIT)
    cases = [lamb.to_json(), pairs.to_json(), stopped.to_json() | {"stop_after": 4}]
    ranks.train_all(cases, runs.parent, ranks=4)
    train(recipe_of_module(name="four-stopped", **SHORT), progress=False, resume="must")
    stop_after(recipe_of_module(name="four-continued", **SHORT), 4)
    ranks.train_all([recipe_of_module(name="four-continued", **SHORT | SPLIT).to_json()], runs.parent, ranks=4)
    assert_same(lines(runs, "four-lamb"), lines(runs, "lamb"))
    for name in ("pairs", "stopped", "continued"):
        assert_same(lines(runs, f"four-{name}"), lines(runs, "llama"))


@pytest.mark.parametrize("name", ["continued", "stopped"])
def test_a_checkpoint_goes_from_one_process_to_split_ones_and_back(runs, name):
    assert_same(lines(runs, name), lines(runs, "llama"))


@pytest.mark.parametrize("count", [2, 4])
def test_every_kind_of_block_is_split(count):
    families = ["llama-biases", "gpt2-scaled", "qwen3", "gemma2", "phi3-window"]
    values = {name: make_reference(name).config.to_dict() for name in families}
    code = Path(split_steps.__file__).read_text(encoding="utf-8")
    for status, said, errors in ranks.run(code, json.dumps(values), ranks=count):
        assert status == 0, errors
        found = json.loads(said.splitlines()[-1])
    for name, own in values.items():
        for (loss, norm), (whole, its) in zip(found[name], split_steps.steps(own), strict=True):
            assert loss == pytest.approx(whole, rel=1e-5), name
            assert norm == pytest.approx(its, rel=1e-3), name  # it magnifies what rounding has left


def test_what_cannot_be_split_is_refused(recipe, monkeypatch):
    for fields, said in (
        ({"tensor": 2}, "parallel.tensor has no effect with parallel.zero 0; set that too"),
        ({**SPLIT, "context": 33}, "data.context .33. must be a multiple"),
        ({**SPLIT, "kind": "muon"}, "needs whole matrices"),
        ({**SPLIT, "loss": "reference"}, "chunked loss of its own"),
        ({**SPLIT, "dropout": 0.1}, "neither lora.rank nor dropout"),
    ):
        with pytest.raises(ConfigError, match=said):
            train(recipe(**fields), progress=False)
    with pytest.raises(ConfigError, match=r"parallel.tensor is 2, which does not divide the number of processes .3."):
        Ranks(size=3, rank=0).split(2)
    model, two = tiny_llama(), Ranks(size=2, joined=True, tensor=2)
    monkeypatch.setattr("hasten.training.setup.initialize", lambda *_, **__: pytest.fail("the model was made first"))
    with pytest.raises(ConfigError, match=r"which the model's 3 key.value heads cannot be split into"):
        set_up(recipe(**SPLIT, heads=3, kv_heads=None, hidden_size=48), progress=False, ranks=two)
    with pytest.raises(ConfigError, match=r"parallel.tensor is 4, which the model's 2 key/value heads"):
        apply_tensor_parallel(model, replace(two, size=4, tensor=4), 1)
    families = ("mixtral", "olmoe", "qwen2_moe", "granitemoe", "dots1", "glm4_moe", "ernie4_5_moe", "minimax_m2")
    for family in (*families, "gpt_oss"):
        other = Transformer(read_config(values_of(family) | {"vocab_size": 102}))
        with pytest.raises(ConfigError, match="not support a model with experts"):
            apply_tensor_parallel(other, two, 1)
    for family, part in (
        ("olmo2", "blocks without norms before attention and MLP"),
        ("cohere2", "blocks whose attention and MLP read the same stream"),
        ("granite", "scaled logits"),
        ("apertus", "activations that learn"),
        ("nanochat", "norms without weights"),
        ("qwen3_5_text", "Gated DeltaNet"),
        ("lfm2", "short convolution"),
    ):
        other = Transformer(read_config(values_of(family) | {"vocab_size": 102}))
        with pytest.raises(ConfigError, match=f"not support a model with {part}"):
            apply_tensor_parallel(other, two, 1)

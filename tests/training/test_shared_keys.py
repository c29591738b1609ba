"""Models whose layers use the keys of others are trained whole, over packed documents, and as adapters."""

import pytest
import torch

import hasten
from hasten.checkpoints.export import export_model
from hasten.errors import ConfigError
from hasten.model.families import read_config
from hasten.model.initialize import initialize
from hasten.training.journal import read
from hasten.training.recipe import Lora
from hasten.training.session import train
from references import values_of
from tiny_model import tiny_llama


def folder_of(case, folder):
    """A folder with a tiny random Gemma 4 and a tokenizer."""
    tokenizer = tiny_llama().tokenizer
    sizes = {"vocab_size": tokenizer.vocab_size, "vocab_size_per_layer_input": tokenizer.vocab_size}
    model = initialize(read_config(values_of(case) | sizes | {"initializer_range": 0.1}), seed=0)
    model.tokenizer = tokenizer
    export_model(model, folder)
    return str(folder)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Shaped like the E2B."""
    return folder_of("gemma4_text-shared", tmp_path_factory.mktemp("gemma4") / "base")


@pytest.mark.parametrize(
    "fields",
    [{"separate_documents": True}, {"checkpointing": "full"}, {"lora": Lora(rank=4, targets=("all-linear",))}],
    ids=["documents", "recomputed", "lora"],
)
def test_the_loss_falls(recipe, base, fields):
    name = "-".join(["run", *fields])
    result = train(recipe(name=name, init=base, steps=12, learning_rate=1e-2, warmup_steps=2, **fields), progress=False)
    losses = [line["loss"] for line in read(result.folder / "train.jsonl")]
    assert losses[-1] < losses[0] - 0.1
    if "lora" not in fields:
        before, after = (hasten.load(folder, dtype="float32") for folder in (base, result.model_folder))
        for name, parameter in after.named_parameters():
            assert not torch.equal(parameter, before.get_parameter(name)), name


@pytest.mark.parametrize("case", ["gemma4_text", "gemma4_text-experts"])
def test_the_loss_falls_where_values_are_keys(recipe, case, tmp_path):
    made = recipe(name="run", init=folder_of(case, tmp_path / "base"), steps=8, learning_rate=1e-2, warmup_steps=2)
    losses = [line["loss"] for line in read(train(made, progress=False).folder / "train.jsonl")]
    assert losses[-1] < losses[0] - 0.1


def test_layers_are_not_dropped(recipe, base):
    with pytest.raises(ConfigError, match=r"techniques.layer_drop: layers of a gemma4_text use the keys of others"):
        train(recipe(name="dropped", init=base, steps=2, layer_drop=0.5), progress=False)

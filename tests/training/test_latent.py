"""Models with latent attention are trained whole, over packed documents, as adapters, and while they are rounded."""

import pytest
import torch

import hasten
from hasten.checkpoints.export import export_model
from hasten.errors import ConfigError
from hasten.model.families import read_config
from hasten.model.initialize import initialize
from hasten.training.journal import read
from hasten.training.recipe import Lora, Qat
from hasten.training.session import train
from references import values_of
from tiny_model import tiny_llama


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with a tiny random DeepSeek V3 and a tokenizer."""
    folder, tokenizer = tmp_path_factory.mktemp("latent") / "base", tiny_llama().tokenizer
    sizes = {"vocab_size": tokenizer.vocab_size, "initializer_range": 0.1}
    model = initialize(read_config(values_of("deepseek_v3") | sizes), seed=0)
    model.tokenizer = tokenizer
    export_model(model, folder)
    return str(folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"separate_documents": True},
        {"checkpointing": "full"},
        {"dropout": 0.1},
        {"kind": "muon"},
        {"lora": Lora(rank=4, targets=("all-linear",))},
        {"qat": Qat(bits=8)},
    ],
    ids=["documents", "recomputed", "dropout", "muon", "lora", "rounded"],
)
def test_the_loss_falls(recipe, base, fields):
    name = "-".join(["run", *fields])
    result = train(recipe(name=name, init=base, steps=12, learning_rate=1e-2, warmup_steps=2, **fields), progress=False)
    losses = [line["loss"] for line in read(result.folder / "train.jsonl")]
    assert losses[-1] < losses[0] - 0.1
    if not {"lora", "qat"} & set(fields):
        before, after = (hasten.load(folder, dtype="float32") for folder in (base, result.model_folder))
        for name, parameter in after.named_parameters():
            if ".attention." in name:
                assert not torch.equal(parameter, before.get_parameter(name)), name


def test_it_has_no_sparse_pattern(recipe, base):
    with pytest.raises(ConfigError, match=r"model.attention_pattern: a deepseek_v3 has latent attention"):
        train(recipe(name="sparse", init=base, steps=2, attention_pattern="local:radius=1"), progress=False)

"""Models whose layers keep states are trained block by block, over packed documents, and as adapters."""

import pytest
import torch

import hasten
from hasten.checkpoints.export import export_model
from hasten.model.families import read_config
from hasten.model.initialize import initialize
from hasten.model.transformer import Block
from hasten.training import compiled
from hasten.training.journal import read
from hasten.training.recipe import Lora
from hasten.training.session import train
from references import values_of
from tiny_model import tiny_llama


@pytest.fixture(scope="module", params=["qwen3_5_text", "lfm2", "granitemoehybrid-dense", "nemotron_h-dense"])
def base(request, tmp_path_factory):
    """A tiny random model with a tokenizer."""
    tokenizer = tiny_llama().tokenizer
    values = values_of(request.param) | {"vocab_size": tokenizer.vocab_size, "initializer_range": 0.15}
    model = initialize(read_config(values), seed=0)
    model.tokenizer = tokenizer
    folder = tmp_path_factory.mktemp("states") / "base"
    export_model(model, folder)
    return str(folder)


@pytest.mark.parametrize(
    "fields",
    [{}, {"separate_documents": True}, {"checkpointing": "full"}, {"lora": Lora(rank=4, targets=("all-linear",))}],
    ids=["plain", "documents", "recomputed", "lora"],
)
def test_the_loss_falls(recipe, base, fields):
    name = "-".join(["run", *fields])
    result = train(recipe(name=name, init=base, steps=12, learning_rate=1e-2, warmup_steps=2, **fields), progress=False)
    losses = [line["loss"] for line in read(result.folder / "train.jsonl")]
    assert losses[-1] < losses[0] - 0.1
    if "lora" not in fields:
        before, after = (hasten.load(folder, dtype="float32") for folder in (base, result.model_folder))
        for name, parameter in after.named_parameters():
            if ".mixer." in name:
                assert not torch.equal(parameter, before.get_parameter(name)), name


def test_only_blocks_with_attention_are_compiled(monkeypatch):
    blocks = []
    monkeypatch.setattr(Block, "compile", lambda block, **options: blocks.append(block))
    monkeypatch.setattr(compiled, "outside_graphs", lambda: None)
    model = initialize(read_config(values_of("qwen3_5_text")), seed=0)
    compiled.apply_compile(model)
    assert blocks == [model.blocks[3]]

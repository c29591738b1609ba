"""`hasten train … --lora.rank`: only the adapter is trained, kept and resumed; the base may be in any format."""

import json
import os
import signal
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import hasten
from hasten.checkpoints.export import export_model
from hasten.errors import ConfigError
from hasten.model.lora import LoRALinear, attached
from hasten.ops.linear import PackedLinear
from hasten.quantization import Int4, Int8, quantize
from hasten.training.checkpoint_state import find
from hasten.training.journal import read
from hasten.training.recipe import Lora, Qat, Recipe
from hasten.training.session import train
from hasten.training.setup import set_up
from tiny_model import tiny_llama


def losses(result):
    lines = read(result.folder / "train.jsonl")
    return [(line["step"], line["loss"], line["gradient_norm"], line.get("validation_loss")) for line in lines]


LORA = Lora(rank=4, alpha=8.0, targets=("q_proj", "v_proj", "down_proj"), dropout=0.1)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """One tiny model in float32, bfloat16, int8 and int4."""
    folder, model = tmp_path_factory.mktemp("bases"), tiny_llama()
    export_model(model, folder / "float32")
    export_model(model, folder / "bfloat16", dtype=torch.bfloat16)
    for name, scheme in (("int8", Int8()), ("int4", Int4(group_size=32))):
        export_model(quantize(hasten.load(folder / "float32", dtype="stored"), scheme), folder / name)
    return folder


@pytest.mark.parametrize("base", ["float32", "bfloat16", "int8", "int4"])
def test_only_the_adapter_learns_and_is_kept(recipe, bases, base):
    own = recipe(name=base, init=str(bases / base), lora=LORA, steps=10, learning_rate=3e-2, warmup_steps=2)
    setup = set_up(own, progress=False)
    trained = {name for name, parameter in setup.model.named_parameters() if parameter.requires_grad}
    layers = [module for module in setup.model.modules() if isinstance(module, LoRALinear)]
    assert len(layers) == 2 * 3
    assert isinstance(layers[0].base, PackedLinear) == (base in ("int8", "int4"))
    assert all(".a.0" in name or ".b.0" in name for name in trained)
    assert len(trained) == 2 * len(layers)
    before = {name: tensor.clone() for name, tensor in setup.model.state_dict().items() if name not in trained}
    batch = setup.batches.batch(0)
    setup.step.run([batch])
    held = {id(p) for group in setup.step.optimizer.param_groups for p in group["params"]}
    assert held == {id(setup.model.get_parameter(name)) for name in trained}
    after = setup.model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())

    result = train(own, progress=False)
    found = losses(result)
    assert found[-1][3] < found[0][1] - 0.3
    stored = find(result.folder / "checkpoints" / "last")
    assert load_file(stored.folder / stored.files["weights"][0]).keys() == trained
    assert sorted(path.name for path in result.model_folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert result.model_folder.name == "adapter"


def test_an_adapter_is_written_in_the_dtype_that_is_asked_for(recipe, bases):
    for asked, dtype in (("auto", torch.float32), ("bfloat16", torch.bfloat16)):
        own = recipe(name=asked, init=str(bases / "float32"), lora=LORA, steps=1, export_dtype=asked)
        folder = train(own, progress=False).model_folder
        assert {tensor.dtype for tensor in load_file(folder / "adapter_model.safetensors").values()} == {dtype}


def test_a_run_that_was_stopped_goes_on_bit_for_bit(recipe, bases):
    hard = {"init": str(bases / "int4"), "lora": LORA, "steps": 20, "accumulation": 2, "checkpoint_every": 10}
    whole = train(recipe(name="whole", **hard), progress=False)
    killed = recipe(name="killed", **hard)

    def stop(line):
        if line["step"] == 14:
            os.kill(os.getpid(), signal.SIGTERM)

    assert train(killed, progress=False, on_step=stop).stopped_by == signal.SIGTERM
    resumed = train(killed, progress=False, resume="must")
    assert losses(resumed) == losses(whole)
    name = "adapter_model.safetensors"
    assert (resumed.model_folder / name).read_bytes() == (whole.model_folder / name).read_bytes()
    with pytest.raises(ConfigError, match=r"lora\.rank: 4 -> 8"):
        train(replace(killed, lora=replace(LORA, rank=8)), progress=False)


@pytest.mark.slow  # compiles: half a minute
def test_compiled_blocks_learn_the_same(recipe, bases):
    """torch.compile around the frozen products: the same losses up to rounding."""
    how = {"init": str(bases / "int4"), "lora": replace(LORA, dropout=0.0), "steps": 3}
    plain, compiled = (losses(train(recipe(name=str(c), compile=c, **how), progress=False)) for c in (False, True))
    assert [line[1] for line in plain] == pytest.approx(
        [line[1] for line in compiled], rel=1e-3
    )  # activations are rounded to int8


def test_a_fused_projection_shares_its_a(recipe, tmp_path):
    """GPT-2's c_attn: one A for queries, keys and values, so that the adapter is one of that module."""
    from hasten.model.families import read_config
    from hasten.model.initialize import initialize
    from hasten.model.lora import attach, new_adapter
    from hasten.planning.shapes import gpt2

    model = initialize(read_config(gpt2(32, 1, 2, n_inner=64, n_positions=64) | {"vocab_size": 90}), seed=0)
    adapter = new_adapter(model.config, rank=3, alpha=6, targets=["c_attn"])
    attach(model, [adapter])
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 3 * 32 + 96 * 3
    q, k, v = (attached(model)[f"blocks.0.attention.{name}"] for name in "qkv")
    assert q.a is k.a is v.a


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 0}, "lora.rank is 0; it must be more than 0"),
        ({"rank": 5000}, "lora.rank is 5000; it must be at most 4096"),
        ({"alpha": -1.0}, "lora.alpha is -1.0"),
        ({"targets": ("nonsense",)}, r"'nonsense' is no linear layer .* use all-linear or some of q_proj, k_proj"),
        ({"targets": ()}, "and targets"),
        ({"dropout": 1.0}, "lora.dropout is 1.0"),
    ],
)
def test_wrong_settings_are_refused_in_words(recipe, bases, changes, message):
    with pytest.raises(ConfigError, match=message):
        train(recipe(init=str(bases / "float32"), lora=replace(LORA, **changes)), progress=False)


@pytest.mark.parametrize("bits", [None, 4])
def test_the_weights_of_a_quantized_folder_are_not_trained(recipe, bases, bits):
    with pytest.raises(ConfigError, match=r"int4 is quantized.*--lora\.rank"):
        train(recipe(init=str(bases / "int4"), qat=Qat(bits=bits)), progress=False)


def test_a_recipe_with_lora_is_json_and_back(recipe):
    own = recipe(init="model", lora=LORA)
    assert Recipe.from_json(json.loads(json.dumps(own.to_json()))) == own
    with pytest.raises(ConfigError, match="--init"):
        recipe(lora=LORA).check()

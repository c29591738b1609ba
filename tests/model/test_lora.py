"""Adapters: what they add, and their files in peft's format, both ways."""

import json
import math
import os
import struct
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import hasten
from hasten.checkpoints.adapter_files import load_adapter, save_adapter
from hasten.errors import CheckpointError, ConfigError
from hasten.model.context import training_context
from hasten.model.lora import Factors, adaptable, attach, layer_size, new_adapter
from references import make_reference
from tiny_model import tiny_llama

NAME = "base_model.model.model.layers.{}.self_attn.{}.lora_{}.weight"


def logits(model, tokens):
    positions = torch.arange(tokens.shape[1])[None]
    with torch.no_grad():
        return model(tokens, positions, training_context(model, tokens.shape[1]))


def by_hand(folder, *, rank=3, config=None, layers=(0, 1), modules=("q_proj", "v_proj"), sizes=None):
    """An adapter made of its definition, as peft names things: {name: (A, B)} and its files."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(1)
    made, tensors = {}, {}
    for layer in layers:
        for module in modules:
            n = (sizes or {"q_proj": 64, "v_proj": 32})[module]
            pair = torch.randn(rank, 64, generator=generator), torch.randn(n, rank, generator=generator)
            made[layer, module] = pair
            for which, tensor in zip("AB", pair, strict=True):
                tensors[NAME.format(layer, module, which)] = tensor
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": 6, "target_modules": list(modules)} | (config or {})
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return made


@pytest.mark.parametrize(("rslora", "alpha"), [(False, 6), (True, 6), (False, 2.5)])
def test_what_it_adds_is_its_definition_in_float64(tmp_path, rslora, alpha):
    """W + s·B·A with s = alpha/r, or alpha/√r: the adapted model is the one of those weights."""
    model, merged = tiny_llama(), tiny_llama()
    patterns = {"alpha_pattern": {"layers.1.self_attn.v_proj": 12}} if alpha == 2.5 else {}
    made = by_hand(tmp_path / "a", config={"lora_alpha": alpha, "use_rslora": rslora} | patterns)
    for (layer, module), (a, b) in made.items():
        own = 12 if patterns and (layer, module) == (1, "v_proj") else alpha
        scale = own / (math.sqrt(3) if rslora else 3)
        weight = getattr(merged.blocks[layer].attention, module[0]).weight
        weight.data = (weight.double() + scale * b.double() @ a.double()).float()
    tokens = torch.arange(40)[None] * 7 % 300
    plain = logits(model, tokens)
    choice = attach(model, [load_adapter(tmp_path / "a", model)])
    torch.testing.assert_close(logits(model, tokens), logits(merged, tokens), rtol=1e-3, atol=1e-3)
    choice.every = -1
    assert torch.equal(logits(model, tokens), plain)


def test_each_row_takes_its_own_adapter(tmp_path):
    """Several at once: rows of the base keep every bit, others have what they have alone."""
    made = [by_hand(tmp_path / "a"), by_hand(tmp_path / "b", rank=5, modules=("q_proj",), layers=(1,))]
    assert made
    model = tiny_llama()
    tokens = torch.arange(30)[None] * 11 % 300
    plain = logits(model, tokens)
    choice = attach(model, [load_adapter(tmp_path / name, model) for name in "ab"])
    layer, x = model.blocks[1].attention.q, torch.randn(6, 64)
    choice.choose([0, -1, 1, 1, 0, -1], x.device)
    mixed = layer(x)
    assert torch.equal(mixed[[1, 5]], layer.base(x)[[1, 5]])
    choice.rows = None
    for number, rows in ((0, [0, 4]), (1, [2, 3])):
        choice.every = number
        torch.testing.assert_close(mixed[rows], layer(x)[rows])
        assert not torch.allclose(mixed[rows], layer.base(x)[rows])
    choice.every = -1
    assert torch.equal(logits(model, tokens), plain)


@pytest.mark.parametrize("case", ["llama", "gpt2", "phi3", "qwen3", "qwen2_moe", "glm4_moe"])
def test_saved_and_loaded_it_is_the_same(case, tmp_path):
    model = hasten.load(make_reference(case))
    adapter = new_adapter(model.config, rank=3, alpha=5, targets=["all-linear"], rslora=case == "gpt2")
    for index, own in enumerate(adapter.values()):
        torch.nn.init.normal_(own.b, generator=torch.Generator().manual_seed(index))
    save_adapter(tmp_path / "a", adapter, model.config)
    again = load_adapter(tmp_path / "a", model)
    assert again.keys() == adapter.keys()
    for name, own in adapter.items():
        assert torch.equal(own.a, again[name].a)
        assert torch.equal(own.b, again[name].b)
        assert own.scale == again[name].scale
    assert set(adaptable(model.config)) == {
        name.removeprefix("base_model.model.").rsplit(".", 2)[0]
        for name in load_file(tmp_path / "a" / "adapter_model.safetensors")
    }


# In a process of its own: the environment may have peft in a folder of its own (HASTEN_TEST_PEFT).
WITH_PEFT = """
import sys, json, torch, warnings
sys.path[:0] = [sys.argv[1]] if sys.argv[1] else []
sys.path.append(sys.argv[2])
from pathlib import Path
from peft import LoraConfig, PeftModel, get_peft_model
from references import make_reference
import hasten
from hasten.checkpoints.adapter_files import load_adapter, save_adapter
from hasten.model.lora import attach, new_adapter
from test_lora import logits
folder = Path(sys.argv[3])
targets = {
    "llama": ["q_proj", "v_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj"],
    "phi3": ["qkv_proj", "gate_up_proj"],
}
for case, names in targets.items():
    theirs = make_reference(case)
    tokens = torch.arange(20)[None] * 5 % 101
    plain = theirs(tokens).logits
    config = LoraConfig(
        r=4, lora_alpha=10, target_modules=names, use_rslora=case == "phi3", init_lora_weights=False,
        task_type="CAUSAL_LM", fan_in_fan_out=case == "gpt2",
        rank_pattern={names[0]: 6}, alpha_pattern={"layers.1.self_attn.v_proj": 3} if case == "llama" else {},
    )
    wrapped = get_peft_model(theirs, config).eval()
    wrapped.save_pretrained(folder / case)
    with torch.no_grad():
        expected = wrapped(tokens).logits
    model = hasten.load(make_reference(case))
    attach(model, [load_adapter(folder / case, model)])
    torch.testing.assert_close(logits(model, tokens), expected, rtol=1e-3, atol=2e-4)
    assert not torch.allclose(expected, plain, atol=1e-2)
    # and ours, read by peft
    model = hasten.load(make_reference(case))
    adapter = new_adapter(model.config, rank=3, alpha=7, targets=["all-linear"])
    for own in adapter.values():
        torch.nn.init.normal_(own.b)
    save_adapter(folder / (case + "-ours"), adapter, model.config)
    attach(model, [adapter])
    wrapped = PeftModel.from_pretrained(make_reference(case), folder / (case + "-ours")).eval()
    with torch.no_grad():
        torch.testing.assert_close(logits(model, tokens), wrapped(tokens).logits, rtol=1e-3, atol=1e-3)
print("agreed")
"""


def test_it_agrees_with_peft_both_ways(tmp_path):
    """Adapters of plain and of fused projections, with patterns and with rslora: theirs read by us, ours by peft."""
    where, tests = os.environ.get("HASTEN_TEST_PEFT", ""), os.path.dirname(os.path.dirname(__file__))
    looked = subprocess.run(
        [sys.executable, "-c", "import sys; sys.path[:0] = sys.argv[1:]; import peft", *([where] if where else [])],
        capture_output=True,
        check=False,
    )
    if looked.returncode:
        pytest.skip("peft is not installed here (HASTEN_TEST_PEFT may name a folder that has it)")
    command = [sys.executable, "-c", WITH_PEFT, where, tests, str(tmp_path)]
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), tests, os.path.dirname(__file__)])
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, env=os.environ | {"PYTHONPATH": path}
    )
    assert done.stdout.endswith("agreed\n"), done.stderr


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"use_dora": True}, ConfigError, "use_dora is True, which hasten does not support"),
        ({"modules_to_save": ["lm_head"]}, ConfigError, r"modules_to_save is \['lm_head'\]"),
        ({"bias": "all"}, ConfigError, "bias is 'all'"),
        ({"init_lora_weights": "pissa_niter_4"}, ConfigError, "pissa_niter_4"),
        ({"peft_type": "IA3"}, ConfigError, "peft_type is 'IA3'"),
        ({"r": 0}, ConfigError, "r is 0; it must be a whole number from 1"),
        ({"r": "3"}, ConfigError, "r is '3'"),
        ({"lora_alpha": None}, ConfigError, "lora_alpha is None"),
        ({"lora_alpha": 10**400}, ConfigError, "lora_alpha is 1000"),
        ({"rank_pattern": {"(a+)+$": 3}}, ConfigError, "hasten knows names"),
        ({"rank_pattern": [3]}, ConfigError, "it must be an object"),
        ({"r": 4}, CheckpointError, r"lora_A.weight is F32 of shape \[3, 64\]; with rank 4 .* \[4, 64\]"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, config, error, message):
    by_hand(tmp_path / "a", config=config)
    with pytest.raises(error, match=message):
        load_adapter(tmp_path / "a", tiny_llama())


def test_files_that_are_damaged_or_of_another_model(tmp_path):
    model, folder = tiny_llama(), tmp_path / "a"
    with pytest.raises(CheckpointError, match="no folder with an adapter"):
        load_adapter(folder, model)
    by_hand(folder, layers=(0, 7))
    with pytest.raises(CheckpointError, match=r"layers\.7\..*is no LoRA factor .* \(llama, 2 layers\)"):
        load_adapter(folder, model)
    by_hand(folder, sizes={"q_proj": 48, "v_proj": 32})
    with pytest.raises(CheckpointError, match=r"lora_B.weight is F32 of shape \[48, 3\]; .* \[64, 3\]"):
        load_adapter(folder, model)
    by_hand(folder)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {NAME.format(0, "q_proj", "A"): torch.full((3, 64), torch.nan)}, file)
    with pytest.raises(CheckpointError, match="NaN"):
        load_adapter(folder, model)
    del tensors[NAME.format(0, "q_proj", "B")]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"lora_B\.weight is absent"):
        load_adapter(folder, model)
    save_file({}, file)
    with pytest.raises(CheckpointError, match="holds no tensors"):
        load_adapter(folder, model)
    for bad in (b"", b"PK\x03\x04 a pickle", struct.pack("<Q", 1 << 40) + b"{}", struct.pack("<Q", 9) + b'{"a": [[['):
        file.write_bytes(bad)
        with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors"):
            load_adapter(folder, model)
    file.unlink()
    with pytest.raises(CheckpointError, match="lacks the file adapter_model"):
        load_adapter(folder, model)
    (folder / "adapter_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(CheckpointError, match="a pickle"):
        load_adapter(folder, model)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load_adapter(folder, model)


def test_factors_know_their_scale():
    a, b = torch.randn(4, 8), torch.randn(6, 4)
    assert Factors(a, b, 8.0).scale == 2.0
    assert Factors(a, b, 8.0, rslora=True).scale == 4.0
    assert layer_size(tiny_llama().config, "blocks.0.mlp.down") == (128, 64)

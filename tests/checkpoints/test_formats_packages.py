"""Folders of hasten in GPTQModel, and AutoRound's in hasten: the same numbers, bit for bit.

Both packages ask for another torch than ours, so they live in an environment of their own (docs/in-depth/formats.md):

    PYTHON_WITH_BOTH -m pytest tests/checkpoints/test_formats_packages.py
"""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

import hasten
from hasten.quantization import Int2, Int3, Int4, quantize_to_folder
from tiny_model import tiny_llama

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
NAMES = {"self_attn": ("attention", {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "output"})}
NAMES |= {"mlp": ("mlp", {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"})}
OURS = {
    f"model.layers.{i}.{theirs}.{leaf}": f"blocks.{i}.{ours}.{own}"
    for i in range(2)
    for theirs, (ours, leaves) in NAMES.items()
    for leaf, own in leaves.items()
}


def weights_of(folder):
    """What hasten reads, in float16 as the packages compute it."""
    model = hasten.load(folder, dtype="float32")
    layers = {name: model.get_submodule(ours) for name, ours in OURS.items()}
    return {
        name: (one.dequantize() if hasattr(one, "dequantize") else one.weight).half() for name, one in layers.items()
    }


@pytest.mark.parametrize(
    "scheme", [Int4(group_size=32), Int4(group_size=64, symmetric=False), Int3(group_size=32), Int2(symmetric=False)]
)
def test_gptqmodel_reads_what_is_written(scheme, tmp_path):
    gptqmodel = pytest.importorskip("gptqmodel", reason="the package gptqmodel is not installed")
    scheme = type(scheme)(
        group_size=scheme.group_size, symmetric=scheme.symmetric, lm_head="none", scale_dtype="float16"
    )
    quantize_to_folder(tiny_llama(), scheme, tmp_path / "out", format="gptq")
    options = {"device": "cpu", "backend": gptqmodel.BACKEND.TORCH, "dtype": torch.float16}
    theirs = gptqmodel.GPTQModel.load(str(tmp_path / "out"), **options).model
    for name, expected in weights_of(tmp_path / "out").items():
        assert torch.equal(theirs.get_submodule(name).dequantize_weight().T, expected), name


@pytest.mark.parametrize("symmetric", [True, False])
def test_what_auto_round_writes_is_read(symmetric, tmp_path):
    auto_round = pytest.importorskip("auto_round", reason="the package auto-round is not installed")
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

    hasten.save(tiny_llama(), tmp_path / "plain")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "plain")
    found = {}
    layouts = ["auto_gptq", "auto_round:auto_gptq", "auto_round:gptqmodel", "llm_compressor"]
    for layout in [*layouts, *([] if symmetric else ["auto_awq", "auto_round:auto_awq"])]:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
        settings = {"bits": 4, "group_size": 32, "sym": symmetric, "iters": 1, "nsamples": 2, "seqlen": 32}
        settings |= {"dataset": ["def add(a, b): return a + b " * 20] * 4, "batch_size": 1, "device_map": "cpu"}
        place = tmp_path / layout.replace(":", "-")
        auto_round.AutoRound(model, tokenizer, **settings).quantize_and_save(str(place), format=layout)
        folder = next(place.rglob("config.json")).parent
        found[layout] = weights_of(folder)
        kinds = {"auto_round:auto_gptq": qlinear_torch_zp, "auto_round:gptqmodel": qlinear_torch}
        if layout in kinds:  # the package's own layer multiplies the identity
            assert (
                json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"] == "auto-round"
            )
            tensors = load_file(folder / "model.safetensors")
            for name, expected in found[layout].items():
                n, k = expected.shape
                layer = kinds[layout].QuantLinear(4, 32, k, n, False)
                layer.load_state_dict(
                    {leaf: tensors[f"{name}.{leaf}"] for leaf in ("qweight", "qzeros", "scales")}, False
                )
                layer.post_init()
                assert torch.equal(layer(torch.eye(k, dtype=torch.float16)).T, expected), name
    first, *others = found.values()
    assert all(torch.equal(other[name], weight) for other in others for name, weight in first.items())

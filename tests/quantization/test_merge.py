"""`hasten merge`: the sum of weight and adapter, rounded once; what rounding quantized layers anew costs is told."""

import json

import pytest
import torch
from safetensors.torch import load_file

import hasten
from hasten.checkpoints.adapter_files import load_adapter, save_adapter
from hasten.checkpoints.export import export_model
from hasten.cli.main import main
from hasten.errors import ConfigError
from hasten.model.lora import attach, new_adapter
from hasten.quantization import Int4, quantize
from hasten.quantization.rounding import round_weight
from tiny_model import tiny_llama


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model in bfloat16 and in int4, and an adapter of it."""
    folder, model = tmp_path_factory.mktemp("merge"), tiny_llama()
    export_model(model, folder / "bfloat16", dtype=torch.bfloat16)
    adapter = new_adapter(model.config, rank=4, alpha=8, targets=["q_proj", "down_proj"])
    for index, own in enumerate(adapter.values()):
        torch.nn.init.normal_(own.b, std=0.1, generator=torch.Generator().manual_seed(index))
    save_adapter(folder / "adapter", adapter, model.config)
    export_model(quantize(hasten.load(folder / "bfloat16", dtype="stored"), Int4(group_size=32)), folder / "int4")
    return folder


def test_bfloat16_is_the_sum_in_float64_rounded_once(folders, tmp_path, capsys):
    arguments = ["merge", str(folders / "bfloat16"), str(folders / "adapter")]
    main([*arguments, str(tmp_path / "out")])
    assert "4 layers merged" in capsys.readouterr().out
    main([*arguments, str(tmp_path / "wide"), "--dtype", "float32"])
    before, after, wide = (
        load_file(f / "model.safetensors") for f in (folders / "bfloat16", tmp_path / "out", tmp_path / "wide")
    )
    factors = load_file(folders / "adapter" / "adapter_model.safetensors")
    assert before.keys() == after.keys()
    for name, weight in before.items():
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        if f"{key}A.weight" in factors:
            a, b = (factors[f"{key}{one}.weight"].double() for one in "AB")
            exact = weight.double() + 2.0 * (b @ a)
            assert torch.equal(wide[name], exact.float())
            weight = exact.to(torch.bfloat16)
            assert not torch.equal(weight, before[name])
        assert torch.equal(after[name], weight)
    with pytest.raises(SystemExit):
        main(["merge", str(folders / "bfloat16"), str(folders / "adapter"), str(tmp_path / "out")])
    assert "holds a model already" in capsys.readouterr().err


def test_int4_is_rounded_anew_and_says_what_that_costs(folders, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("def add(a, b):\n    return a + b\n" * 5)
    arguments = [str(folders / "int4"), str(folders / "adapter"), str(tmp_path / "out"), "--json", str(tmp_path / "j")]
    main(["merge", *arguments, "--text", str(tmp_path / "text.txt")])
    done, shown = json.loads((tmp_path / "j").read_text()), capsys.readouterr().out
    assert "4 of them rounded again" in shown
    assert f"perplexity {done['perplexity']:.4f} with the adapter, {done['merged_perplexity']:.4f} merged" in shown
    model, merged = hasten.load(folders / "int4", dtype="stored"), hasten.load(tmp_path / "out", dtype="stored")
    adapter = load_adapter(folders / "adapter", model)
    for row in done["rounded"]:
        layer, own = model.get_submodule(row["name"]), merged.get_submodule(row["name"]).to_weight()
        wanted = (layer.dequantize().double() + adapter[row["name"]].delta).float()
        assert torch.equal(own.values, round_weight(wanted, layer.format).values)
        error = (own.dequantize() - wanted).norm() / adapter[row["name"]].delta.norm()
        assert row["lost"] == pytest.approx(float(error), rel=1e-4)
    same = [n for n in model.quantization if n not in adapter]
    assert same
    for name in same:
        assert torch.equal(model.get_submodule(name).data, merged.get_submodule(name).data)


def test_a_model_with_adapters_is_not_saved_without_them(folders, tmp_path):
    model = tiny_llama()
    attach(model, [load_adapter(folders / "adapter", model)])
    with pytest.raises(ConfigError, match=r"hasten\.merge"):
        hasten.save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_commands_take_an_adapter(folders, tmp_path, capsys):
    """generate with an adapter is not generate without; a wrong one is one line."""
    texts = []
    for more in ([], ["--adapter", str(folders / "adapter")]):
        main(["generate", str(folders / "int4"), "--prompt", "def add", "--max-new-tokens", "8", "--temperature", "0",
              "--ignore-eos", "--json", str(tmp_path / "j"), *more])  # fmt: skip
        texts.append(json.loads((tmp_path / "j").read_text())["tokens"])
    assert texts[0] != texts[1]
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["generate", str(folders / "int4"), "--prompt", "x", "--adapter", str(tmp_path)])
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")

"""What `hasten quantize` takes by default is read by transformers: a tied head stays as it is."""

import json

import pytest
import torch

import hasten
from hasten.cli.generate import Generate
from hasten.cli.main import main
from hasten.model.context import TrainingContext
from quantized_folders import exact
from tiny_model import tiny_llama


@pytest.fixture
def folder(tmp_path):
    """A tied model whose layers have 192 and 384 input features, which the default group divides and 128 does not."""
    hasten.save(tiny_llama(hidden_size=192, intermediate_size=384, tie_word_embeddings=True), tmp_path / "plain")
    return tmp_path / "plain"


def test_a_tied_head_stays_and_groups_are_small(folder, tmp_path, capfd):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    main(["quantize", str(folder), "--scheme", "int4", "--output", str(tmp_path / "out")])
    err = capfd.readouterr().err
    assert "the lm_head, one matrix with the embedding, is not quantized" in err
    assert "--lm-head int8 makes it 0 MB smaller" in err
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert {group["weights"]["group_size"] for group in config["config_groups"].values()} == {32}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    ours, tokens = hasten.load(tmp_path / "out"), torch.arange(7, 31)[None]
    with torch.no_grad():
        found = theirs(tokens).logits[0]
    with torch.no_grad():
        expected = exact(ours)(tokens, torch.arange(24)[None], TrainingContext([None] * 2))[0].float()
    assert float((found - expected).pow(2).mean() / expected.var()) < 1e-3


@pytest.mark.parametrize(("scheme", "blocks"), [("int8", "float"), ("int4", "int8")])
def test_a_folder_and_quantizing_after_loading_treat_activations_alike(scheme, blocks, tmp_path):
    hasten.save(tiny_llama(hidden_size=128), tmp_path / "plain")
    main(["quantize", str(tmp_path / "plain"), "--scheme", scheme, "--output", str(tmp_path / "out")])
    loaded = Generate(model=str(tmp_path / "plain"), prompt="", quantize=scheme, device="cpu").load()
    for model in (hasten.load(tmp_path / "out"), loaded):
        found = {name: layer.activations for name, layer in model.quantization.items()}
        assert found.pop("head") == "float"
        assert set(found.values()) == {blocks}


@pytest.mark.filterwarnings("always:hasten reads this quantized model")
def test_what_is_asked_for_is_taken_with_a_warning(folder, tmp_path, capfd):
    options = ["--lm-head", "int8", "--group-size", "128", "--output", str(tmp_path / "out")]
    main(["quantize", str(folder), "--scheme", "int4", *options])
    err = capfd.readouterr().err
    assert "stays as it is" not in err
    assert "transformers does not" in err
    assert hasten.load(tmp_path / "out").quantization["head"].weight.bits == 8

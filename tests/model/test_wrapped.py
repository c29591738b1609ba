"""Checkpoints with towers: the text model alone is loaded, and computes what the whole one computes for text."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import hasten
from hasten.cli.main import main
from hasten.errors import CheckpointError, HastenWarning
from hasten.model.families import FAMILIES, read_config
from hasten.model.families.wrapped import WRAPPERS, skipped_towers, text_modules, text_tensors
from parity import (
    PROMPTS,
    assert_exported,
    assert_same,
    our_greedy,
    reference_greedy,
)
from tiny_model import tiny_llama
from wrapped_models import WRAPPED, make_wrapped

transformers = pytest.importorskip("transformers")


@pytest.fixture(params=list(WRAPPED))
def wrapped(request):
    return request.param


def load(source, **options):
    with pytest.warns(
        HastenWarning, match=r"the text model is read, without \d+ tensors? of the (vision tower|projector)"
    ):
        return hasten.load(source, **options)


def test_every_wrapper_has_a_case():
    assert {name.partition("-")[0] for name in WRAPPED} == set(WRAPPERS)


def test_folder_gives_the_logits_and_tokens_of_the_whole_model(wrapped, tmp_path):
    reference = make_wrapped(wrapped)
    reference.save_pretrained(tmp_path)
    model = load(tmp_path, dtype="float32")
    assert model.config.family in FAMILIES
    assert_same(model, reference)
    for tokens in PROMPTS:
        assert our_greedy(model, tokens, 32) == reference_greedy(reference, tokens, 32)


def test_model_in_memory_is_taken_over(wrapped):
    reference = make_wrapped(wrapped)
    model = load(reference)
    assert_same(model, reference)
    storages = {t.untyped_storage().data_ptr() for t in reference.state_dict().values()}
    assert all(p.untyped_storage().data_ptr() in storages for p in model.parameters())


def test_export_is_the_plain_text_model(wrapped, tmp_path):
    reference = make_wrapped(wrapped)
    hasten.save(load(reference), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["model_type"] in FAMILIES
    assert "text_config" not in values
    assert_exported(tmp_path, reference)


# Both spellings of the prefix, what is left out of each, and what stays as a name of nobody.
NAMES = [
    ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
    ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
    ("language_model.lm_head.weight", "lm_head.weight"),
    ("lm_head.weight", "lm_head.weight"),
    ("model.text_model.norm.weight", "model.norm.weight"),
    ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
    ("something.else", "something.else"),
    ("vision_tower.encoder.weight", None),
    ("model.vision_tower.encoder.weight", None),
    ("visual.blocks.0.weight", None),
    ("model.multi_modal_projector.weight", None),
]


@pytest.mark.parametrize(("stored", "own"), NAMES)
def test_tensors_get_the_text_models_names_and_towers_are_counted(stored, own):
    kept, towers = text_tensors({"model_type": "gemma3"}, [stored])
    assert kept == ({} if own is None else {own: stored})
    assert sum(towers.values()) == (own is None)
    assert text_tensors({"model_type": "llama"}, [stored]) == ({stored: stored}, {})


def test_no_wrapper_is_a_family():
    """A type that is looked up among the families is never that of a wrapper."""
    assert not FAMILIES.keys() & WRAPPERS.keys()


def test_a_tensor_under_two_names_is_refused():
    with pytest.raises(CheckpointError, match=r"language_model\.lm_head\.weight' are both 'lm_head\.weight'"):
        text_tensors({"model_type": "gemma3"}, ["lm_head.weight", "language_model.lm_head.weight"])


def test_towers_are_named_in_one_line():
    assert skipped_towers({"audio tower": 1}) == "1 tensor of the audio tower"
    assert (
        skipped_towers({"vision tower": 391, "projector": 4})
        == "391 tensors of the vision tower and 4 of the projector"
    )


def wrap(folder, values=(), prefix="language_model."):
    """Make a folder of a text model one of a LLaVA's, with a tower."""
    config = json.loads((folder / "config.json").read_text())
    outer = {"model_type": "llava", "eos_token_id": 7, **dict(values)}
    if "quantization_config" in config:
        quantization, outer["hasten"] = config.pop("quantization_config"), config.pop("hasten", {})
        outer["quantization_config"] = quantization | {"ignore": [prefix + name for name in quantization["ignore"]]}
    (folder / "config.json").write_text(json.dumps(outer | {"text_config": config}))
    tensors = load_file(folder / "model.safetensors")
    tensors = {prefix + name: tensor for name, tensor in tensors.items()}
    save_file(tensors | {"vision_tower.patches.weight": torch.zeros(3, 3)}, folder / "model.safetensors")


@pytest.mark.parametrize("scheme", [None, hasten.Int8(), hasten.Int4(group_size=32, lm_head="none")], ids=str)
def test_quantized_weights_under_a_prefix(scheme, tmp_path):
    model = tiny_llama().to(torch.bfloat16)
    hasten.save(model if scheme is None else hasten.quantize(model, scheme), tmp_path)
    expected = hasten.load(tmp_path, dtype="stored")
    wrap(tmp_path)
    found = load(tmp_path, dtype="stored")
    assert found.quantization == expected.quantization
    assert found.config == expected.config
    ours, theirs = found.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_modules_named_in_a_quantization_config_are_the_text_models():
    given = {
        "ignore": [
            "lm_head",
            "language_model.lm_head",
            "re:vision_tower.*",
            r"re:^model\.language_model\.layers\.0\..*",
        ],
        "dynamic": {"language_model.model.layers.1.mlp.up_proj": {"bits": 8}},
        "bits": 4,
    }
    assert text_modules({"model_type": "llava"}, given) == {
        "ignore": ["lm_head", "lm_head", "re:vision_tower.*", r"re:^model.layers\.0\..*"],
        "dynamic": {"model.layers.1.mlp.up_proj": {"bits": 8}},
        "bits": 4,
    }
    assert text_modules({"model_type": "llama"}, given) is given


def test_fields_that_the_text_config_leaves_out_come_from_the_outer_one():
    text = dict(tiny_llama().config.source)
    text.pop("tie_word_embeddings")
    given = {"model_type": "llava", "text_config": text, "tie_word_embeddings": True, "eos_token_id": 9}
    config = read_config(given)
    assert config.family == "llama"
    assert config.tie_embeddings
    assert config.source["eos_token_id"] == 9
    assert read_config(given | {"tie_word_embeddings": False}).tie_embeddings is False


def test_errors_name_the_place():
    with pytest.raises(CheckpointError, match="here lacks 'text_config', which a gemma3 needs"):
        read_config({"model_type": "gemma3"}, "here")
    with pytest.raises(CheckpointError, match="here: text_config must be an object; found 5"):
        read_config({"model_type": "gemma3", "text_config": 5}, "here")
    with pytest.raises(CheckpointError, match="here: text_config: hidden_size must be"):
        read_config({"model_type": "gemma3", "text_config": {"hidden_size": "many"}}, "here")
    with pytest.raises(CheckpointError, match="here: text_config: model_type must be one that hasten knows"):
        read_config({"model_type": "llava", "text_config": {"model_type": "mamba"}}, "here")
    with pytest.raises(CheckpointError, match="with their text model in text_config gemma3, gemma4, idefics3"):
        read_config({"model_type": "blip"}, "here")


@pytest.mark.filterwarnings("always::hasten.errors.HastenWarning")
def test_commands_take_a_wrapped_folder(tmp_path, capsys):
    hasten.save(tiny_llama(), tmp_path / "model")
    plan = ["plan", str(tmp_path / "model"), "--device", "epyc", "--json"]
    main([*plan, str(tmp_path / "alone.json")])
    wrap(tmp_path / "model")
    main([*plan, str(tmp_path / "wrapped.json")])
    alone, wrapped = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("alone", "wrapped"))
    assert wrapped["parts"] == alone["parts"]
    main(["quantize", str(tmp_path / "model"), "--output", str(tmp_path / "int8"), "--scheme", "int8"])
    assert "the text model is read, without 1 tensor of the vision tower" in capsys.readouterr().err
    assert json.loads((tmp_path / "int8" / "config.json").read_text())["model_type"] == "llama"
    assert hasten.load(tmp_path / "int8").quantization


def test_older_qwens_have_the_text_models_fields_beside_the_outer_ones():
    text = dict(tiny_llama().config.source) | {"rope_theta": 5e4, "max_window_layers": 2, "rms_norm_eps": 1e-6}
    flat = text | {"model_type": "qwen2_5_vl", "vision_config": {"depth": 1}}
    flat |= {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    assert read_config(flat) == read_config(text | {"model_type": "qwen2"})
    nested = {"model_type": "qwen2_5_vl", "text_config": text | {"model_type": "qwen2_5_vl_text"}}
    assert read_config(nested) == read_config(flat)

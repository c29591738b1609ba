"""`Mixed` and `hasten quantize --formats FILE`: a format for each layer, from a table."""

import json

import pytest
import torch

import hasten
from hasten.cli.main import main
from hasten.errors import ConfigError, HastenWarning
from hasten.quantization import GPTQ, Int2, Int3, Int4, Int8, Mixed, quantize, quantize_to_folder
from hasten.quantization.schemes import layers_to_quantize, tied_head_group, units_of
from quantized_folders import logits
from references import make_reference, tiny_llama

TOKENS = torch.randint(0, 100, (8, 16), generator=torch.Generator().manual_seed(0))


def fresh():
    model = tiny_llama(tie_word_embeddings=True).to(torch.bfloat16)
    model.bind()
    return model


def some_of_each(names):
    """A table in which the layers of the first block are int8, and the others int4 in two group sizes."""
    groups = {name: "int4-g32" if "mlp" in name else "int4-g64" for name in names}
    return {name: "int8" if name.startswith("blocks.0.") or name == "head" else groups[name] for name in names}


@pytest.fixture(scope="module")
def table():
    return some_of_each(layers_to_quantize(fresh()))


def test_a_table_is_written_and_read_as_any_scheme(table, tmp_path):
    own, scheme = fresh(), Mixed(table=table)
    with pytest.warns(HastenWarning, match="dequantize=True"):
        quantize_to_folder(own, scheme, tmp_path, method=GPTQ(), calibration=TOKENS)
    again = hasten.load(tmp_path, dtype="stored")
    assert again.tied
    assert set(again.quantization) == set(table)
    for name, layer in again.quantization.items():
        size = f"-g{layer.weight.group_size}" if layer.weight.group_size else ""
        assert layer.weight.element + size == table[name]
    assert torch.equal(logits(again), logits(quantize(own, scheme, method=GPTQ(), calibration=TOKENS)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"blocks.9.attention.q": "int8"}, "names 'blocks.9.attention.q', which this model does not have"),
        ({"embedding": "int8"}, "it is one matrix with the head"),
        ({"head": "int5"}, "head: there is no format 'int5'; known: int8, int4-g32"),
        ({"blocks.0.mlp.down": None}, r"lacks 'blocks.0.mlp.down' \(1 layers in all\)"),
    ],
)
def test_a_table_that_does_not_fit(change, words, table):
    table = {name: format for name, format in (table | change).items() if format is not None}
    with pytest.raises(ConfigError, match=words):
        quantize(fresh(), Mixed(table=table))


def test_formats_that_the_fused_steps_cannot_join_are_said(table):
    own = fresh()
    table = table | {"blocks.1.attention.q": "int8", "blocks.1.attention.k": "int4-g32"}
    with pytest.warns(HastenWarning, match=r"blocks.1.attention.q, .*attention.v have different formats"):
        quantize(own, Mixed(table=table))
    assert own.quantization["blocks.1.attention.k"].weight.group_size == 32


@pytest.mark.filterwarnings("ignore:.*dequantize=True")
def test_the_command(tiny, tiny_folder, tmp_path, capsys):
    text, file, out = tmp_path / "text.py", tmp_path / "formats.json", str(tmp_path / "out")
    text.write_text("def function(name):\n    return name\n" * 60)
    table = some_of_each(layers_to_quantize(tiny)) | {"head": "int4-g32", "blocks.1.mlp.down": "int3-g32"}
    file.write_text(json.dumps(table))
    given = ["--calibration", str(text), "--samples", "4", "--length", "32", "--json", "-"]
    main(["quantize", str(tiny_folder), "--output", out, "--formats", str(file), "--method", "gptq", *given])
    captured = capsys.readouterr()
    assert json.loads(captured.out)["scheme"]["table"] == table
    rounded = sum(name != "embedding" and "int8" not in kind for name, kind in table.items())  # it has no groups
    assert f"that serve it (in {rounded} of {len(table)} layers)" in captured.err
    assert hasten.load(out, dtype="stored").quantization["head"].weight.group_size == 32


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "no format is given: give --scheme int8, int4, int3 or int2, or --formats FILE"),
        (["--scheme", "int8", "--formats", "x.json"], "--formats one for each"),
        (["--formats", "x.json", "--group-size", "32"], "--group-size has no effect without --scheme"),
        (["--formats", "/no/such/file"], "--formats /no/such/file does not exist"),
        (["--formats", __file__], "is not valid JSON"),
        (["--scheme", "int8", "--method", "awq"], "awq"),
        (["--bits", "5"], "--bits"),
    ],
)
def test_what_cannot_be_is_one_error(options, words, tiny_folder, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["quantize", str(tiny_folder), "--output", str(tmp_path / "out"), *options])
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert words in err
    assert "Traceback" not in err


def test_a_layout_of_one_width_refuses_a_table_of_several(tiny, tiny_folder, tmp_path, capsys):
    file = tmp_path / "formats.json"
    table = some_of_each(layers_to_quantize(tiny))
    file.write_text(json.dumps({name: format for name, format in table.items() if name.startswith("blocks.")}))
    out = ["--output", str(tmp_path / "out"), "--format", "gptq"]
    with pytest.raises(SystemExit) as caught:
        main(["quantize", str(tiny_folder), "--formats", str(file), *out])
    assert caught.value.code == 2
    assert "integers of one width and group size in all layers" in capsys.readouterr().err


def test_experts_of_a_block_have_one_format():
    names = layers_to_quantize(hasten.load(make_reference("mixtral")))
    units = units_of(names)
    assert sorted(name for unit in units.values() for name in unit) == sorted(names)
    assert len(units["blocks.0.mlp.experts.inputs"]) == 8
    assert units["blocks.0.attention.inputs"] == [f"blocks.0.attention.{one}" for one in "qkv"]


def test_what_is_no_format():
    with pytest.raises(ConfigError, match="head: there is no format 4"):
        Mixed(table={"head": 4})


@pytest.mark.parametrize("scheme", [Int8(), Int4(), Int3(), Int2(), Mixed(table={})], ids=type)
@pytest.mark.parametrize("name", ["activations", "activation"])
def test_a_scheme_does_not_change_and_has_no_other_settings(scheme, name):
    with pytest.raises((AttributeError, TypeError)):
        setattr(scheme, name, "float")
    assert scheme.activations == "auto"


@pytest.mark.parametrize(("width", "group"), [(4096, 128), (960, 64), (896, 128), (160, 32), (32, 32), (100, 128)])
def test_a_head_that_is_also_the_embedding_has_the_largest_groups_that_fit(width, group):
    """128 where none does."""
    assert tied_head_group(width) == group


@pytest.mark.parametrize(("scheme", "bits"), [(Int8(), 8), (Int4(), 4), (Int3(), 3), (Int2(), 2)])
def test_the_layers_of_a_scheme_have_its_bits(scheme, bits):
    layers = scheme.layers(fresh())
    assert {layer.weight.bits for name, layer in layers.items() if name != "head"} == {bits}
    assert layers["head"].weight.bits == 8


@pytest.mark.parametrize("scheme", [Int4(embedding="int8", lm_head="same"), Int4(embedding="same")])
def test_an_embedding_that_is_the_head_has_no_format_of_its_own(scheme):
    with pytest.raises(ConfigError, match=r"one matrix, so embedding=.* contradict each other: lm_head decides"):
        scheme.layers(fresh())
    untied = tiny_llama(tie_word_embeddings=False).to(torch.bfloat16)
    untied.bind()
    assert {"head", "embedding"} <= set(scheme.layers(untied))

"""`choose_bits`, `Mixed` and `hasten quantize --bits`: formats by layer under a budget, in a table to edit."""

import json
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hasten
from hasten.cli.main import main
from hasten.errors import ConfigError, HastenWarning
from hasten.quantization import GPTQ, Mixed, choose_bits, quantize, quantize_to_folder
from hasten.quantization.automatic import PROBE, Unit, probing_flops, spend
from hasten.quantization.report import stored_weights
from hasten.quantization.schemes import layers_to_quantize, units_of
from quantized_folders import exact, logits
from references import make_reference, tiny_llama

TOKENS = torch.randint(0, 100, (8, 16), generator=torch.Generator().manual_seed(0))


def fresh():
    model = tiny_llama(tie_word_embeddings=True).to(torch.bfloat16)
    model.bind()
    return model


@pytest.fixture(scope="module")
def model():
    return fresh()


@pytest.fixture(scope="module")
def chosen(model):
    return choose_bits(model, 6.0, calibration=TOKENS)


def bits_of(model, scheme):
    """Of all that is stored, by what quantizing reports."""
    reports = []
    quantize(fresh(), scheme, report=reports.append)
    sizes = {name: weight.nbytes for name, weight in stored_weights(model).items()}
    sizes |= {f"{report.name}.weight": report.bytes_after for report in reports}
    return 8 * sum(sizes.values()) / sum(weight.numel() for weight in stored_weights(model).values())


def test_it_fits_and_spends_the_budget(model, chosen):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seen = []
    again = choose_bits(model, 6.0, calibration=TOKENS, progress=lambda *done: seen.append(done))
    assert again == chosen  # the same input
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert list(chosen.table) == layers_to_quantize(model)
    assert len(set(chosen.table.values())) > 1
    units = units_of(chosen.table).values()
    assert seen == [(i + 1, len(units)) for i in range(len(units))]
    for names in units:
        assert len({chosen.table[name] for name in names}) == 1
    assert 5.5 < bits_of(model, chosen) <= 6.0
    assert probing_flops(model, TOKENS) > 0


def test_the_ends_of_the_scale(model):
    most = choose_bits(model, 16, calibration=TOKENS)
    assert set(most.table.values()) == {"int8"}
    words = r"in int8, int4-g32, int4-g128 this model takes at least \d\.\d\d bits per weight; found 3"
    with pytest.raises(ConfigError, match=words) as caught:
        choose_bits(model, 3, calibration=TOKENS)
    least = float(str(caught.value).split("at least ")[1].split(" ")[0])
    smallest = choose_bits(model, least, calibration=TOKENS)
    assert {"int4-g128"} <= set(smallest.table.values()) <= {"int4-g128", "int4-g32"}  # least is rounded up
    with_int3 = choose_bits(model, least - 0.2, calibration=TOKENS, allow_int3=True)
    assert any(name.startswith("int3") for name in with_int3.table.values())


def test_each_unit_was_measured_by_itself(model, monkeypatch):
    """The same divergence as of whole passes with one unit rounded."""
    measured = {}
    monkeypatch.setattr(
        "hasten.quantization.automatic.spend",
        lambda units, room: (
            measured.update({unit.layers[0]: unit.divergence for unit in units}) or [PROBE] * len(units)
        ),
    )
    plain = hasten.load(make_reference("llama"))
    tokens = torch.tensor([[3, 7, 1, 9, 4, 4, 10, 2, 60, 99]])
    choose_bits(plain, 8, calibration=tokens)
    p = logits(plain).log_softmax(-1)
    layers = layers_to_quantize(plain)
    whole = exact(quantize(hasten.load(make_reference("llama")), Mixed(table=dict.fromkeys(layers, PROBE))))
    for names in units_of(layers).values():
        before = {name: plain.get_submodule(name) for name in names}
        for name in names:
            plain.set_submodule(name, whole.get_submodule(name))
        q = logits(plain).log_softmax(-1)
        assert measured[names[0]] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=0.02)
        for name, module in before.items():
            plain.set_submodule(name, module)


def of_kinds(divergence, size, ratio):
    sizes = {"int8": 2 * size, "int4-g32": size + size // 10 + 1, "int4-g128": size}
    return Unit(["x"], divergence, sizes, {"int8": 0.005, "int4-g32": ratio, "int4-g128": 1.0})


@settings(max_examples=60)
@given(
    kinds=st.lists(st.tuples(st.floats(0, 1), st.integers(10, 500), st.floats(0.5, 0.9)), min_size=1, max_size=5),
    share=st.floats(0, 1),
)
def test_no_choice_that_fits_has_less_divergence(kinds, share):
    units = [of_kinds(*kind) for kind in kinds]
    sizes = [sum(unit.bytes[name] for unit in units) for name in ("int4-g128", "int8")]
    room = int(sizes[0] + share * (sizes[1] - sizes[0]))

    def cost(choice):
        pairs = list(zip(units, choice, strict=True))
        return sum(unit.bytes[name] for unit, name in pairs), sum(unit.loss(name) for unit, name in pairs)

    every = [cost(choice) for choice in product(*(unit.bytes for unit in units))]
    size, loss = cost(spend(units, room))
    assert size <= room
    assert loss == pytest.approx(min(loss for size, loss in every if size <= room), abs=1e-12)


def test_what_costs_nothing_stays_small():
    assert spend([of_kinds(0.0, 100, 0.8), of_kinds(1.0, 100, 0.8)], 10_000) == ["int4-g128", "int8"]


def test_a_table_is_written_and_read_as_any_scheme(model, chosen, tmp_path):
    own = fresh()
    with pytest.warns(HastenWarning, match="dequantize=True"):
        quantize_to_folder(own, chosen, tmp_path, method=GPTQ(), calibration=TOKENS)
    again = hasten.load(tmp_path, dtype="stored")
    assert again.tied
    assert set(again.quantization) == set(chosen.table)
    for name, layer in again.quantization.items():
        size = f"-g{layer.weight.group_size}" if layer.weight.group_size else ""
        assert layer.weight.element + size == chosen.table[name]
    assert torch.equal(logits(again), logits(quantize(own, chosen, method=GPTQ(), calibration=TOKENS)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"blocks.9.attention.q": "int8"}, "names 'blocks.9.attention.q', which this model does not have"),
        ({"embedding": "int8"}, "it is one matrix with the head"),
        ({"head": "int5"}, "head: there is no format 'int5'; known: int8, int4-g32"),
        ({"blocks.0.mlp.down": None}, r"lacks 'blocks.0.mlp.down' \(1 layers in all\)"),
    ],
)
def test_a_table_that_does_not_fit(change, words, model, chosen):
    table = {name: format for name, format in (dict(chosen.table) | change).items() if format is not None}
    with pytest.raises(ConfigError, match=words):
        quantize(model, Mixed(table=table))


def test_formats_that_the_fused_steps_cannot_join_are_said(chosen):
    own = fresh()
    table = dict(chosen.table) | {"blocks.1.attention.q": "int8", "blocks.1.attention.k": "int4-g32"}
    with pytest.warns(HastenWarning, match=r"blocks.1.attention.q, .*attention.v have different formats"):
        quantize(own, Mixed(table=table))
    assert own.quantization["blocks.1.attention.k"].weight.group_size == 32


@pytest.mark.filterwarnings("ignore:.*dequantize=True")
@pytest.mark.filterwarnings("ignore:no kernel takes a quantized weight")
def test_the_command(tiny_folder, tmp_path, capsys):
    text, file, out = tmp_path / "text.py", tmp_path / "formats.json", str(tmp_path / "out")
    text.write_text("def function(name):\n    return name\n" * 60)
    given = ["--calibration", str(text), "--samples", "4", "--length", "32"]
    command = ["quantize", str(tiny_folder), "--output", out, "--json", "-"]
    main([*command, "--bits", "7", "--formats", str(file), *given])
    captured = capsys.readouterr()
    found, table = json.loads(captured.out), json.loads(file.read_text())
    assert "measuring each layer" in captured.err
    assert found["scheme"]["table"] == table
    assert 6 < found["bits_per_weight"] <= 7
    table |= {"head": "int4-g32", next(name for name in table if "mlp.down" in name): "int3-g32"}
    file.write_text(json.dumps(table))
    main([*command, "--formats", str(file), "--method", "gptq", *given, "--overwrite"])
    captured = capsys.readouterr()
    assert json.loads(captured.out)["scheme"]["table"] == table
    rounded = sum(name != "embedding" and "int4" in kind for name, kind in table.items())  # int8 has no groups
    assert f"that serve it (in {rounded} of {len(table)} layers)" in captured.err
    assert hasten.load(out, dtype="stored").quantization["head"].weight.group_size == 32


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "--scheme int8, int4, int3 or int2, --bits NUMBER, or --formats FILE"),
        (["--scheme", "int8", "--bits", "5"], "--bits and --formats take its place"),
        (["--bits", "5", "--group-size", "32"], "--group-size has no effect without --scheme"),
        (["--formats", "/no/such/file", "--allow-int3"], "--allow-int3 has no effect without --bits"),
        (["--formats", "/no/such/file"], "/no/such"),
        (["--bits", "5", "--formats", "/no/such/folder/x.json"], "no folder"),
        (["--bits", "2"], "takes at least"),
    ],
)
def test_what_cannot_be_is_one_line(options, words, tiny_folder, tmp_path, capsys):
    text = ["--calibration", __file__, "--length", "32"] if options == ["--bits", "2"] else []
    with pytest.raises(SystemExit) as caught:
        main(["quantize", str(tiny_folder), "--output", str(tmp_path / "out"), *options, *text])
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert words in err
    assert "Traceback" not in err
    assert "measuring" not in err


def test_experts_of_a_block_have_one_format():
    names = layers_to_quantize(hasten.load(make_reference("mixtral")))
    units = units_of(names)
    assert sorted(name for unit in units.values() for name in unit) == sorted(names)
    assert len(units["blocks.0.mlp.experts.inputs"]) == 8
    assert units["blocks.0.attention.inputs"] == [f"blocks.0.attention.{one}" for one in "qkv"]


def test_what_is_no_format_and_no_number():
    with pytest.raises(ConfigError, match="head: there is no format 4"):
        Mixed(table={"head": 4})
    for bits in (True, float("nan"), "4", -1):
        with pytest.raises(ConfigError, match="bits must be a number above 0"):
            choose_bits(tiny_llama(), bits, calibration=TOKENS)

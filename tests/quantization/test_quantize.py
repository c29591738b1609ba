"""`hasten.quantize`, `hasten quantize` and `--quantize`: what is quantized, what it is then, and what is refused."""

import copy
import json
import math
import shutil
import sys
import weakref

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import hasten
from combinations import combinations
from full_disk import full_disk
from hasten.cli.main import main
from hasten.cli.options import ModelOptions
from hasten.errors import CheckpointError, ConfigError, HastenWarning
from hasten.model.context import TrainingContext
from hasten.model.fused import refusal
from hasten.ops.linear import PackedLinear
from hasten.quantization import GPTQ, Int4, Int8, Mixed, quantize, quantize_to_folder
from references import decided, make_reference, tiny_llama

TOKENS = torch.tensor([[3, 7, 1, 9, 4, 4, 10, 2]])


def logits(model):
    context = TrainingContext([layer.window for layer in model.config.layers])
    with torch.no_grad():
        return model(TOKENS, torch.arange(8)[None], context)[0].double()


def packed(model):
    return {name for name, module in model.named_modules() if isinstance(module, PackedLinear)}


STATES = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "lfm2_moe", "granitemoehybrid"]
STATES += ["nemotron_h", "nemotron_h-latent", "nemotron_h-dense"]
PLAIN = ("router", "shared_gate", "beta", "decay")  # small layers
EXPERTS = ["olmoe", "qwen2_moe", "granitemoe", "dots1", "glm4_moe", "ernie4_5_moe", "minimax_m2", "gpt_oss"]
SCHEMES = [
    Int8(),
    Int8(activations="int8"),
    Int4(group_size=32),
    Int4(group_size=64, symmetric=False, lm_head="same"),
    Int4(group_size=0),
]


@pytest.mark.parametrize(
    ("name", "scheme"),
    combinations(
        ["llama-biases", "gemma2", "gpt2", "phi3", "qwen3_moe", "olmo2", "cohere2", "glm4", *EXPERTS, *STATES], SCHEMES
    ),
    ids=str,
)
def test_all_linear_layers_but_routers_are_quantized(name, scheme):
    model = decided(hasten.load(make_reference(name)))
    plain = logits(model)
    expected = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    expected = {name for name in expected if not name.endswith(PLAIN)}
    assert hasten.quantize(model, scheme) is model
    assert packed(model) == expected
    assert model.quantization is not None
    assert set(model.quantization) == expected
    kinds = {name: (layer.weight.bits, layer.weight.group_size) for name, layer in model.quantization.items()}
    blocks = (8, 0) if isinstance(scheme, Int8) else (4, scheme.group_size)
    assert {kind for name, kind in kinds.items() if name != "head"} == {blocks}
    in_groups = isinstance(scheme, Int8) and scheme.activations == "auto" and model.tied
    assert kinds["head"] == ((8, 64) if in_groups else blocks if scheme.lm_head == "same" else (8, 0))
    # The weights of the reference are random: 4 bits of them are far off, and still the same model.
    limit = 0.35 if isinstance(scheme, Int8) else 0.9
    assert (logits(model) - plain).std() < limit * plain.std()


@pytest.mark.parametrize(
    ("scheme", "blocks", "head"),
    [
        (Int8(), "float", "float"),
        (Int8(activations="int8"), "int8", "int8"),
        (Int4(group_size=32), "int8", "float"),
        (Int4(group_size=32, lm_head="same"), "int8", "int8"),
        (Int4(group_size=32, activations="int8"), "int8", "int8"),
        (Int4(group_size=32, activations="float"), "float", "float"),
        (Int4(group_size=0), "float", "float"),
    ],
    ids=str,
)
def test_only_activations_with_a_scale_for_each_group_are_rounded_by_default(scheme, blocks, head):
    model = hasten.load(make_reference("llama"))
    table = dict.fromkeys(scheme.layers(model), "int8") | {"blocks.0.mlp.down": "int4-g64"}
    mixed = {name for name, layer in Mixed(table=table).layers(model).items() if layer.activations == "int8"}
    assert mixed == {"blocks.0.mlp.down"}
    quantize(model, scheme)
    assert {model.head.activations} == {model.quantization["head"].activations} == {head}
    assert {layer.activations for name, layer in model.quantization.items() if name != "head"} == {blocks}
    assert model.blocks[0].mlp.down.activations == blocks


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_kernels_are_those_for_the_dtype_of_the_model(dtype):
    """float16 has no native kernel: one for bfloat16 would fail on the first token."""
    model = quantize(hasten.load(make_reference("llama"), dtype=dtype), Int4(group_size=32))
    expected = exact_logits(model)
    assert (logits(model) - expected).std() < 0.05 * expected.std()


def exact_logits(model):
    """Those of the same integers, in float32."""
    with hasten.kernels(copy.deepcopy(model).float(), linear="reference") as same:
        return logits(same)


def test_each_weight_is_let_go_as_its_packed_form_is_there():
    model = tiny_llama()
    weights = [weakref.ref(module.weight) for module in model.modules() if isinstance(module, nn.Linear)]
    alive = []
    quantize(model, Int8(), report=lambda report: alive.append(sum(ref() is not None for ref in weights)))
    assert alive == list(range(len(weights), 0, -1))
    assert all(ref() is None for ref in weights)


def test_reports_say_what_each_layer_lost_and_saved():
    model = tiny_llama()
    reports = []
    quantize(model, Int4(group_size=32), report=reports.append)
    assert [report.name for report in reports] == list(model.quantization)
    for report in reports:
        eight = report.name == "head"
        assert report.format.weight.bits == (8 if eight else 4)
        assert (0.001 < report.relative_error < 0.015) if eight else (0.05 < report.relative_error < 0.12)
        assert report.bytes_after < report.bytes_before / (3.5 if eight else 6)


def test_nan_is_refused_and_the_layer_named():
    model = tiny_llama()
    with torch.no_grad():
        model.blocks[1].mlp.down.weight[3, 4] = float("nan")
    with pytest.raises(ConfigError, match=r"blocks\.1\.mlp\.down.*NaN"):
        quantize(model, Int8())


def test_a_quantized_model_and_other_schemes_are_refused():
    model = quantize(tiny_llama(), Int8())
    with pytest.raises(ConfigError, match="quantized already"):
        quantize(model, Int4())
    with pytest.raises(ConfigError, match="Int8"):
        quantize(tiny_llama(), "int4")


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: Int4(group_size=7), "group_size"),
        (lambda: Int4(search="best"), "search"),
        (lambda: Int4(scale_dtype="float32"), "scale_dtype"),
        (lambda: Int4(activations="int4"), "activations"),
        (lambda: Int8(lm_head="int4"), "lm_head"),
        (lambda: Int8(activations=None), "activations"),
    ],
)
def test_schemes_refuse_what_cannot_be(make, word):
    with pytest.raises(ConfigError, match=word):
        make()


# -- to a folder ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "scheme"),
    combinations(["llama-mqa", "phi3", "qwen3_moe", "qwen2_moe", "ernie4_5_moe"], SCHEMES),
    ids=str,
)
def test_streaming_writes_what_quantizing_in_memory_and_saving_writes(name, scheme, tmp_path, recwarn):
    model = hasten.load(make_reference(name))
    plain = logits(model)
    quantize_to_folder(model, scheme, tmp_path / "streamed")
    assert torch.equal(logits(model), plain)  # as it was
    hasten.save(quantize(model, scheme), tmp_path / "saved")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "streamed" / file).read_bytes() == (tmp_path / "saved" / file).read_bytes()


@pytest.mark.parametrize("scheme", [Int8(), Int4(group_size=32)], ids=str)
@pytest.mark.parametrize(
    ("family", "place"),
    [
        ("granitemoe", "model.layers.0.block_sparse_moe.experts"),
        ("granitemoehybrid", "model.layers.0.block_sparse_moe.experts"),
        ("gemma4_text-experts", "model.layers.0.experts"),
    ],
)
def test_stacked_experts_are_written_as_modules_of_their_own(family, place, scheme, tmp_path):
    model = hasten.load(make_reference(family))
    with pytest.warns(HastenWarning, match="transformers does not: it has a layer's experts in one tensor"):
        quantize_to_folder(model, scheme, tmp_path / "streamed")
    expected = logits(quantize(model, scheme))
    assert torch.equal(logits(hasten.load(tmp_path / "streamed", dtype="float32")), expected)
    with pytest.warns(HastenWarning, match="transformers does not"):
        hasten.save(model, tmp_path / "saved")
    stored = load_file(tmp_path / "saved" / "model.safetensors")
    assert stored.keys() == load_file(tmp_path / "streamed" / "model.safetensors").keys()
    for part in ("gate", "up", "down"):
        assert f"{place}.1.{part}_proj.weight_scale" in stored
    hasten.save(model, tmp_path / "plain", dequantize=True)  # where they are stacked again
    assert not any(".experts.0." in name for name in load_file(tmp_path / "plain" / "model.safetensors"))


def test_stacked_experts_with_biases_are_not_written_quantized(tmp_path):
    model = hasten.load(make_reference("gpt_oss"))
    said = pytest.raises(ConfigError, match=r"experts in one tensor .*gate_up_proj.*--quantize int8")
    with said:
        quantize_to_folder(model, Int8(), tmp_path)
    quantize(model, Int8())
    with said:
        hasten.save(model, tmp_path)
    hasten.save(model, tmp_path / "plain", dequantize=True)
    expected = logits(model)
    found = logits(hasten.load(tmp_path / "plain", dtype="stored"))
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


def test_a_folder_is_written_whole_or_not_at_all(tmp_path):
    model = tiny_llama()
    with torch.no_grad():
        model.blocks[1].mlp.down.weight[3, 4] = float("inf")
    with pytest.raises(ConfigError, match="down"):
        quantize_to_folder(model, Int8(), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="cannot be written"):
        quantize_to_folder(tiny_llama(), Int8(), tmp_path / "file")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_folder_in_the_way_of_a_file_leaves_the_old_folder_as_it_was(name, tmp_path):
    (tmp_path / "out" / name).mkdir(parents=True)
    with pytest.raises(CheckpointError, match=f"{name} is a folder there"):
        quantize_to_folder(tiny_llama(), Int8(), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]


@pytest.mark.parametrize("limit", [500, 20_000])
def test_a_full_disk_leaves_nothing(limit, tmp_path):
    """In the header, and between tensors."""
    with full_disk(limit), pytest.raises(CheckpointError, match="cannot be written: File too large"):
        quantize_to_folder(tiny_llama(), Int4(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("scheme", "word"),
    [
        (Int4(), r"\(--dtype bfloat16\)"),
        (Int4(scale_dtype="bfloat16", symmetric=False), "int8 holds them"),
        (Int8(), None),
    ],
    ids=str,
)
def test_weights_too_large_for_a_scale_are_refused_by_layer(scheme, word):
    model = tiny_llama()
    with torch.no_grad():
        weight = model.blocks[1].mlp.down.weight.fill_(3e38)
        weight[:, ::2] = -3e38
    if word is None:
        assert quantize(model, scheme).blocks[1].mlp.down.dequantize().isfinite().all()
    else:
        with pytest.raises(ConfigError, match=f"blocks.1.mlp.down: the weights are so large .* {word}"):
            quantize(model, scheme)


# -- the commands -----------------------------------------------------------------------------------------------------


def test_the_command(tiny_folder, tmp_path, capsys):
    out = tmp_path / "int4"
    main(["quantize", str(tiny_folder), "--scheme", "int4", "--group-size", "32", "--output", str(out), "--json", "-"])
    done = json.loads(capsys.readouterr().out)
    assert done["bytes"] == (out / "model.safetensors").stat().st_size < done["bytes_before"] / 2
    assert {layer["bits"] for layer in done["layers"]} == {4, 8}
    assert done["scheme"]["group_size"] == 32
    model = hasten.load(out, dtype="stored")
    assert model.tokenizer is not None
    assert model.quantization["blocks.0.mlp.up"].weight.group_size == 32
    assert model.quantization["blocks.0.mlp.up"].weight.symmetric
    main(["generate", str(out), "--prompt", "def", "--max-new-tokens", "3", "--json", "-"])
    assert json.loads(capsys.readouterr().out)["text"] is not None


def test_the_command_without_json_tells_the_errors(tiny_folder, tmp_path, capsys):
    out = tmp_path / "int8"
    main(["quantize", str(tiny_folder), "--scheme", "int8", "--lm-head", "none", "--output", str(out)])
    text = capsys.readouterr().out
    assert "attention.q" in text
    assert "relative error" in text
    assert "head " not in text
    assert not isinstance(hasten.load(out, dtype="stored").head, PackedLinear)


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        (["--symmetric", "--asymmetric"], "one of"),
        (["--scheme", "int8", "--asymmetric"], "--asymmetric has no effect with --scheme int8"),
        (["--scheme", "int8", "--group-size", "32"], "--group-size has no effect with --scheme int8"),
        (["--scheme", "int8", "--search", "minmax"], "--search has no effect with --scheme int8"),
        (["--json", "/no/such/folder/x.json"], "no folder"),
        (["--scheme", "None", "--formats", "/no/such/formats.json"], "formats.json does not exist"),
    ],
)
def test_options_that_contradict_each_other(extra, word, tiny_folder, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["quantize", str(tiny_folder), "--scheme", "int4", *extra, "--output", str(tmp_path / "out")])
    assert caught.value.code == 2
    assert word in capsys.readouterr().err


def test_no_model_is_overwritten_unasked(tiny_folder, tmp_path, capsys):
    own = shutil.copytree(tiny_folder, tmp_path / "own")
    (tmp_path / "link").symlink_to(own)
    (tmp_path / "file").write_text("x")
    before = {path.name: path.read_bytes() for path in own.iterdir()}

    def refused(output, *options):
        with pytest.raises(SystemExit) as caught:
            main(["quantize", str(own), "--scheme", "int8", "--output", str(output), *options])
        assert caught.value.code == 2
        return capsys.readouterr().err

    assert "is the model itself" in refused(own)
    assert "is the model itself" in refused(tmp_path / "link", "--overwrite")
    assert "is a file" in refused(tmp_path / "file")
    other = shutil.copytree(own, tmp_path / "other")
    assert "holds a model already (config.json); --overwrite replaces it" in refused(other)
    for folder in (own, other):
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    main(["quantize", str(own), "--scheme", "int8", "--output", str(other), "--overwrite"])
    assert hasten.load(other, dtype="stored").quantization is not None


def test_ctrl_c_is_one_line_and_leaves_no_half_of_a_folder(tiny_folder, tmp_path, capsys, monkeypatch):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["hasten.quantization.quantize"], "round_weight", interrupt)
    with pytest.raises(SystemExit) as caught:
        main(["quantize", str(tiny_folder), "--scheme", "int8", "--output", str(tmp_path / "out")])
    assert caught.value.code == 130
    assert capsys.readouterr().err.strip().endswith("stopped by Ctrl-C")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "bits"), [("int8", 8), ("int4", 4)])
def test_every_command_that_runs_a_model_can_quantize_it(name, bits, tiny_folder):
    options = ModelOptions(model=str(tiny_folder), quantize=name, threads=1, fuse=False)
    model = options.load()
    assert model.quantization["blocks.0.attention.q"].weight.bits == bits


def test_a_fused_model_is_taken_apart_and_fused_again_when_it_generates():
    model = tiny_llama().to(torch.bfloat16)
    if refusal(model) is not None:
        pytest.skip("the native kernels cannot be built here")
    quantize(hasten.fuse(model), Int8())
    assert model.readable
    assert hasten.generate(model, "def", max_new_tokens=2)
    assert not model.readable


def spoiled(model, name):
    """The same model with a NaN in one weight."""
    model.get_submodule(name).weight.data[0, 0] = math.nan
    return model


NO_TEXT = {"method": GPTQ()}  # which looks at calibration text


@pytest.mark.parametrize(
    ("spoil", "scheme", "options"),
    [
        (None, Int8(), NO_TEXT),
        (None, "int8", {}),
        ("blocks.0.attention.q", Int8(), {}),
        ("blocks.1.mlp.down", Int8(), {}),  # the layers before it are quantized by then
    ],
    ids=["calibration", "scheme", "first layer", "later layer"],
)
def test_a_fused_model_is_fused_after_an_error_too(spoil, scheme, options):
    model = tiny_llama().to(torch.bfloat16)
    if refusal(model) is not None:
        pytest.skip("the native kernels cannot be built here")
    before = logits(hasten.fuse(model if spoil is None else spoiled(model, spoil)))
    with pytest.raises(ConfigError):
        quantize(model, scheme, **options)
    assert not model.readable
    assert spoil or torch.equal(logits(model), before)


def test_writing_a_fused_model_to_a_folder_leaves_it_fused(tmp_path):
    model = tiny_llama().to(torch.bfloat16)
    if refusal(model) is not None:
        pytest.skip("the native kernels cannot be built here")
    before = logits(hasten.fuse(model))
    quantize_to_folder(model, Int8(), tmp_path / "out")
    assert not model.readable
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize(
    "settings",
    [{"symmetric": "no"}, {"symmetric": None}, {"symmetric": 1}, {"group_size": 64.0}, {"group_size": True}],
)
def test_a_setting_of_another_type_is_refused(settings):
    (name,) = settings
    with pytest.raises(ConfigError, match=f"{name} must be one of"):
        Int4(**settings)


@pytest.mark.filterwarnings("ignore::hasten.HastenWarning")
@pytest.mark.parametrize("embedding", ["none", "int8"])
def test_an_embedding_that_stays_large_is_named_with_its_option(embedding, tmp_path, capsys):
    hasten.save(tiny_llama(hidden_size=32, intermediate_size=32, vocab_size=600).bfloat16(), tmp_path / "plain")
    main(
        ["quantize", str(tmp_path / "plain"), "--scheme", "int4", "--output", str(tmp_path / embedding)]
        + (["--embedding", embedding] if embedding != "none" else [])
    )
    assert ("--embedding int8 rounds it too" in capsys.readouterr().out) == (embedding == "none")

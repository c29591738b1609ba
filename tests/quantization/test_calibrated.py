"""Quantization with calibration samples: whole models, block by block, in memory and into a folder that can resume."""

import shutil
import weakref

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import hasten
from hasten.checkpoints.load import open_checkpoint
from hasten.errors import ConfigError
from hasten.model.context import training_context
from hasten.model.families import read_config
from hasten.model.initialize import initialize
from hasten.ops.linear import PackedLinear
from hasten.quantization import (
    GPTQ,
    Int2,
    Int3,
    Int4,
    Int8,
    calibration_tokens,
    quantize,
    quantize_to_folder,
)
from hasten.quantization.resume import WorkFolder
from hasten.quantization.walk import CalibrationWalk
from references import make_reference

SAMPLES = torch.randint(3, 101, (24, 32), generator=torch.Generator().manual_seed(0))
HELD_OUT = torch.randint(3, 101, (8, 32), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def before_block(monkeypatch):
    """Call what is given with the name of each block that GPTQ begins (the head's is empty)."""
    plain = GPTQ.quantize_block

    def watch(call):
        def watched(self, task):
            call(task.prefix.rstrip("."))
            plain(self, task)

        monkeypatch.setattr(GPTQ, "quantize_block", watched)

    return watch


def stop_at(block):
    def stop(name):
        if name == block:
            raise KeyboardInterrupt

    return stop


def logits(model, tokens=HELD_OUT):
    with torch.no_grad():
        positions = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
        return model(tokens, positions, training_context(model, tokens.shape[1])).double()


def error(model, exact):
    return float((logits(model) - exact).std() / exact.std())


NEWER = [
    "olmo2",
    "cohere2",
    "granite",
    "qwen2_moe",
    "dots1",
    "qwen3_next",
    "qwen3_5_text",
    "lfm2",
    "granitemoehybrid-dense",
    "nemotron_h",
    "nemotron_h-latent",
    "nemotron_h-dense",
]


@pytest.mark.parametrize("name", ["llama-biases", "gemma2", "gpt2", "phi3", "qwen3", "mixtral", "qwen3_moe", *NEWER])
def test_every_family_and_nearer_to_the_model_than_rounding(name):
    exact = logits(hasten.load(make_reference(name)))
    scheme = Int4(group_size=32, lm_head="same", activations="float")
    reports = []
    model = hasten.load(make_reference(name))
    assert quantize(model, scheme, method=GPTQ(), calibration=SAMPLES, report=reports.append) is model
    expected = {name for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    plain = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert {report.name for report in reports} == expected == set(model.quantization)
    assert all(name.endswith(("router", "shared_gate", "beta", "decay")) for name in plain)
    calibrated = [report for report in reports if report.output_error is not None]
    better = sum(report.output_error < report.nearest_output_error for report in calibrated)
    assert better > 0.9 * len(calibrated) > 0
    assert error(model, exact) < error(quantize(hasten.load(make_reference(name)), scheme), exact)


def test_the_inputs_are_those_of_the_quantized_blocks_before():
    """Layer by layer by hand: the statistics of block 1 come from block 0 as it is served."""
    model = quantize(hasten.load(make_reference("llama")), Int8(), method=GPTQ(), calibration=SAMPLES)
    other = hasten.load(make_reference("llama"))
    other.blocks[0] = model.blocks[0]
    seen = []
    hook = other.blocks[1].attention.q.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    logits(other, SAMPLES)
    hook.remove()
    from hasten.ops.linear.weights import INT8
    from hasten.quantization.gptq import InputStatistics, Solver
    from hasten.quantization.rounding import Grid

    found = InputStatistics(64)
    found.add(seen[0].flatten(0, 1))
    found.finish()
    expected = Solver(found, GPTQ(), 0).round(other.blocks[1].attention.q.weight.detach(), Grid(INT8))
    again = model.blocks[1].attention.q.to_weight()
    assert torch.equal(again.scales, expected.scales)
    assert (again.values != expected.values).float().mean() < 0.01  # sums of other batches round otherwise


def test_gptaq_is_nearer_to_the_outputs_of_the_model_before():
    exact = logits(hasten.load(make_reference("llama")), SAMPLES)
    errors = []
    for gptaq in (False, True):
        model = hasten.load(make_reference("llama"))
        quantize(model, Int3(group_size=32), method=GPTQ(gptaq=gptaq), calibration=SAMPLES)
        errors.append(float((logits(model, SAMPLES) - exact).std()))
    assert errors[1] < errors[0]


def test_an_expert_that_saw_too_little_is_rounded_and_says_so():
    reports = []
    model = hasten.load(make_reference("qwen3_moe"))
    quantize(model, Int4(group_size=32), method=GPTQ(), calibration=SAMPLES[:2], report=reports.append)
    noted = [report for report in reports if report.note]
    assert noted
    assert all("calibration tokens came here: rounded to nearest" in report.note for report in noted)
    assert all(".experts." in report.name for report in noted)


@pytest.mark.filterwarnings("ignore:.*dequantize=True")  # the embedding is quantized with the head
def test_a_folder_is_the_model_quantized_in_memory(tmp_path):
    model = hasten.load(make_reference("llama-mqa"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    quantize_to_folder(model, Int4(group_size=32), tmp_path / "out", method=GPTQ(), calibration=SAMPLES)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    quantize(model, Int4(group_size=32), method=GPTQ(), calibration=SAMPLES)
    assert torch.equal(logits(hasten.load(tmp_path / "out", dtype="stored")), logits(model))


@pytest.mark.parametrize(
    ("case", "gptaq"), [("llama", False), ("llama", True), ("gemma4_text-shared", False), ("gemma4_text-shared", True)]
)
def test_an_interrupted_run_goes_on_at_its_block(tmp_path, before_block, case, gptaq):
    method = GPTQ(gptaq=gptaq)
    model = hasten.load(make_reference(case))
    heads, stop, reports = model.config.tie_embeddings is False, len(model.blocks) - 2, []
    scheme = Int4(group_size=32) if heads else Int4(group_size=32, lm_head="none")
    arguments = {"method": method, "calibration": SAMPLES, "report": reports.append}
    quantize_to_folder(model, scheme, tmp_path / "whole", **arguments)
    layers = [report.name for report in reports]

    def started(name):
        names.append(name)
        if name == f"blocks.{stop}" and len(names) == stop + 1:
            raise KeyboardInterrupt

    names = []
    before_block(started)
    with pytest.raises(KeyboardInterrupt):
        quantize_to_folder(model, scheme, tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()
    with pytest.raises(hasten.HastenError):
        hasten.load(tmp_path / "out.partial", dtype="stored")  # never taken for a model
    reports.clear()
    quantize_to_folder(model, scheme, tmp_path / "out", **arguments)
    assert names == [*(f"blocks.{i}" for i in [*range(stop + 1), stop, stop + 1]), *[""] * heads]
    assert [report.name for report in reports] == layers
    assert not (tmp_path / "out.partial").exists()
    one, other = (load_file(tmp_path / folder / "model.safetensors") for folder in ("whole", "out"))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("group", [32, 0])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("scheme", [Int3, Int2])
def test_weights_of_3_and_2_bits_run_as_int4_and_are_stored_in_their_own(tmp_path, scheme, symmetric, group):
    model = hasten.load(make_reference("llama"))
    kind = scheme(group_size=group, symmetric=symmetric, lm_head="none")
    arguments = {"method": GPTQ(), "calibration": SAMPLES}
    quantize_to_folder(model, kind, tmp_path / "out", **arguments)
    again = hasten.load(tmp_path / "out", dtype="stored")
    quantize(model, kind, **arguments)
    assert torch.equal(logits(again), logits(model))
    layer = again.blocks[0].attention.q
    assert (layer.format.element, layer.format.group_size) == ("int4", group or 128)
    read = open_checkpoint(tmp_path / "out").quantized
    exact = read.dequantize(read.modules["model.layers.0.self_attn.q_proj.weight"], torch.float32)
    assert torch.equal(layer.dequantize(), exact)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored["model.layers.0.self_attn.q_proj.weight_packed"].nbytes == 64 * 64 * kind.bits // 8
    assert again.quantization == model.quantization
    for name, one in (("saved", model), ("saved again", again)):
        hasten.save(one, tmp_path / name)
        saved = load_file(tmp_path / name / "model.safetensors")
        assert {key for key, tensor in stored.items() if not torch.equal(saved[key], tensor)} == set()


def test_the_blocks_of_another_run_are_neither_gone_on_with_nor_lost(tmp_path, before_block):
    model = hasten.load(make_reference("llama"))
    scheme = Int4(group_size=32)
    before_block(stop_at("blocks.2"))
    with pytest.raises(KeyboardInterrupt):
        quantize_to_folder(model, scheme, tmp_path / "out", method=GPTQ(), calibration=SAMPLES)
    before_block(stop_at(None))
    before = {path.name: path.read_bytes() for path in (tmp_path / "out.partial").iterdir()}
    for other, tokens in ((GPTQ(damping=0.02), SAMPLES), (GPTQ(), SAMPLES[1:])):
        with pytest.raises(ConfigError, match="holds 2 finished blocks of a run with other settings"):
            quantize_to_folder(model, scheme, tmp_path / "out", method=other, calibration=tokens)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out.partial").iterdir()} == before
    for path in (tmp_path / "out.partial").glob("states*"):
        path.unlink()  # none is finished then
    quantize_to_folder(model, scheme, tmp_path / "out", method=GPTQ(damping=0.02), calibration=SAMPLES)
    assert hasten.load(tmp_path / "out", dtype="stored").quantization is not None


def test_a_damaged_work_folder_is_one_error(tmp_path):
    model = hasten.load(make_reference("llama"))
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "settings.json").write_text("{")
    with pytest.raises(hasten.HastenError, match=r"out.partial.*remove it"):
        quantize_to_folder(model, Int4(), tmp_path / "out", method=GPTQ(), calibration=SAMPLES)


def test_a_finished_block_that_is_damaged_is_one_error(tmp_path, before_block):
    model = hasten.load(make_reference("llama"))
    before_block(stop_at("blocks.1"))
    arguments = {"method": GPTQ(), "calibration": SAMPLES}
    with pytest.raises(KeyboardInterrupt):
        quantize_to_folder(model, Int4(group_size=32), tmp_path / "out", **arguments)
    block = tmp_path / "out.partial" / "block-00000.safetensors"
    block.write_bytes(block.read_bytes()[:100])
    with pytest.raises(hasten.HastenError, match=r"out.partial.*remove it"):
        quantize_to_folder(model, Int4(group_size=32), tmp_path / "out", **arguments)


def test_other_files_where_blocks_are_kept_are_left_alone(tmp_path):
    """Nobody's download that happens to be called OUT.partial is removed."""
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "mine.txt").write_text("mine")
    model = hasten.load(make_reference("llama"))
    with pytest.raises(ConfigError, match=r"out.partial, which holds other files \('mine.txt'\)"):
        quantize_to_folder(model, Int4(group_size=32), tmp_path / "out", method=GPTQ(), calibration=SAMPLES)
    assert [path.name for path in (tmp_path / "out.partial").iterdir()] == ["mine.txt"]


def test_two_runs_into_one_folder_do_not_mix(tmp_path, before_block):
    """The second says so; before, it removed the blocks of the first, whose later ones it then took for its own."""
    model, scheme = hasten.load(make_reference("llama")), Int4(group_size=32)
    errors = []

    def meanwhile(name):
        if name == "blocks.1":
            with pytest.raises(ConfigError, match="another process is quantizing into") as caught:
                quantize_to_folder(model, scheme, tmp_path / "out", method=GPTQ(damping=0.1), calibration=SAMPLES)
            errors.append(caught.value)

    before_block(meanwhile)
    quantize_to_folder(model, scheme, tmp_path / "out", method=GPTQ(), calibration=SAMPLES)
    assert len(errors) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_the_folder_one_stands_in(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    model = hasten.load(make_reference("llama"))
    quantize_to_folder(model, Int4(group_size=32), ".", method=GPTQ(), calibration=SAMPLES)
    assert (tmp_path / "out" / "config.json").exists()
    assert not (tmp_path / "out.partial").exists()


METHODS_AND_SCHEMES = {
    "gptq": (GPTQ(), Int4(group_size=32)),
    "gptaq": (GPTQ(gptaq=True), Int4(group_size=32)),
    "gptq in 3 bits": (GPTQ(), Int3(group_size=32)),  # held as int4
}


WIDE_SAMPLES = torch.randint(512, (8, 512), generator=torch.Generator().manual_seed(0))


def wide_model():
    values = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 1, "vocab_size": 512}
    config = read_config(values | {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 2})
    return initialize(config, seed=0, dtype=torch.bfloat16).eval()


def by_threads(counts, make):
    """What `make` gives with so many threads."""
    threads, results = torch.get_num_threads(), []
    try:
        for count in counts:
            torch.set_num_threads(count)
            results.append(make())
    finally:
        torch.set_num_threads(threads)
    return results


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("name", METHODS_AND_SCHEMES)
def test_the_bits_do_not_depend_on_the_number_of_threads(name, family):
    method, scheme = METHODS_AND_SCHEMES[name]

    def make():
        model = hasten.load(make_reference(family), dtype="bfloat16")
        return quantize(model, scheme, method=method, calibration=SAMPLES).state_dict()

    one, three = by_threads((1, 3), make)
    assert all(torch.equal(tensor, three[key]) for key, tensor in one.items())


@pytest.mark.slow(minutes=3)
@pytest.mark.parametrize("name", METHODS_AND_SCHEMES)
def test_nor_do_those_of_a_block_wide_enough_to_be_shared_out(name):
    method, scheme = METHODS_AND_SCHEMES[name]

    def make():
        return quantize(wide_model(), scheme, method=method, calibration=WIDE_SAMPLES).state_dict()

    results = by_threads((1, 3), make)
    for key, tensor in results[0].items():
        assert all(torch.equal(tensor, other[key]) for other in results[1:]), key


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*dequantize=True")  # the embedding is quantized with the head
@pytest.mark.parametrize("family", ["gemma2", "mixtral"])
@pytest.mark.parametrize("name", [*METHODS_AND_SCHEMES, None])
def test_another_device_gets_one_block_at_a_time(name, family, tmp_path, monkeypatch):
    """ "cpu:0" is another device than the model's to hasten, and computes the same bits."""
    method, scheme = METHODS_AND_SCHEMES.get(name, (None, Int4(group_size=32)))
    here, copies, most = CalibrationWalk.here, weakref.WeakSet(), []

    def watched(self, module):
        found = here(self, module)
        if found is not module:
            copies.add(found)
        most.append(len(copies))
        return found

    monkeypatch.setattr(CalibrationWalk, "here", watched)
    model = hasten.load(make_reference(family))
    for folder, device in (("a", None), ("b", torch.device("cpu", 0))):
        options = {"method": method, "calibration": None if method is None else SAMPLES, "device": device}
        most.clear()
        quantize_to_folder(model, scheme, tmp_path / folder, **options)
    assert most == ([] if method is None else [1] * (len(model.blocks) + ("head" in scheme.layers(model))))
    assert all(isinstance(layer, nn.Linear) for block in model.blocks for layer in [block.attention.q])
    one, other = (load_file(tmp_path / folder / "model.safetensors") for folder in "ab")
    assert all(torch.equal(tensor, other[key]) for key, tensor in one.items())


@pytest.fixture
def tokenizer(tiny):
    return tiny.tokenizer


def test_samples_are_drawn_by_the_seed(tokenizer):
    documents = [f"document {i}: " + " ".join(str(i * j) for j in range(40)) for i in range(30)]
    options = {"samples": 5, "length": 16}
    first = calibration_tokens(tokenizer, documents, **options)
    assert first.shape == (5, 16)
    assert first.dtype == torch.int64
    assert torch.equal(first, calibration_tokens(tokenizer, documents, **options))
    assert not torch.equal(first, calibration_tokens(tokenizer, documents, seed=1, **options))
    begin = tokenizer.encode("")
    assert all(row[: len(begin)].tolist() == begin for row in first)


def test_calibration_that_cannot_be_is_one_clear_error(tokenizer):
    with pytest.raises(ConfigError, match="shorter than one sample"):
        calibration_tokens(tokenizer, ["short"], length=100)
    with pytest.raises(ConfigError, match="samples must be a whole number, at least 1"):
        calibration_tokens(tokenizer, ["short"], samples=0)
    with pytest.raises(ConfigError, match="calibration seed must be a whole number, at least 0"):
        calibration_tokens(tokenizer, ["short"], seed=10**30)
    model = hasten.load(make_reference("llama"))
    for tokens, message in (
        (None, "give calibration="),
        (SAMPLES.tolist(), "int64 tokens.*found list"),
        (SAMPLES.float(), "int64 tokens"),
        (SAMPLES[0], "int64 tokens"),
        (SAMPLES + 200, "tokens are 0 to 100"),
        (torch.zeros(1, 300, dtype=torch.int64), "256 positions"),
    ):
        with pytest.raises(ConfigError, match=message):
            quantize(model, Int4(), method=GPTQ(), calibration=tokens)


def test_a_full_disk_is_one_error_and_the_output_is_not_there(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(WorkFolder, "_write", full)
    model = hasten.load(make_reference("llama"))
    with pytest.raises(hasten.HastenError, match="No space left on device"):
        quantize_to_folder(model, Int4(), tmp_path / "out", method=GPTQ(), calibration=SAMPLES)
    assert not (tmp_path / "out").exists()
    shutil.rmtree(tmp_path / "out.partial")

"""What generates takes the fused steps by itself, whatever dtype a checkpoint has; what cannot says so once."""

import copy
import re
import warnings

import pytest
import torch

import hasten
from hasten.checkpoints.export import export_model
from hasten.cli.main import main
from hasten.errors import ConfigError, HastenWarning
from hasten.machine import emulated
from hasten.model.fused import is_fused, path_of
from hasten.model.inference import inference_dtype
from hasten.ops.native import library
from references import make_reference
from tiny_model import tiny_llama

CPU = torch.device("cpu")
NATIVE = library() is not None
FORMATS = ("plain", "int8", "int4")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder for each dtype and format."""
    root, model = tmp_path_factory.mktemp("formats"), tiny_llama()
    for name, dtype in DTYPES.items():
        plain = copy.deepcopy(model).to(dtype)
        export_model(plain, root / f"{name}-plain")
        for kind, scheme in (("int8", hasten.Int8()), ("int4", hasten.Int4(group_size=32, search="minmax"))):
            hasten.save(hasten.quantize(copy.deepcopy(plain), scheme), root / f"{name}-{kind}")
    return root


def auto(name):
    """The dtype that a checkpoint of this one generates in on this machine."""
    if NATIVE:
        return torch.float16 if name == "float16" else torch.bfloat16
    return torch.float32 if name == "float32" and emulated(torch.bfloat16) else torch.bfloat16


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_and_format_is_fused_from_python(name, kind, folders):
    model = hasten.load(folders / f"{name}-{kind}")
    assert (model.dtype, model.stored_dtype) == (auto(name), DTYPES[name])
    text = "".join(hasten.stream(model, "def", temperature=0, max_new_tokens=4, ignore_eos=True))
    assert is_fused(model) == NATIVE
    assert ("fused steps" in path_of(model) and "not fused" not in path_of(model)) == NATIVE
    again = hasten.load(folders / f"{name}-{kind}")
    assert hasten.generate(again, "def", temperature=0, max_new_tokens=4, ignore_eos=True)[0].text == text
    assert is_fused(again) == NATIVE


@pytest.mark.skipif(not NATIVE, reason="needs the native kernels")
def test_a_model_that_has_not_generated_yet_is_not_called_slower_than_pytorch(folders):
    assert path_of(hasten.load(folders / "float32-int8")).endswith("not fused yet")


ALL = [f"{name}-{kind}" for name in DTYPES for kind in FORMATS]
SOME = ("float32-plain", "float16-int4")
COMMANDS = {
    "generate": ["--prompt", "def", "--max-new-tokens", "2"],
    "chat": ["--max-new-tokens", "2"],
    "eval": ["--text", "TEXT"],
    "explain": [],
    "bench serve": ["--requests", "1", "--prompt-tokens", "4", "--output-tokens", "2", "--warmup", "0"],
}


@pytest.mark.parametrize("dtype", ["auto", *DTYPES])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_fused_or_says_why_not(command, dtype, folders, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin.readline", lambda *_: "", raising=False)
    monkeypatch.setattr("builtins.input", eof)
    (tmp_path / "text.txt").write_text("def add(a, b):\n    return a + b\n")
    options = [str(tmp_path / "text.txt") if word == "TEXT" else word for word in COMMANDS[command]]
    for name in ALL if (command, dtype) == ("generate", "auto") else SOME:
        folder = folders / name
        place = ["--model", str(folder)] if command == "bench serve" else [str(folder)]
        with warnings.catch_warnings():
            warnings.simplefilter("always", HastenWarning)
            main([*command.split(), *place, "--dtype", dtype, "--device", "cpu", *options])
        lines = capsys.readouterr().err.splitlines()
        assert lines[0].startswith(f"{folder.name}: "), lines
        assert not any(line.startswith("warning: ") for line in lines)
        if dtype == "float32":
            assert lines[0].endswith("float32 as asked for, not fused")
        elif NATIVE:
            assert ", fused steps (native, " in lines[0]
        else:
            assert lines[0].endswith("not fused: no native kernels here")


def eof(prompt=""):
    raise EOFError


@pytest.mark.skipif(not NATIVE, reason="nothing is fused without the native kernels")
def test_llm_chat_and_drafts_fuse_what_they_are_given(folders):
    model = hasten.load(folders / "float32-plain")
    hasten.Chat(model)
    assert is_fused(model)
    model, draft = (hasten.load(folders / "float16-plain") for _ in range(2))
    hasten.generate(model, "def", max_new_tokens=3, temperature=0, draft=draft)
    assert all(map(is_fused, (model, draft)))
    llm = hasten.LLM(hasten.load(folders / "float32-int4"), cache_bytes=1 << 20, max_length=64)
    assert is_fused(llm.model)
    llm.close()


@pytest.mark.skipif(not NATIVE, reason="nothing is fused without the native kernels")
@pytest.mark.parametrize("dtype", ["auto", "float32", "float16"])
def test_what_cannot_be_fused_says_so_once_below_the_first_line(dtype, tmp_path, capsys):
    hasten.save(tiny_llama(head_dim=584, num_hidden_layers=1), tmp_path / "wide-heads")
    command = ["generate", str(tmp_path / "wide-heads"), "--dtype", dtype, "--prompt", "def", "--max-new-tokens", "2"]
    for more in ([], ["--quantize", "int8"]):  # as the warning advises
        with warnings.catch_warnings():
            warnings.simplefilter("always", HastenWarning)
            main([*command, "--device", "cpu", *more])
        first, second, *others = capsys.readouterr().err.splitlines()
        assert first.startswith("wide-heads: ")
        assert ", not fused" in first
        assert not any(line.startswith("warning: ") for line in others)
        if dtype != "float32":
            words = (
                r"warning: the model runs without the fused steps, about \d+ times slower: the head size is 584; .*; "
            )
            assert re.match(words + ("--quantize int8" if not more else ""), second), second


@pytest.mark.skipif(not NATIVE, reason="nothing is fused without the native kernels")
def test_a_checkpoint_that_was_rounded_to_generate_warns_when_it_is_trained(folders):
    model = hasten.load(folders / "float32-plain")
    with pytest.warns(HastenWarning, match="load it with dtype='float32' to train it"):
        model.train()
    hasten.load(folders / "float32-plain", dtype="float32").train()
    hasten.load(folders / "bfloat16-plain").train()


@pytest.mark.skipif(not NATIVE, reason="nothing is fused without the native kernels")
def test_a_float32_model_in_memory_says_what_would_be_faster():
    model = hasten.load(make_reference("llama"))
    with pytest.warns(HastenWarning, match=r"about 4 times slower.*load it with dtype='bfloat16'"):
        hasten.generate(model, [1, 2], max_new_tokens=1)
    hasten.generate(model, [1, 2], max_new_tokens=1)  # said once
    hasten.generate(hasten.load(make_reference("llama"), dtype="float32"), [1, 2], max_new_tokens=1)
    model = hasten.load(make_reference("llama"), dtype="bfloat16")
    hasten.generate(model, [1, 2], max_new_tokens=1)
    assert is_fused(model)


class Mine(torch.nn.Linear):
    """A caller's own layer; where bfloat16 is emulated it is given float32."""

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight.to(x.dtype))


@pytest.mark.skipif(not NATIVE, reason="nothing is fused without the native kernels")
@pytest.mark.parametrize("change", ["hook", "trained", "gradient", "patched", "replaced"])
def test_a_model_that_somebody_changed_or_trains_is_not_touched(change, folders):
    model = hasten.load(folders / "bfloat16-plain")
    part = model.blocks[1].mlp
    if change == "hook":
        part.register_forward_hook(lambda *_: None)
    elif change == "trained":
        model.train().eval()
    elif change == "gradient":
        model.norm.weight.grad = torch.zeros_like(model.norm.weight)
    elif change == "patched":
        part.forward = part.forward
    else:
        part.up = Mine(64, 128, bias=False, dtype=torch.bfloat16)
    before = {name: id(tensor) for name, tensor in model.named_parameters()}
    with pytest.warns(HastenWarning, match="without the fused steps"):
        hasten.generate(model, "def", max_new_tokens=1)
    assert {name: id(tensor) for name, tensor in model.named_parameters()} == before
    if change in ("trained", "gradient"):  # as the warning says
        assert is_fused(hasten.fuse(model))


@pytest.mark.skipif(not NATIVE, reason="nothing is fused without the native kernels")
def test_a_fused_model_is_quantized_saved_and_taken_apart(folders, tmp_path):
    model = hasten.load(folders / "bfloat16-plain")
    weights = {name: tensor.clone() for name, tensor in model.named_parameters()}
    hasten.generate(model, "def", max_new_tokens=1)
    with pytest.raises(ConfigError, match=r"call hasten.unfuse\(model\) first"):
        model.train()
    hasten.save(model, tmp_path / "saved")
    assert is_fused(model)
    hasten.unfuse(model)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.named_parameters())
    hasten.generate(model, "def", max_new_tokens=1)
    assert not is_fused(model, any), "it stays as the caller wants it"
    model.train()
    model = hasten.load(folders / "bfloat16-plain")
    hasten.generate(model, "def", max_new_tokens=1)
    hasten.quantize(model, hasten.Int8())
    hasten.generate(model, "def", max_new_tokens=1)
    assert is_fused(model)
    assert model.quantization


def test_a_model_in_memory_keeps_its_dtype():
    model = tiny_llama()
    hasten.generate(model, "def", max_new_tokens=1)
    assert model.dtype == torch.float32
    assert not is_fused(model, any)


def test_without_native_kernels_float32_stays_where_bfloat16_is_emulated(monkeypatch, processor):
    monkeypatch.setenv("HASTEN_ISA", "none")
    config = tiny_llama().config
    processor("avx2")
    assert inference_dtype(config, torch.float32, CPU) == torch.float32
    assert inference_dtype(config, torch.float16, CPU) == torch.bfloat16
    processor("avx512_bf16")
    assert inference_dtype(config, torch.float32, CPU) == torch.bfloat16


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_length_asked_for_changes_nothing_of_an_unfused_model(dtype):
    model = tiny_llama(hidden_size=128, head_dim=64).to(DTYPES[dtype])
    model.auto_fuse = False
    for prompt in ("def add", "for name in", "return a + b\n"):
        short, long = (
            hasten.generate(model, prompt, temperature=0, max_new_tokens=n, ignore_eos=True)[0].tokens for n in (12, 70)
        )
        assert long[:12] == short

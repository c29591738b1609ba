"""What `hasten generate` does before its first token: it imports what it runs, and reads the checkpoint once."""

import subprocess
import sys

import pytest
import torch

from hasten.checkpoints import load as loading
from hasten.checkpoints.export import export_model
from hasten.checkpoints.gguf import open as gguf_open
from hasten.checkpoints.gguf.write import write_gguf
from hasten.cli.main import main
from tiny_model import tiny_llama

# What other commands, other machines and other options need. Each takes from 10 ms to seconds to import.
NOT_NEEDED = [
    *(
        "fastapi",
        "huggingface_hub",
        "jinja2",
        "pydantic",
        "ray",
        "starlette",
        "sympy",
        "transformers",
        "triton",
        "uvicorn",
    ),
    *(
        "torch._dynamo",
        "torch._inductor",
        "hasten.bench.plan",
        "hasten.data",
        "hasten.text.chat_sandbox",
    ),
    *("hasten.ops.fp8", "hasten.ops.loss", "hasten.planning.plan", "hasten.profiling", "hasten.quantization"),
    *("hasten.engine.engine", "hasten.training"),
]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("start") / "tiny.gguf"
    write_gguf(tiny_llama().bfloat16(), path)
    return path


def test_generate_imports_only_what_it_runs(tmp_path):
    export_model(tiny_llama().bfloat16(), tmp_path)
    code = (
        "import sys\nfrom hasten.cli.main import main\n"
        "main(['generate', sys.argv[1], '--prompt', 'def', '--max-new-tokens', '8', '--temperature', '0'])\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    imported = set(done.stderr.splitlines()[-1].split())
    assert {"torch", "hasten.checkpoints.load", "hasten.engine.generate"} <= imported
    assert not imported & set(NOT_NEEDED)


@pytest.mark.parametrize("name", ["hasten", "hasten.cli.main", "hasten.cli.generate"])
def test_options_are_parsed_without_torch(name):
    code = f"import sys, {name}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_file_is_read_once(file, monkeypatch, capsys):
    opened = []

    def counted(path):
        opened.append(path)
        return read(path)

    read = gguf_open.read_gguf
    monkeypatch.setattr(gguf_open, "read_gguf", counted)
    main(["generate", str(file), "--prompt-ids", "1", "--max-new-tokens", "2", "--temperature", "0"])
    assert opened == [file]
    capsys.readouterr()


def test_load_takes_what_was_opened(file):
    source = loading.open_checkpoint(file)
    found, expected = (loading.load(one, dtype="float32").state_dict() for one in (source, file))
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())

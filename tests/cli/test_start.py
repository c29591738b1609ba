"""What `hasten generate` does before its first token: it imports what it runs, and reads the checkpoint once."""

import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from hasten.checkpoints import load as loading
from hasten.checkpoints.export import export_model
from hasten.checkpoints.gguf import open as gguf_open
from hasten.checkpoints.gguf.tokenizer import StoredTokenizer
from hasten.checkpoints.gguf.write import write_gguf
from hasten.cli.main import main
from hasten.errors import CheckpointError
from hasten.ops import native
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
        "hasten.engine.llm",
        "hasten.text.chat_sandbox",
    ),
    *("hasten.ops.fp8", "hasten.ops.loss", "hasten.planning.plan", "hasten.profiling", "hasten.quantization"),
    *("hasten.engine.ahead", "hasten.engine.batch_runner", "hasten.engine.prompt_steps", "hasten.training"),
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


def test_a_compiler_is_asked_once_for_all_layers(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path))
    monkeypatch.setenv("HASTEN_ISA", "portable")
    monkeypatch.setenv("CXX", "g++-of-this-test")
    compiler = SimpleNamespace(takes=lambda flags, probe: asked.append(flags) or True)
    monkeypatch.setattr("hasten.ops.build.find_compiler", lambda: compiler)
    assert [native.obtainable("training") for _ in range(3)] == [True] * 3
    assert len(asked) == 1


def test_the_tokenizer_is_built_when_it_is_wanted(file, monkeypatch):
    built = []
    monkeypatch.setattr(StoredTokenizer, "build", lambda stored: built.append(threading.current_thread()))
    source = loading.open_checkpoint(file)
    assert not built
    assert source.tokenizer_bytes > 0
    loading.load(source)
    assert [thread is threading.main_thread() for thread in built] == [False]


def test_a_tokenizer_that_does_not_fit_together_is_refused_by_load(file, monkeypatch):
    def damaged(stored):
        raise CheckpointError("its tokenizer does not fit together")

    monkeypatch.setattr(StoredTokenizer, "build", damaged)
    with pytest.raises(CheckpointError, match="does not fit together"):
        loading.load(file)


@pytest.mark.skipif(
    sys.platform != "linux" or torch.version.cuda is not None or torch.version.hip is not None,
    reason="only for the CPU build on Linux",
)
def test_libtorch_is_loaded_before_it_is_imported():
    code = (
        "import sys, threading\nfrom hasten.cli.preload import preload_torch\npreload_torch()\n"
        "[t.join() for t in threading.enumerate() if t.name == 'hasten-preload']\n"
        "assert 'torch' not in sys.modules\nassert 'libtorch_cpu.so' in open('/proc/self/maps').read()\n"
        "import torch\nassert torch.ones(2).sum() == 2"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

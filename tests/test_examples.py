"""Every script in examples/ runs, on a tiny model and with few steps."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from instruction_sets import needs_native
from tiny_model import tiny_llama

EXAMPLES = Path(__file__).parents[1] / "examples"
TEXT = "One day Alice asked the cat which way she ought to go from there.\n" * 40


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose widths can be quantized in groups of 128, beside a text."""
    import hasten

    folder = tmp_path_factory.mktemp("examples")
    (folder / "text.txt").write_text(TEXT)
    hasten.save(tiny_llama(hidden_size=128, intermediate_size=256), folder / "model")
    return folder / "model"


@pytest.fixture
def run(monkeypatch, capsys):
    """A function that runs an example in this process and returns what it prints."""

    def main(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return main


def test_every_example_is_short_and_tested():
    names = sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert len(names) == 10
    own = Path(__file__).read_text()
    for name in names:
        assert name in own
        assert len((EXAMPLES / name).read_text().splitlines()) <= 60


def test_load_and_stream(run, model):
    printed = run("01_load_and_stream.py", model)
    assert printed.count("tokens, ended by") == 2


def test_quantize(run, model):
    printed = run("02_quantize.py", model)
    assert printed.count("perplexity") == 4


@pytest.mark.slow  # 10 s
def test_lora(run, model):
    printed = run("03_lora.py", model, model.parent / "text.txt", 2)
    assert "step 2: loss" in printed
    assert "no adapter: " in printed
    assert "book: " in printed


def test_attention_kernel(run, model):
    lines = run("05_attention_kernel.py", model).splitlines()
    found, mine = (float(line.rpartition(" ")[2]) for line in lines[1:3])
    assert mine == pytest.approx(found, rel=1e-4)
    assert lines[3].count(",") == 1  # one kernel for each of the two calls


def test_training_loop(run):
    first, last = run("06_training_loop.py", 20).splitlines()
    assert float(last.rpartition(" ")[2]) < float(first.rpartition(" ")[2])


@pytest.mark.slow  # 10 s of measuring
@needs_native
def test_profile(run, model, tmp_path):
    printed = run("08_profile.py", model, tmp_path)
    assert "ms, at the limit" in printed
    assert "profile.json" in printed


def test_gguf(run, model):
    pytest.importorskip("gguf")
    _, stored, rounded = run("09_gguf.py", model).splitlines()
    assert "BF16, " in stored
    assert "Q8_0, " in rounded


def test_evaluate(run, model):
    printed = run("10_evaluate.py", model, model.parent / "text.txt")
    assert "bits per byte" in printed
    assert "KL divergence" in printed


@pytest.mark.slow  # a server starts
def test_serve_and_call(model):
    pytest.importorskip("uvicorn")
    done = _process(sys.executable, EXAMPLES / "04_serve_and_call.py", model)
    assert done.stdout.strip()


@pytest.mark.slow  # two processes, and one to compare with
def test_zero():
    script = EXAMPLES / "07_zero.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    shared, alone = (_process(*command, script, 5).stdout.splitlines() for command in (torchrun, [sys.executable]))
    assert shared[0].startswith("step 5: loss ")
    assert shared[0].partition(",")[0] == alone[0].partition(",")[0]


def _process(*command):
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done

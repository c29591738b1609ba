"""Fixtures of the tests on published models."""

import shutil
import subprocess
import sys

import pytest

import hasten
from hasten.machine import cache_folder
from hasten.machine.files import locked
from real_models import TEXT, real_model

TOKENS = 512  # of the chapter
LLAMA_CPP = "xllamacpp==2026.10.11549"


CODER = pytest.param("qwen2.5-coder-0.5b", marks=pytest.mark.night)  # half a GB to download


@pytest.fixture(params=["smollm2-135m", "gemma3-270m", CODER], scope="session")
def real(request):
    """Each published model in turn."""
    return real_model(request.param)


@pytest.fixture(scope="session")
def smollm2():
    """The instruction-tuned one."""
    return real_model("smollm2-135m")


@pytest.fixture(scope="session")
def llama_cpp_wheel():
    """A folder with llama.cpp as a Python package, which pip installs once."""
    folder = cache_folder("real-models") / LLAMA_CPP
    with locked(folder.with_name(f"{LLAMA_CPP}.lock"), waiting="another process installs llama.cpp"):
        if not folder.exists():
            partial = folder.with_name(f"{LLAMA_CPP}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary", ":all:"]
            done = subprocess.run([*install, "--target", str(partial), LLAMA_CPP], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"pip cannot get {LLAMA_CPP}: {done.stderr.strip().splitlines()[-1]}")
            partial.rename(folder)
    return folder


@pytest.fixture(scope="module")
def exact(real):
    """The model in float32, plain PyTorch."""
    return hasten.load(real.folder, dtype="float32")


@pytest.fixture(scope="module")
def document(exact):
    """The beginning of the chapter as token ids."""
    return exact.tokenizer.encode(TEXT)[:TOKENS]

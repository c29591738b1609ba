"""Fixtures of the tests on published models."""

import pytest

import hasten
from real_models import TEXT, real_model

TOKENS = 512  # of the chapter


@pytest.fixture(params=["smollm2-135m", "gemma3-270m"], scope="session")
def real(request):
    """Each published model in turn."""
    return real_model(request.param)


@pytest.fixture(scope="session")
def smollm2():
    """The instruction-tuned one."""
    return real_model("smollm2-135m")


@pytest.fixture(scope="module")
def exact(real):
    """The model in float32, plain PyTorch."""
    return hasten.load(real.folder, dtype="float32")


@pytest.fixture(scope="module")
def document(exact):
    """The beginning of the chapter as token ids."""
    return exact.tokenizer.encode(TEXT)[:TOKENS]

"""Fixtures of the tests on published models."""

import pytest

from real_models import real_model


@pytest.fixture(params=["smollm2-135m", "gemma3-270m"], scope="session")
def real(request):
    """Each published model in turn."""
    return real_model(request.param)


@pytest.fixture(scope="session")
def smollm2():
    """The instruction-tuned one."""
    return real_model("smollm2-135m")

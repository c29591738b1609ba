"""The tiny random models of tests/references.py, one after the other."""

import pytest

from references import CASES


@pytest.fixture(params=list(CASES))
def case(request) -> str:
    return request.param

"""Fixtures over the tiny random models of tests/references.py."""

import pytest
import torch

from references import CASES


@pytest.fixture(params=list(CASES))
def case(request) -> str:
    return request.param


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Models this small gain nothing from two threads, and on a busy machine wait for the second: ten times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

"""A server in front of an engine that only pretends; a module with other wishes has fixtures of these names itself."""

import pytest


@pytest.fixture(scope="module")
def engine():
    from fake_engine import FakeEngine
    from references import tiny_llama

    return FakeEngine(tiny_llama().tokenizer)


@pytest.fixture(scope="module")
def client(engine):
    from starlette.testclient import TestClient

    from server_case import app_of

    with TestClient(app_of(engine), base_url="http://localhost") as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer():
    from references import tiny_llama

    return tiny_llama().tokenizer


@pytest.fixture(scope="module")
def client_for_all(tokenizer):
    """One that stays, in modules whose engine is a new one in each test."""
    from starlette.testclient import TestClient

    from fake_engine import FakeEngine
    from server_case import app_of

    with TestClient(app_of(FakeEngine(tokenizer)), base_url="http://localhost") as client:
        yield client

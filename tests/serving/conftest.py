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

    with TestClient(app_of(engine, engine.tokenizer), base_url="http://localhost") as client:
        yield client

"""The request that `benchmarks/serving.py restart` sends has the recorded shape."""

import json

import pytest

from hasten.bench.serve_restart import BYTES, TOOLS, agent_request
from hasten.server.messages import MessagesBody


@pytest.mark.parametrize("size", [BYTES, 40_000])
def test_an_agents_request_has_the_recorded_bytes_and_parts(size):
    body = agent_request("model", max_tokens=16, size=size)
    assert len(json.dumps(body)) == size
    assert [len(part["text"]) for part in body["system"][:2]] == [74, 62]
    user, system = body["messages"]
    assert [len(part["text"]) for part in user["content"]] == [306, 9]
    assert len(system["content"]) == 6062
    assert len(body["tools"]) == TOOLS
    assert len({tool["description"] for tool in body["tools"]}) == TOOLS
    assert body == agent_request("model", max_tokens=16, size=size)
    MessagesBody.model_validate(body)

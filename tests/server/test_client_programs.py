"""Client libraries of PyPI complete a task of one tool call against a server whose model is scripted.

make test-clients    # installs them into an environment of their own
"""

import os
import subprocess

import pytest

import client_programs
from fake_engine import SAID, ScriptedEngine
from server_case import TOOL_TEMPLATE, app_of, serving

PYTHON = os.environ.get("HASTEN_CLIENTS_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="HASTEN_CLIENTS_PYTHON names no Python with these libraries"),
]


@pytest.mark.parametrize("name", list(client_programs.PROGRAMS))
def test_a_library_completes_a_task(name, tokenizer):
    engine = ScriptedEngine(tokenizer.with_chat_template(TOOL_TEMPLATE), "look", {"word": "hello"})
    program = client_programs.__file__
    with serving(app_of(engine, max_length=4096)) as (url, _):
        found = subprocess.run([PYTHON, program, name, url], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr[-2000:]
    assert SAID in found.stdout
    assert engine.results == 1

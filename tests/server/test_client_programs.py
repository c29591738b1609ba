"""Client libraries of PyPI complete a task of one tool call against a server whose model is scripted.

make test-clients    # installs them into an environment of their own
"""

import json
import os
import subprocess

import pytest

import client_programs
from answer_templates import TEMPLATES
from fake_engine import SAID, THOUGHT, ScriptedEngine
from server_case import app_of, serving

PYTHON = os.environ.get("HASTEN_CLIENTS_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="HASTEN_CLIENTS_PYTHON names no Python with these libraries"),
]


@pytest.mark.parametrize("name", list(client_programs.PROGRAMS))
def test_a_library_completes_a_task(name, tokenizer):
    engine = ScriptedEngine(tokenizer.with_chat_template(TEMPLATES["tagged objects"]), "look", {"word": "hello"})
    program = client_programs.__file__
    with serving(app_of(engine, max_length=4096)) as (url, _):
        found = subprocess.run([PYTHON, program, name, url], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr[-2000:]
    said, thought = json.loads(found.stdout.splitlines()[-1])
    assert said == SAID
    assert thought == (None if name.startswith("langchain") else THOUGHT)
    assert engine.results == 1

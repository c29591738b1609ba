"""Coding agents, started as `hasten start` does, complete a task of one tool call; the server's model is scripted.

make test-clients    # codex and opencode from npm; also claude where it is on PATH
"""

import os
import shutil
import subprocess

import pytest

from fake_engine import SAID, ScriptedEngine
from hasten.cli.start import AGENTS, Served, agent_command
from server_case import TOOL_TEMPLATE, app_of, serving

pytestmark = pytest.mark.slow
# Of each: what it runs, the name and the arguments of its tool, and the protocol that it speaks.
TASKS = {
    "codex": (["exec", "--skip-git-repo-check"], "exec_command", {"cmd": "echo hi-from-tool"}, "/v1/responses"),
    "claude": (["--allowedTools", "Bash", "-p"], "Bash", {"command": "echo hi-from-tool"}, "/v1/messages"),
    "opencode": (["run"], "bash", {"command": "echo hi-from-tool", "description": "x"}, "/v1/chat/completions"),
}


@pytest.mark.parametrize("agent", list(AGENTS))
def test_an_agent_completes_a_task(agent, tokenizer, tmp_path, caplog):
    if shutil.which(agent) is None:
        pytest.skip(f"{agent} is not on PATH")
    caplog.set_level("INFO", "hasten.server")
    command, name, arguments, path = TASKS[agent]
    engine = ScriptedEngine(tokenizer.with_chat_template(TOOL_TEMPLATE), name, arguments)
    work, home = tmp_path / "work", tmp_path / "home"
    work.mkdir()
    home.mkdir()
    with serving(app_of(engine, max_length=400_000)) as (url, _):
        starts, variables = agent_command(agent, Served(url, "tiny", 400_000, "none"), tmp_path / "own")
        found = subprocess.run(
            [*starts, *command, "say what the tool says"],
            cwd=work,
            env={"PATH": os.environ["PATH"], "HOME": str(home)} | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert found.returncode == 0, found.stderr[-2000:]
    assert not list(home.rglob("config*"))  # its settings are in a folder of their own
    assert SAID in found.stdout
    assert engine.results >= 1
    asked = [record.fields for record in caplog.records if getattr(record, "fields", {}).get("method") == "POST"]
    assert {(one["path"], one["status"]) for one in asked} == {(path, 200)}

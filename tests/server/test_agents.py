"""Coding agents complete a task of one tool call against a server whose model is scripted.

npm install -g @openai/codex@0.171.0 opencode-ai@1.18.33 @anthropic-ai/claude-code@2.1.197
python -m pytest -m slow tests/server/test_agents.py    # those that are on PATH
"""

import json
import os
import shutil
import subprocess

import pytest

from fake_engine import FakeEngine
from server_case import TOOL_TEMPLATE, app_of, serving

pytestmark = pytest.mark.slow
SAID = "All done: hi-from-tool."
CODEX = """model = "tiny"
model_provider = "local"
[model_providers.local]
name = "local"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "KEY"
"""
OPENCODE = {"npm": "@ai-sdk/openai-compatible", "name": "local", "models": {"tiny": {"name": "tiny"}}}
# Of each: what it runs, its settings, the name and the arguments of its tool, and the protocol that it speaks.
AGENTS = {
    "codex": (["exec", "--skip-git-repo-check"], "exec_command", {"cmd": "echo hi-from-tool"}, "/v1/responses"),
    "claude": (["--allowedTools", "Bash", "-p"], "Bash", {"command": "echo hi-from-tool"}, "/v1/messages"),
    "opencode": (["run"], "bash", {"command": "echo hi-from-tool", "description": "x"}, "/v1/chat/completions"),
}


class ScriptedEngine(FakeEngine):
    """Calls a tool, and once its result is in the prompt says that all is done."""

    def __init__(self, tokenizer, name, arguments):
        super().__init__(tokenizer)
        call = json.dumps({"name": name, "arguments": arguments})
        self.call = tokenizer.encode(f"I look.\n<tool_call>\n{call}\n</tool_call>", add_special_tokens=False)
        self.said = tokenizer.encode(SAID, add_special_tokens=False)
        self.results = 0

    async def generate(self, *requests):
        seen = "<|tool|>" in self.tokenizer.decode(requests[0].prompt)
        self.results += seen
        self.answer = self.said if seen else self.call
        async for output in super().generate(*requests):
            yield output


def settings_of(agent, url, home):
    """Write the agent's settings into its home; returns its environment."""
    if agent == "codex":
        (home / ".codex").mkdir()
        (home / ".codex" / "config.toml").write_text(CODEX.format(url=url))
        return {"KEY": "none"}
    if agent == "claude":
        quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
        models = {"ANTHROPIC_MODEL": "tiny", "ANTHROPIC_DEFAULT_HAIKU_MODEL": "tiny"}
        return quiet | models | {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "none"}
    folder = home / ".config" / "opencode"
    folder.mkdir(parents=True)
    provider = OPENCODE | {"options": {"baseURL": f"{url}/v1", "apiKey": "none"}}
    (folder / "opencode.json").write_text(json.dumps({"provider": {"local": provider}, "model": "local/tiny"}))
    return {}


@pytest.mark.parametrize("agent", list(AGENTS))
def test_an_agent_completes_a_task(agent, tokenizer, tmp_path, caplog):
    if shutil.which(agent) is None:
        pytest.skip(f"{agent} is not on PATH")
    caplog.set_level("INFO", "hasten.server")
    command, name, arguments, path = AGENTS[agent]
    engine = ScriptedEngine(tokenizer.with_chat_template(TOOL_TEMPLATE), name, arguments)
    work, home = tmp_path / "work", tmp_path / "home"
    work.mkdir()
    home.mkdir()
    with serving(app_of(engine, max_length=400_000)) as (url, _):
        variables = {"PATH": os.environ["PATH"], "HOME": str(home)} | settings_of(agent, url, home)
        found = subprocess.run(
            [agent, *command, "say what the tool says"],
            cwd=work,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert found.returncode == 0, found.stderr[-2000:]
    assert SAID in found.stdout
    assert engine.results >= 1
    asked = [record.fields for record in caplog.records if getattr(record, "fields", {}).get("method") == "POST"]
    assert {(one["path"], one["status"]) for one in asked} == {(path, 200)}

"""`hasten start` with a program in an agent's place: what it is given, what it leaves alone, and how it ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hasten.cli.main import main

# Asks the server that its arguments name, says what it found, and ends with status 7.
AGENT = f"""#!{sys.executable}
import json, os, sys, urllib.request
settings = dict(word.split("=", 1) for word in sys.argv[1:] if word.startswith("model"))
url = json.loads(settings["model_providers.hasten.base_url"])
body = json.dumps({{"model": json.loads(settings["model"]), "input": "hello", "max_output_tokens": 2}}).encode()
headers = {{"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["HASTEN_API_KEY"]}}
with urllib.request.urlopen(urllib.request.Request(url + "/responses", body, headers), timeout=60) as answer:
    answer = json.load(answer)
found = {{"arguments": sys.argv[1:], "direct": os.environ["no_proxy"], "home": os.environ["CODEX_HOME"]}}
found |= {{"url": url, "answer": answer}}
print(json.dumps(found), flush=True)
sys.exit(7)
"""
WAITS = f"#!{sys.executable}\nimport sys, time\nprint(sys.argv, flush=True)\ntime.sleep(600)\n"


@pytest.fixture
def home(tmp_path):
    """A home folder with a user's own settings of Codex in it."""
    (tmp_path / "home" / ".codex").mkdir(parents=True)
    (tmp_path / "home" / ".codex" / "config.toml").write_text('model = "mine"\n')
    return tmp_path / "home"


def run_start(tmp_path, home, agent: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "codex").write_text(agent)
    (programs / "codex").chmod(0o755)
    own = {"HOME": str(home), "HASTEN_CACHE": str(tmp_path / "cache"), "HASTEN_ISA": "none"}  # nothing to compile
    own["PATH"] = f"{programs}:{os.environ['PATH']}"
    return subprocess.Popen(
        [sys.executable, "-m", "hasten", "start", "codex", *arguments],
        env=os.environ | own | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("key", ["none", "secret"])
def test_an_agent_gets_a_server_and_a_home_of_its_own(tmp_path, home, tiny_folder, key):
    variables = {} if key == "none" else {"HASTEN_API_KEY": key}
    run = run_start(tmp_path, home, AGENT, str(tiny_folder), "--device", "cpu", "--", "exec", "hi", **variables)
    out, err = run.communicate(timeout=120)
    assert run.returncode == 7, err
    found = json.loads(out)
    assert found["arguments"][-2:] == ["exec", "hi"]
    assert found["direct"].endswith("127.0.0.1,localhost")
    assert found["answer"]["usage"]["output_tokens"] == 2
    assert Path(found["home"]) == tmp_path / "cache" / "agents" / "codex" / "codex"
    assert '"path": "/v1/responses"' in (tmp_path / "cache" / "agents" / "codex" / "server.log").read_text()
    assert "coding agents begin with up to 20,000 tokens, and model has room for" in err
    assert [path.name for path in home.rglob("*") if path.is_file()] == ["config.toml"]
    assert (home / ".codex" / "config.toml").read_text() == 'model = "mine"\n'
    assert not _listens(found["url"])


def _listens(url: str) -> bool:
    import urllib.error
    import urllib.request

    try:
        urllib.request.urlopen(f"{url}/models", timeout=5)
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError:
        return False
    return True


def test_the_server_ends_with_a_killed_parent(tmp_path, home, tiny_folder):
    run = run_start(tmp_path, home, WAITS, str(tiny_folder), "--device", "cpu")
    given = run.stdout.readline()
    url = given.partition('base_url="')[2].partition('"')[0]
    assert _listens(url)
    run.send_signal(signal.SIGKILL)
    end = time.monotonic() + 60
    while _listens(url):
        assert time.monotonic() < end, "the server did not end"
        time.sleep(0.1)
    subprocess.run(["pkill", "-f", str(tmp_path / "bin" / "codex")], check=False)


def test_a_key_among_the_options_is_refused(tmp_path, home, tiny_folder):
    options = (str(tiny_folder), "--device", "cpu", "--api-key", "x")
    run = run_start(tmp_path, home, AGENT, *options, http_proxy="http://127.0.0.1:9")  # it is not asked
    _, err = run.communicate(timeout=120)
    assert run.returncode == 2
    assert err.splitlines()[-1] == "error: the server wants its key; give it in HASTEN_API_KEY instead of by --api-key"


def test_what_the_server_refuses_is_said_once(tmp_path, home):
    run = run_start(tmp_path, home, AGENT, str(tmp_path / "nothing"))
    out, err = run.communicate(timeout=120)
    assert (run.returncode, out) == (2, "")
    assert [line.partition(":")[0] for line in err.splitlines()] == ["error"]


@pytest.mark.parametrize("place", ["codex", "codex/server.log"])
def test_a_log_that_cannot_be_written_is_an_error_before_the_server(tmp_path, home, place):
    path = tmp_path / "cache" / "agents" / place
    path.parent.mkdir(parents=True)
    if place == "codex":
        path.touch()
    else:
        path.mkdir()
    run = run_start(tmp_path, home, AGENT, str(tmp_path / "nothing"))
    _, err = run.communicate(timeout=120)
    assert run.returncode == 2
    assert err.splitlines() == [err.strip()]
    assert err.startswith(f"error: {path} cannot be written (")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["vim", "MODEL"], "'vim' is not an agent that hasten starts; these are: codex, opencode, claude"),
        (["codex"], "no model is named; give one, as in: hasten start codex MODEL"),
        (["opencode", "MODEL"], "opencode is not on PATH; install it: npm install -g opencode-ai"),
    ],
)
def test_mistakes_are_named(arguments, said, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        main(["start", *arguments])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {said}\n"

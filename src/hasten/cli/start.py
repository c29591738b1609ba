"""`hasten start codex|opencode|claude MODEL`: serve a model to a coding agent, and run the agent in this terminal."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from hasten.cli.help import wants_help
from hasten.errors import ConfigError, ResourceError
from hasten.machine.caches import cache_folder
from hasten.machine.signals import end_with_parent
from hasten.measure.workers import address_in

KEY = "HASTEN_API_KEY"  # which the server reads too
FIRST_REQUEST = 20_000  # tokens of the longest first request that was recorded: Claude Code's, with Gemma's tokenizer
ANSWER = 8_192  # tokens that opencode leaves free for one answer, at most
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy reaches a server of this machine


@dataclass(frozen=True)
class Served:
    """A model that is served: the server's URL without /v1, the model's name and its context in tokens, and a key."""

    url: str
    model: str
    length: int
    key: str


@dataclass(frozen=True)
class Agent:
    """A coding agent: how it is installed, where it keeps what is its own, and how it is pointed at a server.

    Args:
        package: Its npm package.
        homes: Environment variables, each with the name of a folder: its settings and its history are there.
        configure: Its first arguments and its environment variables for a served model.
    """

    package: str
    homes: Mapping[str, str]
    configure: Callable[[Served], tuple[list[str], dict[str, str]]]


def _codex(served: Served) -> tuple[list[str], dict[str, str]]:
    provider = "model_providers.hasten"
    settings = {
        "model": served.model,
        "model_context_window": served.length,
        "model_provider": "hasten",
        f"{provider}.name": "hasten",
        f"{provider}.base_url": f"{served.url}/v1",
        f"{provider}.wire_api": "responses",
        f"{provider}.env_key": KEY,
    }
    # Strings and numbers are written in TOML as in JSON.
    return [word for name, value in settings.items() for word in ("-c", f"{name}={json.dumps(value)}")], {}


def _opencode(served: Served) -> tuple[list[str], dict[str, str]]:
    limit = {"context": served.length, "output": min(ANSWER, served.length // 2)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "hasten",
        "options": {"baseURL": f"{served.url}/v1", "apiKey": served.key},
        "models": {served.model: {"name": served.model, "limit": limit}},
    }
    settings = {"provider": {"hasten": provider}, "model": f"hasten/{served.model}", "autoupdate": False}
    return [], {"OPENCODE_CONFIG_CONTENT": json.dumps(settings)}


def _claude(served: Served) -> tuple[list[str], dict[str, str]]:
    return [], {
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_AUTH_TOKEN": served.key,
        "ANTHROPIC_MODEL": served.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": served.model,
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


AGENTS = {
    "codex": Agent("@openai/codex", {"CODEX_HOME": "codex"}, _codex),
    "opencode": Agent(
        "opencode-ai",
        {"XDG_CONFIG_HOME": "config", "XDG_DATA_HOME": "data", "XDG_STATE_HOME": "state"},
        _opencode,
    ),
    "claude": Agent("@anthropic-ai/claude-code", {"CLAUDE_CONFIG_DIR": "claude"}, _claude),
}
HELP = f"""\
usage: hasten start {{{",".join(AGENTS)}}} MODEL [options of hasten serve] [-- arguments of the agent]

Serve a model on a free port, and run a coding agent on it in this terminal; the server ends with the agent.
The agent's settings and history are in a folder of their own, beside hasten's caches: yours are not touched.
The model needs a chat template that shows tools, and room for some {FIRST_REQUEST:,} tokens.

  hasten start codex ./Qwen3-4B --quantize int4
  hasten start opencode ./Qwen3-4B --prefix-cache ~/prefixes     (soon ready again after a restart)
  hasten start codex ./Qwen3-4B -- exec "explain this folder"

The agents are npm packages: {", ".join(agent.package for agent in AGENTS.values())}."""


def start(arguments: list[str]) -> None:
    """Serve a model, run an agent on it, and end with the agent's exit status."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    own, theirs = arguments[:end], arguments[end + 1 :]
    if not own or wants_help(own):
        print(HELP)
        return
    name, *options = own
    if name not in AGENTS:
        raise ConfigError(f"{name!r:.40} is not an agent that hasten starts; these are: {', '.join(AGENTS)}")
    if not options:
        raise ConfigError(f"no model is named; give one, as in: hasten start {name} MODEL")
    if shutil.which(name) is None:
        raise ResourceError(f"{name} is not on PATH; install it: npm install -g {AGENTS[name].package}")
    folder = cache_folder("agents") / name
    with _new_log(folder) as log, _serving(options, log) as served:
        if served.length < FIRST_REQUEST:
            print(
                f"warning: coding agents begin with up to {FIRST_REQUEST:,} tokens, and {served.model} has room for "
                f"{served.length:,}",
                file=sys.stderr,
            )
        command, environment = agent_command(name, served, folder)
        status = _run([*command, *theirs], environment)
    raise SystemExit(status)


def _new_log(folder: Path) -> TextIO:
    """An empty log in an agent's folder, which is made. Raises ResourceError where it cannot be written."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        log = folder / "server.log"
        log.write_text("")
        return log.open("a")  # another agent's server may write to it, too
    except OSError as error:
        message = f"{error.filename} cannot be written ({error.strerror}); move it, or set HASTEN_CACHE"
        raise ResourceError(message) from None


def agent_command(name: str, served: Served, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return an agent's command and the environment that it adds; makes the folders of its own in `folder`."""
    agent = AGENTS[name]
    arguments, environment = agent.configure(served)
    homes = {variable: folder / place for variable, place in agent.homes.items()}
    for home in homes.values():
        home.mkdir(parents=True, exist_ok=True)
    environment |= {variable: str(home) for variable, home in homes.items()} | {KEY: served.key}
    for variable in ("NO_PROXY", "no_proxy"):  # the server is on this machine
        hosts = [os.environ[variable]] if os.environ.get(variable) else []
        environment[variable] = ",".join([*hosts, "127.0.0.1", "localhost"])
    return [name, *arguments], environment


@contextmanager
def _serving(options: Sequence[str], log: TextIO) -> Iterator[Served]:
    """Run `hasten serve` on a free port. What it says is shown until it listens, and written to a log.

    Exits with the server's status if that ends before it listens; its error has been shown then.
    """
    server = subprocess.Popen(
        [sys.executable, "-m", "hasten", "serve", "--port", "0", *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is the agent's
        preexec_fn=lambda: end_with_parent(signal.SIGTERM),
    )
    listening = threading.Event()
    copier = threading.Thread(target=_copy, args=(server, log, listening), daemon=True)
    copier.start()
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        if not line:
            status = server.wait()
            copier.join()
            raise SystemExit(status)
        listening.set()
        url = address_in(line)
        print(f"{line.rpartition('; try')[0]}; log: {log.name}", file=sys.stderr)
        yield _ask(url)
        if server.poll() is not None:
            print(f"error: the server has ended with status {server.returncode}; see {log.name}", file=sys.stderr)
    finally:
        server.terminate()
        server.wait()
        copier.join(10)


def _copy(server: subprocess.Popen[str], log: TextIO, listening: threading.Event) -> None:
    """Copy the server's standard error to its log, and to this process's own until the server listens."""
    assert server.stderr is not None
    for line in server.stderr:
        log.write(line)
        log.flush()
        if not listening.is_set():
            sys.stderr.write(line)


def _ask(url: str) -> Served:
    """Ask a server for the model that it serves."""
    key = os.environ.get(KEY, "none")
    request = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"})
    try:
        with _DIRECT.open(request, timeout=60) as answer:
            model = json.load(answer)["data"][0]
    except urllib.error.HTTPError as error:
        if error.code != 401:
            raise
        raise ConfigError(f"the server wants its key; give it in {KEY} instead of by --api-key") from None
    return Served(url, model["id"], model["max_model_len"], key)


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run an agent until it ends; returns its exit status. Ctrl-C is for the agent to handle."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        status = subprocess.run(command, env=os.environ | environment, check=False).returncode
    finally:
        signal.signal(signal.SIGINT, before)
    return status if status >= 0 else 128 - status

"""`hasten serve`: it starts, serves, drains; what it cannot serve is one line; nobody is let in by mistake."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import warnings
from dataclasses import asdict

import pytest
import tyro

from hasten.cli.serve import Serve
from hasten.engine import admission
from hasten.engine.cache import KVCache
from hasten.engine.engine import Engine
from hasten.engine.request import RequestRefused
from hasten.engine.settings import EngineSettings
from hasten.errors import ConfigError, HastenWarning, ResourceError
from hasten.planning.memory import InferenceUse, inference_memory
from hasten.server.settings import ServerSettings
from references import tiny_llama
from serving_cases import request, run, tokens_of


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


def test_the_command_serves_and_drains(tiny_folder):
    command = [sys.executable, "-m", "hasten", "serve", str(tiny_folder), "--port", "0", "--fit"]
    command += ["--max-sequences", "4", "--kv-cache-dtype", "int8", "--draft", str(tiny_folder)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "HASTEN_API_KEY": "k"}
    )
    try:
        line = process.stdout.readline()
        assert "is served at http://127.0.0.1:" in line, process.stderr.read()
        assert re.search(r", a page at http://127\.0\.0\.1:\d+/; try:", line)
        curl = process.stdout.readline().strip()
        done = subprocess.run(
            ["bash", "-c", curl.replace("curl ", "curl -s ")],
            capture_output=True,
            text=True,
            env={**os.environ, "HASTEN_API_KEY": "k"},
            timeout=30,
        )
        assert json.loads(done.stdout)["usage"]["completion_tokens"] > 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        said = process.stderr.read().splitlines()
        assert any("holds 2,048 tokens: 4 sequences of 512" in line for line in said), "all that they could need"
        assert [json.loads(line)["status"] for line in said if line.startswith("{")] == [200]
    finally:
        process.kill()


def test_the_name_is_never_a_path(tiny_folder, tmp_path):
    (tmp_path / "some.gguf").touch()
    names = {str(tmp_path / "some.gguf"): "some.gguf", str(tiny_folder): tiny_folder.name, "owner/name": "owner/name"}
    assert {path: Serve(model=path).name() for path in names} == names


def test_what_cannot_be_served_is_one_line(tiny_folder, tmp_path, capsys, monkeypatch):
    from hasten.cli.main import main

    monkeypatch.delenv("HASTEN_API_KEY", raising=False)
    (broken := tmp_path / "broken.jinja").write_text("{% for")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        cases = [
            (["--port", port], "in use"),
            (["--port", "99999"], "65535"),
            (["--host", "256.1.1.1"], "cannot listen"),
            (["--cache-gib", "0"], "above 0"),
            (["--api-key", "a b"], "API key"),
            (["--api-key", ""], "API key is empty"),
            (["--host", "0.0.0.0", "--api-key", "one", ""], "API key is empty"),
            (["--served-model-name", ""], "--served-model-name"),
            (["--chat-template", str(broken)], "syntax error"),
            (["--chat-template", str(broken) + "x"], f"--chat-template {broken}x cannot be read"),
            (["--cache-gib", "nan"], "--cache-gib is nan"),
            (["--cache-gib", "inf"], "--cache-gib is inf"),
            (["--allowed-origins", "localhost"], "--allowed-origins localhost"),
            (["--chat-template-kwargs", "{enable_thinking: false}"], "--chat-template-kwargs takes a JSON object"),
            (["--chat-template-kwargs", '{"messages": []}'], "--chat-template-kwargs: 'messages' cannot be given"),
            (["--max-body-mib", "nan"], "--max-body-mib is nan"),
            (["--max-body-mib", "inf"], "--max-body-mib is inf"),
            (["--drain-timeout", "inf"], "--drain-timeout is inf"),
            (["--request-timeout", "nan"], "--request-timeout is nan"),
            (["--token-budget", "1"], "error: --token-budget is 1, below max_sequences"),
            (["--max-sequences", "1024", "--token-budget", "512"], "error: --token-budget is 512, below max_sequences"),
            (["--block-size=0"], "error: --block-size is 0; it must be"),
            (["--max-samples", "0"], "error: --max-samples is 0"),
            (["--draft", "self:9-layers"], "error: self:9-layers: this model has"),
            (["--draft", str(tmp_path / "nowhere")], "nowhere"),
        ]
        for options, text in cases:
            with pytest.raises(SystemExit) as end:
                main(["serve", str(tiny_folder), *(["--port", "0"] if "--port" not in options else []), *options])
            lines = capsys.readouterr().err.splitlines()
            assert end.value.code == 2
            if "fused" in lines[0]:  # where the model is loaded before it shows
                lines = lines[1:]
            (error,) = lines
            assert error.startswith("error: ")
            assert text in error


def test_every_limit_on_a_request_is_an_option_that_says_so(capsys, monkeypatch):
    from hasten.cli.main import main

    monkeypatch.setenv("COLUMNS", "120")  # one column
    with pytest.raises(SystemExit):
        main(["serve", "--help-all"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    limits = [name for name, value in asdict(ServerSettings()).items() if type(value) is int]
    assert "samples" in limits
    for name in limits:
        if name != "body_bytes":  # --max-body-mib
            assert f" --max-{name.replace('_', '-')} INT Maximum " in text
    command = tyro.cli(Serve, args=["x", "--max-samples", "5", "--max-choices", "3"])
    assert (command.server.samples, command.server.choices) == (5, 3)


def test_an_empty_key_in_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("HASTEN_API_KEY", "")
    with pytest.raises(ConfigError, match="HASTEN_API_KEY"):
        Serve(model="x")._settings()
    monkeypatch.setenv("HASTEN_API_KEY", "k")
    assert Serve(model="x", api_key=("l",))._settings().api_keys == ("l", "k")


def test_a_server_for_everybody_is_warned_of(monkeypatch):
    monkeypatch.delenv("HASTEN_API_KEY", raising=False)
    for host, key, warned in (("0.0.0.0", (), True), ("0.0.0.0", ("k",), False), ("127.0.0.1", (), False)):
        command = Serve(model="x", host=host, api_key=key)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            command._warn_of_strangers(command._settings())
        assert [host in str(one.message) for one in told] == [True] * warned
    settings = ServerSettings(allowed_origins=("*",))
    with pytest.warns(HastenWarning, match=r'any page .* --allowed-origins is "\*"'):
        Serve(model="x", server=settings)._warn_of_strangers(settings)


def test_a_broken_template_of_the_folder_is_warned_of(model):
    class Broken:
        tokenizer = model.tokenizer.with_chat_template("{% for", origin="the folder")

    with pytest.warns(HastenWarning, match="chat/completions"):
        assert Serve(model="x")._tokenizer(Broken) is Broken.tokenizer


def test_fit_takes_what_is_free_beside_a_step_and_shortens_what_is_too_long(model, monkeypatch):
    use = InferenceUse(batch_size=8, length=16, step=16, weights=0, row_bytes=0)
    size = KVCache.bytes_per_block(model.config, dtype=model.dtype)
    free = inference_memory(model.config, use).peak + 9 * size + 5
    monkeypatch.setattr(admission, "available_memory", lambda device: free)
    engine = Engine(model, None, EngineSettings(max_sequences=8, token_budget=16, fit=True))
    assert (engine.blocks.blocks, engine.max_length) == (9, 9 * 16)
    assert "one of 144" in admission.room(model, engine.settings, blocks=9, max_length=144)
    assert len(tokens_of(run(engine, [request("one", [5, 6], max_new_tokens=3)])["one"])) == 3
    with pytest.raises(RequestRefused, match="may have 144 together"):
        engine.add(request("long", [5] * 150, max_new_tokens=3))


def test_memory_that_the_system_refuses_is_named(model, monkeypatch):
    import mmap

    def refuse(*args, **kwargs):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(ResourceError, match=r"does not give [\d,]+ bytes .*Cannot allocate.* [\d,]+ bytes are free"):
        Engine(model, model.tokenizer, EngineSettings(max_sequences=64, token_budget=64, cache_bytes=64 << 20))

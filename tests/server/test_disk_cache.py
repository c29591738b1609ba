"""A server with a prefix cache on disk: what it says of it, and what is left of it after kill -9."""

import os
import re
import subprocess
import sys

import httpx
import pytest

import hasten
from hasten.cli.main import main
from hasten.engine.async_engine import AsyncEngine
from hasten.engine.engine import Engine
from hasten.engine.settings import EngineSettings
from references import tiny_llama
from server_case import app_of, serving

TALK = [{"role": "system", "content": "for name in names: " * 12}, {"role": "user", "content": "def add"}]


def metric(url: str, name: str) -> float:
    (found,) = re.findall(rf"^hasten:{name}{{.*}} (.*)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    return float(found)


def talk(url: str, **more):
    body = {"model": "tiny", "messages": TALK, "max_tokens": 12, "temperature": 0} | more
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status().json()
    return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_usage_and_metrics_count_what_was_read(tmp_path):
    model, found = tiny_llama(), []
    for _ in range(2):
        settings = EngineSettings(max_sequences=4, cache_bytes=1 << 22, prefix_cache=tmp_path / "cache")
        with serving(app_of(AsyncEngine(Engine(model, model.tokenizer, settings)))) as (url, _):
            found.append(talk(url))
            mine = talk(url, cache_salt="mine")[1]
            hits = metric(url, "prefix_cache_disk_hits_total")
            assert hits == found[-1][1] + mine
            assert (metric(url, "prefix_cache_disk_seconds_total") > 0) == (hits > 0)
        assert mine == found[-1][1]
    (text, before), (again, after) = found
    prompt = len(model.tokenizer.encode_chat(TALK))
    assert (again, before, after) == (text, 0, (prompt - 1) // 16 * 16)


def test_a_folder_that_cannot_be_written_ends_the_command(tiny_folder, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(tiny_folder), "--port", "0", "--device", "cpu", "--prefix-cache", "/proc/cache"])
    assert ended.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: the folder of the prefix cache, /proc/cache, cannot be written: ")


@pytest.mark.slow
def test_a_server_that_was_killed_goes_on_where_it_was(tiny_folder, tmp_path):
    """`hasten serve` itself, killed after an answer and in the middle of one."""
    command = [sys.executable, "-m", "hasten", "serve", str(tiny_folder), "--port", "0", "--served-model-name", "tiny"]
    command += ["--device", "cpu", "--cache-gib", "0.01", "--prefix-cache", str(tmp_path / "cache")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    model, found = hasten.load(tiny_folder), []
    (alone,) = hasten.generate(model, model.tokenizer.encode_chat(TALK), temperature=0, max_new_tokens=12)
    for turn in range(3):
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as server:
            try:
                url = re.search(r"http://\S+(?=/v1 )", server.stdout.readline())[0]
                found.append(talk(url))
                if turn == 0:
                    body = {"model": "tiny", "prompt": "x" * 300, "max_tokens": 100, "stream": True}
                    with httpx.stream("POST", f"{url}/v1/completions", json=body) as stream:
                        next(stream.iter_lines())
                        server.kill()
            finally:
                server.kill()
    assert {text for text, _ in found} == {alone.text}
    assert found[0][1] == 0 < found[1][1] == found[2][1]

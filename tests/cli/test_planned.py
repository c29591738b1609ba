"""`hasten serve --devices auto`: a plan chooses the ranks and the precision, and the server runs with them."""

import re
import signal
import subprocess
import sys

import httpx
import pytest

import hasten
from hasten.bench import choices
from hasten.bench.plan import PlanOptions
from hasten.cli.main import main
from hasten.cli.planned import by_plan
from hasten.cli.serve import Serve
from hasten.errors import ConfigError
from hasten.machine import available_cores
from hasten.replicas.settings import ReplicaSettings


@pytest.mark.slow  # a server in a process of its own
def test_the_server_runs_with_what_was_planned(tiny_folder):
    degree = "2" if available_cores().physical > 1 else "1"
    auto = ["--devices", "auto", "--quantize", "int8", "--tensor-parallel", degree, "--cache-gib", "0.02"]
    command = [sys.executable, "-m", "hasten", "serve", str(tiny_folder), "--port", "0", *auto]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        found = re.search(r"is served at (\S+)/v1", process.stdout.readline())
        assert found, process.stderr.read()
        body = {"model": tiny_folder.name, "prompt": "def add", "temperature": 0, "max_tokens": 8, "ignore_eos": True}
        answer = httpx.post(f"{found[1]}/v1/completions", json=body).json()
        process.send_signal(signal.SIGTERM)
        process.wait(20)
        told = process.stderr.read()
    finally:
        process.kill()
    assert "drained and closed" in told
    assert f"{degree} rank" in told
    assert "the time of an answer is the least" in told
    model = hasten.quantize(hasten.load(tiny_folder, dtype="stored"), hasten.Int8())
    alone = hasten.generate(model, "def add", temperature=0, max_new_tokens=8, ignore_eos=True, draft="none")
    assert answer["choices"][0]["text"] == alone[0].text


@pytest.fixture
def h100s(monkeypatch):
    """Plans for eight H100s, and the options that they were asked with."""
    asked, choose = [], choices.choose_plan

    def planned(model, options):
        asked.append(options)
        changes = {"use": options.use, "goal": options.goal, "batch_size": options.batch_size}
        return choose("llama-70b", PlanOptions(device="h100", gpus=8, weights=options.weights, **changes))

    monkeypatch.setattr(choices, "choose_plan", planned)
    return asked


def test_ranks_and_precision_go_to_the_ranks_and_replicas_are_told(h100s, tiny_folder, capsys):
    command = Serve(model=str(tiny_folder), devices="auto", goal="latency")
    planned, arguments = by_plan(command, ["serve", "MODEL", "--devices", "auto", "--goal=latency"])
    assert (planned.tensor_parallel, planned.quantize, planned.devices, planned.goal) == (8, "int8", "given", None)
    assert arguments[2:] == ["--tensor-parallel", "8", "--quantize", "int8"]
    assert (h100s[0].use, h100s[0].length, h100s[0].new_tokens) == ("serve", 512, 256)
    assert "replicas" not in capsys.readouterr().err
    planned, _ = by_plan(Serve(model=str(tiny_folder), devices="auto", goal="throughput", quantize="int8"), [])
    assert planned.quantize == "int8"
    assert h100s[1].weights == "int8"
    told = capsys.readouterr().err
    replicas = 8 // planned.tensor_parallel
    assert f"the plan has {replicas} replicas" in told
    ranks = f" --tensor-parallel {planned.tensor_parallel}" * (planned.tensor_parallel > 1)
    assert f"all of them: hasten serve {tiny_folder} --replicas {replicas}{ranks} --quantize int8" in told
    with pytest.raises(ConfigError, match="--replicas and --devices auto do not go together"):
        Serve(model=str(tiny_folder), devices="auto", goal="latency", fleet=ReplicaSettings(replicas=2))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--goal", "cost"], "--goal has no effect with --devices given, only with auto"),
        (["--devices", "auto"], "--devices auto starts the ranks itself"),
    ],
)
def test_what_does_not_go_together_is_refused(options, told, tiny_folder, monkeypatch, capsys):
    if "auto" in options:
        for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(tiny_folder), "--port", "0", *options])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err

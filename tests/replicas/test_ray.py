"""`hasten serve --replicas` on Ray itself: one server for all of it, because a cluster is slow to start."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import psutil
import pytest

import hasten
from hasten.errors import ConfigError, ResourceError
from hasten.replicas.settings import ReplicaSettings
from references import tiny_llama

TEXT = "def add(a, b):\n    return a + b\n" * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    hasten.save(tiny_llama(), folder)
    return folder


@contextmanager
def serving(folder, *options):
    """A client of the server, and its process."""
    command = [sys.executable, "-m", "hasten", "serve", str(folder), "--port", "0", *options]
    command += ["--served-model-name", "tiny", "--max-sequences", "8", "--draft", "none"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "HASTEN_API_KEY": "k"})
    try:
        line = process.stdout.readline()
        assert "tiny is served at" in line
        url = next(word for word in line.split() if word.startswith("http")).removesuffix("/v1")
        with httpx.Client(base_url=url, headers={"Authorization": "Bearer k"}, timeout=120) as client:
            yield client, process
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert not workers(process), "Ray's processes end with it"
    finally:
        process.kill()


@pytest.fixture(scope="module")
def served(folder):
    pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'hasten[ray]'")
    with serving(folder, "--replicas", "2") as both:
        yield both


def workers(process):
    """The replicas' processes."""
    try:
        found = psutil.Process(process.pid).children(recursive=True)
        return [one for one in found if "ServeReplica" in " ".join(one.cmdline())]
    except psutil.Error:
        return []


def ask(client, **changes):
    body = {"model": "tiny", "prompt": TEXT, "max_tokens": 12, "temperature": 0} | changes
    return client.post("/v1/completions", json=body)


def gauges(client, name):
    lines = client.get("/metrics").text.splitlines()
    return [float(line.split()[-1]) for line in lines if line.startswith(f"hasten:{name}{{")]


def eventually(condition, seconds=120.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_replicas_answer_die_are_replaced_and_drain(served, folder):
    client, process = served
    model = hasten.load(folder)
    expected = "".join(hasten.stream(model, TEXT, temperature=0, max_new_tokens=12))

    answer = ask(client).json()
    assert answer["choices"][0]["text"] == expected
    eventually(lambda: sum(gauges(client, "prefix_cache_queries_total")) > 0)  # the replica has reported
    again = ask(client).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, "it went where the blocks are"
    lines = ask(client, stream=True).text.split("\n\n")
    said = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith("data: {"))
    assert said == expected
    assert ask(client, n=99).json()["error"]["param"] == "n", "an engine's refusal comes through"

    before = workers(process)
    assert len(before) == 2
    before[0].kill()
    assert [ask(client).json()["choices"][0]["text"] for _ in range(6)] == [expected] * 6
    eventually(lambda: len(set(workers(process)) - {before[0]}) == 2)
    eventually(lambda: client.get("/ready").status_code == 200 and len(gauges(client, "kv_cache_blocks")) == 2)

    old = set(workers(process))
    process.send_signal(signal.SIGHUP)
    while old & set(workers(process)):
        assert ask(client).json()["choices"][0]["text"] == expected
    eventually(lambda: gauges(client, "num_requests_running") == [0.0, 0.0])
    assert gauges(client, "kv_cache_usage_perc") == [0.0, 0.0], "no block is held"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_cluster_of_two_nodes_and_a_second_replica_while_requests_wait(folder):
    pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'hasten[ray]'")
    from ray.cluster_utils import Cluster

    expected = "".join(hasten.stream(hasten.load(folder), TEXT, temperature=0, max_new_tokens=12))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)  # a replica needs one, so the second one is here
        options = ["--replicas", "1", "--max-replicas", "2", "--requests-each", "1", "--threads", "1"]
        options += ["--shrink-seconds", "3"]
        with serving(folder, *options, "--ray-address", cluster.address) as (client, process):
            assert not workers(process), "they are the cluster's"
            assert len(gauges(client, "kv_cache_blocks")) == 1
            with ThreadPoolExecutor(4) as pool:
                done = threading.Event()

                def keep_asking():
                    told = set()
                    while not done.is_set():
                        told.add(ask(client).json()["choices"][0]["text"])
                    return told

                asking = [pool.submit(keep_asking) for _ in range(4)]
                eventually(lambda: len(gauges(client, "kv_cache_blocks")) == 2, seconds=300.0)
                done.set()
                assert all(one.result() == {expected} for one in asking)
            eventually(lambda: len(gauges(client, "kv_cache_blocks")) == 1)  # nobody asks: it is let go
            assert ask(client).json()["choices"][0]["text"] == expected
    finally:
        cluster.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_replica_of_two_ranks_is_replaced_when_one_of_them_dies(folder):
    pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'hasten[ray]'")
    model = hasten.load(folder, dtype="float32")
    expected = "".join(hasten.stream(model, TEXT, temperature=0, max_new_tokens=12))
    options = ["--replicas", "1", "--tensor-parallel", "2", "--threads", "2", "--dtype", "float32"]
    with serving(folder, *options) as (client, process):
        assert ask(client).json()["choices"][0]["text"] == expected
        (worker,) = workers(process)
        (rank,) = [one for one in worker.children() if "spawn_main" in " ".join(one.cmdline())]
        rank.kill()
        eventually(lambda: workers(process) not in ([], [worker]))
        eventually(lambda: ask(client).status_code == 200)
        assert ask(client).json()["choices"][0]["text"] == expected


def test_a_cluster_that_is_not_there_is_one_error():
    pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'hasten[ray]'")
    from hasten.replicas.ray_serve import connect

    with pytest.raises(ResourceError, match=r"no Ray cluster answers at 127\.0\.0\.1:9: .*refused"):
        connect(ReplicaSettings(replicas=1, ray_address="127.0.0.1:9"), cores=1)
    with pytest.raises(ConfigError, match="is not HOST:PORT"):
        connect(ReplicaSettings(replicas=1, ray_address="ray://host"), cores=1)


def test_without_ray_it_is_one_line(folder, capsys, monkeypatch):
    from hasten.cli.main import main

    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "hasten.replicas.ray_serve", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(folder), "--replicas", "2", "--port", "0"])
    assert ended.value.code == 2
    told = "error: Ray Serve is not installed, which --replicas needs: pip install 'hasten[ray]'"
    assert capsys.readouterr().err.splitlines()[-1] == told


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--replicas", "-1"], "replicas is -1"),
        (["--replicas", "2", "--max-replicas", "1"], "max-replicas is 1, below replicas"),
        (["--max-replicas", "2"], "--max-replicas has no effect with --replicas 0"),
        (["--replicas", "2", "--tensor-parallel", "5"], "take at most 4"),
    ],
)
def test_numbers_that_make_no_sense(folder, capsys, options, told):
    from hasten.cli.main import main

    with pytest.raises(SystemExit) as ended:
        main(["serve", str(folder), *options])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err

"""What a plan for several devices takes, and why not the others; the link between ranks; what is refused."""

import errno
import json
import os
from dataclasses import replace

import pytest

from hasten.bench.choices import choose_plan
from hasten.bench.plan import PlanOptions, make_plan
from hasten.cli.main import main
from hasten.distributed import communication
from hasten.distributed.communication import fitted, link_here
from hasten.errors import ConfigError, ResourceError
from hasten.machine import Link, available_cores
from hasten.planning.choices import GOALS
from hasten.planning.devices import DEVICES, LINKS
from instruction_sets import needs_native

H100S = PlanOptions(device="h100", gpus=8, goal="latency")


def test_each_goal_takes_what_is_best_for_it_and_says_why_not_the_others():
    found = {goal: choose_plan("llama-70b", replace(H100S, goal=goal, use="serve")) for goal in GOALS}
    latency, throughput, cost = (found[goal].best for goal in ("latency", "throughput", "cost"))
    assert latency.use.degree == 8, "every rank reads an eighth of the weights"
    assert latency.use.batch_size == 1
    assert throughput.replicas * throughput.use.degree == 8, "no device is left idle"
    assert throughput.use.batch_size > 1
    assert cost.use.degree < 8, "sums cost time on every device"
    for goal, choices in found.items():
        best, *others = choices.rows
        assert not best.rejected
        assert all(one.rejected for one in others)
        assert len({(one.use.degree, one.replicas, one.weights) for one in choices.rows}) == len(choices.rows)
        _, order = GOALS[goal]
        fair = [one for one in others if "times" in one.rejected or "as good" in one.rejected]
        assert fair
        assert all(order(best) <= order(one) for one in fair)
    whole = next(one for one in found["latency"].rows if one.use.degree == 1 and one.weights == "bfloat16")
    assert whole.rejected.startswith("needs 138.6 GB a rank, 79.6 GB are free")


def test_a_bound_a_price_and_the_weights_are_kept_to():
    options = replace(H100S, goal="cost", use="serve", price=3.6)
    slow, quick = (choose_plan("llama-70b", replace(options, token_ms=bound)) for bound in (200.0, 12.0))
    assert quick.best.token_seconds <= 0.012 < slow.best.token_seconds <= 0.2
    assert quick.best.device_seconds > slow.best.device_seconds, "what is sooner costs more"
    taken = slow.to_json()["candidates"][0]
    assert taken["price_per_million"] == pytest.approx(taken["device_seconds_per_million"] / 1000)
    assert choose_plan("llama-70b", H100S).best.weights == "int8"
    assert choose_plan("llama-70b", replace(H100S, weights="bfloat16")).best.weights == "bfloat16"
    assert choose_plan("llama-70b", replace(H100S, weights="int4")).best.weights == "int4"


@needs_native
def test_ranks_that_cannot_all_be_started_leave_none(monkeypatch):
    fork, started = os.fork, []

    def forks():
        if started:
            raise BlockingIOError(errno.EAGAIN, "no more processes")
        started.append(fork())
        return started[-1]

    monkeypatch.setattr(os, "fork", forks)
    with pytest.raises(BlockingIOError), communication._crew(3):
        pass
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


def test_a_candidate_is_the_plan_of_one_rank():
    found = choose_plan("llama-70b", replace(H100S, tensor_parallel=4, weights="bfloat16"))
    assert {one.use.degree for one in found.rows} == {4}
    plan = make_plan("llama-70b", PlanOptions(device="h100", tensor_parallel=4, length=1024))
    assert found.best.plan.memory == plan.memory
    assert found.best.token_seconds == plan.phases[1].seconds(plan.device)


def test_what_an_exchange_costs_decides():
    """The same GPUs behind a slow link are used as replicas, not as ranks."""
    plan = make_plan("llama-7b", PlanOptions(device="h100", tensor_parallel=8))
    near = plan.phases[1].seconds(plan.device)
    far = plan.phases[1].seconds(replace(plan.device, link=Link(1e-3, 0.0, plan.device.link.bandwidth, "far")))
    assert far - near == pytest.approx(66 * (1e-3 - 3.6e-6 - 7 * 0.47e-6)), "two sums a block, two around"
    whole = make_plan("llama-7b", PlanOptions(device="h100"))
    assert near < whole.phases[1].seconds(whole.device) < far


def test_a_link_is_found_from_the_times_of_sums():
    link = Link(5e-6, 0.0, 4e9, "")
    for ranks in (2, 5):
        seconds = {size: link.latency + (ranks - 1) * size / link.bandwidth for size in (4096, 1 << 20)}
        found = fitted(seconds, ranks=ranks)
        assert (found.latency, found.bandwidth) == pytest.approx((link.latency, link.bandwidth))
    assert fitted({4096: 2e-6, 1 << 20: 1e-6}, ranks=2).bandwidth > 0, "noise"


@pytest.mark.skipif(
    communication.library() is None or available_cores().physical < 2, reason="ranks share memory natively"
)
def test_the_link_here_is_measured_once_and_refuses_more_ranks_than_cores(monkeypatch, tmp_path):
    assert link_here(2) is LINKS["shared-memory"], "nothing is measured in tests"
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path))
    monkeypatch.setenv("HASTEN_MEASURE", "1")
    monkeypatch.setattr(communication, "BUSY", 1e3)
    monkeypatch.setattr("hasten.machine.measured._store", {}.copy)
    found = link_here(2)
    assert found.source == "measured on this machine"
    assert found.latency >= 0
    assert found.bandwidth > 0
    monkeypatch.setattr("os.fork", lambda: pytest.fail("measured again"))
    assert link_here(2) == found
    monkeypatch.setattr(communication, "BUSY", 0.0)  # whatever was measured, others had the cores
    assert "other programs had the cores" in link_here(2).source
    assert not list((tmp_path / "measured").iterdir()), "it is measured anew the next time"
    cores = available_cores().physical
    with pytest.raises(ConfigError, match=rf"{cores + 1} ranks are more than the {cores} cores here"):
        link_here(cores + 1)


def test_ranks_of_this_machine_share_it():
    options = PlanOptions(device="cpu", length=64, new_tokens=16, measure=False)
    one = make_plan("tiny", options)
    assert one.device.parts == 1
    if available_cores().physical < 2:
        return
    choices = choose_plan("tiny", replace(options, goal="throughput", gpus=2, weights="bfloat16"))
    layouts = {(row.use.degree, row.replicas): row for row in choices.rows}
    assert set(layouts) == {(1, 1), (1, 2), (2, 1)}
    assert {row.devices for row in choices.rows} == {1}, "of one machine"
    whole, two = layouts[1, 1], layouts[1, 2]
    assert two.token_seconds == pytest.approx(2 * whole.token_seconds, rel=0.5), "half of the machine each"
    assert layouts[2, 1].plan.phases[1].limits(layouts[2, 1].plan.device)["link"] > 0


@pytest.mark.parametrize(
    ("model", "options", "error", "text"),
    [
        ("tiny", {"goal": "speed"}, ConfigError, "--goal 'speed' is not known; use latency, throughput, cost"),
        ("tiny", {"goal": None}, ConfigError, "several devices want a --goal"),
        ("tiny", {"use": "train"}, ConfigError, "--use generate or serve"),
        ("tiny", {"token_ms": 0.0}, ConfigError, "--token-ms is 0.0"),
        ("tiny", {"price": -1.0}, ConfigError, "--price is -1.0"),
        ("tiny", {"gpus": 0}, ConfigError, "--gpus is 0"),
        ("tiny", {"tensor_parallel": 5}, ConfigError, "take at most 4"),
        ("tiny", {"tensor_parallel": 4, "gpus": 2}, ConfigError, "there are 2 devices"),
        ("tiny", {"device": "cpu", "gpus": 4096}, ConfigError, "4096 ranks are more than the"),
        ("llama-70b", {"token_ms": 0.5}, ConfigError, "no plan makes a token in 0.5 ms; the fastest takes"),
        ("llama-70b", {"gpus": 2, "device": "rtx4090"}, ResourceError, r"int8 on 2 of .* needs 35.4 GB a rank, 23.6"),
    ],
)
def test_what_cannot_be_is_one_error(model, options, error, text):
    with pytest.raises(error, match=text):
        choose_plan(model, replace(H100S, **options))


def test_the_command(tmp_path, capsys):
    file = tmp_path / "plan.json"
    given = ["plan", "llama-7b", "--device", "a100-80gb", "--gpus", "4", "--goal", "cost", "--price", "2"]
    main([*given, "--json", str(file)])
    shown, found = capsys.readouterr().out, json.loads(file.read_text())
    assert "taken" in shown
    assert "NCCL's model of NVLink" in shown
    assert found["token_seconds_bound"] == 0.1
    assert [bool(one["rejected"]) for one in found["candidates"]] == [False] + [True] * (len(found["candidates"]) - 1)
    main(["plan", "llama-7b", "--device", "h100", "--tensor-parallel", "2"])  # plans two ranks, and starts none
    assert "tokens/s of answers" in capsys.readouterr().out
    for wrong in (["--goal", "speed"], ["--goal", "cost", "--picture", "x.png"], []):
        with pytest.raises(SystemExit) as ended:
            main(["plan", "llama-7b", "--gpus", "2", "--device", "h100", *wrong])
        assert ended.value.code == 2


def test_every_link_of_the_table_says_where_it_is_from():
    for device in DEVICES.values():
        assert device.link.source
        assert device.link.seconds(exchanges=1, received=8192, ranks=2) < device.link.seconds(
            exchanges=1, received=8192, ranks=8
        )

"""`hasten bench serve`: loads as they are described, figures as they are defined, over HTTP and in process."""

import asyncio
import json
import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_engine import FakeEngine
from hasten.bench.serve import LatencyLimits, Load, figures, measure
from hasten.bench.serve_targets import HttpTarget, RequestOutcome
from hasten.bench.serve_workload import MEANS, Planned, Workload, plan
from hasten.cli.main import main
from hasten.engine.speculation import make_speculator
from hasten.errors import ConfigError
from server_case import app_of, serving


def test_arrivals_have_the_rate_and_the_burstiness():
    for burstiness in (0.5, 1.0, 4.0):
        load = Workload(requests=4000, rate=8.0, burstiness=burstiness, prompt_tokens=1, output_tokens=1)
        at = [planned.at for planned in plan(load, vocabulary=1000)]
        gaps = [b - a for a, b in pairwise(at)]
        mean = sum(gaps) / len(gaps)
        variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
        assert mean == pytest.approx(1 / 8, rel=0.1)
        assert variance / mean**2 == pytest.approx(1 / burstiness, rel=0.25)  # of a gamma distribution
    assert {planned.at for planned in plan(Workload(requests=5), vocabulary=1000)} == {0.0}


@pytest.mark.parametrize("lengths", ["sharegpt", "alpaca"])
def test_lengths_have_the_published_means(lengths):
    load = Workload(requests=4000, lengths=lengths, prompt_tokens=10**5, output_tokens=10**5)
    planned = plan(load, vocabulary=1000)
    found = (sum(len(p.prompt) for p in planned) / 4000, sum(p.output_tokens for p in planned) / 4000)
    assert found == pytest.approx(MEANS[lengths], rel=0.06)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 9),
    shared=st.integers(0, 15),
    groups=st.integers(1, 4),
    lengths=st.sampled_from(["fixed", "alpaca"]),
)
def test_a_plan_is_decided_by_its_seed_and_keeps_to_its_limits(seed, shared, groups, lengths):
    load = Workload(
        requests=20,
        seed=seed,
        lengths=lengths,
        prompt_tokens=16,
        output_tokens=8,
        shared_prefix_tokens=shared,
        prefix_groups=groups,
    )
    planned = plan(load, vocabulary=300)
    assert planned == plan(load, vocabulary=300)
    assert all(0 < p.output_tokens <= 8 and shared < len(p.prompt) <= 16 for p in planned)
    assert all(token < 300 for p in planned for token in p.prompt)
    assert len({p.prompt[:shared] for p in planned}) <= groups


def test_figures_are_what_the_definitions_say():
    def outcome(sent, pieces, tokens, ended):
        return RequestOutcome(
            Planned(0, (1,), 3), sent=sent, ended=ended, pieces=pieces, prompt_tokens=4, output_tokens=tokens
        )

    first = outcome(1.0, {0: [1.5, 1.7, 2.5], 1: [1.6, 2.0, 2.2]}, 6, 3.0)
    assert figures(first) == pytest.approx({"ttft_ms": 500, "tpot_ms": 400, "e2e_ms": 2000})
    second = outcome(2.0, {0: [5.0]}, 1, 5.0)
    assert figures(second)["tpot_ms"] is None
    failed = RequestOutcome(Planned(0, (1,), 3), sent=1.0, ended=1.5, error="no")
    before = {"prefix_queries": 10.0, "prefix_hits": 5.0}
    after = {"prefix_queries": 30.0, "prefix_hits": 10.0}
    samples = [{"running": 1, "blocks": 10, "cache_usage": 0.3, "blocks_saved": 1}, {"running": 0, "cache_usage": 0.0}]
    load = Load(Workload(), 1.0, [first, second, failed], before, after, samples)
    found = load.summary(LatencyLimits(goodput_ttft_ms=600))
    assert (found["completed"], found["failed"]) == (2, 1)
    assert found["output_tokens_per_second"] == pytest.approx(7 / 4)
    assert found["goodput"] == pytest.approx(1 / 4)
    assert found["itl_ms"]["mean"] == pytest.approx((200 + 800 + 400 + 200) / 4)
    assert found["ttft_ms"]["p50"] == pytest.approx((500 + 3000) / 2)
    assert found["prefix_hit_rate"] == pytest.approx(0.25)
    assert found["blocks_saved"] == pytest.approx(0.25)
    assert [entry.get("error") for entry in load.requests(0)] == [None, None, "no"]


@pytest.fixture
def engine():
    from references import tiny_llama

    return FakeEngine(tiny_llama().tokenizer, delay=0.001)


def test_a_server_is_measured_over_http(engine):
    with serving(app_of(engine)) as (url, _):

        async def run(workload):
            target = HttpTarget(url + "/v1", model=None, key=None, vocabulary=None)
            await target.prepare()
            try:
                return await measure(target, workload)
            finally:
                await target.close()

        load = asyncio.run(run(Workload(requests=6, concurrency=2, prompt_tokens=9, output_tokens=5, n=2)))
        found = load.summary(LatencyLimits())
        assert (found["completed"], found["output_tokens"], found["prompt_tokens"]) == (6, 60, 54)
        assert all(len(at) == 5 for outcome in load.outcomes for at in outcome.pieces.values())
        assert max(len(request.prompt) for request in engine.requests) == 9
        engine.fails_after = 1
        load = asyncio.run(run(Workload(requests=2, output_tokens=5)))
        assert load.summary(LatencyLimits())["error"] == "the fake engine failed as it was told to"


def test_the_command_in_process(tmp_path, capsys, monkeypatch):
    drafts = []
    monkeypatch.setattr(
        "hasten.engine.llm.make_speculator", lambda *a, **k: drafts.append(a[1]) or make_speculator(*a, **k)
    )
    report, picture = tmp_path / "r.json", tmp_path / "r.png"
    options = ["--shape", "tiny", "--dtype", "float32", "--cache-gib", "0.01", "--requests", "4", "--rates", "200,inf"]
    options += ["--kv-cache-dtype", "int8", "--draft", "suffix"]
    options += ["--prompt-tokens", "20", "--output-tokens", "6", "--warmup", "1", "--shared-prefix-tokens", "16"]
    main(["bench", "serve", *options, "--json", str(report), "--picture", str(picture)])
    found = json.loads(report.read_text())
    assert set(found) == {"schema", "kind", "machine", "target", "workload", "summary", "requests", "definitions"}
    assert [entry["completed"] for entry in found["summary"]] == [4, 4]
    assert [entry["rate"] for entry in found["summary"]] == [200, None]
    assert sorted(entry["load"] for entry in found["requests"]) == [0] * 4 + [1] * 4
    assert found["target"]["draft"] == "suffix"
    assert drafts == ["suffix"]
    assert picture.stat().st_size > 1000
    assert "time to first token" in capsys.readouterr().err


def test_a_model_is_also_measured_as_loaded_from_files_in_other_dtypes(tmp_path, capsys):
    report = tmp_path / "r.json"
    options = ["--shape", "tiny", "--cache-gib", "0.01", "--requests", "2", "--prompt-tokens", "8"]
    options += ["--output-tokens", "4", "--warmup", "0", "--file-dtypes", "float32,float16"]
    main(["bench", "serve", *options, "--json", str(report)])
    found = json.loads(report.read_text())
    assert [entry.get("row") for entry in found["summary"]] == [None, "float32-file", "float16-file"]
    assert [entry["completed"] for entry in found["summary"]] == [2, 2, 2]
    assert sorted(entry["load"] for entry in found["requests"]) == [0, 0, 1, 1, 2, 2]
    assert "float16-file, all at once: 2 completed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "--url"),
        (
            ["--shape", "tiny", "--file-dtypes", "int8"],
            "takes float32, float16 and bfloat16; found 'int8'",
        ),
        (["--url", "http://127.0.0.1:9", "--file-dtypes", "float32"], "--file-dtypes has no effect with --url"),
        (["--shape", "tiny", "--model", "x"], "one of --model and --shape"),
        (["--shape", "tiny", "--rates", "0"], "--rates takes numbers above 0"),
        (["--shape", "tiny", "--speculate", "4"], "--speculate has no effect with --draft none"),
        (["--shape", "tiny", "--warmup", "-1"], "--warmup is -1; it must be at least 0"),
        (["--url", "http://127.0.0.1:9", "--block-size", "32"], "has no effect with --url http://127.0.0.1:9"),
        (["--url", "http://127.0.0.1:9", "--cache-gib", "1"], "has no effect with --url http://127.0.0.1:9"),
        (["--url", "http://127.0.0.1:9", "--draft", "suffix"], "has no effect with --url http://127.0.0.1:9"),
        (["--url", "http://127.0.0.1:9"], "does not answer"),
    ],
)
def test_what_cannot_be_measured_is_one_line(options, words, capsys):
    with pytest.raises(SystemExit) as end:
        main(["bench", "serve", *options])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert words in line


@pytest.mark.parametrize("wrong", [{"requests": 0}, {"rate": 0.0}, {"rate": math.nan}, {"shared_prefix_tokens": 200}])
def test_a_load_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ConfigError):
        Workload(**wrong)

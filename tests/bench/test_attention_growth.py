"""`hasten bench attention`: memory grows as it should, asserted on measured bytes, and the report says so."""

import json

import pytest

from hasten.bench.attention import AttentionGrowth, growth
from hasten.cli.main import main
from hasten.errors import ConfigError

CALL = {"heads": 2, "kv_heads": 2, "head_dim": 128}


def peaks(report):
    assert all("rounds" in point for point in report["points"]), report["points"]
    return [point["forward_backward_peak_bytes"] for point in report["points"]]


@pytest.mark.slow
def test_memory_grows_linearly_and_the_command_writes_report_and_pictures(tmp_path, capsys):
    kernels = ["native", "flash", "chunked"]
    arguments = ["--lengths", "4096", "8192", "--kernels", *kernels, "--heads", "2", "--head-dim", "128"]
    target, picture = tmp_path / "growth.json", tmp_path / "growth.png"
    # None is left out because the machine is busy.
    more = ["--rounds", "1", "--threads", "1", "--point-seconds", "3600", "--json", str(target)]
    main(["bench", "attention", *arguments, "--kv-heads", "2", *more, "--picture", str(picture)])
    report = json.loads(target.read_text())
    assert report["kind"] == "attention"
    assert [(p["kernel"], p["tokens"]) for p in report["points"]] == [(k, n) for n in (4096, 8192) for k in kernels]
    found = peaks(report)
    for short, long in zip(found[:3], found[3:], strict=True):
        inputs_and_gradients = 2 * 3 * 8192 * 2 * 128 * 4  # q, k, v and their gradients
        scores = 2 * 8192 * 8192 * 4
        assert inputs_and_gradients < long < scores / 2
        assert long <= 2.3 * short
    for point in report["points"]:
        assert 0 < point["forward_seconds"] < point["forward_backward_seconds"] * 100
        assert point["forward_gflops"] == pytest.approx(
            4 * 2 * 128 * point["tokens"] ** 2 / 2 / point["forward_seconds"] / 1e9
        )
    assert set(report["growth"]) == set(kernels)
    assert (tmp_path / "growth-time.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "growth-memory.png").stat().st_size > 10_000
    assert "memory ~ T^" in capsys.readouterr().err


@pytest.mark.slow
def test_memory_of_explicit_scores_grows_with_the_square():
    settings = {"rounds": 1, "threads": 1, "point_seconds": 3600}
    lengths = (3072, 6144)  # shorter ones drown in what any call takes
    short, long = peaks(AttentionGrowth(**CALL, lengths=lengths, kernels=("math",), **settings).run())
    assert long > 2 * 6144 * 6144 * 4
    assert long >= 3 * short


def test_what_will_not_fit_or_takes_too_long_is_left_out_with_the_reason(monkeypatch):
    monkeypatch.setattr("hasten.bench.attention.available_memory", lambda device: 1 << 20)
    plan = AttentionGrowth(**CALL, point_seconds=10)
    assert "1 MiB are free" in plan._too_much("reference", 4096, [])
    assert plan._too_much("flash", 4096, []) is None
    before = [{"kernel": "flash", "tokens": 1024, "forward_seconds": 0.4, "forward_backward_seconds": 1.0}]
    assert plan._too_much("flash", 2048, before) is None
    assert plan._too_much("flash", 4096, before) == "it would take about 22 s"
    before = [{"kernel": "flash", "tokens": 1024, "error": "killed"}]
    assert plan._too_much("flash", 2048, before) == "killed"


def test_growth_is_the_slope_between_the_two_longest():
    points = [
        {
            "kernel": "x",
            "tokens": n,
            "rounds": [],
            "forward_backward_seconds": 1e-9 * n**2,
            "forward_backward_peak_bytes": 10 * n,
        }
        for n in (8, 16, 64)
    ]
    found = growth(points)["x"]
    assert (found["from"], found["to"]) == (16, 64)
    assert found["time"] == pytest.approx(2)
    assert found["memory"] == pytest.approx(1)
    assert growth(points[:1]) == {}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lengths": ()}, "start at 1"),
        ({"lengths": (0,)}, "start at 1"),
        ({"kernels": ("warp",)}, "known: triton"),
        ({"kernels": ("cudnn",)}, "none on a CPU"),
    ],
)
def test_nonsense_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        AttentionGrowth(**CALL, **options).run()

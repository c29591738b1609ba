import json
import math
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from hasten.errors import ResourceError
from hasten.machine.files import write_json
from hasten.measure.draw import draw_curves, draw_ladder
from hasten.measure.process import Rung, RungRun
from hasten.measure.report import build_report
from hasten.measure.table import cell, format_value, print_ladder

MACHINE = {"cpu": "Test CPU", "physical_cores": 2, "versions": {"torch": "2.13.0"}, "gpus": []}
NAMELESS = Rung("", (), "")
LIMITS = RungRun(
    NAMELESS, rounds=[{"bandwidth": 50e9, "rate bfloat16": 400e9}, {"bandwidth": 25e9, "rate bfloat16": 200e9}] * 2
)


def report(runs: dict[str, RungRun], *, kind: str = "generate", **options: Any) -> dict[str, Any]:
    for name, run in runs.items():
        run.rung = Rung(name, ("one", "two"), "")
    return build_report(
        **{
            "kind": kind,
            "machine": MACHINE,
            "settings": {"model": "m", "rounds": 4, "threads": 2},
            "runs": list(runs.values()),
            "limits": LIMITS,
            **options,
        }
    )


def decode(*speeds: float, **description: Any) -> RungRun:
    rounds = [{"decode_tokens_per_second": speed} for speed in speeds]
    return RungRun(NAMELESS, rounds=rounds, description=description, peak_memory_bytes=123)


def test_the_schema() -> None:
    made = report({"plain": decode(1, 2, 3, 4, bytes_per_token=10)})
    assert list(made) == ["schema", "kind", "machine", "settings", "limits", "rows"]
    assert (made["schema"], made["kind"]) == (1, "generate")
    row = made["rows"][0]
    wanted = {"name", "techniques", "decode_tokens_per_second", "bytes_per_token", "bandwidth_gb_s", "mbu"}
    assert wanted | {"peak_memory_bytes", "speedup", "min", "max", "rounds"} <= set(row)
    assert row["techniques"] == ["one", "two"]
    assert made["limits"]["bandwidth_gb_s"] == pytest.approx(37.5)
    assert made["limits"]["matrix_rates"] == {"bfloat16": pytest.approx(300e9)}
    json.dumps(made, allow_nan=False)


def test_speedups_are_formed_within_each_round() -> None:
    # The machine halves its speed after two rounds; the ratio of the medians would be 4, the rung is 2 times as fast.
    made = report({"plain": decode(20, 20, 20, 10), "fast": decode(40, 40, 40, 20), "odd": decode(10, 80, 80, 80)})
    assert [row["speedup"] for row in made["rows"]] == [1, 2, 4]
    made = report({"plain": decode(20, 10, 10), "fast": decode(40, 20, 90)})
    assert made["rows"][1]["decode_tokens_per_second"] == 40
    assert made["rows"][1]["speedup"] == 2, "the ratio of the medians is 4"
    assert [found["speedup"] for found in made["rows"][1]["rounds"]] == [2, 2, 9]


def test_a_rung_may_have_further_rows() -> None:
    speed, own = "decode_tokens_per_second", {"decode_tokens_per_second": 10.0}
    rounds = [{**own, f"x8|{speed}": 50.0, f"c9|{speed}": 8.0}, {**own, f"x8|{speed}": 60.0, f"c9|{speed}": 4.0}]
    further = {"x8": {"batch": 8, "bytes_per_token": 2e8}, "c9": {"ratio_to": "x8"}}
    rung = RungRun(NAMELESS, rounds=rounds, description={"bytes_per_token": 1e9, "rows": further}, peak_memory_bytes=5)
    made = report(
        {"plain": decode(1, 1), "one": rung, "lost": RungRun(NAMELESS, error="x", description={"rows": further})}
    )
    assert [row["name"] for row in made["rows"]] == ["plain", "one", "one-x8", "one-c9", "lost"]
    one, many, other = made["rows"][1:4]
    assert (one["speedup"], one["peak_memory_bytes"], one["mbu"]) == (10, 5, pytest.approx(0.3))
    assert (many["ratio"], many["ratio_to"], many["batch"]) == (5.5, "one", 8)
    assert many["rounds"][0]["mbu"] == pytest.approx(50 * 2e8 / 50e9), "over its own bytes"
    assert (other["ratio"], other["ratio_to"]) == (pytest.approx((8 / 50 + 4 / 60) / 2), "one-x8")
    for row in (many, other):
        assert not {"speedup", "peak_memory_bytes", "rows"} & set(row)
    assert not any("|" in key for row in made["rows"] for key in row)


def test_the_second_set_up_stands_beside_the_first() -> None:
    outcome = decode(1, compile_seconds=9.0)
    outcome.description["setup_seconds"] = 12.0
    outcome.again = {"setup_seconds": 4.0, "compile_seconds": 2.0, "bytes_per_token": 1}
    row = report({"compiled": outcome})["rows"][0]
    seconds = ("setup_seconds", "warm_setup_seconds", "compile_seconds", "warm_compile_seconds")
    assert [row[name] for name in seconds] == [12, 4, 9, 2]
    assert "warm_bytes_per_token" not in row


def test_utilisation_is_formed_within_each_round() -> None:
    made = report({"plain": decode(20, 10, 20, 10, bytes_per_token=2e9)})
    row = made["rows"][0]
    assert row["mbu"] == row["min"]["mbu"] == row["max"]["mbu"] == pytest.approx(0.8)
    train = RungRun(
        NAMELESS,
        rounds=[{"tokens_per_second": 100}] * 4,
        description={"flops_per_token": 1e9, "matrix_dtype": "bfloat16"},
    )
    row = report({"plain": train}, kind="train")["rows"][0]
    assert [found["mfu"] for found in row["rounds"][:2]] == [pytest.approx(0.25), pytest.approx(0.5)]
    prefill = RungRun(
        NAMELESS,
        rounds=[{"decode_tokens_per_second": 1, "prefill_tokens_per_second": 100}],
        description={"flops_per_token": 2e9, "prefill_flops_per_token": 1e9, "matrix_dtype": "bfloat16"},
    )
    assert report({"plain": prefill})["rows"][0]["prefill_mfu"] == pytest.approx(0.25)


def test_a_known_gpu_is_also_held_against_its_data_sheet() -> None:
    machine = {**MACHINE, "gpus": [{"name": "NVIDIA H200"}]}
    outcome = decode(480, bytes_per_token=5e9)
    limits = RungRun(Rung("", (), "", device="cuda:0"), rounds=LIMITS.rounds)
    row = report({"plain": outcome}, machine=machine, limits=limits)["rows"][0]
    assert row["vendor_mbu"] == pytest.approx(0.5)
    assert "vendor_mbu" not in report({"plain": outcome}, machine=machine)["rows"][0]


def test_errors_are_rows_and_the_next_rung_becomes_the_base() -> None:
    made = report(
        {"broken": RungRun(NAMELESS, error="no memory", traceback="trace"), "plain": decode(2, 2), "fast": decode(4, 4)}
    )
    assert made["rows"][0] == {
        "name": "broken",
        "techniques": ["one", "two"],
        "error": "no memory",
        "traceback": "trace",
    }
    assert [row.get("speedup") for row in made["rows"]] == [None, 1, 2]
    all_broken = report({"a": RungRun(NAMELESS, error="x")}, limits=RungRun(NAMELESS, error="y"))
    assert all_broken["limits"] == {"device": "cpu", "error": "y"}


@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=9))
def test_the_median_lies_between_the_extremes_and_the_rounds_are_kept(speeds: list[float]) -> None:
    row = report({"plain": decode(*speeds)})["rows"][0]
    key = "decode_tokens_per_second"
    assert row["min"][key] == min(speeds) <= row[key] <= max(speeds) == row["max"][key]
    assert [found[key] for found in row["rounds"]] == speeds
    assert row["speedup"] == 1


def test_json_goes_to_a_file_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "new" / "report.json"
    write_json(target, {"a": math.nan, "b": [math.inf, 1.5], "c": "µ"})
    assert json.loads(target.read_text()) == {"a": None, "b": [None, 1.5], "c": "µ"}

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResourceError, match=r"report.json: No space left.*--json"):
        write_json(target, {"a": 2})
    assert json.loads(target.read_text())["c"] == "µ", "the old file is intact"
    assert [file.name for file in target.parent.iterdir()] == ["report.json"]


def test_json_to_odd_targets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_json("-", {"a": 1})
    assert json.loads(capsys.readouterr().out) == {"a": 1}
    write_json("/dev/null", {"a": 1})
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode), "a device is written to, not replaced"
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_json(tmp_path / "link", 1)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "1\n"
    with pytest.raises(ResourceError, match="cannot write"):
        write_json(tmp_path, 1)


def test_the_table_shows_figures_and_errors() -> None:
    console = Console(record=True, width=120, file=open(os.devnull, "w"))  # noqa: SIM115
    fast = decode(40, 20, 44, 22, bytes_per_token=1e9)
    print_ladder(
        report({"plain": decode(20, 10, 22, 11), "[fast]": fast, "gone": RungRun(NAMELESS, error="no [x]")}), console
    )
    text = console.export_text()
    for wanted in ("31.0 (20.0-44.0)", "2.00×", "[fast]", "gone failed: no [x]", "37.5 GB/s", "Test CPU", "MBU"):
        assert wanted in text
    assert "prefill" not in text, "a column without values is left out"


@pytest.mark.parametrize(
    ("value", "style", "text"),
    [
        (1234.5, "speed", "1,234"),
        (12.34, "speed", "12.3"),
        (1.234, "speed", "1.23"),
        (0.876, "percent", "88%"),
        (12.34, "times", "12.3×"),
        (3 << 30, "bytes", "3.00 GiB"),
        (5 << 20, "bytes", "5 MiB"),
        (None, "speed", ""),
    ],
)
def test_figures_for_people(value: float | None, style: str, text: str) -> None:
    assert format_value(value, style) == text


def test_a_share_says_of_what() -> None:
    row = {"name": "native-int8-x8", "ratio": 5.5, "ratio_to": "native-int8"}
    row |= {"prefill_mfu": 0.8, "matrix_dtype": "int8"}
    assert cell(row, "ratio", "times") == "5.50×"
    assert cell(row | {"ratio_to": "native-int8-c16"}, "ratio", "times") == "5.50× c16"
    assert cell(row, "prefill_mfu", "percent") == "80% int8"
    assert cell({}, "prefill_mfu", "percent") == cell({}, "ratio", "times") == ""
    assert format_value(9.04, "seconds") == "9.0 s"


def test_pictures_are_drawn_without_pyplot(tmp_path: Path) -> None:
    from matplotlib.image import imread

    before = "matplotlib.pyplot" in sys.modules
    made = report(
        {
            "plain": decode(20, 10, bytes_per_token=1e9),
            "fast": decode(40, 41),
            "gone": RungRun(NAMELESS, error="x" * 300),
        }
    )
    draw_ladder(made, tmp_path / "ladder.png", title="x")
    lost = report({"gone": RungRun(NAMELESS, error="no")}, limits=RungRun(NAMELESS, error="no"))
    draw_ladder(lost, tmp_path / "none.png", title="x")
    draw_curves({"a": ([1, 2, 3], [3, 2, 1]), "b": ([1], [1])}, tmp_path / "c.png", log_x=True, log_y=True)
    ladder = imread(tmp_path / "ladder.png")
    assert ladder.shape[0] > imread(tmp_path / "none.png").shape[0] > 100, "taller with more rungs"
    assert len(set(map(tuple, ladder.reshape(-1, 4)[::97].tolist()))) > 3, "not one colour"
    assert {file.name for file in tmp_path.iterdir()} == {"ladder.png", "none.png", "c.png"}
    assert ("matplotlib.pyplot" in sys.modules) == before
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match="cannot write picture"):
        draw_ladder(made, tmp_path / "file" / "x.png", title="x")

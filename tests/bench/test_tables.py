"""The pages' tables are those of the committed JSON."""

import importlib.util
import re
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "tables.py"
spec = importlib.util.spec_from_file_location("tables", FILE)
tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tables)


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_a_page_shows_what_its_json_holds(page):
    text = page.read_text()
    assert tables.with_tables(text) == text, "run python benchmarks/tables.py"


def test_a_table_that_differs_is_noticed_and_fixed(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("Before.\n\n<!-- table: compare-avx2 -->\n| 9.99× |\n<!-- /table -->\n\nAfter.\n")
    monkeypatch.setattr(tables, "PAGES", [page])
    assert list(tables.stale()) == [page]
    page.write_text(tables.with_tables(page.read_text()))
    text = page.read_text()
    assert "9.99" not in text
    assert text.count("ik_llama.cpp") >= 3
    assert text.startswith("Before.\n")
    assert text.endswith("\nAfter.\n")
    assert list(tables.stale()) == []


def test_what_is_not_measured_yet_says_so_and_is_not_stale(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("<!-- table: no-such-result -->\n\nNot measured yet.\n\n<!-- /table -->\n")
    monkeypatch.setattr(tables, "PAGES", [page])
    assert list(tables.stale()) == []
    page.write_text("<!-- table: no-such-result -->\n\n| 9.99× |\n\n<!-- /table -->\n")
    assert list(tables.stale()) == [page], "figures of a result that is not committed"


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_the_commands_of_a_page_exist(page):
    """`benchmarks/SUBJECT.py BENCHMARK`: the file is there, and has a benchmark of that name if it has several."""
    for path, name in re.findall(r"(benchmarks/[\w/]+\.py)(?: ([a-z][a-z-]*)\b)?", page.read_text()):
        code = (FILE.parents[1] / path).read_text()
        benchmarks = re.findall(
            r'"([a-z-]+)": [A-Z]\w+', "".join(re.findall(r"    main\(\s*\{(.*?)\}", code, re.DOTALL))
        )
        assert not name or name in benchmarks, f"{path} {name}"


def test_a_mixed_file_is_held_against_the_line_through_uniform_ones():
    import compare

    def pair(kind, size, seconds):
        decode = {"peer": {"decode": 1 / seconds}, "hasten": {"decode": 1 / 1.65}}
        sizes = {"peer": size, "hasten": 150 * 10**6}
        names = {"peer": "hasten, uniform", "hasten": "small", "model": f"small-{kind}.gguf"}
        return names | {"weight_bytes_per_token": sizes, "median": decode, "rounds": [decode, {"peer": {"error": "x"}}]}

    report = {"pairs": [pair("Q8_0", 200 * 10**6, 2.0), pair("Q4_0", 100 * 10**6, 1.0)]}
    report["by_bytes"] = [compare.time_by_bytes(report, "small")]
    assert report["by_bytes"] == [{"hasten": "small", "ratio": pytest.approx(1.1), "ratios": [pytest.approx(1.1)]}]
    assert "| small | 150 MB, 0.6 tokens/s | 200 MB, 0.5 | 100 MB, 1.0 | 1.10× | 1.10 |" in tables.by_bytes(report)


def test_ratios_of_turns_are_shown_by_their_quartiles():
    def side(speed):
        return {"decode": speed, "prefill": 10 * speed, "share_of_bandwidth": 0.5}

    turns = [{"peer": side(1.0), "hasten": side(speed)} for speed in (0.1, 1.0, 1.2, 1.4, 9.0)]
    pair = {"hasten": "Q4_0", "peer": "other", "model": "m-Q4_0.gguf", "rounds": turns, "median": turns[2]}
    pair["ratio"] = {"decode": 1.2, "prefill": 1.2}
    by_rounds, by_turns = {"pairs": [pair]}, {"pairs": [pair], "protocol": {"turns": 5}}
    assert "| 1.20× | 0.10 1.00 1.20 1.40 9.00 |" in tables.beside_others(by_rounds)
    assert "| ratio | turn by turn |" in tables.beside_others(by_turns)
    assert "| 1.20× | 1.20 (0.55 to 5.20) | 50% / 50% |" in tables.beside_others(by_turns)


def test_plans_in_the_wrong_order_and_far_off_are_named():
    from plan_ranks import order, plan_ranks

    def row(ranks, predicted, measured):
        numbers = [{"prompt": 1.0, "token": 1.0, "tokens_per_second": speed} for speed in (predicted, measured)]
        ratios = {"prompt": 1.0, "token": 1.0, "tokens_per_second": predicted / measured}
        own = {"predicted": numbers[0], "measured": numbers[1], "predicted / measured": ratios}
        return {"format": "int8", "batch": 1, "ranks": ranks, "replicas": 1} | own

    rows = [row(1, 10.0, 10.0), row(2, 20.0, 8.0), row(4, 20.5, 21.0)]
    found = order(rows)["tokens_per_second"]
    assert found["pairs"] == 2, "the last two are predicted alike"
    assert [one[:2] for one in found["in the wrong order"]] == [
        ["int8, batch 1, 1 rank, 1 replica", "int8, batch 1, 2 ranks, 1 replica"]
    ]
    assert found["off by more than 20%"] == ["int8, batch 1, 2 ranks, 1 replica"]
    shown = plan_ranks({"rows": rows, "order": order(rows)})
    assert "1 of 2 pairs" in shown
    assert "**2.50**" in shown


def test_runs_of_plans_and_of_ranks_become_one_report():
    import parallel
    import plan_ranks

    def plan(ratio):
        numbers = {kind: {"token": value} for kind, value in (("predicted", ratio), ("measured", 1.0))}
        row = dict(zip(plan_ranks.CASE, ("int8", 1, 2, 1), strict=True)) | numbers
        settings = dict.fromkeys(("schema", "machine", "shape", "layers", "prompt", "tokens"), 1)
        return settings | {"rounds": 3, "rows": [row | {plan_ranks.RATIO: {"token": ratio}}]}

    made = plan_ranks.combined([plan(0.7), plan(1.1), plan(1.3)])
    assert made["rows"][0][plan_ranks.RATIO] == {"token": 1.1}
    assert made["off by more than 20% in each run"] == [1, 0, 1]
    assert made["order"]["token"]["off by more than 20%"] == []

    def ranks(*speeds):
        rates = {"ranks": list(speeds), "alone": [10.0] * len(speeds)}
        return {"rounds": len(speeds), "rows": [{"speed": {"decode": parallel.speeds(rates)}}]}

    both = parallel.combined([ranks(7.0, 8.0), ranks(9.0)])
    assert (both["rounds"], both["rows"][0]["speed"]["decode"]["ratio"]) == (3, 0.8)

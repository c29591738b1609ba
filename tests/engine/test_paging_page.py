"""The page on paging: its program runs, its tables are those of the committed measurements, its picture is drawn."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "paged-cache.md"
MEASURED = ROOT / "docs" / "results" / "paged-cache.md"
BENCHMARKS = ROOT / "benchmarks"


def script(name, folder=BENCHMARKS):
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_program_prints_what_the_page_says():
    program = next(p for p in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "BlockManager" in p)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    first, second = re.search(r"It prints `(.*?)` and `(.*?)`", PAGE.read_text()).groups()
    assert done.stdout.split("\n")[:2] == [first, second], done.stderr


def sharing_rows():
    rows = json.loads((BENCHMARKS / "results" / "sharing.json").read_text())["rows"]
    for row in (row for row in rows if row["scale"] == 1.0):
        same = [r["saved"] for r in rows if (r["lengths"], r["kind"]) == (row["lengths"], row["kind"])]
        ends = f"{min(s['2'] for s in same)}-{max(s['2'] for s in same)} to {min(s['6'] for s in same)}-"
        low, high = row["published"]
        found = " | ".join(f"{value}%" for value in row["saved"].values())
        yield f"| {row['lengths']} | {row['kind']} | {found} | {ends}{max(s['6'] for s in same)}% | {low}-{high}% |"


def decode_rows():
    for row in json.loads((BENCHMARKS / "results" / "paged-decode.json").read_text())["rows"]:
        times = " | ".join(f"{row[kind] * 1e3:.2f} ms" for kind in ("contiguous", "blocks"))
        int8 = f"{row['int8'] * 1e3:.2f} ms | {row['int8_ratio']:.3f}"
        yield f"| {row['what']} | {row['batch']} | {times} | {row['ratio']:.3f} | {int8} |"


def format_rows():
    report = json.loads((BENCHMARKS / "results" / "cache-formats.json").read_text())
    for row in report["quality"]:
        if row["model"] == "bfloat16":
            cache = "bfloat16" if row["kv_cache_dtype"] == "auto" else row["kv_cache_dtype"]
            yield f"| {cache} | {row['perplexity']:.2f} | {row['kl_mean']:.6f} |"


def cache_quality():
    report = json.loads((BENCHMARKS / "results" / "cache-formats.json").read_text())
    return {(row["model"], row["kv_cache_dtype"]): row for row in report["quality"]}


INVENTED_OUTLIERS = pytest.mark.xfail(
    strict=True, reason="measured 1.05% on code-25m with two key channels a head scaled by 16: a miss, told on the page"
)


@pytest.mark.parametrize("model", ["bfloat16", pytest.param("bfloat16, outliers", marks=INVENTED_OUTLIERS)])
def test_rotated_int4_adds_at_most_one_percent_of_perplexity(model):
    found = cache_quality()
    assert found[model, "int4"]["perplexity"] <= 1.01 * found[model, "auto"]["perplexity"]


def test_the_turn_loses_less_where_a_model_has_outliers():
    found = cache_quality()
    outliers = [found["bfloat16, outliers", cache]["kl_mean"] for cache in ("int4", "int4-plain", "int8", "int8-plain")]
    assert outliers[0] < outliers[1]
    assert outliers[2] < outliers[3]


@pytest.mark.parametrize("rows", [sharing_rows, decode_rows, format_rows])
def test_the_tables_are_those_of_the_measurements(rows):
    for row in rows():
        assert row in MEASURED.read_text()


@pytest.mark.xfail(
    strict=True, reason="7% with eight sequences on a Zen 4, 4% on a Zen 5 (docs/results/paged-cache.md)"
)
def test_a_step_over_blocks_costs_at_most_five_percent_more():
    rows = json.loads((BENCHMARKS / "results" / "paged-decode.json").read_text())["rows"]
    assert max(row["ratio"] for row in rows if row["what"] == "step") <= 1.05


def test_a_step_over_blocks_costs_what_the_page_says():
    rows = json.loads((BENCHMARKS / "results" / "paged-decode.json").read_text())["rows"]
    one, eight = (round(100 * (row["ratio"] - 1)) for row in rows if row["what"] == "step")
    page = MEASURED.read_text()
    assert f"takes {one}% longer with one sequence and {eight}% with eight" in page


def test_as_much_is_saved_as_was_published_or_more():
    for row in json.loads((BENCHMARKS / "results" / "sharing.json").read_text())["rows"]:
        if row["scale"] == 1.0:
            assert min(row["saved"].values()) >= row["published"][0]


def test_the_lengths_have_the_published_means():
    sharing = script("sharing")
    for data, means in sharing.MEANS.items():
        pairs = sharing.length_pairs(np.random.default_rng(1), data)
        assert pairs.mean(0) == pytest.approx(means, rel=0.01)
        assert pairs.min() >= 1
        assert pairs.sum(1).max() < 2048


@pytest.mark.parametrize(("prompt", "answer"), [(5, 30), (40, 30), (16, 3)])
def test_parallel_sampling_saves_what_arithmetic_says(prompt, answer):
    sharing, width = script("sharing"), 3
    sharing.SEQUENCES = width  # one request after the other
    quotients = [width]
    for length in range(prompt + 1, prompt + answer):
        blocks, shared = -(-length // 16), prompt // 16
        quotients.append(width * blocks / (shared + width * (blocks - shared)))
    found = sharing.saved("parallel", width, np.array([[prompt, answer]]), None, steps=3 * answer)
    assert found == pytest.approx(100 * (1 - 1 / np.mean(quotients)))


def test_beams_share_more_than_samples():
    sharing, pairs = script("sharing"), np.array([[20, 40], [33, 25]])
    beam, parallel = (sharing.saved(k, 4, pairs, np.random.default_rng(0), steps=200) for k in ("beam", "parallel"))
    assert parallel < beam < 75


def test_the_picture_is_drawn(tmp_path):
    script("draw_paging", PAGE.parent).draw(tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"

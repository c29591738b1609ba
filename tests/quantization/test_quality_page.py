"""What docs/results/quantization.md promises is what the committed measurements say."""

import json
from pathlib import Path

import pytest

RESULTS = Path(__file__).parent.parent.parent / "benchmarks" / "results"


def read(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def named(name, *, by="name"):
    return {row[by]: row for row in read(name)["rows"]}


@pytest.fixture(scope="module")
def rows():
    return named("quantize-quality")


@pytest.mark.parametrize("peer", ["Q4_K_M", "Q4_K_M imatrix"])
def test_int4_keeps_more_than_q4_k_m_in_fewer_bytes(rows, peer):
    ours, theirs = rows["int4 g128 gptq"], rows[f"llama.cpp {peer}"]
    assert ours["kl_mean"] <= theirs["kl_mean"]
    assert ours["bytes"] <= theirs["bytes"]


@pytest.mark.parametrize("training", ["quantize-quality", "quantize-quality-h100"])
@pytest.mark.parametrize("scheme", ["int3 g128", "int3 g32"])
def test_what_three_bits_lose_is_won_back(training, scheme):
    rows = named(training)
    rtn, gptq, gptaq = (rows[f"{scheme} {method}"]["kl_mean"] for method in ("rtn", "gptq", "gptaq"))
    assert gptaq < gptq <= 0.35 * rtn


def test_a_second_training_loses_as_much(rows):
    again = named("quantize-quality-h100")
    assert len(again) == 25
    for name in set(rows) & set(again):
        assert again[name]["kl_mean"] == pytest.approx(rows[name]["kl_mean"], rel=0.13)


def test_a_cpu_and_a_gpu_lose_as_much():
    gpu, cpu = read("quantize-quality-h100"), read("quantize-quality-cpu")
    assert gpu["weights_sha256"] == cpu["weights_sha256"]
    assert (gpu["device"], cpu["device"]) == ("cuda", "cpu")
    theirs, ours = named("quantize-quality-h100"), named("quantize-quality-cpu")
    assert len(set(theirs) & set(ours)) == 15
    for name in set(theirs) & set(ours):
        near = 1e-3 if name.endswith("rtn") else 0.026
        assert ours[name]["kl_mean"] == pytest.approx(theirs[name]["kl_mean"], rel=near)


def test_a_calibrated_folder_decodes_as_fast_and_is_soon_made():
    assert read("format-pair")["paired"]["gptq / rtn"]["median"] >= 0.98
    for seconds in (named("quantize-time", by="method")["gptq"]["seconds"], read("quantize-gptq-1.1b")["seconds"]):
        assert seconds <= 25 * 60


def test_both_tables_are_of_one_model(rows):
    quality, speeds = read("quantize-quality"), read("format-speeds")
    assert quality["weights_sha256"] == speeds["settings"]["weights_sha256"]


@pytest.mark.parametrize("off_grid", [False, True])
@pytest.mark.parametrize("model", ["smollm2-135m", "gemma3-270m"])
def test_published_models_lose_less_than_in_q4_0_and_less_than_half_of_that_by_gptq(model, off_grid):
    found = {
        row["name"]: row
        for row in read("real-precision")["rows"]
        if (row["model"], row["off_grid"]) == (model, off_grid)
    }
    rounded, peer = found["int4 g32"], found["llama.cpp Q4_0"]
    assert rounded["bits"] == peer["bits"] == found["int4 g32 by gptq"]["bits"]
    assert rounded["kl"] < peer["kl"]
    assert found["int4 g32 by gptq"]["kl"] < 0.5 * rounded["kl"]
    assert rounded["kl"] < 0.8 * found["int4 g128"]["kl"]


@pytest.mark.parametrize(
    ("model", "mixed"),
    [("smollm2-135m", "int8 v and down"), ("gemma3-270m", "int8 k, v and most of down")],
)
def test_at_the_bits_of_q4_k_m_gptq_with_int8_in_between_loses_no_more(model, mixed):
    rows = read("real-precision")["rows"]
    found = {row["name"]: row for row in rows if row["model"] == model and row["off_grid"]}
    ours, peer = found[f"int4 g32 by gptq, {mixed}"], found["llama.cpp Q4_K_M"]
    assert ours["bits"] <= peer["bits"]
    assert ours["kl"] <= peer["kl"]

"""Which dtypes a processor multiplies at speed: the rule, and the times that overrule it."""

import pytest
import torch

from hasten.errors import ConfigError
from hasten.machine import emulated, measured, precision, training_precision
from hasten.machine.measured import adopt, compare, known, slower

ZEN4, ZEN3, RAPIDS = ("avx2", "avx512f", "avx512_bf16"), ("avx2", "fma"), ("avx512_bf16", "amx_bf16", "avx512_fp16")


@pytest.fixture
def measuring(monkeypatch, tmp_path):
    """Comparisons are made and kept, in a cache of their own."""
    monkeypatch.setenv("HASTEN_MEASURE", "1")
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path))
    monkeypatch.setattr(measured, "SECONDS", 0.0)
    measured._store.cache_clear()
    yield tmp_path
    measured._store.cache_clear()


@pytest.mark.parametrize(
    ("flags", "slow"),
    [(ZEN4, ["float16"]), (ZEN3, ["bfloat16", "float16"]), (RAPIDS, []), (("bf16", "asimdhp"), []), ((), None)],
)
def test_the_rule_is_the_instruction_sets(processor, flags, slow):
    processor(*flags)
    found = [name for name in ("float32", "bfloat16", "float16", "float64") if emulated(name) is not None]
    assert found == (["bfloat16", "float16"] if slow is None else slow)
    assert emulated(torch.float16, "meta") is None


def test_what_onednn_may_not_use_counts_as_absent(processor, monkeypatch):
    processor(*RAPIDS)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    assert emulated("bfloat16") is None
    assert "ONEDNN_MAX_CPU_ISA is AVX512_CORE_BF16" in emulated("float16")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert str(training_precision()) == "float32: bfloat16 is emulated: ONEDNN_MAX_CPU_ISA is AVX2"


def test_training_takes_bfloat16_where_it_is_fast(processor):
    processor(*ZEN4)
    assert training_precision().dtype == "bfloat16"
    processor(*ZEN3)
    assert str(training_precision()) == "float32: bfloat16 is emulated by this processor"


def test_only_a_clear_difference_overrules_the_rule(processor, monkeypatch):
    def takes(float32, bfloat16):
        monkeypatch.setattr(precision, "compare", lambda *_: {"float32": float32, "bfloat16": bfloat16})
        return emulated("bfloat16")

    processor(*ZEN4)
    assert takes(1e-3, 1.2e-3) is None
    assert takes(1e-3, 2e-3) == "measured here, bfloat16 takes 2.00 ms where float32 takes 1.00 ms"
    processor(*ZEN3)
    assert "emulated by this processor" in takes(1e-3, 0.9e-3)
    assert takes(2e-3, 1e-3) is None


def test_a_comparison_is_made_once_a_machine(measuring):
    calls = []

    def contenders():
        return {"one": lambda: calls.append(1), "two": lambda: None}

    first = compare("a thing", contenders)
    assert set(first) == {"one", "two"}
    made = len(calls)
    assert made >= 2
    measured._store.cache_clear()  # as in another process
    assert compare("a thing", contenders) == first
    assert len(calls) == made
    assert len(list((measuring / "measured").iterdir())) == 1
    compare("a thing", contenders, library="another")
    assert len(calls) > made
    for file in (measuring / "measured").iterdir():
        file.write_text('{"seconds": {"one": "fast"}}')  # damaged: measured again
    measured._store.cache_clear()
    assert compare("a thing", contenders)["one"] > 0


def test_the_variable_switches_it_off_and_what_a_run_brings_along_counts(measuring, monkeypatch):
    monkeypatch.setenv("HASTEN_MEASURE", "0")
    assert compare("a thing", lambda: pytest.fail("measured")) == {}
    off = known()
    assert slower("one", "two", {}) is None
    measured._store.cache_clear()
    monkeypatch.setenv("HASTEN_MEASURE", "1")
    adopt(off)  # a run that began by the rules goes on by them
    assert compare("a thing", lambda: pytest.fail("measured")) == {}
    key = next(iter(off))
    adopt({key: {"one": 2.0, "two": 1.0}, "damaged": {"one": "x"}})
    assert slower("one", "two", compare("a thing", lambda: pytest.fail("measured"))) is not None
    assert set(known()) == {key}


def test_what_another_process_measured_meanwhile_is_taken(measuring):
    key = measured._key("a thing", "")

    def contenders():
        measured.write_atomically(  # the other one is done first
            measured.cache_folder("measured") / measured._file(key), '{"seconds": {"one": 1.0, "two": 2.0}}'
        )
        return {"one": lambda: None, "two": lambda: None}

    assert compare("a thing", contenders) == {"one": 1.0, "two": 2.0}


def test_the_variable_is_0_or_1(measuring, monkeypatch):
    monkeypatch.setenv("HASTEN_MEASURE", "off")
    with pytest.raises(ConfigError, match="HASTEN_MEASURE must be 0 or 1; found 'off'"):
        compare("a thing", dict)


def test_measuring_leaves_random_numbers_and_threads_alone(measuring, processor):
    processor(*ZEN4)
    torch.manual_seed(0)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    with torch.device("meta"), torch.inference_mode():
        emulated("bfloat16")
    assert torch.equal(before, torch.get_rng_state())
    assert torch.get_num_threads() == threads
    assert len(known()) == 1

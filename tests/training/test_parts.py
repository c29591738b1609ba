"""The small pieces of a run: journal, spikes, budget, memory, validation."""

import json
import math
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hasten.data import TokenSplit
from hasten.errors import DataError, HastenWarning, ResourceError
from hasten.model.initialize import initialize
from hasten.ops.native import obtainable
from hasten.planning.cost import parameters
from hasten.training.budget import fixed_steps, timed_steps
from hasten.training.build import attention_kernel, shape_config
from hasten.training.evaluate import Validation
from hasten.training.journal import FEWEST, Journal, is_spike, read
from hasten.training.memory import MemoryCheck, step_memory
from hasten.training.optimizers import adamw
from hasten.training.precision import Precision
from hasten.training.recipe import Data, Optimizer, Recipe, Run, Shape, Techniques
from hasten.training.step import TrainStep

CONFIG = shape_config(Shape(layers=1, hidden_size=32, heads=2, feed_forward=64), vocab_size=50, positions=16)


def test_a_journal_is_cut_at_the_checkpoint_and_a_torn_line_is_dropped(tmp_path):
    path = tmp_path / "train.jsonl"
    journal = Journal(path, keep_steps=0)
    for step in range(1, 6):
        journal.write({"step": step, "loss": 1 / 3})
    journal.close()
    with path.open("a") as file:
        file.write('{"step": 6, "lo')
    assert [line["step"] for line in read(path)] == [1, 2, 3, 4, 5]
    journal = Journal(path, keep_steps=3)
    journal.write({"step": 4, "loss": 2.0})
    journal.close()
    assert [(line["step"], line["loss"]) for line in read(path)] == [(1, 1 / 3), (2, 1 / 3), (3, 1 / 3), (4, 2.0)]
    Journal(path, keep_steps=0).close()
    assert read(path) == []


def test_a_journal_that_is_no_text_is_read_up_to_there(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "name": "\xff"}\n{"step": 3}\n')
    assert [line["step"] for line in read(path)] == [1]
    with pytest.warns(HastenWarning, match="only up to step 1; the lines from there to 3 are lost"):
        Journal(path, keep_steps=3).close()


def test_a_journal_on_a_full_disk():
    class Full:
        def write(self, text):
            raise OSError(28, "No space left on device")

    journal = Journal.__new__(Journal)
    journal.path, journal._file = "train.jsonl", Full()
    with pytest.raises(ResourceError, match=r"train.jsonl .*disk is full"):
        journal.write({"step": 1})


@given(st.lists(st.floats(1.0, 1.2), min_size=FEWEST, max_size=200))
def test_a_spike_is_what_stands_far_above_the_rest(losses):
    recent = []
    for loss in losses[: FEWEST - 1]:
        assert not is_spike(loss, recent)
    for loss in losses[FEWEST - 1 :]:
        is_spike(loss, recent)
    assert is_spike(10.0, recent)
    assert not is_spike(0.5, recent)


@given(st.lists(st.floats(0.1, 10), max_size=150), st.integers(0, 150))
def test_spikes_are_found_the_same_after_a_checkpoint(losses, at):
    whole, first = [], []
    expected = [is_spike(loss, whole) for loss in losses]
    found = [is_spike(loss, first) for loss in losses[:at]]
    second = json.loads(json.dumps(first))
    found += [is_spike(loss, second) for loss in losses[at:]]
    assert found == expected


def test_a_higher_plateau_is_not_a_spike_for_ever():
    recent = [1.0] * 64
    flags = [is_spike(2.0, recent) for _ in range(100)]
    assert flags[0]
    assert not any(flags[60:])


def test_steps_and_epochs_and_the_smaller_of_both():
    assert fixed_steps(Recipe(name="x", run=Run(steps=10)), windows=1000) == 10
    assert fixed_steps(Recipe(name="x", run=Run(epochs=2)), windows=1000) == 250
    assert fixed_steps(Recipe(name="x", run=Run(steps=10, epochs=2)), windows=1000) == 10
    assert fixed_steps(Recipe(name="x", run=Run(minutes=2)), windows=1000) is None


@given(st.floats(0.01, 10), st.floats(0, 100), st.floats(0.1, 60), st.integers(0, 50))
def test_the_steps_of_a_timed_run_fit_into_its_minutes(each, used, minutes, batches):
    recipe = Recipe(name="x", run=Run(minutes=minutes, validate_every=50))
    seconds = [20.0, 5.0] + [each] * 6  # the first ones compile
    total = timed_steps(recipe, step_seconds=seconds, used=used, validation_batches=batches)
    more = total - len(seconds)
    validation = each * batches / 3
    spent = used + more * each + (more / 50 + 1) * validation
    assert more >= 0
    assert more == 0 or spent <= minutes * 60 + 1e-6
    assert spent + each + validation / 50 >= minutes * 60 - 1e-6


MEMORY_CASES = {
    "bfloat16": {},
    "float32": {"precision": "float32", "layers": 2},
    "accumulation": {"accumulation": 2, "hidden_size": 512, "heads": 8, "batch_size": 2},
    "recomputed": {"checkpointing": "full"},
    "products kept": {"checkpointing": "selective"},
    "large vocabulary": {"vocab_size": 16384, "layers": 1, "batch_size": 4},
    "explicit attention": {"context": 512, "batch_size": 3, "attention": "reference", "layers": 2},
    "rounded": {"bits": 3, "hidden_size": 512, "heads": 8, "batch_size": 4},
}


@pytest.mark.slow  # takes steps of many recipes
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak is exact there")
def test_the_memory_estimate_is_what_a_step_takes():
    # In a process of its own: the peak of this one belongs to other tests. Freed blocks go back to the system at once.
    code = textwrap.dedent("""
        import gc, json, sys, torch
        from dataclasses import fields, replace
        from hasten.data import Batch
        from peak_memory import PeakMemory
        from hasten.model.initialize import initialize
        from hasten.training.build import shape_config, training_step
        from hasten.training.memory import step_memory
        from hasten.training.recipe import Data, Qat, Recipe, Shape, Techniques

        def part(kind, changes, **usual):
            return kind(**usual | {f.name: changes[f.name] for f in fields(kind) if f.name in changes})

        def run(recipe, vocab_size):
            device, data = torch.device("cpu"), recipe.data
            config = shape_config(recipe.model, vocab_size=vocab_size, positions=data.context)
            tokens = torch.randint(0, vocab_size, (data.batch_size, data.context))
            batch = Batch(inputs=tokens, targets=tokens, documents=None)
            step = training_step(initialize(config, seed=0), recipe)
            one_row = Batch(inputs=tokens[:1], targets=tokens[:1], documents=None)
            step.run([one_row])  # makes the optimizer's state
            step.run([batch] * data.accumulation)
            return step_memory(config, recipe, device).peak

        torch.set_num_threads(1)
        usual = {"keep_memory": False, "compile": False, "precision": "bfloat16"}
        for changes in [{"layers": 1, "batch_size": 1}, *json.loads(sys.argv[1])]:
            model = part(Shape, changes, layers=4, hidden_size=256, heads=4)
            data = part(Data, changes, context=128, batch_size=16)
            techniques, qat = part(Techniques, changes, **usual), part(Qat, changes)
            recipe = Recipe(name="x", model=model, data=data, techniques=techniques, qat=qat)
            with PeakMemory() as peak:
                estimated = run(recipe, changes.get("vocab_size", 512))
            gc.collect()
            print(estimated, peak.bytes)
    """)
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    cases = json.dumps(list(MEMORY_CASES.values()))
    done = subprocess.run(
        [sys.executable, "-c", code, cases],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        cwd=Path(__file__).parents[1],  # of peak_memory.py
    )
    lines = done.stdout.splitlines()[1:]  # the first loads libraries
    for name, line in zip(MEMORY_CASES, lines, strict=True):
        estimated, measured = map(int, line.split())
        assert 0.85 < estimated / measured < 1.15, (name, estimated, measured)


def test_the_memory_error_names_the_field_that_helps(monkeypatch):
    recipe = Recipe(name="x", techniques=Techniques(attention="sdpa"))
    need = step_memory(CONFIG, recipe, torch.device("cpu"))

    def room(free, **data):
        own = replace(recipe, data=replace(recipe.data, **data))
        return MemoryCheck(config=CONFIG, recipe=own, device=torch.device("cpu"), free=free)

    line = room(need.peak).check()
    assert "batches of 8 x 256 tokens" in line
    assert "up to 8 rows would fit, or 16 tokens in a row" in line, "no longer than the model's positions"
    with pytest.raises(ResourceError, match=r"lower data\.batch_size \(now 8\) .* as --fit does"):
        room(need.peak - 1).check()
    with pytest.raises(ResourceError, match=r"lower data\.context"):
        room(room(0, batch_size=1).memory().peak - 1, batch_size=1).check()
    with pytest.raises(ResourceError, match=r"lower model\.layers"):
        room(16 * parameters(CONFIG).total).check()


def test_fitted_rows_are_cut_into_as_few_micro_batches_as_fit():
    asked = Recipe(name="x", data=Data(batch_size=4, accumulation=6), run=Run(fit=True))

    def fitted(free, **run):
        recipe = replace(asked, run=replace(asked.run, **run))
        found = MemoryCheck(config=CONFIG, recipe=recipe, device=torch.device("cpu"), free=free).fitted().recipe.data
        return found.batch_size, found.accumulation

    def peak(rows, count):
        check = MemoryCheck(config=CONFIG, recipe=asked, device=torch.device("cpu"))
        return check.memory(replace(asked.data, batch_size=rows, accumulation=count)).peak

    assert fitted(peak(24, 1)) == (24, 1)
    assert fitted(peak(24, 1) - 1) == (12, 2)
    assert fitted(peak(2, 12)) == (2, 12)
    assert fitted(0) == (4, 6), "what fits in no way is refused with the recipe's own batch"
    assert fitted(1 << 40, fit=False) == (4, 6)


def split(count):
    tokens = np.random.default_rng(0).integers(0, 50, count).astype(np.uint16)
    return TokenSplit(tokens=tokens, document_starts=np.array([0]))


def step():
    model = initialize(CONFIG, seed=0)
    return TrainStep(model, adamw(model, Optimizer()), Precision("float32", "cpu"))


def test_validation_is_the_mean_over_the_whole_split_and_leaves_the_model_in_training():
    data, one = split(16 * 5 + 4), step()
    with torch.no_grad():
        for parameter in one.model.parameters():
            parameter.zero_()
    validation = Validation(data, batch_size=4, sequence_length=16, batches=10)
    assert validation.whole
    assert validation.loss(one) == pytest.approx(math.log(50), rel=1e-6)
    assert one.model.training


def test_validation_on_a_part_is_the_same_part_every_time():
    validation = Validation(split(16 * 500), batch_size=4, sequence_length=16, batches=3)
    assert (validation.whole, validation.batches) == (False, 3)
    one = step()
    assert validation.loss(one) == validation.loss(one)


def test_a_validation_split_shorter_than_a_window_is_filled_up_and_one_without_targets_refused_at_once():
    assert Validation(split(10), batch_size=2, sequence_length=16, batches=1).batches == 1
    with pytest.raises(DataError, match="1 tokens"):
        Validation(split(1), batch_size=2, sequence_length=16, batches=1)


def test_validation_draws_no_random_numbers():
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    Validation(split(200), batch_size=2, sequence_length=16, batches=2).loss(step())
    assert torch.equal(torch.rand(2), expected)


def test_the_explicit_attention_is_for_short_rows_on_a_cpu_that_no_native_kernel_serves():
    def kernel(device="cpu", **changes):
        data = Data(context=changes.pop("context", 256), separate_documents=changes.pop("separate", False))
        dropout = changes.pop("dropout", 0.0)
        recipe = Recipe(name="x", data=data, dropout=dropout, techniques=Techniques(**changes))
        return attention_kernel(recipe, torch.device(device))

    assert kernel() is None
    assert kernel(dropout=0.1) == (None if obtainable("training") else "reference")
    assert kernel(separate=True) is kernel(separate=True, precision="float16") is None
    assert kernel(dropout=0.1, compile=False) is None
    assert kernel(dropout=0.1, context=1024) is None
    assert kernel("cuda", dropout=0.1) is None
    assert kernel(dropout=0.1, attention="sdpa") == "sdpa"


def test_kept_memory_changes_no_result():
    # In a process of its own, which keeps its memory from then on.
    code = textwrap.dedent("""
        import torch
        from hasten.training.allocator import keep_freed_memory
        def total():
            torch.manual_seed(0)
            return sum(float((torch.randn(1200, 1200) @ torch.randn(1200, 1200)).sum()) for _ in range(3))
        before = total()
        print(keep_freed_memory() in (True, False), before == total(), before == total() and keep_freed_memory() >= 0)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "True"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the heap of glibc")
def test_large_blocks_are_returned_whatever_was_freed_before():
    code = textwrap.dedent("""
        import torch
        from hasten.machine import process_memory
        from hasten.training.allocator import return_large_blocks
        done = return_large_blocks()
        del [torch.ones(6_000_000)][:]  # from here on, glibc would keep whatever is smaller
        before = process_memory()
        pairs = [(torch.ones(1_000_000), torch.ones(20_000)) for _ in range(30)]
        small = [pair[1] for pair in pairs]
        del pairs
        print(done, process_memory() - before < 16 << 20)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the heap of glibc")
def test_keeping_memory_takes_an_address_range_and_no_memory():
    code = textwrap.dedent("""
        import resource, torch
        from hasten.machine import process_memory
        from hasten.training.allocator import keep_freed_memory
        resource.setrlimit(resource.RLIMIT_DATA, (3 << 30, 3 << 30))
        before = process_memory()
        kept = keep_freed_memory()
        assert process_memory() - before < 16 << 20
        block = torch.ones(50_000_000)
        filled = process_memory()
        del block
        print(kept, filled - process_memory() < 16 << 20, torch.ones(200_000_000).sum().item() == 2e8)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    kept, still_there, works = done.stdout.split()
    assert kept == still_there == works == "True" or kept == "False"

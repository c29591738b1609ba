"""Training beside other programs: steps with fewer threads."""

from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from hasten.machine.compiler import find_compiler
from hasten.training import RECIPES
from hasten.training.setup import set_up


def small(tmp_path, **run):
    recipe = RECIPES["demo"]
    source = tmp_path / "text.txt"
    source.write_text("the quick brown fox jumps over the lazy dog\n" * 2000)
    return replace(
        recipe,
        model=replace(recipe.model, layers=2, hidden_size=32, heads=2, feed_forward=64),
        data=replace(recipe.data, source=str(source), vocab_size=300, context=32),
        run=replace(recipe.run, minutes=None, steps=4, device="cpu", folder=str(tmp_path), **run),
    )


def test_a_named_number_of_threads_is_kept(tmp_path):
    assert not set_up(small(tmp_path, threads=1), progress=False).step.shares_cores
    assert set_up(small(tmp_path, threads="auto"), progress=False).step.shares_cores


@pytest.mark.slow  # compiles
@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
def test_another_number_of_threads_compiles_nothing_again(tmp_path):
    setup = set_up(small(tmp_path), progress=False)
    losses = []
    for threads in (2, 1, 2, 1):
        torch.set_num_threads(threads)
        result = setup.step.run([setup.batches.batch(0)], learning_rate=0.0)
        losses.append(result.read()[0])
        if threads == 2 and len(losses) == 1:
            graphs = counters["stats"]["unique_graphs"]
    torch.set_num_threads(1)
    assert graphs >= 1
    assert counters["stats"]["unique_graphs"] == graphs
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)


@pytest.mark.slow  # compiles
@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
def test_validation_before_the_first_step_leaves_it_its_gradients(tmp_path):
    setup = set_up(small(tmp_path), progress=False)
    assert setup.validation is not None
    setup.validation.loss(setup.step)
    result = setup.step.run([setup.batches.batch(0)], learning_rate=0.0)
    assert result.read()[1] > 0, "the norm of the gradients"

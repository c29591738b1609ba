"""`benchmarks/equal_steps.py`: what its contestants are, and what its tables compare."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import equal_steps
from equal_steps import Dropping, OneBit
from ranks_in_turn import CompressedInTurn, train_in_turn

import ranks
from hasten.training import onebit
from hasten.training.journal import read


def test_contestants_have_names_of_their_own_and_recipes_that_hold():
    for benchmark in (OneBit(), Dropping()):
        contestants = list(benchmark.contestants())
        assert len({one.name for one in contestants}) == len(contestants)
        for one in contestants:
            one.recipe.check()
            assert one.change in ("", *equal_steps.CHANGES)


def test_a_warm_up_is_its_share_of_the_steps():
    found = {one.name: one.recipe.optimizer.freeze_after for one in OneBit(steps=1000).contestants()}
    assert (found["adamw"], found["onebit-adam 16.4%"], found["onebit-adam 50.0%"]) == (None, 164, 500)


def test_longer_runs_with_dropping_take_the_flops_of_those_without():
    benchmark = Dropping(steps=1000, layers=12)
    runs = {one.facts["way"]: one.recipe.run.steps for one in benchmark.contestants()}
    # 12 blocks at θ = 0.5: 77% of them run, 78% over a run; the head always does.
    assert 0.77 < benchmark.cost() < 0.83
    assert runs["no dropping"] == runs["dropping"] == 1000
    assert runs["dropping, equal FLOPs"] == round(1000 / benchmark.cost())


@pytest.fixture
def unchanged(monkeypatch):
    """What the changes replace is put back."""
    monkeypatch.setattr(CompressedInTurn, "__call__", CompressedInTurn.__call__)
    monkeypatch.setattr(onebit, "_LEAST", onebit._LEAST)
    monkeypatch.setattr(onebit.OneBitOptimizer, "_scaling", onebit.OneBitOptimizer._scaling)


def frozen_step(received: list, steps: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """A parameter before and after the step that follows the freeze; received: what the step sent."""
    p = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0, 0.5]))
    optimizer = onebit.OneBitAdam([p], lr=0.1, betas=(0.9, 0.999), weight_decay=0.0)
    optimizer.freeze_after = steps

    def mean(x, kept):
        received.append(x.clone())
        return x

    optimizer.mean = mean
    for step in range(steps):
        p.grad = torch.tensor([1.0, 2.0, -1.0, 1e-4]) * (1 + 0.1 * step)
        optimizer.step()
    before = p.detach().clone()
    p.grad = torch.tensor([1.0, 2.0, -1.0, 1e-4])
    optimizer.step()
    return before, p.detach().clone()


def test_paper_sends_the_momentum_and_keeps_small_variances(unchanged):
    sent, plain = [], []
    before, after = frozen_step(sent)
    equal_steps.CHANGES["paper"]()
    _, theirs = frozen_step(plain)
    assert plain[0].abs()[3] < 1e-3 < sent[0].abs()[3], "in units of its step the small one is larger"
    assert (theirs - before).abs()[3] > 10 * (after - before).abs()[3], "its variance was raised to a tenth of the mean"


def test_gaps_are_to_the_same_seed_of_the_optimizer_that_is_compressed():
    def row(name, kind, seed, *losses, share=None):
        checks = [[100 * number, loss] for number, loss in enumerate(losses, 1)]
        return {"name": name, "kind": kind, "seed": seed, "share": share, "steps": 500, "loss": losses[-1]} | {
            "losses": checks
        }

    rows = [
        row("adamw", "adamw", 0, 5, 4, 3, 3, 2.0),
        row("adamw", "adamw", 1, 5, 4, 3, 3, 4.0),
        row("onebit-adam 25.0%", "onebit-adam", 0, 4, 4, 3, 3.3, 2.2, share=0.25),
        row("onebit-lamb 25.0%", "onebit-lamb", 0, 5, 4, 3, 3, 2, share=0.25),
    ]
    table = equal_steps.onebit_table({"rows": rows}).splitlines()
    assert table[4] == "| onebit-adam 25.0% | 0 | 125 | 2.2000 | -20.00% | +0.00% | +0.00% | +10.00% | +10.00% |"
    assert table[5].endswith("| 2.0000 |  |  |  |  |  |"), "LAMB was not run"


def test_dropping_is_compared_with_the_best_run_without():
    def row(name, loss, drop, seed=0):
        return {"name": name, "loss": loss, "layer_drop": drop, "seed": seed, "rate": 1e-3, "kept_blocks": 1.0} | {
            "steps": 1000,
            "tokens": 2000,
        }

    rows = [row("a", 2.0, None), row("a", 4.0, None, 1), row("b", 3.6, None), row("c", 3.3, 0.5)]
    table = equal_steps.dropping_table({"rows": rows}).splitlines()
    assert table[2] == "| a | 1e-03 | 100% | 1,000 | 2,000 | 3.0000 | +0.00% | 2.000 4.000 |"
    assert "| +10.00% | 3.300 |" in table[4]


MEANS = """
import json, torch
import torch.distributed as dist
from hasten.distributed.compressed import compressed_mean, no_errors
dist.init_process_group("gloo")
errors, kept = no_errors(1000, 2, torch.device("cpu")), torch.arange(1000) % 7 > 0
for step in range(4):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    found = compressed_mean(x, errors, kept)
print(json.dumps(found.tolist()))
dist.destroy_process_group()
"""


def test_ranks_in_turn_average_as_ranks_over_a_network_do():
    average, kept = CompressedInTurn(2), torch.arange(1000) % 7 > 0
    for step in range(4):
        xs = [torch.randn(1000, generator=torch.Generator().manual_seed(10 * step + rank)) for rank in range(2)]
        wanted = average(xs, kept)
    for status, output, errors in ranks.run(MEANS, ranks=2):
        assert status == 0, errors
        torch.testing.assert_close(torch.tensor(json.loads(output.splitlines()[-1])), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.slow  # two ranks train
def test_ranks_in_turn_train_as_two_ranks_do(tmp_path):
    """The same losses as `hasten train` on two ranks, through the warm-up and after it."""
    recipe = OneBit(steps=20, layers=1, hidden_size=32).contestant("onebit-adam", 0.5).recipe
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"{number} times {number} is {number**2}." for number in range(3000)))
    data = replace(recipe.data, source=str(text), tokenizer_kind="character", context=32)
    techniques = replace(recipe.techniques, compile=False)
    recipe = replace(recipe, data=data, techniques=techniques)
    losses = []
    for name in ("in-turn", "two-ranks"):
        run = replace(recipe.run, folder=str(tmp_path / name), threads=1)
        own = replace(recipe, run=run)
        if name == "in-turn":
            train_in_turn(own, ranks=2)
        else:
            file = tmp_path / "recipes.json"
            file.write_text(json.dumps([own.to_json()]))
            for status, _, errors in ranks.run(ranks.TRAIN, file, ranks=2):
                assert status == 0, errors
        lines = read(tmp_path / name / "run" / "train.jsonl")
        losses.append(torch.tensor([line["loss"] for line in lines]))
    assert len(losses[0]) == 20
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-4)

"""`hasten profile train --processes 2`: one report of what each rank computes, how long it waits, and what it sends."""

import json
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest

import ranks
from hasten.distributed.ranks import Ranks
from hasten.errors import ConfigError
from hasten.profiling.ranks import Exchange, check_clocks, fastest_of, folded_parts, times_of_ranks
from hasten.profiling.show import rank_rows
from hasten.training.recipes import RECIPES
from rank_runs import flags
from traces import check_trace

# Profiles the recipe of a JSON file; on rank 1 each MLP takes 50 ms longer.
SLOWER = textwrap.dedent("""
    import json, os, sys, time
    import torch
    from hasten.machine.limits import Limits
    from hasten.model.mlp import MLP
    from hasten.profiling import profile as profiles
    from hasten.training import setup
    from hasten.training.recipe import Recipe
    from hasten.training.training_modules import FusedMLP
    setup.matrix_rate = lambda dtype, **options: 1e11
    profiles.product_limits = lambda *given: Limits(1e10, {"float32": 1e11})
    torch.set_num_threads(1)
    if os.environ["RANK"] == "1":
        for kind in (MLP, FusedMLP):
            forward = kind.forward
            kind.forward = lambda self, x, forward=forward: time.sleep(0.05) or forward(self, x)
    values, folder = json.load(open(sys.argv[1])), sys.argv[2]
    profiles.profile(Recipe.from_json(values), folder, steps=2)
""")


class Both(Ranks):
    """Rank 0 of two; the other one says what a test gives."""

    def texts(self, own):
        return [own, OTHER[0]]


OTHER = [""]


def test_a_rank_waits_until_the_last_one_has_begun_and_then_communicates():
    second = 10**9
    ours = [Exchange("update.all-reduce", "0", 3 * second, 10 * second, 100), Exchange("barrier", "0", 0, 0, 0)]
    theirs = [Exchange("update.all-reduce", "0", 7 * second, 10 * second, 100), Exchange("barrier", "0", 0, 0, 0)]
    spent = {("", "forward"): 2.0, ("model.blocks.0", "forward"): 1.0, ("model.blocks.1", "backward"): 3.0}
    spent |= {("update", "forward"): 4.0, ("update.all-reduce", "forward"): 7.0, ("barrier", "forward"): 0.0}
    fields = ("part", "group", "begun", "ended", "sent")
    told = [dict(zip(fields, (getattr(one, name) for name in fields), strict=True)) for one in theirs]
    OTHER[0] = json.dumps(
        {"own": {"": 13.0, "update": 1.0, "update.all-reduce": 3.0, "barrier": 0.0}, "exchanges": told}
    )
    first, second_rank = times_of_ranks(Both(size=2), spent, ours)
    by_name = {part.name: part for part in first.parts}
    assert first.parts[0].name == ""
    step = by_name[""]
    assert (step.computing, step.waiting, step.communicating, step.sent, step.exchanges) == (10.0, 4.0, 3.0, 100, 2)
    assert by_name["model.blocks"].computing == 4.0
    assert by_name["update"].computing == 4.0
    assert by_name["update"].waiting == 4.0
    assert {part.name: part.computing for part in folded_parts(first.parts)}["model.blocks.*"] == 4.0
    other = {part.name: part for part in second_rank.parts}
    assert (other[""].waiting, other[""].communicating) == (0.0, 3.0), "it came last"
    shown = rank_rows([first, second_rank])
    assert shown[0] == ["step", "0", "1e+04", "4e+03", "3e+03", "0.0001", "2"]
    assert shown[1][:2] == ["", "1"]
    assert [row[0].strip() for row in shown[::2]] == ["step", "update", "all-reduce", "barrier"]


def test_the_step_is_the_one_in_which_the_slowest_rank_was_the_fastest():
    OTHER[0] = json.dumps([5.0, 2.5, 9.0])
    assert fastest_of(Both(size=2), [1.0, 3.0, 2.0]) == 1


def test_ranks_of_several_machines_have_no_clock_in_common():
    with pytest.raises(ConfigError, match="several machines; profile on one"):
        check_clocks(Ranks(size=4, local_size=2))


def of_step(folder):
    """The step of each rank, and the names of its parts, from a profile's JSON."""
    found = json.loads((folder / "profile.json").read_text())["phases"][0]
    return found, [{part["name"]: part for part in one["parts"]} for one in found["ranks"]]


@pytest.mark.slow  # four processes, two at a time
def test_two_ranks_make_one_report(recipe, tmp_path):
    file = tmp_path / "case.json"
    made = recipe(accumulation=2, layers=2)
    file.write_text(json.dumps(made.to_json()))
    for status, _, errors in ranks.run(SLOWER, file, tmp_path / "slower"):
        assert status == 0, errors
    _, (first, second) = of_step(tmp_path / "slower")
    slept = 2 * 2 * 0.05  # blocks, micro-batches
    assert second[""]["computing"] > slept
    assert second["model.blocks.1.mlp"]["computing"] > slept / 2
    assert first[""]["waiting"] > second[""]["waiting"], "though other programs may slow either of them"
    for rank in (0, 1):
        check_trace(tmp_path / f"slower/step.rank{rank}.trace.json", "forward model.blocks.0.mlp.down")
    output = tmp_path / "found"
    made = recipe(name="demo", zero=3, layers=2, precision="float32")
    asked = replace(made, run=replace(RECIPES["demo"].run, device="cpu", threads=1))  # a profile has no length
    words = [*flags(asked), "--processes", "2", "--measured", "2", "--output", str(output)]
    done = subprocess.run(
        [sys.executable, "-m", "hasten", "profile", "train", "demo", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("found: profile.json") == 1, "rank 0 reports"
    assert "communicating" in done.stderr
    phase, trees = of_step(output)
    for parts in trees:
        step = parts[""]
        assert step["computing"] > 0
        assert step["communicating"] > 0
        assert step["exchanges"] == sum(one["exchanges"] for name, one in parts.items() if "-" in name)
    assert phase["rows"][0]["forward"] + phase["rows"][0]["backward"] == pytest.approx(
        sum(trees[0][""][name] for name in ("computing", "waiting", "communicating"))
    )
    assert max(parts[""]["waiting"] for parts in trees) > 0, "of one that did not always come last"
    numbers = {row["name"]: row["parameters"] for row in phase["rows"]}
    again = numbers["model.blocks"]  # what is gathered again for the backward pass
    sent = 4 * (2 * numbers[""] + again) / 2
    assert trees[1][""]["sent"] == pytest.approx(sent, rel=0.02), "and a few counts"
    shapes, counted = phase["checks"]["FLOPs: from shapes, torch's FlopCounterMode"]
    assert shapes == pytest.approx(counted, rel=0.05)

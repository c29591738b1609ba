"""When one of several processes goes wrong: one clear error on rank 0 that names it, no hang, nothing half-written."""

import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager, suppress
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

import ranks
from hasten.distributed.launch import _Watch, joined
from hasten.distributed.ranks import Ranks
from hasten.errors import ConfigError, ResourceError
from hasten.training import build, checkpoints, rank_checks, session
from hasten.training.checkpoint_state import find
from hasten.training.journal import read
from hasten.training.recipe import Qat
from hasten.training.session import train
from rank_runs import flags, stop_after

# Trains; what goes wrong, on rank 1 alone, is the second argument.
CHILD = textwrap.dedent("""
    import json, os, signal, sys
    from dataclasses import replace
    import torch
    from hasten.errors import HastenError, ResourceError
    from hasten.training import session, setup
    from hasten.training.recipe import Recipe
    from hasten.training.session import train
    setup.matrix_rate = lambda dtype, **options: 1e11
    torch.set_num_threads(1)
    values, wrong = json.load(open(sys.argv[1])), sys.argv[2]
    def memory(*given, **options):
        raise ResourceError("the memory is gone")
    def on_step(line):
        if line["step"] == 3 and wrong == "killed" and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
    recipe = Recipe.from_json(values)
    if os.environ["RANK"] == "1":
        if wrong == "memory":
            setup.MemoryCheck.here = memory
        if wrong == "code":
            session.code_digest = lambda: "older"
        if wrong == "folder":  # of which only rank 0 sees the checkpoints
            session.find_start = lambda *given: None
        if wrong == "text":
            prepare, less = setup.prepare_data, replace(recipe.data, limit_bytes=20_000)
            setup.prepare_data = lambda recipe, **options: prepare(replace(recipe, data=less), **options)
        if wrong == "recipe":
            recipe = replace(recipe, optimizer=replace(recipe.optimizer, learning_rate=1e-3))
    try:
        train(recipe, progress=False, on_step=on_step)
    except HastenError as error:
        print(f"{type(error).__name__}: {error}")
        sys.exit(2)
""")


WRONG = [
    ("memory", {}, "TrainingError: rank 1: the memory is gone"),
    ("killed", {}, "TrainingError: rank 1 ended without an error"),
    ("code", {}, "ConfigError: rank 1 has another version of hasten's code than rank 0 (older, not "),
    ("folder", {}, "ConfigError: rank 1 has another checkpoint than rank 0 (none, not of step 2)"),
    ("text", {}, "ConfigError: rank 1 has another data than rank 0 ("),
    ("recipe", {}, "ConfigError: rank 1 has another optimizer.learning_rate than rank 0 (0.001, not 0.005)"),
    ("rows", {"batch_size": 3}, "ConfigError: data.batch_size is 3, which 2 processes cannot share evenly"),
    ("replicas", {"replicas": 3}, "ConfigError: parallel.replicas is 3, which 2 processes cannot share evenly"),
    ("model", {"layers": 3}, "(model.layers: 2 -> 3): give the same values"),
]
SOON = ("memory", "killed", "code", "text")  # in make test; each case is two processes


CASES = [pytest.param(*case, marks=() if case[0] in SOON else pytest.mark.slow, id=case[0]) for case in WRONG]


@pytest.mark.parametrize(("wrong", "changes", "told"), CASES)
def test_the_first_rank_names_who_went_wrong(recipe, tmp_path, wrong, changes, told):
    file = tmp_path / "case.json"
    file.write_text(json.dumps(recipe(steps=2000, zero=1, checkpoint_every=2, **changes).to_json()))
    before = wrong in ("folder", "model")
    if before:
        stop_after(recipe(steps=2000, checkpoint_every=2), 2)
    (status, said, errors), (other, silent, _) = ranks.run(CHILD, file, wrong, timeout=120)
    assert (status, other) == (2, -9 if wrong == "killed" else 2), errors
    assert told in said, (said, errors)
    assert said.count("\n") == 1
    assert silent == ""
    stored = find(tmp_path / "runs/tiny/checkpoints/last")
    assert (stored is not None and stored.step == 2) == (before or wrong == "killed")
    assert not list(tmp_path.glob("runs/**/*.partial"))


def test_a_port_that_is_taken_is_named(recipe, tmp_path):
    file = tmp_path / "case.json"
    file.write_text(json.dumps(recipe().to_json()))
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        command = [sys.executable, "-c", CHILD, str(file), "nothing"]
        done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert done.stdout.startswith(f"ConfigError: port localhost:{port} is taken"), done.stderr


@pytest.mark.parametrize(
    ("rank", "told"),
    [
        ("0", r"the processes cannot connect at localhost:\d+: .*1/2 clients joined"),
        ("5", "RANK is 5 and WORLD_SIZE 2"),
    ],
)
def test_a_rank_does_not_wait_for_ever_for_one_that_does_not_come(rank, told, monkeypatch):
    monkeypatch.setattr("hasten.distributed.launch.TOGETHER", timedelta(seconds=1))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    for name, value in {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=told), joined():
        pass


def test_a_first_rank_that_never_came_is_not_asked_for_its_process():
    watch = object.__new__(_Watch)
    watch.ranks, watch.store = Ranks(rank=1, size=2, local_rank=1, local_size=2), dist.HashStore()
    before = time.monotonic()
    assert watch._first() is None
    assert not watch._wait("reported", 0.1, by=None)
    assert time.monotonic() - before < 10, "the store waits for half an hour for what is not there"
    watch.store.set("first", "17")
    assert watch._first() == 17


def test_ranks_with_other_facts_are_named():
    class Two(Ranks):
        def texts(self, own):
            return [own, own.replace("4df1", "90aa")]

    with pytest.raises(ConfigError, match=r"rank 1 has another data than rank 0 \(90aa, not 4df1\)"):
        Two(size=2).require_same({"recipe": "{}", "data": "4df1"})
    Two(size=2).require_same({"recipe": "{}"})


def test_a_wrong_recipe_is_found_where_one_rank_tells_it(recipe, monkeypatch):
    found = []

    @contextmanager
    def watched():
        try:
            yield Ranks()
        except ConfigError as error:
            found.append(error)

    monkeypatch.setattr(session, "joined", watched)
    train(recipe(batch_size=0), progress=False)
    assert "data.batch_size is 0" in str(found[0])


CURVED = Qat(bits=4, learned_scales=False, start_bits=8, eigenvalue_steps=2)


def refuse(config, made, two):
    made.check()
    rank_checks.check_ranks(made, two)
    rank_checks.check_shares(config, made.parallel)


def test_what_does_not_fit_together_is_refused_before_anything_is_shared(recipe):
    two = Ranks(rank=0, size=2, joined=True)
    config = build.shape_config(recipe().model, vocab_size=64, positions=32)
    for made, told in [
        (recipe(zero=1, replicas=3), "parallel.replicas is 3, which 2 processes cannot share"),
        (recipe(offload="all"), "set parallel.zero to 1, 2 or 3"),
        (recipe(zero=4), "parallel.zero is 4"),
        (recipe(policy="float32-masters"), "needs techniques.precision bfloat16 or float16"),
        (recipe(zero=3, prefetch=1, layer_drop=0.5), "layer_drop skips"),
        (recipe(zero=0, prefetch=1), "parallel.prefetch has no effect with parallel.zero 0; set that too"),
        (recipe(zero=1, kind="onebit-adam", beta2=0.999), r"20 \+ 4/N bytes .* set parallel.zero 0"),
        (recipe(zero=1, tensor=2, qat=Qat(bits=4)), "qat.bits rounds whole matrices, which parallel.tensor splits"),
        (recipe(zero=1, qat=CURVED), "qat.eigenvalue_steps measures whole blocks"),
        (recipe(qat=Qat(bits=4), policy="float32-masters", precision="bfloat16"), "qat.bits trains float32 weights"),
    ]:
        with pytest.raises(ConfigError, match=told):
            refuse(config, made, two)


def test_a_part_that_one_rank_cannot_write_is_told_and_the_old_one_stays(recipe, monkeypatch, tmp_path):
    """As on two ranks: what `texts` gives is every rank's."""
    made = recipe(steps=4, checkpoint_every=2)
    train(made, progress=False)
    folder = tmp_path / "runs/tiny/checkpoints/last"
    before = (folder / "checkpoint.json").read_text()

    class Two(Ranks):
        def texts(self, own):
            return [own, "the disk is full"]

        def any(self, flag):
            return flag

    pending = checkpoints.Pending(folder, {}, {"files": {}}, ranks=Two(size=2), background=False, also=None)
    with pytest.raises(ResourceError, match="rank 1: the disk is full"):
        pending.finish()
    assert (folder / "checkpoint.json").read_text() == before


@contextmanager
def alone(monkeypatch):
    """This process, as the only one that torchrun has started."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("gloo", store=dist.PrefixStore("attempt", dist.HashStore()), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_a_run_that_starts_over_goes_on_from_its_own_checkpoints_only(recipe, monkeypatch):
    made, steps = recipe(steps=8, checkpoint_every=2), []
    train(made, progress=False)  # the old run

    def attempt(number, *, killed_at):
        """What torchrun's attempt of this number trains until it is killed: before step 1, or after another one."""

        def on_step(line):
            steps.append(line["step"])
            if line["step"] == killed_at:
                raise KeyboardInterrupt

        def begin(*given, **options):
            raise KeyboardInterrupt

        steps.clear()
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(number))
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            if killed_at == 0:
                patch.setattr(session, "set_up", begin)
            train(made, progress=False, resume="never", on_step=on_step)
        return list(steps)

    with alone(monkeypatch):
        assert attempt(0, killed_at=0) == []
        assert attempt(1, killed_at=1) == [1]  # not the old run's end
        assert attempt(2, killed_at=5) == [1, 2, 3, 4, 5]  # there was no checkpoint yet
        assert attempt(3, killed_at=None) == [5, 6, 7, 8]


@pytest.mark.slow  # nine processes, one after the other in twos and threes
def test_a_killed_rank_is_restarted_and_everything_goes_on_bit_for_bit(recipe, tmp_path):
    """`hasten train --processes 2 --max-restarts 1`, whose rank 1 is killed somewhere after a checkpoint."""
    fields = {"zero": 3, "steps": 40, "checkpoint_every": 3, "validate_every": 20, "dropout": 0.1, "accumulation": 2}
    whole, killed = recipe(name="whole", **fields), recipe(name="killed", **fields)
    ranks.train_all([whole.to_json()], tmp_path)
    command = [sys.executable, "-m", "hasten", "train", "demo", *flags(killed), "--processes", "2"]
    child = subprocess.Popen(
        [*command, "--max-restarts", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    journal = tmp_path / "runs/killed/train.jsonl"
    for _ in range(3000):
        if len(read(journal)) > 5 or child.poll() is not None:
            break
        time.sleep(0.02)
    (worker,) = [one for one in psutil.Process(child.pid).children() if one.environ().get("RANK") == "1"]
    worker.kill()
    output, errors = child.communicate(timeout=200)
    assert child.returncode == 0, errors
    assert output.count("40 steps") == 1
    assert "Traceback" not in errors
    ours, theirs = (read(tmp_path / "runs" / name / "train.jsonl") for name in ("killed", "whole"))
    assert [line["step"] for line in ours] == list(range(1, 41))
    for one, other in zip(ours, theirs, strict=True):
        assert all(one.get(key) == other.get(key) for key in ("loss", "gradient_norm", "validation_loss"))
    first, second = (tmp_path / "runs" / name / "model/model.safetensors" for name in ("killed", "whole"))
    assert first.read_bytes() == second.read_bytes()

"""Several processes that run the same Python, as torchrun would start them; what they print comes back."""

import json
import os
import subprocess
import sys
import textwrap

from hasten.distributed.launch import meeting

# Trains the recipes of a JSON file one after the other. stop_after: rank 1 is told to stop after that step. overflow:
# in that step a gradient that only rank 1 has is infinite.
TRAIN = textwrap.dedent("""
    import json, os, signal, sys
    from dataclasses import asdict
    import torch
    from hasten.distributed.placement import Sharded
    from hasten.training import display, setup
    from hasten.training.recipe import Recipe
    from hasten.training.session import train
    setup.matrix_rate = lambda dtype, **options: 1e11
    display.draw_losses = lambda *given, **options: None  # it takes longer than a tiny run
    torch.set_num_threads(1)
    collect = Sharded.collect
    for case in json.load(open(sys.argv[1])):
        def on_step(line, at=case.pop("stop_after", None)):
            if line["step"] == at and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGTERM)
        def overflowing(placement, at=case.pop("overflow", None), steps=[]):
            collect(placement)
            steps.append(1)
            if len(steps) == at and os.environ["RANK"] == "1":
                placement.worked["norm.weight"].grad[0] = float("inf")
        Sharded.collect = overflowing
        train(Recipe.from_json(case), progress=False, on_step=on_step)
""")


def start(code, *arguments, ranks, env=None):
    """The processes, and the store through which they find each other: keep it as long as they run."""
    store, environments = meeting(ranks)
    processes = []
    for rank, variables in enumerate(environments):
        own = os.environ | {"OMP_NUM_THREADS": "1"} | variables | (env or {}).get(rank, {})
        command = [sys.executable, "-c", code, *map(str, arguments)]
        processes.append(subprocess.Popen(command, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    return processes, store


def run(code, *arguments, ranks=2, env=None, timeout=400):
    """(status, output, errors) of every rank."""
    processes, store = start(code, *arguments, ranks=ranks, env=env)
    try:
        said = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    del store
    return [(process.returncode, *both) for process, both in zip(processes, said, strict=True)]


def train_all(recipes, folder, *, ranks=2):
    """Train recipes (as JSON, with what else TRAIN knows) in new processes; all must end well."""
    file = folder / "cases.json"
    file.write_text(json.dumps(list(recipes)))
    for status, _, errors in run(TRAIN, file, ranks=ranks):
        assert status == 0, errors

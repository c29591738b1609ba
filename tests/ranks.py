"""Several processes that run the same Python, as torchrun would start them; what they print comes back."""

import json
import multiprocessing
import os
import sys
import textwrap
import time
from pathlib import Path
from tempfile import TemporaryDirectory

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
                placement.optimizer_params["norm.weight"].grad[0] = float("inf")
        Sharded.collect = overflowing
        train(Recipe.from_json(case), progress=False, on_step=on_step)
""")


def run(code, *arguments, ranks=2, env=None, timeout=400):
    """(status, output, errors) of every rank. They are forked from a server that has imported torch and hasten."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "hasten.training.session"])
    store, environments = meeting(ranks)  # through which they find each other, as long as it lives
    with TemporaryDirectory() as folder:
        said = [[Path(folder) / f"{rank}-{stream}" for stream in (1, 2)] for rank in range(ranks)]
        processes = []
        for rank, variables in enumerate(environments):
            own = os.environ | {"OMP_NUM_THREADS": "1"} | variables | (env or {}).get(rank, {})
            given = (code, [str(argument) for argument in arguments], own, said[rank])
            processes.append(context.Process(target=work, args=given))
            processes[-1].start()
        end = time.monotonic() + timeout
        for process in processes:
            process.join(max(0, end - time.monotonic()))
        for process in processes:
            process.kill()
            process.join()
        del store
        return [
            (process.exitcode, *(file.read_text() for file in files))
            for process, files in zip(processes, said, strict=True)
        ]


def work(code, arguments, environment, said):
    """One rank."""
    import torch

    os.environ.clear()
    os.environ.update(environment)
    for stream, file in enumerate(said, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), stream)
    sys.argv = ["-c", *arguments]
    torch.set_num_threads(1)
    exec(compile(code, "<rank>", "exec"), {"__name__": "__main__"})


def train_all(recipes, folder, *, ranks=2):
    """Train recipes (as JSON, with what else TRAIN knows) in new processes; all must end well."""
    file = folder / "cases.json"
    file.write_text(json.dumps(list(recipes)))
    for status, _, errors in run(TRAIN, file, ranks=ranks):
        assert status == 0, errors

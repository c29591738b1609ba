"""Three training steps of tiny models of several families: in one process, or in ranks that split them."""

import json
import sys

import torch

from hasten.data import Batch
from hasten.distributed.launch import joined
from hasten.distributed.ranks import ALONE
from hasten.model.families import read_config
from hasten.model.initialize import initialize
from hasten.training.build import training_step
from hasten.training.recipe import Data, Optimizer, Parallel, Recipe, Run, Schedule, Techniques

ROWS = 4


def steps(values, ranks=ALONE, zero=0):
    """(loss, gradient norm) of each step of a model with this config.json."""
    parallel = Parallel(zero=zero, tensor=ranks.tensor)
    recipe = Recipe(
        name="split",
        data=Data(context=32, batch_size=ROWS),
        optimizer=Optimizer(learning_rate=1e-2, clip=0.1),
        schedule=Schedule(),
        techniques=Techniques(precision="float32", compile=False, keep_memory=False, pad_vocabulary_to=8),
        parallel=parallel,
        run=Run(steps=3),
    )
    step = training_step(initialize(read_config(values), seed=0), recipe, ranks=ranks)
    dice, found = torch.Generator().manual_seed(0), []
    own = slice(ranks.reader * ROWS // ranks.readers, (ranks.reader + 1) * ROWS // ranks.readers)
    for _ in range(3):
        tokens = torch.randint(0, values["vocab_size"], (ROWS, 33), generator=dice)
        targets = tokens[:, 1:].clone()
        targets[0, :20] = -100
        result = step.run([Batch(tokens[own, :-1].contiguous(), targets[own].contiguous(), None)], learning_rate=1e-2)
        found.append((result.loss.item(), result.gradient_norm.item()))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    with joined() as ranks:
        found = {name: steps(values, ranks.split(2), zero=3) for name, values in json.loads(sys.argv[1]).items()}
        print(json.dumps(found))

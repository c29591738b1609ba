"""Train with ZeRO on several processes. Losses are those of one process, whatever the stage.

    torchrun --nproc-per-node 2 examples/07_zero.py [STEPS] [STAGE]
    python examples/07_zero.py                         # the same script on one process, without sharing

On GPUs each process takes the device of its number (NCCL), on CPUs they talk over gloo.
"""

import os
import sys
import tempfile

import hasten
from hasten.training import Data, Optimizer, Parallel, Recipe, Run, Schedule, Shape, Techniques

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 20
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
# 1 shares the optimizer's states, 2 the gradients too, 3 the weights too; 0 keeps everything on every rank (DDP).
STAGE = int(sys.argv[2]) if len(sys.argv) > 2 else 3

# One folder that all ranks see: torchrun gives them the same run id and port.
folder = os.path.join(tempfile.gettempdir(), f"hasten-zero-{os.environ.get('MASTER_PORT', os.getpid())}")
recipe = Recipe(
    name="zero",
    model=Shape(layers=2, hidden_size=128, heads=4),
    data=Data(limit_bytes=1_000_000, vocab_size=512, context=128, batch_size=8),  # rows of all ranks together
    optimizer=Optimizer(learning_rate=1e-3),
    schedule=Schedule(warmup_steps=5),
    techniques=Techniques(compile=False),  # compiling takes longer than these few steps
    parallel=Parallel(zero=STAGE if RANKS > 1 else 0),
    run=Run(steps=STEPS, folder=folder, validate_every=STEPS, checkpoint_every=STEPS),
)


def show(line: dict) -> None:
    if RANK == 0 and line["step"] % 5 == 0:
        print(f"step {line['step']}: loss {line['loss']:.3f}, {line['tokens_per_second']:,.0f} tokens/s")


result = hasten.train(recipe, progress=False, resume="never", on_step=show)
if RANK == 0:
    print(f"validation loss {result.validation_loss:.3f}; the model, whole: {result.model_folder}")

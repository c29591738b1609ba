"""A tiny model, plainly trained and as one function, whose steps are recorded and replayed."""

from dataclasses import replace

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hasten.data import Batch
from hasten.distributed.placement import Placement
from hasten.model.initialize import initialize
from hasten.training import RECIPES, build
from hasten.training.capture import CapturedStep
from hasten.training.optimizers import make_optimizer
from hasten.training.precision import Precision
from hasten.training.step import TrainStep
from hasten.training.whole import WholeModel

WORDS, TOKENS = 250, 16


class Recorder(TorchDispatchMode):
    """What a CUDA graph does, on a CPU: tensor operations are noted, and later run again on the same memory.

    No Python runs again: a number that the host counts, or a tensor it makes, would stay as recorded.
    """

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.calls.append(tree_map(_detached, (function, args, kwargs or {}, result)))
        return result

    @torch.no_grad()
    def replay(self):
        for function, args, kwargs, result in self.calls:
            fresh = function(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(fresh), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)  # a graph writes where it wrote before


def _detached(value):
    return value.detach() if isinstance(value, torch.Tensor) else value


def recorded(step):
    """Stands in for `capture_graph`: a capture runs nothing, so what it changed is put back."""

    def capture(run, pool):
        kept = [(tensor, tensor.clone()) for tensor in _tensors(step)]
        recorder = Recorder()
        with recorder:
            run()
        for tensor, before in kept:
            tensor.copy_(before)
        step.recordings = [*getattr(step, "recordings", []), recorder]
        return recorder.replay, pool

    return capture


def _tensors(step):
    found = [parameter.data for parameter in step.parameters]
    for parameter in step.parameters:
        found += step.optimizer.state[parameter].values()
    if step.whole.copies is not None:
        found += [copy for _, copy in step.whole.copies.pairs()]
        found += [] if step.whole.copies.fp8 is None else [step.whole.copies.fp8.largest]
    found += [step.total, step.norm, *(step.sums or [])]
    return list({id(one): one for one in found}.values())


def make(kind, *, family="gpt2", dtype="float32", dropout=0.0, device="cpu", **options):
    """A step of one kind: "plain", "whole" (its loss uncaptured), "uncaptured" or "captured" (recorded on a CPU)."""
    recipe = RECIPES["gpt2-124m"]
    shape = replace(recipe.model, family=family, layers=2, hidden_size=32, heads=2)
    recipe = replace(recipe, dropout=dropout, model=shape)
    config = build.shape_config(recipe.model, vocab_size=WORDS, positions=TOKENS)
    model = initialize(build.training_config(recipe, config), seed=0, device=torch.device(device))
    model.bind(loss="chunked" if device == "cpu" else None)
    precision, where = Precision(dtype, device), Placement(model)
    optimizer = make_optimizer(where, replace(recipe.optimizer, learning_rate=1e-2), fused=True)
    if kind == "plain":
        return TrainStep(model, optimizer, precision, placement=where)
    where.module = whole = WholeModel(model, dtype=precision.dtype, compiles=options.pop("compiles", False))
    if kind == "whole":
        return TrainStep(model, optimizer, precision, placement=where)
    step = CapturedStep(
        model, optimizer, precision, placement=where, whole=whole, captures=kind == "captured", **options
    )
    if device == "cpu":
        step.capture = recorded(step)
    return step


def batches(steps, micro=1, rows=2, seed=1):
    """The micro-batches of each step; some tokens have no target."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        found = []
        for _ in range(micro):
            drawn = torch.randint(WORDS, (rows, TOKENS + 1), generator=generator)
            inputs, targets = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
            targets[0, -2:] = -100
            found.append(Batch(inputs, targets, None))
        yield found


def train(step, steps=5, micro=1, **sizes):
    """Losses and norms of some steps, whose learning rate falls."""
    found = []
    for number, batch in enumerate(batches(steps, micro, **sizes)):
        result = step.run(batch, learning_rate=1e-2 / (number + 1))
        found.append((result.loss.item(), result.gradient_norm.item()))
    return found

"""Sign-gradient rounding (arXiv 2309.05516): rounding offsets and scales tuned by what a whole block puts out.

Each weight is rounded as s·(clip(round(w/s + v) + z) - z). The offsets v in [-½, ½] and the ends of each group's range
are moved by the sign of their gradient, a fixed and falling step at a time, so that the block's outputs come nearest to
those of the block before quantization. Nothing but the integers, scales and zeros that come out is stored.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import pad

from hasten.checks import whole
from hasten.errors import ConfigError
from hasten.model.layer_format import activation_group
from hasten.ops.linear import QuantizedWeight, empty_weight
from hasten.quantization.gptq import InputStatistics, output_error
from hasten.quantization.rounding import Grid, rounded_activations
from hasten.quantization.sequential import BlockTask
from hasten.quantization.walk import Call, inputs_of, outputs, passes, stages

NARROWEST, WIDEST = 0.5, 1.5  # how far a group's range may move from the one that rounding to nearest searched
SAVE_EVERY = 20  # steps


@dataclass(frozen=True, slots=True, kw_only=True)
class SignRounding:
    """Settings of the method.

    steps: of tuning for each block; their size falls from 1/steps to 0 along a line. batch: calibration samples of a
    step. seed: which samples a step looks at.

    Blocks are tuned on what the quantized blocks before them give, towards the outputs of the model before.
    """

    needs_before: ClassVar[bool] = True  # the targets are outputs of the model before quantization
    steps: int = 200
    batch: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch"):
            whole(name, getattr(self, name))

    def quantize_block(self, task: BlockTask) -> None:
        """Tune all layers of the block together; the head, whose outputs are no state, is rounded to nearest."""
        if torch.is_inference_mode_enabled():
            raise ConfigError("sign rounding needs gradients, which torch.inference_mode() forbids: use no_grad()")
        if not task.prefix:
            nearest_weights = {name: task.nearest(name) for name in task.layers}
            errors = output_errors(task, nearest_weights)
            for name, weight in nearest_weights.items():
                task.place(name, weight, note="rounded to nearest", **errors.get(name, {}))
            return
        assert task.calls_before is not None
        targets = list(outputs(task.before, task.calls_before))
        tuned = {name: TunedLinear(task, name) for name in task.layers}
        for name, module in tuned.items():
            task.block.set_submodule(name, module)

        def measured() -> float:
            for module in tuned.values():
                module.hold()
            return block_loss(task.block, task.calls, targets)

        nearest = measured()
        if not math.isfinite(nearest):
            raise ConfigError(
                "the calibration samples give NaN or infinite outputs; this checkpoint cannot be calibrated"
            )
        best = self._tune(task, tuned, targets)
        last = [tensor.clone() for tensor in _parameters(tuned)]
        loss = measured()
        _set(tuned, best)
        of_best = measured()
        if loss < of_best:
            _set(tuned, last)
        else:
            loss = of_best
        note = f"block error {loss / max(nearest, 1e-30):.3f} of rounding to nearest"
        if not loss <= nearest:  # of all samples: tuning saw a few at a time; and NaN is no gain
            note = "tuning found nothing better than rounding to nearest"
            for module in tuned.values():
                module.reset()
        weights = {name: module.quantized() for name, module in tuned.items()}
        errors = output_errors(task, weights)
        for name, weight in weights.items():
            task.place(name, weight, note=note if name == next(iter(tuned)) else "", **errors.get(name, {}))

    def _tune(self, task: BlockTask, tuned: dict[str, "TunedLinear"], targets: Sequence[Tensor]) -> list[Tensor]:
        """Move the parameters; returns those of the step with the least loss. An interrupted tuning goes on."""
        parameters, rows = _parameters(tuned), [row for target in targets for row in target]
        run = task.run
        assert run is not None
        best, least, first = [tensor.clone() for tensor in parameters], float("inf"), 0
        if task.saved is not None and (saved := task.saved.load_tuning(task.prefix)) is not None:
            first, least = int(saved["step"]), float(saved["least"])
            for i, (tensor, kept) in enumerate(zip(parameters, best, strict=True)):
                tensor.copy_(saved[f"now.{i}"])
                kept.copy_(saved[f"best.{i}"])

        @torch.enable_grad()
        def gradients_of(part: Tensor) -> tuple[float, tuple[Tensor | None, ...]]:
            target = torch.stack([rows[index] for index in part.tolist()])
            own = _squared_error(run(task.block, samples=part), target)
            held = [module.held for module in tuned.values()]
            return float(own.detach()), torch.autograd.grad(own, held, allow_unused=True)

        for step in range(first, self.steps):
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
            chosen = torch.randperm(len(rows), generator=generator)[: self.batch]
            with torch.enable_grad():
                weights = [module.hold() for module in tuned.values()]
            sums, loss = [torch.zeros_like(weight) for weight in weights], 0.0
            for own, found in passes(task.block, chosen.split(1), gradients_of):
                loss += own
                for total, gradient in zip(sums, found, strict=True):
                    if gradient is not None:  # an expert may see nothing
                        total.add_(gradient)
            gradients = torch.autograd.grad(weights, parameters, sums)
            if loss < least:
                least = loss
                for kept, tensor in zip(best, parameters, strict=True):
                    kept.copy_(tensor)
            size = (1 - step / self.steps) / self.steps
            for tensor, gradient in zip(parameters, gradients, strict=True):
                tensor.sub_(gradient.sign(), alpha=size)
            for module in tuned.values():
                module.clamp()
            task.progress(step + 1, self.steps)
            if task.saved is not None and (step + 1) % SAVE_EVERY == 0 and step + 1 < self.steps:
                now = {f"now.{i}": tensor for i, tensor in enumerate(parameters)}
                kept_too = {f"best.{i}": tensor for i, tensor in enumerate(best)}
                numbers = {"step": torch.tensor(step + 1), "least": torch.tensor(least, dtype=torch.float64)}
                task.saved.save_tuning(task.prefix, numbers | now | kept_too)
        return best


class TunedLinear(nn.Module):
    """A linear layer whose weight is rounded anew in each step; its gradient leads to how."""

    def __init__(self, task: BlockTask, name: str) -> None:
        super().__init__()
        linear = task.before.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        self.grid, self.dtype = task.grid(name), task.dtype
        weight = linear.weight.detach()
        self.activation_group = activation_group(task.layers[name], weight.shape[1])
        self.size = tuple(weight.shape)
        n, k = weight.shape
        self.group = self.grid.format.group_size or k
        groups = self.grid.format.groups(k)
        self.weight = pad(weight.float(), (0, groups * self.group - k)).unflatten(1, (groups, self.group))  # (N, G, g)
        self.bias = None if linear.bias is None else linear.bias.detach().to(task.dtype)
        self.scale, self.zero = self.grid.choose(self.weight)
        self.offset = torch.zeros_like(self.weight).requires_grad_()
        self.low = torch.ones(n, groups, 1, device=weight.device).requires_grad_()
        self.high = torch.ones_like(self.low).requires_grad_()
        self.held: Tensor

    def parameters_of_rounding(self) -> list[Tensor]:
        """The offsets, and of each group's range the ends: one factor where it is symmetric."""
        return [self.offset, self.high] if self.grid.format.symmetric else [self.offset, self.low, self.high]

    def clamp(self) -> None:
        """Bring everything back into its range."""
        self.offset.clamp_(-0.5, 0.5)
        self.low.clamp_(NARROWEST, WIDEST)
        self.high.clamp_(NARROWEST, WIDEST)

    def reset(self) -> None:
        """Back to rounding to nearest."""
        self.offset.zero_()
        self.low.fill_(1)
        self.high.fill_(1)

    def grids(self) -> tuple[Tensor, Tensor | float]:
        """Scale and zero of each group as they will be stored, (N, G, 1)."""
        if self.grid.format.symmetric:
            return _as_stored(self.scale * self.high, self.grid), self.zero
        lowest = -self.zero * self.scale
        highest = (self.grid.highest - self.zero) * self.scale
        scale = _as_stored((highest * self.high - lowest * self.low) / self.grid.highest, self.grid)
        return scale, _straight(-lowest * self.low / scale, torch.round).clamp(0, self.grid.highest)

    def integers(self, scale: Tensor, zero: Tensor | float) -> Tensor:
        """The integers, (N, G, group), as floats."""
        found = _straight(self.weight / scale + self.offset, torch.round) + zero
        return found.clamp(self.grid.lowest, self.grid.highest)

    def hold(self) -> Tensor:
        """Round the weight for all passes up to the next call; returns it (N, K), with gradients for how."""
        scale, zero = self.grids()
        weight = ((self.integers(scale, zero) - zero) * scale).flatten(1)[:, : self.size[1]]
        self.held = weight.detach().to(self.dtype).requires_grad_()
        return weight

    def forward(self, x: Tensor) -> Tensor:
        if self.activation_group:
            x = rounded_activations(x, self.activation_group)
        return F.linear(x, self.held.to(x.dtype), self.bias)

    @torch.no_grad()
    def quantized(self) -> QuantizedWeight:
        """What is stored."""
        scale, zero = self.grids()
        n, k = self.size
        found = empty_weight((n, k), self.grid.format, self.weight.device)
        found.values.copy_(self.integers(scale, zero).flatten(1)[:, :k])
        found.scales.copy_(scale.squeeze(-1))
        if found.zeros is not None:
            assert isinstance(zero, Tensor)
            found.zeros.copy_(zero.squeeze(-1))
        return found


def output_errors(task: BlockTask, weights: Mapping[str, QuantizedWeight]) -> dict[str, dict[str, float]]:
    """How far off each layer's outputs are on the block's inputs, and those of rounding to nearest; not of experts."""
    found = {}
    plain = [name for name in weights if ".experts." not in name]
    for names in stages(task.block, plain, task.calls[0]):
        exact = {name: task.weight(name) for name in names}
        first = exact[names[0]]
        inputs = InputStatistics(first.shape[1], device=first.device)
        for x in inputs_of(task.block, names[0], task.calls):
            inputs.add(x)
        inputs.finish()
        for name in names:
            ours, nearest = (output_error(exact[name], q, inputs.gram) for q in (weights[name], task.nearest(name)))
            found[name] = {"output_error": ours, "nearest_output_error": nearest}
    return found


def block_loss(block: nn.Module, calls: Sequence[Call], targets: Sequence[Tensor]) -> float:
    """The squared error of a block's outputs on all calibration samples."""

    def work(pair: tuple[Call, Tensor]) -> float:
        call, target = pair
        return float(_squared_error(call(block), target))

    return sum(passes(block, list(zip(calls, targets, strict=True)), work))


def _squared_error(found: Tensor, target: Tensor) -> Tensor:
    return (found.float() - target.float()).square().sum()


def _parameters(tuned: dict[str, TunedLinear]) -> list[Tensor]:
    return [tensor for module in tuned.values() for tensor in module.parameters_of_rounding()]


def _set(tuned: dict[str, TunedLinear], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(_parameters(tuned), values, strict=True):
        tensor.data.copy_(value)


def _straight(x: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """fn(x), with the gradient of x itself."""
    return x + (fn(x) - x).detach()


def _as_stored(scale: Tensor, grid: Grid) -> Tensor:
    return _straight(scale, lambda exact: exact.to(grid.format.scale_dtype).float())

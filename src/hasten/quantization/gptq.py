"""GPTQ (arXiv 2210.17323): round the columns of a weight one after the other, and spread each error over the rest.

For a layer's inputs X (tokens, K) it looks for integers whose weight Q has the least |X·(W - Q)ᵀ|², which depends on X
through H = XᵀX alone. With U upper triangular and H⁻¹ = UᵀU, the error e = (w - q)/U[i, i] of column i is compensated
best by subtracting e·U[i, j] from every later column j. What remains of it is |e|²: so the scale of a group is the one
with the least Σ ((w - q)/U[i, i])² over its columns.

On a CPU the columns are rounded in one native call (ops/rounding/rounding.cpp); `Solver._columns` is its reference.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Literal, get_args

import torch
from torch import Tensor

from hasten.errors import ConfigError
from hasten.machine.pages import return_freed_memory
from hasten.ops.linear import QuantizedWeight, empty_weight
from hasten.quantization.block_task import BlockTask
from hasten.quantization.blocks import TILE, add_product, each_slice, on_one_thread, root_of_shares
from hasten.quantization.rounding import Grid, check_matrix, native_rounding
from hasten.quantization.walk import Call, inputs_of, inputs_of_each, rows_calls, stages

Order = Literal["columns", "activation", "groups"]

COLUMNS = 128  # columns whose errors are gathered before they are spread over the columns after them
ROWS = 1024  # rows of a weight that one thread rounds; rows are independent
NATIVE_ROWS = 128  # the same in the native operator, two of its tiles
LEAST_ROWS = 128  # tokens that an expert must have seen to be calibrated
ERROR_ROWS = 512  # outputs of a weight that are compared for the report
ATTEMPTS = 8  # at a factorisation, with ten times the damping each time


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTQ:
    """Settings of the method.

    order: the order in which columns are rounded. "columns": as stored. "activation": largest inputs first. "groups":
    the groups with the largest inputs first, and their columns likewise (a group stays together, so that its scale is
    chosen when all earlier errors are known). What is stored does not depend on it.
    damping: added to the diagonal of H, as a share of its mean; ten times more until H can be factorised.
    gptaq: aim at the layer's output in the original model instead of the exact weight's output for the quantized
    inputs (GPTAQ, arXiv 2504.02692). It takes a second copy of the samples.
    """

    order: Order = "groups"
    damping: float = 0.01
    gptaq: bool = False

    def __post_init__(self) -> None:
        if self.order not in get_args(Order):
            raise ConfigError(f"order must be one of {', '.join(get_args(Order))}; found {self.order!r}")
        if not 0 <= self.damping <= 1:
            raise ConfigError(f"damping must be from 0 to 1; found {self.damping!r}")

    def quantize_block(self, task: BlockTask) -> None:
        """Quantize a block: layers with the same input share its statistics; experts come last, one by one."""
        experts: dict[str, list[str]] = {}
        plain: list[str] = []
        for name in task.layers:
            found = re.match(r"(mlp\.experts\.\d+)\.", name)
            (experts.setdefault(found[1], []) if found else plain).append(name)
        self._stages(task, "", plain, task.calls, task.calls_before)
        rows = inputs_of_each(task.block, list(experts), task.calls) if experts else {}
        for prefix, names in experts.items():
            parts = rows.pop(prefix)
            seen = sum(len(part) for part in parts)
            if seen >= LEAST_ROWS:
                # In the original model other tokens came here: there is no drift to correct.
                self._stages(task, f"{prefix}.", names, rows_calls(parts), None)
                continue
            for name in names:
                task.place(name, task.nearest(name), note=f"{seen} calibration tokens came here: rounded to nearest")

    def _stages(
        self,
        task: BlockTask,
        prefix: str,
        names: Sequence[str],
        calls: Sequence[Call],
        calls_before: Sequence[Call] | None,
    ) -> None:
        """Quantize layers of a block, or of its submodule `prefix`. calls: run that module."""
        module, before = (whole.get_submodule(prefix.rstrip(".")) for whole in (task.block, task.before))
        own = [name.removeprefix(prefix) for name in names]
        for stage in stages(module, own, calls[0]):
            weight = task.weight(prefix + stage[0])
            inputs = InputStatistics(weight.shape[1], drift=calls_before is not None, device=weight.device)
            exact = repeat(None, len(calls)) if calls_before is None else inputs_of(before, stage[0], calls_before)
            for x, x_before in zip(inputs_of(module, stage[0], calls), exact, strict=True):
                inputs.add(x, x_before)
            inputs.finish()
            return_freed_memory()  # of the samples' activations, before matrices are allocated
            solvers: dict[int, Solver] = {}
            for name in (prefix + one for one in stage):
                grid = task.grid(name)
                size = grid.format.group_size
                if size not in solvers:
                    solvers[size] = Solver(inputs, self, size)
                rounded = solvers[size].round(task.weight(name), grid)
                errors = [output_error(task.weight(name), q, inputs.gram) for q in (rounded, task.nearest(name))]
                task.place(name, rounded, output_error=errors[0], nearest_output_error=errors[1])


class InputStatistics:
    """H = XᵀX of a layer's inputs X, and (X_before - X)ᵀX if the inputs before quantization are given too."""

    def __init__(
        self,
        features: int,
        *,
        drift: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        self.gram = torch.zeros(features, features, dtype=dtype, device=device)
        self.drift = torch.zeros_like(self.gram) if drift else None

    def add(self, x: Tensor, before: Tensor | None = None) -> None:
        """Add inputs (T, K), in the order of the calls."""
        wide = x.to(self.gram.dtype)
        add_product(self.gram, wide, wide)
        if self.drift is not None and before is not None:
            add_product(self.drift, before.to(wide.dtype) - wide, wide)

    def finish(self) -> None:
        """Fill the upper half; call it once, after all inputs."""
        for start in range(0, len(self.gram), TILE):
            stop = start + TILE
            own = self.gram[start:stop, start:stop].tril()
            self.gram[start:stop, start:stop] = own + own.tril(-1).T
            self.gram[start:stop, stop:] = self.gram[stop:, start:stop].T


class Solver:
    """Everything that depends on the inputs alone, shared by the weights that see them: order, damping and U (K, K)."""

    def __init__(self, inputs: InputStatistics, settings: GPTQ, group_size: int) -> None:
        gram = inputs.gram
        diagonal = gram.diagonal().clone()
        if not torch.isfinite(diagonal).all():  # the diagonal sees every input
            raise ConfigError(
                "the calibration samples give NaN or infinite inputs; this checkpoint cannot be calibrated"
            )
        self.dead = diagonal == 0  # inputs that are always 0: their columns have no effect, and become 0
        self.group_size = group_size or len(gram)
        self.order = column_order(diagonal, settings.order, self.group_size)
        # In reverse order, so that the flipped inverse of H's factor is U (see below).
        back = self.order.flip(0)
        mean = float(on_one_thread(torch.where(self.dead, 1, diagonal).mean))
        self.damping = settings.damping
        for _ in range(ATTEMPTS):
            damped = gram[back[:, None], back]
            damped.diagonal().add_(self.dead[back].to(gram.dtype) + self.damping * mean)
            factor = _factor(damped)
            if factor is not None:
                break
            self.damping = max(self.damping, 1e-4) * 10
        else:
            raise ConfigError("its inputs cannot be factorised, however damped; give more calibration text")
        del damped
        inverse = torch.zeros_like(factor)
        on_one_thread(partial(_invert_lower, factor, inverse))
        del factor
        # H = R·Rᵀ with R upper triangular; U = R⁻¹. Row j: the factors of earlier columns' errors in column j.
        inverse = inverse.flip(0, 1)
        self.lower = inverse.T.contiguous()
        self.drift = None if inputs.drift is None else inputs.drift[self.order][:, self.order]

    def round(self, weight: Tensor, grid: Grid) -> QuantizedWeight:
        """Round a weight (N, K), in the precision of the statistics. Raises ConfigError for NaN and infinity in it."""
        check_matrix(weight)
        rounded = empty_weight((weight.shape[0], weight.shape[1]), grid.format, weight.device)
        native = native_rounding(weight.device) if self.lower.dtype == torch.float32 else None

        def work(rows: slice) -> None:
            w, own = self._ordered(weight[rows]), rounded.rows(rows)
            inputs = (w, self.lower, self.order, self.group_size)
            if not (native and native.round_columns(*inputs, *grid.native_arguments(own))):
                self._columns(w, grid, own)

        each_slice(weight, ROWS if native is None else NATIVE_ROWS, work)
        return rounded

    def _ordered(self, weight: Tensor) -> Tensor:
        """Some rows of a weight as they are rounded: (K, R), so that columns are contiguous, and in their order."""
        w = weight.to(self.lower.dtype)
        w = torch.where(self.dead, 0, w)[:, self.order]
        if self.drift is not None:  # the best unrounded weight: W·(XX̃ᵀ)·(X̃X̃ᵀ)⁻¹, with X - X̃ the drift
            w = w + w @ self.drift @ self.lower @ self.lower.T
        return w.T.contiguous()

    def _columns(self, w: Tensor, grid: Grid, rounded: QuantizedWeight) -> None:
        """Round the columns w (K, R) of some rows, one after the other."""
        places = self.order.tolist()
        groups: dict[int, tuple[Tensor, Tensor | float]] = {}  # scale and zero (R), by group
        for start in range(0, len(w), COLUMNS):
            stop = min(start + COLUMNS, len(w))
            errors = w.new_zeros(stop - start, w.shape[1])
            for i in range(start, stop):
                done, place = i - start, places[i]
                group = place // self.group_size
                if group not in groups:
                    columns = (self.order // self.group_size == group).nonzero().squeeze(1)  # in their order
                    now = w[columns] - self.lower[columns, start:i] @ errors[:done]
                    groups[group] = self._choose(now, columns, grid, rounded, group)
                scale, zero = groups[group]
                column = torch.addmv(w[i], errors[:done].T, self.lower[i, start:i], alpha=-1)
                value = grid.round(column, scale, zero)
                rounded.values[:, place] = value.to(rounded.values.dtype)
                torch.sub(column, (value - zero) * scale, out=errors[done]).div_(self.lower[i, i])
            w[stop:].addmm_(self.lower[stop:, start:stop], errors, alpha=-1)

    def _choose(
        self, now: Tensor, columns: Tensor, grid: Grid, rounded: QuantizedWeight, group: int
    ) -> tuple[Tensor, Tensor | float]:
        """Choose the scale (R) and the zero of a group. now (group, R): its columns with earlier errors."""
        remaining = 1 / self.lower.diagonal()[columns]
        scale, zero = grid.choose(now.T.unsqueeze(1).float(), remaining.float().unsqueeze(0))
        rounded.scales[:, group] = scale.flatten().to(rounded.scales.dtype)
        if rounded.zeros is None:
            return scale.flatten().to(now.dtype), zero
        assert isinstance(zero, Tensor)
        rounded.zeros[:, group] = zero.flatten().to(torch.uint8)
        return scale.flatten().to(now.dtype), zero.flatten().to(now.dtype)


def column_order(diagonal: Tensor, order: Order, group_size: int) -> Tensor:
    """The order in which columns are rounded, int64 (K,). diagonal: that of H, (K,)."""
    if order == "columns":
        return torch.arange(len(diagonal), device=diagonal.device)
    by_size = torch.argsort(diagonal, descending=True, stable=True)
    if order == "activation":
        return by_size
    largest = torch.stack([part.max() for part in diagonal.split(group_size)])
    rank = torch.argsort(torch.argsort(largest, descending=True, stable=True))
    return by_size[torch.argsort(rank[by_size // group_size], stable=True)]


def _factor(gram: Tensor) -> Tensor | None:
    """L, lower triangular with L·Lᵀ = H; None if H is not positive definite, by rounding."""
    factor, info = on_one_thread(lambda: torch.linalg.cholesky_ex(gram))
    # NaN reaches the diagonal from every row, so the rest need not be checked.
    return None if bool(info) or not bool(torch.isfinite(factor.diagonal()).all()) else factor


def _invert_lower(matrix: Tensor, inverse: Tensor) -> None:
    """Write the inverse of a lower triangular matrix by quarters, in half the time of solving for the identity."""
    half = len(matrix) // 2
    if half < 128:
        identity = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        inverse.copy_(torch.linalg.solve_triangular(matrix, identity, upper=False))
        return
    first, last = slice(0, half), slice(half, None)
    _invert_lower(matrix[first, first], inverse[first, first])
    _invert_lower(matrix[last, last], inverse[last, last])
    below = matrix[last, first] @ inverse[first, first]
    inverse[last, first].addmm_(inverse[last, last], below, beta=0, alpha=-1)


def output_error(weight: Tensor, rounded: QuantizedWeight, gram: Tensor) -> float:
    """Relative error of a layer's outputs, |X·(W - Q)ᵀ| / |X·Wᵀ|, for inputs with XᵀX = gram.

    Layers with many outputs are sampled evenly.
    """
    every = slice(None, None, -(-len(weight) // ERROR_ROWS))
    weight, rounded = weight[every], rounded.rows(every)

    def work(rows: slice) -> tuple[float, float]:
        exact = weight[rows].to(gram.dtype)
        wrong = exact - rounded.rows(rows).dequantize(gram.dtype)
        error, whole = (max(0.0, float(((part @ gram) * part).sum())) for part in (wrong, exact))
        return error, whole

    return root_of_shares(each_slice(weight, ROWS, work))

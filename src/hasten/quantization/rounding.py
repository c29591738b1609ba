"""Round to nearest: the integers and scales of a weight matrix, and the search for good scales.

Every scale is rounded to its stored dtype before the integers are chosen, so that they fit the scale that a kernel
reads. On a CPU ops/rounding/rounding.cpp does the same, 16 rows at a time; what is here is its reference.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from hasten.errors import ConfigError
from hasten.ops.linear import QuantizedWeight, WeightFormat, empty_weight
from hasten.ops.native import library
from hasten.quantization.blocks import each_block

Search = Literal["minmax", "mse"]

GROUP_SIZES = (32, 64, 128, 0)  # 0: a row
SCALE_DTYPES = (torch.float16, torch.bfloat16)

GROUPED = ("int4", "int3", "int2")

# Factors by which the search shrinks a group's range. At 4 bits normally distributed weights want about 0.85 in groups
# of 128 and 0.95 in groups of 32. Steps of half the size found 0.3% less error in twice the time.
SHRINK = tuple(1.0 - 0.04 * i for i in range(16))
SHRINKS = {4: 8, 3: 12, 2: 16}  # how many of them are tried, by bits: the fewer bits, the more clipping helps


def round_weight(weight: Tensor, format: WeightFormat, *, search: Search = "mse") -> QuantizedWeight:
    """Round a weight (N, K) of any float dtype to nearest, and choose its scales.

    If K is not a multiple of the group, the last group of a row is shorter.

    int8: the scale is max |group| / 127, so nothing is clipped, and every element is at most half a step off. Fewer
    bits, symmetric: the zero is the middle of the integers; else each group has its own zero point, and its range
    always holds 0. search "minmax": the range covers the group, and every element is at most half a step off. "mse": of
    that range and smaller ones the one with the least squared error, which clips a few outliers in favour of the rest;
    a symmetric scale may then be negative. In symmetric groups of 4 bits the squared error of a weight w
    has the weight rms + |w| (rms: that of its group; an idea of llama.cpp's k-quants): published models lose less.
    Whole rows and fewer bits were not compared.

    Groups of zeros stay exactly zero. Raises ConfigError for NaN and infinity, for formats that are not integers, and
    if a scale exceeds the largest number of its dtype.
    """
    check_matrix(weight)
    grid = Grid(format, search)
    n, k = weight.shape
    size, groups = format.group_size or k, format.groups(k)
    rounded = empty_weight((n, k), format, weight.device)
    native = native_rounding(weight.device)

    def work(rows: slice) -> None:
        own = weight[rows].float()
        if native and native.round_groups(own, size, grid.by_size, *grid.native_arguments(rounded.rows(rows))):
            return
        # Zeros at the end change neither a range that holds 0 nor an error.
        grouped = pad(own, (0, groups * size - k)).unflatten(1, (groups, size))
        scale, zero = grid.choose(grouped)
        rounded.values[rows] = grid.round(grouped, scale, zero).flatten(1)[:, :k].to(rounded.values.dtype)
        rounded.scales[rows] = scale.squeeze(-1).to(format.scale_dtype)
        if rounded.zeros is not None:
            assert isinstance(zero, Tensor)
            rounded.zeros[rows] = zero.squeeze(-1).to(torch.uint8)

    each_block(weight, work)
    return rounded


class Grid:
    """The integers of a format, and the choice of scales (and zeros) for groups of numbers."""

    def __init__(self, format: WeightFormat, search: Search = "mse") -> None:
        if format.element == "int8":
            fits, self.lowest, self.highest = format.symmetric, -127, 127
        else:
            fits, self.lowest, self.highest = format.element in GROUPED, 0, (1 << format.bits) - 1
        if not fits or format.zero == "minimum" or len(format.scales) != 1:
            raise ConfigError(f"hasten rounds to symmetric int8 and to {', '.join(GROUPED)}; found {format!r:.80}")
        if format.element != "int8" and format.group_size not in GROUP_SIZES:
            raise ConfigError(
                f"group_size must be one of {', '.join(map(str, GROUP_SIZES))}; found {format.group_size!r}"
            )
        if search not in ("minmax", "mse"):
            raise ConfigError(f"search must be minmax or mse; found {search!r}")
        if format.element != "int8" and format.scale_dtype not in SCALE_DTYPES:
            raise ConfigError(
                f"the scales of {format.element} are stored in float16 or bfloat16; found {format.scale_dtype}"
            )
        self.format, self.search = format, search

    @property
    def shrink(self) -> tuple[float, ...]:
        """Factors by which the search shrinks a group's range; none where the range is taken as it is."""
        searched = self.format.element != "int8" and self.search == "mse"
        return SHRINK[: SHRINKS[self.format.bits]] if searched else ()

    @property
    def by_size(self) -> bool:
        """Whether `round_weight` gives errors of larger weights more weight."""
        return self.format.symmetric and self.format.bits == 4 and bool(self.format.group_size)

    def native_arguments(self, rounded: QuantizedWeight) -> tuple[Any, ...]:
        """The last arguments of the native operators, which write these rows of a weight."""
        return self.format.bits, list(self.shrink), rounded.values, rounded.scales, rounded.zeros

    def choose(self, groups: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor | float]:
        """Choose the scale (R, G, 1) in float32 and the zero (the same shape, or a number) of groups (R, G, group).

        weights (G, group): factors of the errors in the search, instead of those of `round_weight`.
        """
        if self.format.element == "int8":
            largest = groups.abs().amax(dim=-1, keepdim=True)
            _check_finite(largest)
            return stored_scale(largest / 127, self.format.scale_dtype), 0.0
        return self._search(groups, weights)

    def round(self, w: Tensor, scale: Tensor, zero: Tensor | float) -> Tensor:
        """The nearest integers, as floats."""
        return (w / scale).round_().add_(zero).clamp_(self.lowest, self.highest)

    def _search(self, w: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | float]:
        low, high = w.amin(dim=-1, keepdim=True).clamp_(max=0), w.amax(dim=-1, keepdim=True).clamp_(min=0)
        _check_finite(low)
        _check_finite(high)
        best = self._range(low, high)
        if not self.shrink:
            return best
        buffers = torch.empty_like(w), torch.empty_like(w)
        if weights is None and self.by_size:
            weights = (w.square().mean(dim=-1, keepdim=True).sqrt_() + w.abs()).sqrt_()
        least = self._error(w, *best, weights, buffers)
        for factor in self.shrink:
            zero: Tensor | float = self.format.middle
            if self.format.symmetric:
                scale = self._signed_range(low, high, factor)
            else:
                scale, zero = self._range(low * factor, high * factor)
            error = self._error(w, scale, zero, weights, buffers)
            better = error < least
            least = torch.where(better, error, least)
            zero = zero if self.format.symmetric else torch.where(better, zero, best[1])
            best = torch.where(better, scale, best[0]), zero
        return best

    def _range(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor | float]:
        """Scale (as stored, in float32) and zero of a range that covers [low, high], which holds 0."""
        if self.format.symmetric:
            # Half a step more on either side: the largest positive value is then half a step off.
            steps = self.format.middle - 0.5
            return stored_scale(torch.maximum(-low, high) / steps, self.format.scale_dtype), self.format.middle
        scale = stored_scale((high - low) / self.highest, self.format.scale_dtype)
        return scale, (-low / scale).round_().clamp_(0, self.highest)

    def _signed_range(self, low: Tensor, high: Tensor, factor: float) -> Tensor:
        """The scale that maps the lowest integer to the group's extreme value (negative if that is positive).

        The idea is from llama.cpp's Q4_0: no integer is wasted; 4 to 6% less error than with positive scales alone.
        """
        scale = stored_scale(torch.maximum(-low, high) * (factor / self.format.middle), self.format.scale_dtype)
        return torch.where(high > -low, -scale, scale)

    def _error(
        self, w: Tensor, scale: Tensor, zero: Tensor | float, weights: Tensor | None, buffers: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Root of the squared error of each group, (R, G, 1)."""
        exact, rounded = buffers
        torch.mul(w, 1 / scale, out=exact)
        torch.round(exact, out=rounded)
        lowest: Any = 0 - zero  # a number, or a tensor if each group has its own
        highest: Any = self.highest - zero
        torch.clamp(rounded, lowest, highest, out=rounded)
        wrong = exact.sub_(rounded)
        if weights is not None:
            wrong.mul_(weights)
        return torch.linalg.vector_norm(wrong, dim=-1, keepdim=True).mul_(scale.abs())


def native_rounding(device: torch.device) -> Any:
    """The native operators that round float32 weights on this device, or None.

    They return False for numbers that are not finite and for scales that are too large: the reference says what it is.
    """
    native = library() if device.type == "cpu" else None
    return None if native is None else native.ops


def stored_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale as `dtype` holds it, in float32; rounded up, so that its range does not shrink.

    Never zero: a group of zeros gets the smallest scale there is.
    """
    smallest = torch.finfo(dtype).smallest_normal
    if dtype == torch.float32:
        return scale.clamp(min=smallest)
    if dtype == torch.float16:
        smallest = 2.0**-24  # weights below 1e-4 need its subnormal numbers
    narrow = scale.clamp(min=smallest).to(dtype)
    # The next number up has the next bit pattern.
    up = torch.where(narrow.float() < scale, narrow.view(torch.int16) + 1, narrow.view(torch.int16)).view(dtype).float()
    if not torch.isfinite(up).all():
        name = str(dtype).removeprefix("torch.")
        advice = "quantize a model in bfloat16 (--dtype bfloat16), or choose bfloat16 scales"
        raise ConfigError(
            f"the weights are so large that a scale exceeds the largest {name}; "
            + (advice if dtype == torch.float16 else "int8 holds them")
        )
    return up


def check_matrix(weight: Tensor) -> None:
    """Raise ConfigError unless the weight is a matrix of floats."""
    if weight.dim() != 2 or not weight.is_floating_point() or not weight.numel():
        raise ConfigError(f"only a matrix of floats can be quantized; found {list(weight.shape)} in {weight.dtype}")


def _check_finite(extreme: Tensor) -> None:
    if not torch.isfinite(extreme).all():
        raise ConfigError("a weight that holds NaN or infinite values cannot be quantized: take another checkpoint")


def rounded_activations(x: Tensor, group: int) -> Tensor:
    """Round x (…, K) to int8 by group of features, as the int8 products do; gradients pass unchanged."""
    k = x.shape[-1]
    wide = pad(x.detach().float(), (0, -k % group)).unflatten(-1, (-1, group))
    scale = (wide.abs().amax(dim=-1, keepdim=True) / 127).clamp_(min=torch.finfo(torch.float32).tiny)
    rounded = (wide / scale).round_().mul_(scale).flatten(-2)[..., :k].to(x.dtype)
    return x + (rounded - x.detach())

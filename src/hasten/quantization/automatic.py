"""`choose_bits`: a format for each layer under a budget of bits, by what rounding it costs the whole model.

The layers that the fused steps compute as one product are one unit: q, k and v; gate and up. Each unit is rounded by
itself to int4 in groups of 128, and the divergence of the model's next tokens from those before is measured on
calibration text. For small errors it grows with their square, so the squared errors of the weights tell it for other
formats. Of all choices that fit the one with the least sum of divergences is taken.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hasten.errors import ConfigError
from hasten.model.formats.record import LayerFormat
from hasten.model.transformer import Transformer
from hasten.ops.linear import WeightFormat, empty_weight
from hasten.quantization.calibration import check_calibration
from hasten.quantization.quantize import check_model, round_layer
from hasten.quantization.report import relative_error, stored_bytes, stored_weights
from hasten.quantization.rounding import round_weight
from hasten.quantization.schemes import Mixed, layers_to_quantize, units_of, weight_formats
from hasten.quantization.walk import CalibrationWalk, shared_copy

PROBE = "int4-g128"
CANDIDATES = ("int8", "int4-g32", "int4-g128", "int3-g32", "int3-g128")
TOKENS = 8192  # that a unit's divergence is measured on
ROWS = 512  # of which logits are in memory
STEPS = 1 << 15  # in which the budget is spent


@dataclass(slots=True)
class Unit:
    """Layers of one format. divergence: nats per token with all of them in the probe's format. By format: their bytes,
    and the squared errors of their weights.
    """

    layers: Sequence[str]
    divergence: float = 0.0
    bytes: dict[str, int] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)

    def loss(self, name: str) -> float:
        """The divergence to expect of a format."""
        return self.divergence * self.errors[name] / (self.errors[PROBE] or 1.0)


@torch.no_grad()
def choose_bits(
    model: Transformer,
    bits: float,
    *,
    calibration: Tensor,
    allow_int3: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Mixed:
    """The scheme of at most `bits` bits per weight in all that keeps most of the model, for `quantize`.

    bits: everything that is stored counts, over all weights: scales, norms and embeddings too. calibration: int64
    tokens (samples, length), of which the first 8,192 are looked at. Layers become int8, or int4 in groups of 32 or
    128; with allow_int3 int3 too, which no kernel multiplies. The same input gives the same scheme. progress is called
    with the measured units and that of all.

    Raises ConfigError where the smallest formats do not fit, and for a model that cannot be quantized.
    """
    units, formats, room = budget(model, bits, allow_int3=allow_int3)
    tokens = check_calibration(calibration, model.config.vocab_size, model.config.max_positions)
    for unit in units:
        _weigh(model, unit, formats)
    _measure(model, units, tokens[: max(1, TOKENS // tokens.shape[1])], formats[PROBE], progress)
    chosen = spend(units, room)
    return Mixed(table={name: format for unit, format in zip(units, chosen, strict=True) for name in unit.layers})


def budget(
    model: Transformer, bits: float, *, allow_int3: bool = False
) -> tuple[list[Unit], dict[str, WeightFormat], int]:
    """The units, with their bytes in each format, the formats, and the bytes for all units.

    Measures nothing. Raises ConfigError as `choose_bits` does.
    """
    check_model(model)
    if isinstance(bits, bool) or not isinstance(bits, int | float) or not 0 < bits < math.inf:
        raise ConfigError(f"bits must be a number above 0; found {bits!r}")
    known = weight_formats(model, "auto")
    formats = {name: known[name] for name in CANDIDATES if allow_int3 or known[name].bits != 3}
    units = [Unit(layers) for layers in units_of(layers_to_quantize(model)).values()]
    for unit in units:
        sizes = [tuple(model.get_submodule(name).get_parameter("weight").shape) for name in unit.layers]
        for key, format in formats.items():
            unit.bytes[key] = sum(stored_bytes(empty_weight((n, k), format, torch.device("meta"))) for n, k in sizes)
    weights = stored_weights(model)
    total = sum(weight.numel() for weight in weights.values())
    quantized = {f"{name}.weight" for unit in units for name in unit.layers}
    plain = sum(weight.nbytes for name, weight in weights.items() if name not in quantized)
    smallest = sum(min(unit.bytes.values()) for unit in units)
    least = math.ceil(800 * (smallest + plain) / total) / 100
    if bits < least:
        raise ConfigError(
            f"in {', '.join(formats)} this model takes at least {least:.2f} bits per weight; found {bits}"
        )
    return units, formats, max(smallest, int(bits * total / 8) - plain)  # which rounding may leave a byte below


def _weigh(model: Transformer, unit: Unit, formats: Mapping[str, WeightFormat]) -> None:
    """Note how far off the unit is in each format."""
    for name in unit.layers:
        weight: Tensor = model.get_submodule(name).get_parameter("weight").detach()
        norm = float(torch.linalg.vector_norm(weight, dtype=torch.float32))
        for key, format in formats.items():
            rounded = round_layer(model, name, LayerFormat(format), "mse")
            unit.errors[key] = unit.errors.get(key, 0.0) + (relative_error(weight, rounded) * norm) ** 2


def spend(units: Sequence[Unit], room: int) -> list[str]:
    """The format of each unit, of at most `room` bytes together, with the least sum of divergences.

    A knapsack, solved unit by unit for every room up to this one: in STEPS steps of what is left beside the smallest.
    """
    orders = [sorted(unit.bytes, key=unit.bytes.__getitem__) for unit in units]
    smallest = [unit.bytes[order[0]] for unit, order in zip(units, orders, strict=True)]
    step = max(1, -(-(room - sum(smallest)) // STEPS))
    rooms = (room - sum(smallest)) // step + 1
    least, choices = torch.zeros(rooms, dtype=torch.float64), []
    for unit, order, size in zip(units, orders, smallest, strict=True):
        sums = torch.full((len(order), rooms), math.inf, dtype=torch.float64)
        for row, name in zip(sums, order, strict=True):
            taken = -(-(unit.bytes[name] - size) // step)
            row[taken:] = least[: max(0, rooms - taken)] + unit.loss(name)
        choices.append(sums.argmin(dim=0))  # of equal ones the first, which is the smallest
        least = sums.amin(dim=0)
    chosen, at = [], rooms - 1
    for unit, order, size, choice in zip(units[::-1], orders[::-1], smallest[::-1], choices[::-1], strict=True):
        name = order[int(choice[at])]
        at -= -(-(unit.bytes[name] - size) // step)
        chosen.append(name)
    return chosen[::-1]


def _measure(
    model: Transformer, units: Sequence[Unit], tokens: Tensor, probe: WeightFormat, progress: Callable[[int, int], None]
) -> None:
    """Note each unit's divergence. A unit of a block costs a pass through the blocks from there on."""
    walk = CalibrationWalk(model, tokens)
    target = _states(model, walk, 0)
    at = 0  # the block that the walk has come to
    for done, unit in enumerate(units):
        first = unit.layers[0]
        own = first.startswith("blocks.")  # else it is the head, or the embedding
        while own and at < int(first.split(".")[1]):
            walk.advance(at, model.blocks[at])
            at += 1
        head = model.head
        with _rounded(model, unit.layers, probe):
            if own:
                states = _states(model, walk, at)
            elif first == "head" and not model.tied:
                states = target
            else:
                states = _states(model, CalibrationWalk(model, tokens), 0)
            found = _divergence(model, states, head, target)
        # Sums differ in their last digits with the number of threads; a choice should not.
        unit.divergence = float(f"{max(found, 0.0):.3g}")
        progress(done + 1, len(units))


def probing_flops(model: Transformer, tokens: Tensor) -> float:
    """Of the products of measuring all units, about."""
    units, size = units_of(layers_to_quantize(model)), sum(p.numel() for p in model.blocks.parameters())
    head = 2 * model.head.weight.numel()  # for the probabilities before and now
    return 2.0 * min(TOKENS, tokens.numel()) * len(units) * (size / 2 + head)


@contextmanager
def _rounded(model: Transformer, names: Sequence[str], format: WeightFormat) -> Iterator[None]:
    """For the while, layers have weights that were rounded to the format; a tied embedding is the head's."""
    places = [*names, "embedding"] if "head" in names and model.tied else names
    before = {name: model.get_submodule(name) for name in places}
    try:
        for name, module in before.items():
            new = shared_copy(module)
            weight = module.get_parameter("weight").detach()
            new.weight = nn.Parameter(round_weight(weight, format).dequantize(weight.dtype), requires_grad=False)
            model.set_submodule(name, new)
        yield
    finally:
        for name, module in before.items():
            model.set_submodule(name, module)


def _states(model: Transformer, walk: CalibrationWalk, first: int) -> Tensor:
    """What comes out of the last block (samples, length, C), from the walk's states before the block `first` on."""
    own = copy.copy(walk)
    own.states = walk.states.clone()
    for index in range(first, len(model.blocks)):
        own.advance(index, model.blocks[index])
    return own.states


def _divergence(model: Transformer, states: Tensor, head: nn.Module, target: Tensor) -> float:
    """The mean of KL(before ‖ now) per token: of the next tokens of `target` by the exact head, and of the states."""
    sums = []
    for now, before in zip(states.flatten(0, 1).split(ROWS), target.flatten(0, 1).split(ROWS), strict=True):
        q = model.scores(now).log_softmax(dim=-1)
        p = model.finished(head(model.norm(before))).log_softmax(dim=-1)
        sums.append(float((p.exp() * (p - q)).sum(dim=-1).double().sum()))
    return math.fsum(sums) / (target.shape[0] * target.shape[1])

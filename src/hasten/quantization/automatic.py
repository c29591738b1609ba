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
from functools import partial

import torch
from torch import Tensor, nn

from hasten.errors import ConfigError
from hasten.model.layer_format import LayerFormat
from hasten.model.transformer import Transformer
from hasten.ops.linear import WeightFormat, empty_weight
from hasten.quantization.blocks import on_one_thread
from hasten.quantization.calibration import check_calibration
from hasten.quantization.quantize import check_model, round_layer, taken_apart
from hasten.quantization.report import relative_error, stored_bytes, stored_weights
from hasten.quantization.rounding import round_weight
from hasten.quantization.schemes import Mixed, layers_to_quantize, units_of, weight_formats
from hasten.quantization.sequential import head_of
from hasten.quantization.walk import CalibrationWalk, passes, shared_copy

PROBE = "int4-g128"
CANDIDATES = ("int8", "int4-g32", "int4-g128", "int3-g32", "int3-g128")
TOKENS = 8192  # that a unit's divergence is measured on
ROWS = 256  # whose logits a thread has in memory
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
    device: torch.device | None = None,
) -> Mixed:
    """The scheme of at most `bits` bits per weight in all that keeps most of the model, for `quantize`.

    bits: everything that is stored counts, over all weights: scales, norms and embeddings too. calibration: int64
    tokens (samples, length), of which the first 8,192 are looked at. Layers become int8, or int4 in groups of 32 or
    128; with allow_int3 int3 too, which no kernel multiplies. The same input gives the same scheme. progress is called
    with the measured units and that of all. device: where blocks are computed, one at a time, if not where the model
    is.

    Raises ConfigError where the smallest formats do not fit, and for a model that cannot be quantized.
    """
    with taken_apart(model):
        units, formats, room = budget(model, bits, allow_int3=allow_int3)
        tokens = check_calibration(calibration, model.config.vocab_size, model.config.max_positions)
        for unit in units:
            _weigh(model, unit, formats, device)
        _measure(model, units, tokens[: max(1, TOKENS // tokens.shape[1])], formats[PROBE], progress, device)
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


def _weigh(model: Transformer, unit: Unit, formats: Mapping[str, WeightFormat], device: torch.device | None) -> None:
    """Note how far off the unit is in each format."""
    for name in unit.layers:
        weight: Tensor = model.get_submodule(name).get_parameter("weight").detach()
        norm = float(on_one_thread(partial(torch.linalg.vector_norm, weight, dtype=torch.float32)))
        for key, format in formats.items():
            rounded = round_layer(model, name, LayerFormat(format), "mse", device=device)
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
    model: Transformer,
    units: Sequence[Unit],
    tokens: Tensor,
    probe: WeightFormat,
    progress: Callable[[int, int], None],
    device: torch.device | None,
) -> None:
    """Note each unit's divergence. A unit of a block costs a pass through the blocks from there on."""
    walk = CalibrationWalk(model, tokens, device=device)
    exact = walk.here(head_of(model))
    target = _states(walk, 0)
    at = 0  # the block that the walk has come to
    for done, unit in enumerate(units):
        name = unit.layers[0]
        own = name.startswith("blocks.")  # else it is the head, or the embedding
        while own and at < int(name.split(".")[1]):
            walk.advance(at, walk.here(model.blocks[at]))
            at += 1
        with _rounded(model, unit.layers, probe, device):
            head = walk.here(head_of(model)) if "head" in unit.layers else exact
            if own:
                states = _states(walk, at)
            elif name == "head" and not model.tied:
                states = target
            else:
                states = _states(CalibrationWalk(model, tokens, device=device), 0)
            unit.divergence = max(_divergence(walk, (states, head), (target, exact)), 0.0)
        progress(done + 1, len(units))


def probing_flops(model: Transformer, tokens: Tensor) -> float:
    """Of the products of measuring all units, about."""
    units, size = units_of(layers_to_quantize(model)), sum(p.numel() for p in model.blocks.parameters())
    head = 2 * model.head.weight.numel()  # for the probabilities before and now
    return 2.0 * min(TOKENS, tokens.numel()) * len(units) * (size / 2 + head)


@contextmanager
def _rounded(
    model: Transformer, names: Sequence[str], format: WeightFormat, device: torch.device | None
) -> Iterator[None]:
    """For the while, layers have weights that were rounded to the format; a tied embedding is the head's."""
    places = [*names, "embedding"] if "head" in names and model.tied else names
    before = {name: model.get_submodule(name) for name in places}
    try:
        for name, module in before.items():
            new = shared_copy(module)
            weight = module.get_parameter("weight").detach()
            rounded = round_weight(weight.to(device), format).dequantize(weight.dtype)
            new.weight = nn.Parameter(rounded.to(weight.device), requires_grad=False)
            model.set_submodule(name, new)
        yield
    finally:
        for name, module in before.items():
            model.set_submodule(name, module)


def _states(walk: CalibrationWalk, first: int) -> Tensor:
    """What comes out of the last block (samples, length, C), from the walk's states before the block `first` on."""
    own, blocks = copy.copy(walk), walk.model.blocks
    own.states = walk.states.clone()
    for index in range(first, len(blocks)):
        own.advance(index, own.here(blocks[index]))
    return own.states


def _divergence(walk: CalibrationWalk, now: tuple[Tensor, nn.Module], before: tuple[Tensor, nn.Module]) -> float:
    """The mean of KL(before ‖ now) per token of the next tokens that two heads (with their norms) make of states."""
    (states, head), (states_before, head_before) = now, before

    def work(rows: tuple[Tensor, Tensor]) -> float:
        q, p = (
            walk.model.finished(module(part.to(walk.device))).log_softmax(dim=-1)
            for module, part in zip((head, head_before), rows, strict=True)
        )
        return float((p.exp() * (p - q)).sum(dim=-1).double().sum())

    rows = zip(states.flatten(0, 1).split(ROWS), states_before.flatten(0, 1).split(ROWS), strict=True)
    return math.fsum(passes(head, list(rows), work)) / (states.shape[0] * states.shape[1])

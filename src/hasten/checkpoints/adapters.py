"""Adapters in a model that generates: beside the layers of readable blocks, or inside the fused steps.

They have numbered places. All are filled at once when the model is loaded, or one by one between two steps.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from hasten.checkpoints.adapter_files import WEIGHTS, adapter_config, load_adapter
from hasten.errors import ConfigError, ResourceError
from hasten.machine.memory import available_memory
from hasten.model.fused import FusedBlock, FusedStack, fuse_where_it_fits, unfuse
from hasten.model.lora import Adapter, AdapterChoice, Factors, attach, place
from hasten.model.transformer import Transformer
from hasten.ops.panels import PANEL

LANES = 16  # the fused steps take ranks that are multiples of it


def load_adapters(model: Transformer, folders: Sequence[str | Path]) -> AdapterChoice:
    """Give a loaded model the adapters in these folders (peft's format); what is returned says who takes which.

    At first every row takes the first one. It is `model.adapters` from then on. The model is fused before, where it can
    be; one on a GPU is taken apart, and one whose adapters change an MLP beside experts. Raises ConfigError for a model
    that has adapters, and as `load_adapter` does.
    """
    if model.adapters is not None:
        raise ConfigError("this model has adapters already; load it again and name all of them at once")
    adapters = [load_adapter(folder, model) for folder in folders]
    if model.device.type == "cpu":
        fuse_where_it_fits(model)
    if isinstance(model.stack, FusedStack) and not any(_outside(model, adapter) for adapter in adapters):
        return _attach_fused(model, adapters)
    if not model.readable:  # a GPU's fused steps take no adapters
        unfuse(model)
    return attach(model, adapters)


def _outside(model: Transformer, adapter: Adapter) -> str | None:
    """A layer that an adapter changes and a fused block has no factors for (of an MLP beside experts), or None."""
    blocks = [block for block in model.blocks if isinstance(block, FusedBlock)]
    known = {f"blocks.{i}.{name}" for i, block in enumerate(blocks) for own in block.rows().values() for name in own}
    return next((name for name in adapter if name not in known), None)


def _attach_fused(model: Transformer, adapters: Sequence[Adapter]) -> AdapterChoice:
    model.adapters = choice = AdapterChoice(places=len(adapters))
    for index, block in enumerate(model.blocks):
        assert isinstance(block, FusedBlock)
        for name, parts in block.rows().items():
            named = {f"blocks.{index}.{layer}": rows for layer, rows in parts.items()}
            own = [
                [(adapter[layer], rows) for layer, rows in named.items() if layer in adapter] for adapter in adapters
            ]
            if any(own):
                linear = getattr(block, name)
                block.factors[name] = _stacked(own, linear.in_features, linear.out_features)
        block.choice = choice
        block.bind()
    return choice


def _stacked(adapters: Sequence[Sequence[tuple[Factors, Tensor]]], inputs: int, outputs: int) -> tuple[Tensor, Tensor]:
    """Stack a fused weight's factors for plan_weight: A (adapters, K, R) and scaled B (adapters, panels, R, 64).

    adapters: of each the factors of its layers, with the rows of the weight that are theirs.
    """
    ranks = [sum(own.a.shape[0] for own, _ in parts) for parts in adapters]
    rank = -(-max(ranks) // LANES) * LANES
    a = torch.zeros(len(adapters), inputs, rank)
    b = torch.zeros(len(adapters), -(-outputs // PANEL) * PANEL, rank)
    for number, parts in enumerate(adapters):
        first = 0
        for own, rows in parts:
            last = first + own.a.shape[0]
            a[number, :, first:last] = own.a.detach().t()
            b[number, rows, first:last] = own.b.detach() * own.scale
            first = last
    return a, b.unflatten(1, (-1, PANEL)).transpose(2, 3).contiguous()


def place_adapter(model: Transformer, number: int, adapter: Adapter | None) -> None:
    """Put an adapter into a place of a model that generates, beside its others; None: leave the place empty.

    number: an existing place, whose adapter it replaces, or the next one. No step may run meanwhile. Every rank that
    holds the model calls this. Other adapters, and rows without one, keep every bit. Raises ConfigError where the model
    can have none, ResourceError for lack of memory; then nothing has changed.
    """
    if refusal := placing_refusal(model):
        raise ConfigError(refusal)
    choice = model.adapters or AdapterChoice(every=-1, places=0)
    assert 0 <= number <= choice.places, "places are taken one after the other"
    if isinstance(model.stack, FusedStack):
        if outside := _outside(model, adapter or {}):
            raise ConfigError(
                f"the adapter changes {outside}, for which the fused blocks have no place; name it at the start "
                "(--adapter NAME=FOLDER)"
            )
        _place_fused(model, choice, number, adapter or {})
    else:
        place(model, choice, number, adapter or {})
    model.adapters = choice
    choice.places = max(choice.places, number + 1)


def read_adapter(model: Transformer, folder: Path) -> Adapter:
    """An adapter from a folder, for `place_adapter`. A step may run meanwhile.

    Raises ConfigError where the model can have none, ResourceError for lack of memory, and as `load_adapter` does.
    """
    if refusal := placing_refusal(model):
        raise ConfigError(refusal)
    adapter_config(folder)
    size = 2 * (folder / WEIGHTS).stat().st_size if (folder / WEIGHTS).exists() else 0  # 16 bits become 32
    if size > (free := available_memory(model.device)):
        raise ResourceError(f"{folder} takes {size:,} bytes in memory and {free:,} are free; unload another adapter")
    return load_adapter(folder, model)


def placing_refusal(model: Transformer) -> str | None:
    """Why adapters of this model cannot change while it generates, or None."""
    if model.device.type != "cpu":
        return "steps on a GPU are captured with their adapters; name adapters at the start (--adapter NAME=FOLDER)"
    if not isinstance(model.stack, FusedStack) and not model.readable:
        return (
            "the fused blocks of this model have no place for adapters; name one at the start (--adapter NAME=FOLDER)"
        )
    return None


def _place_fused(model: Transformer, choice: AdapterChoice, number: int, adapter: Adapter) -> None:
    """Stack a fused model's factors again, with those of one place replaced."""
    blocks = [block for block in model.blocks if isinstance(block, FusedBlock)]
    count = max(choice.places, number + 1)
    changed: list[tuple[FusedBlock, str, list[tuple[Factors, Tensor]]]] = []
    for index, block in enumerate(blocks):
        for name, parts in block.rows().items():
            named = {f"blocks.{index}.{layer}": rows for layer, rows in parts.items()}
            own = [(adapter[layer], rows) for layer, rows in named.items() if layer in adapter]
            if own or name in block.factors:
                changed.append((block, name, own))
    needed = sum(_stacked_bytes(*one, count=count) for one in changed)
    if needed > (free := available_memory(model.device)):
        raise ResourceError(
            f"the model's {count} adapters take {needed:,} bytes and {free:,} are free; unload one, or load one of a "
            "smaller rank"
        )
    joined = []
    for block, name, own in changed:
        linear = getattr(block, name)
        new = _stacked([own], linear.in_features, linear.out_features)
        joined.append((block, name, _joined(block.factors.get(name), new, number, count)))
    for block, name, stack in joined:
        block.factors[name] = stack
    for block in blocks:
        block.choice = choice
        block.bind()


def _stacked_bytes(block: FusedBlock, name: str, own: Sequence[tuple[Factors, Tensor]], *, count: int) -> int:
    """Bytes of the stack of `count` adapters of a fused weight, with these factors among them."""
    linear, held = getattr(block, name), block.factors.get(name)
    rank = -(-sum(factors.a.shape[0] for factors, _ in own) // LANES) * LANES
    rank = max(rank, 0 if held is None else held[0].shape[2])
    return 4 * count * rank * int(linear.in_features + -(-linear.out_features // PANEL) * PANEL)


def _joined(
    held: tuple[Tensor, Tensor] | None, new: tuple[Tensor, Tensor], number: int, count: int
) -> tuple[Tensor, Tensor]:
    """Stacks of `count` adapters: those held, with `new` in the place `number`; ranks are filled up with zeros."""
    a, b = new  # (1, K, R), (1, panels, R, 64)
    rank = max(a.shape[2], 0 if held is None else held[0].shape[2])
    joined_a, joined_b = a.new_zeros(count, a.shape[1], rank), b.new_zeros(count, b.shape[1], rank, PANEL)
    if held is not None:
        joined_a[: len(held[0]), :, : held[0].shape[2]] = held[0]
        joined_b[: len(held[1]), :, : held[1].shape[2]] = held[1]
        joined_a[number], joined_b[number] = 0, 0
    joined_a[number, :, : a.shape[2]], joined_b[number, :, : b.shape[2]] = a[0], b[0]
    return joined_a, joined_b

"""Adapters in a model that generates: beside the layers of readable blocks, or inside the fused steps."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from hasten.checkpoints.adapter_files import load_adapter
from hasten.errors import ConfigError
from hasten.model.fused import FusedBlock, FusedStack, fuse_where_it_fits, unfuse
from hasten.model.lora import Adapter, AdapterChoice, Factors, attach
from hasten.model.transformer import Transformer
from hasten.ops.panels import PANEL

LANES = 16  # the fused steps take ranks that are multiples of it


def load_adapters(model: Transformer, folders: Sequence[str | Path]) -> AdapterChoice:
    """Give a loaded model the adapters in these folders (peft's format); what is returned says who takes which.

    At first every row takes the first one. It is `model.adapters` from then on. The model is fused before, where it can
    be; one with experts, or on a GPU, is taken apart. Raises ConfigError for a model that has adapters, and as
    `load_adapter` does.
    """
    if model.adapters is not None:
        raise ConfigError("this model has adapters already; load it again and name all of them at once")
    adapters = [load_adapter(folder, model) for folder in folders]
    if model.device.type == "cpu":
        fuse_where_it_fits(model)
    if not isinstance(model.stack, FusedStack):
        if not model.readable:  # experts are outside the fused steps, and a GPU's take no adapters
            unfuse(model)
        return attach(model, adapters)
    return _attach_fused(model, adapters)


def _attach_fused(model: Transformer, adapters: Sequence[Adapter]) -> AdapterChoice:
    model.adapters = choice = AdapterChoice()
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

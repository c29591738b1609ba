"""Calibrated quantization block by block: each one for the outputs of the quantized blocks before it."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hasten.errors import ConfigError
from hasten.machine.pages import return_freed_memory
from hasten.model.layer_format import LayerFormat
from hasten.model.transformer import Transformer
from hasten.quantization.block_task import BlockResult, BlockTask, served
from hasten.quantization.gptq import GPTQ
from hasten.quantization.resume import WorkFolder
from hasten.quantization.rounding import Search, round_weight
from hasten.quantization.walk import CalibrationWalk, shared_copy


@torch.no_grad()
def quantize_blocks(
    model: Transformer,
    formats: Mapping[str, LayerFormat],
    tokens: Tensor,
    method: GPTQ,
    *,
    search: Search,
    saved: WorkFolder | None = None,
    spill: Path | None = None,
    device: torch.device | None = None,
) -> Iterator[BlockResult]:
    """Quantize the layers of `formats` with calibration tokens (S, T); yields a result for each block and the head.

    The model is not changed. One block at a time is computed on `device`; the results are on the model's device. Blocks
    finished in `saved` are not computed again. spill: a folder for files that hold the samples' states.
    """
    files = [None if spill is None else spill / f"{name}.spill" for name in ("states", "before")]
    with _rounded_embedding(model, formats.get("embedding"), search):
        walks = [CalibrationWalk(model, tokens, device=device, spill=files[0])]
    if method.gptaq:
        walks.append(CalibrationWalk(model, tokens, device=device, spill=files[1]))
    done = 0 if saved is None else saved.blocks()
    if done:
        assert saved is not None
        for walk, kept in zip(walks, saved.kept(), strict=True):
            walk.go_on(kept)

    def finished(index: int | None) -> BlockTask:
        task = _task(model, index, formats, walks, search)
        try:
            method.quantize_block(task)
        except ConfigError as error:
            raise ConfigError(f"{task.prefix.rstrip('.') or 'head'}: {error}") from None
        return_freed_memory()
        return task

    for index in range(len(model.blocks)):
        if saved is not None and index < done:
            yield saved.load(index)
            continue
        task = finished(index)
        for walk, module in zip(walks, (task.block, task.before), strict=False):
            walk.advance(index, module)
        result = task.result().to(model.device)
        del task, module  # before the next block is copied
        if saved is not None:
            saved.save(index, result, [walk.kept() for walk in walks])
        yield result
    if "head" in formats:
        yield finished(None).result().to(model.device)


def _task(
    model: Transformer,
    index: int | None,
    formats: Mapping[str, LayerFormat],
    walks: Sequence[CalibrationWalk],
    search: Search,
) -> BlockTask:
    """Prepare a block for GPTQ. index None: the norm and the head."""
    block: nn.Module
    if index is None:
        prefix, names = "", ["head"]
        block = nn.Sequential(OrderedDict(norm=model.norm, head=model.head))
        calls = [walk.whole_calls() for walk in walks]
    else:
        prefix, block = f"blocks.{index}.", model.blocks[index]
        names = [name for name in formats if name.startswith(prefix)]
        calls = [walk.calls(index) for walk in walks]
    block = walks[0].here(block)
    return BlockTask(
        block=shared_copy(block),
        before=block,
        layers={name.removeprefix(prefix): formats[name] for name in names},
        calls=calls[0],
        calls_before=calls[1] if len(calls) > 1 else None,
        search=search,
        dtype=walks[0].dtype,
        prefix=prefix,
    )


@contextmanager
def _rounded_embedding(model: Transformer, layer: LayerFormat | None, search: Search) -> Iterator[None]:
    """Replace the model's embedding by its quantized form, if it is quantized, during the block."""
    exact: Any = model.embedding
    if layer is not None:
        weight = round_weight(exact.weight.detach(), layer.weight, search=search)
        model.embedding = served(weight, exact, None, layer, model.compute_dtype)
    try:
        yield
    finally:
        model.embedding = exact

"""Check that a model fits into memory before it is loaded; the error lists what needs the memory."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from hasten.machine import available_memory, resolve_dtype
from hasten.planning.cost import parameters
from hasten.planning.held import held_bytes, plain_tensors
from hasten.planning.memory import LARGEST_PREFILL, PROCESS_BYTES, InferenceUse, Memory, inference_memory

if TYPE_CHECKING:
    from hasten.checkpoints.source import ModelSource

PROMPT = 512  # tokens assumed for an unknown prompt


def require_room(command: Any, source: ModelSource, device: str, *, ranks: int = 1) -> None:
    """Raise ResourceError, with a list of parts, if the model of a command (LoadOptions) and its cache do not fit.

    ranks: processes that share the model; on a CPU they share its memory too.
    """
    free = available_memory(device)
    if device == "cpu" and ranks > 1:
        free = free // ranks - PROCESS_BYTES

    memory = _needed(command, source, device, ranks)
    if memory.peak <= free:
        return
    tries = {"leave --dtype out": {"dtype": "auto"}} if command.dtype != "auto" else {}
    if command.quantize == "none" and source.quantized is None:
        without = "" if command.dtype == "auto" else " without --dtype"
        for name in ("int8", "int4"):
            tries[f"give --quantize {name}{without}"] = {"dtype": "auto", "quantize": name}
    smaller = (a for a, changes in tries.items() if _needed(command, source, device, ranks, **changes).peak <= free)
    remedy = next(smaller, "take a smaller or a quantized model, or a machine with more memory")
    what = f"running {command.model}" if ranks == 1 else f"each of {ranks} ranks of {command.model}"
    memory.require(what, max(0, free), device, remedy=remedy)


def _needed(command: Any, source: ModelSource, device: str, ranks: int, **changes: str) -> Memory:
    """The command's memory; on a CPU with that of a tokenizer that has not been read yet."""
    memory = inference_memory(source.config, replace(use_of(command, source, device, **changes), degree=ranks))
    if device != "cpu" or "tokenizer" in vars(source):
        return memory
    return memory.beside(tokenizer=source.tokenizer_bytes)


def use_of(
    command: Any, source: ModelSource, device: str, *, quantize: str | None = None, dtype: str | None = None
) -> InferenceUse:
    """A command's use of a model. A server's cache takes the remaining memory, so one sequence is counted.

    quantize, dtype: override the command's. Weights in their own dtype are mapped, and freed as they are rounded;
    converted ones stay until all are rounded.
    """
    from hasten.checkpoints.load import own_dtype
    from hasten.engine.cache import row_format
    from hasten.model.inference import inference_dtype

    quantize = command.quantize if quantize is None else quantize
    own = source.dtype or own_dtype(plain_tensors(source))
    wanted = command.dtype if dtype is None else dtype
    kept = inference_dtype(source.config, own, torch.device(device)) if wanted == "auto" else resolve_dtype(wanted)
    weights = held_bytes(source, itemsize=None if kept == own else kept.itemsize)
    if quantize != "none":
        from hasten.bench.weight_bytes import weight_bytes

        converted = 0 if kept == own else weights
        weights = weight_bytes(source.config, quantize) + converted
    head_states = 0
    if getattr(command, "draft", "") == "mtp":
        from hasten.engine.speculation import MultiTokenDraft

        weights += source.head_bytes * kept.itemsize // own.itemsize
        head_states = MultiTokenDraft.read_tokens
    texts = [len(text.encode()) // 4 for text in getattr(command, "prompt", ()) if text != "-"]
    prompt = max([len(getattr(command, "prompt_ids", ())), *texts], default=0) or PROMPT
    new, batch = getattr(command, "max_new_tokens", 1), max(1, len(texts))
    length = min(prompt + new, source.config.max_positions)
    cache = getattr(command, "kv_cache_dtype", "auto")
    table = parameters(source.config).table * kept.itemsize
    return InferenceUse(
        batch_size=batch,
        length=length,
        new_tokens=min(new, length - 1),
        step=min(LARGEST_PREFILL, batch * prompt),
        weights=weights,
        row_bytes=row_format(cache).bytes(source.config.head_dim, kept),
        table=table,
        mapped=kept == own and torch.device(device).type == "cpu",
        head_states=head_states,
    )

"""Calibration text that `hasten quantize` has the model write, where it has the memory to run it."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hasten.machine import available_memory, resolve_device
from hasten.machine.progress import share

if TYPE_CHECKING:
    from torch import Tensor


def written_text(command: Any, **wanted: int) -> tuple[Tensor, int]:
    """Samples that the command's model writes, and the bytes that this takes. Raises ResourceError where they are not
    there.
    """
    from hasten.checkpoints.load import load, open_checkpoint
    from hasten.cli.room import use_of
    from hasten.engine.own_text import BATCH, check_wanted, own_text
    from hasten.ops.pages import return_freed_memory
    from hasten.planning.memory import inference_memory

    device, source = str(resolve_device(command.device)), open_checkpoint(command.model)
    check_wanted(source.config, **wanted)
    length = wanted.get("length", 512)
    use = replace(
        use_of(command, source, device, quantize="none", dtype="auto"),
        batch_size=min(BATCH, wanted.get("samples", BATCH)),
        length=length,
        new_tokens=length - 1,
    )
    memory = inference_memory(source.config, use)
    remedy = "give text: --calibration FILE, or stdlib, which is Python's standard library"
    memory.require(f"writing calibration text with {command.model}", available_memory(device), device, remedy=remedy)
    print(f"the model writes its calibration text first: about {memory.peak / 1e9:.2f} GB on {device}", file=sys.stderr)
    with share("calibration samples written") as progress:
        tokens = own_text(load(source, device=device), progress=progress, **wanted).cpu()
    return_freed_memory()
    return tokens, memory.peak

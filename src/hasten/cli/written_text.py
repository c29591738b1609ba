"""Calibration text that `hasten quantize` has the model write, where it has the memory to run it."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hasten.machine import available_memory, resolve_device
from hasten.machine.progress import share

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from hasten.model.transformer import Transformer


def written_text(command: Any, model: Transformer, output: Path, wanted: Mapping[str, int]) -> tuple[Tensor, int]:
    """Samples that the command's model writes, and the bytes of memory that writing them took.

    output: the folder of the run; beside it the text is kept, and read if the run is repeated after an interruption
    (0 bytes). wanted: samples, length and seed. Raises ResourceError if there is too little memory.
    """
    from hasten.checkpoints.load import load, open_checkpoint
    from hasten.cli.room import use_of
    from hasten.engine.own_text import BATCH, check_wanted, own_text
    from hasten.machine.pages import return_freed_memory
    from hasten.planning.memory import inference_memory
    from hasten.quantization.resume import KeptText

    device, source = str(resolve_device(command.device)), open_checkpoint(command.model)
    check_wanted(source.config, **wanted)
    kept = KeptText(output, model, wanted)
    tokens = kept.read()
    if tokens is not None:
        print("calibration text: what the model wrote before the interruption", file=sys.stderr)
        return tokens, 0
    use = replace(
        use_of(command, source, device, quantize="none", dtype="auto"),
        batch_size=min(BATCH, wanted["samples"]),
        length=wanted["length"],
        new_tokens=wanted["length"] - 1,
    )
    memory = inference_memory(source.config, use)
    remedy = "give text: --calibration FILE, or stdlib, which is Python's standard library"
    memory.require(f"writing calibration text with {command.model}", available_memory(device), device, remedy=remedy)
    print(f"the model writes its calibration text first: about {memory.peak / 1e9:.2f} GB on {device}", file=sys.stderr)
    with share("calibration samples written") as progress:
        tokens = own_text(load(source, device=device), progress=progress, **wanted).cpu()
    kept.save(tokens)
    return_freed_memory()
    return tokens, memory.peak

"""The weights of the rung gptq-int4-g32: a folder that is there already, or that is made once, before the rounds."""

import time
from itertools import count
from pathlib import Path
from typing import Any

from hasten.bench.models import BenchmarkModel
from hasten.errors import ConfigError
from hasten.machine import Threads, configure
from hasten.machine.progress import share

GROUP, TEXT = 32, "self"  # the text that the model writes


def gptq_folder(source: BenchmarkModel, folder: Path, *, threads: Threads, samples: int = 128) -> dict[str, Any]:
    """Make sure that `folder` holds `source` in int4 by groups of 32; what the report says of how it came there.

    samples: pieces of calibration text, which the model writes. Made as `hasten quantize --scheme int4 --method gptq`
    makes it: after an interruption the next call goes on. Raises ConfigError for a folder that holds something else.
    """
    if (folder / "config.json").exists():
        _check(source, BenchmarkModel(model=str(folder)))
        return {"found": True}
    from hasten.checkpoints.load import load, resolve_model
    from hasten.engine.own_text import own_text
    from hasten.quantization import GPTQ, Int4, quantize_to_folder

    configure(threads=threads)
    start = time.perf_counter()
    model = load(resolve_model(str(source.model)), dtype="stored")
    if model.tokenizer is None:
        raise ConfigError(f"GPTQ looks at text, and {source.name} has no tokenizer to read it: leave gptq-int4-g32 out")
    length = min(512, model.config.max_positions)
    with share("calibration samples written") as progress:
        tokens = own_text(load(resolve_model(str(source.model))), samples=samples, length=length, progress=progress)
    scheme, done = Int4(group_size=GROUP), count(1)
    with share("layers quantized by GPTQ") as progress:

        def tell(_: object) -> None:
            progress(next(done), None)

        quantize_to_folder(model, scheme, folder, method=GPTQ(), calibration=tokens, report=tell)
    calibration = {"text": TEXT, "samples": len(tokens), "length": length}
    return {"found": False, "seconds": time.perf_counter() - start, "calibration": calibration}


def _check(source: BenchmarkModel, quantized: BenchmarkModel) -> None:
    """Raise ConfigError unless the folder is one of int4 in groups of 32, of a model of the same sizes."""
    wanted, found = source.config(), quantized.config()
    for name in ("vocab_size", "hidden_size", "intermediate_size", "heads", "kv_heads", "layers"):
        if getattr(wanted, name) != getattr(found, name):
            raise ConfigError(f"--gptq {quantized.model} is of another model than {source.name}: its {name} differs")
    formats = quantized.weight_formats()
    if quantized.quantized() != "int4" or any(format.group_size != GROUP for format in formats if format.bits == 4):
        raise ConfigError(f"--gptq {quantized.model} holds no int4 weights in groups of {GROUP}; name another folder")

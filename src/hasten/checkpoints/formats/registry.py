"""The published layouts of quantized weights that hasten reads, by the `quant_method` of config.json."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hasten.checkpoints.checkpoint import StoredTensors
from hasten.checkpoints.formats.columns import GPTQFormat, read_auto_round, read_awq, read_gptq
from hasten.checkpoints.formats.compressed_reader import read_compressed
from hasten.checkpoints.formats.compressed_tensors import CompressedTensors
from hasten.checkpoints.formats.file_format import ConfigFields, OpenFolder, QuantizedFolder, WrittenFormat
from hasten.checkpoints.formats.floats import read_fp8, read_modelopt
from hasten.checkpoints.formats.stacked_fp4 import read_mxfp4
from hasten.errors import CheckpointError, ConfigError

# What reads a quantization_config, of a config.json with some values at a path; CheckpointError names a field.
READERS: Mapping[str, Callable[[Any, Mapping[str, Any], Path], OpenFolder]] = {
    "compressed-tensors": read_compressed,
    "gptq": read_gptq,
    "awq": read_awq,
    "auto-round": read_auto_round,
    "fp8": read_fp8,
    "modelopt": read_modelopt,
    "mxfp4": read_mxfp4,
}
WRITERS: Mapping[str, WrittenFormat] = {one.method: one for one in (CompressedTensors(), GPTQFormat())}


def writer(method: str, *, pack_int8: bool = False) -> WrittenFormat:
    """The writer of a folder of quantized weights; ConfigError for a method that is not written."""
    if method not in WRITERS:
        raise ConfigError(f"format {method!r:.40} is not written; known: {', '.join(WRITERS)}")
    return CompressedTensors(pack_int8=True) if pack_int8 and method == CompressedTensors.method else WRITERS[method]


def read_quantization(values: Mapping[str, Any], given: Any, where: Path) -> Callable[[StoredTensors], QuantizedFolder]:
    """The reader of the quantized modules beside a config.json of these values, which says `given` of them.

    CheckpointError names what hasten does not read; where no weight is quantized, the reader raises it.
    """
    method = ConfigFields(where, given).values.get("quant_method")
    found = READERS.get(method) if isinstance(method, str) else None
    if found is None:
        raise CheckpointError(
            f"{where}: quantization_config says that the weights are quantized ({method!r:.40}), which hasten does not "
            f"read; it reads {', '.join(READERS)} (2, 3, 4 and 8 bits). Load the unquantized checkpoint and use "
            "`hasten quantize`"
        )
    layout = found(given, values, where)

    def opened(stored: StoredTensors) -> QuantizedFolder:
        folder = layout(stored)
        if not folder.modules:
            none = f"{where}: quantization_config says that weights are quantized by {method}, and no tensor is"
            raise CheckpointError(f"{none}; download the folder again")
        return folder

    return opened

"""Commands that errors advise, with the paths of the model at hand."""

import re
import shlex
from pathlib import Path


def plain_folder(source: str | Path) -> str:
    """A name, in the current folder, for the plain weights of a quantized model."""
    name = Path(source).expanduser().resolve().name if Path(source).exists() else str(source).rpartition("/")[2]
    return re.sub(r"[^\w.-]", "-", name.removesuffix(".gguf")) + "-plain"


def export_plain(source: str | Path | None) -> str:
    """What writes the plain weights of a quantized model. source: what it was loaded from, if anything."""
    if source is None:
        return "hasten.save(model, folder, dequantize=True)"
    return f"hasten export {shlex.quote(str(source))} {plain_folder(source)} --dequantize"

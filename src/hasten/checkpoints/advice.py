"""Commands that errors advise, with the model named as its user did."""

import re
import shlex
from pathlib import Path

from hasten.checkpoints import published
from hasten.machine.caches import find_cached

_SNAPSHOT = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/[^/]+$")


def asked_as(source: str | Path) -> str:
    """The name a user knows a model by: the short name or hub id of one in a cache, else the source itself."""
    text = str(source)
    for name, model in published.PUBLISHED.items():
        if text.endswith(model.file) and find_cached("models", model.file) == Path(text):
            return name
    match = _SNAPSHOT.search(text)
    return text if match is None else f"{match[1]}/{match[2]}"


def plain_folder(source: str | Path) -> str:
    """A name, in the current folder, for the plain weights of a quantized model."""
    called = asked_as(source)
    name = Path(called).expanduser().resolve().name if Path(called).exists() else called.rpartition("/")[2]
    return re.sub(r"[^\w.-]", "-", name.removesuffix(".gguf")) + "-plain"


def export_gguf(source: str | Path | None, type_name: str) -> str:
    """The command that writes a plain model as a GGUF file, its matrices in a type. source: as of `export_plain`."""
    if source is None:
        return f"hasten export FOLDER FILE.gguf --gguf {type_name}"
    file = plain_folder(source).removesuffix("-plain") + f"-{type_name}.gguf"
    return f"hasten export {shlex.quote(asked_as(source))} {file} --gguf {type_name}"


def export_plain(source: str | Path | None) -> str:
    """The command that writes the plain weights of a quantized model. source: what it was loaded from, if anything."""
    if source is None:
        return "hasten.save(model, folder, dequantize=True)"
    return f"hasten export {shlex.quote(asked_as(source))} {plain_folder(source)} --dequantize"

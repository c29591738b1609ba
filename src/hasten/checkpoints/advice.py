"""Commands that errors advise, with the model named as its user did, and a warning about tensors that stay unread."""

import re
import shlex
import warnings
from collections.abc import Iterable
from pathlib import Path

from hasten.checkpoints import published
from hasten.errors import HastenWarning
from hasten.machine.caches import find_cached

_SNAPSHOT = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/[^/]+$")
# Buffers that older versions of transformers saved beside the weights.
_LEFTOVERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


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


def export_plain(source: str | Path | None) -> str:
    """The command that writes the plain weights of a quantized model. source: what it was loaded from, if anything."""
    if source is None:
        return "hasten.save(model, folder, dequantize=True)"
    return f"hasten export {shlex.quote(asked_as(source))} {plain_folder(source)} --dequantize"


def warn_of_unread(stored: Iterable[str], used: set[str], folder: Path) -> None:
    """Warn of stored tensors that no part of the model reads, if there are any."""
    unread = [name for name in stored if name not in used and not name.endswith(_LEFTOVERS)]
    if unread:
        warnings.warn(
            f"{folder}: {len(unread)} tensors are not part of this model type and stay unread, "
            f"for example {unread[0]!r:.100}: the results may differ from the model they were trained with",
            HastenWarning,
            stacklevel=4,
        )

"""Where a model's folder is: on this machine, or downloaded from the Hugging Face hub."""

import re
from collections.abc import Sequence
from pathlib import Path

from hasten.errors import CheckpointError, ConfigError, ResourceError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt"]
# The same weights again in another layout, which a model folder is not read from.
_DUPLICATES = ["consolidated*", "original/*", "onnx/*"]


def resolve_model(source: str | Path) -> Path:
    """The local folder of a model as `resolve_folder` gives it, or its GGUF file: the path itself, or the only weights
    of a folder.
    """
    path = _existing(source)
    if path is not None and path.name.endswith(".gguf") and path.is_file():
        return path
    folder = resolve_folder(source)
    found = sorted(folder.glob("*.gguf"))
    if not found or any(folder.glob("*.safetensors*")):
        return folder
    if len(found) > 1:
        raise CheckpointError(
            f"{folder} holds {len(found)} GGUF files: name one of them, such as {found[0]} (parts of one model are "
            "joined by llama-gguf-split --merge)"
        )
    return found[0]


def resolve_folder(source: str | Path, *, files: Sequence[str] = _FILES) -> Path:
    """The local folder of a model: the path itself, or the hub's snapshot of an id "owner/name".

    files: patterns of what is downloaded; what is there already is in the folder too. Raises CheckpointError for what
    is neither a folder nor a hub id, ResourceError if the hub cannot give it.
    """
    name, found = str(source), _existing(source)
    if found is not None and found.is_dir():
        return found
    if found is not None and name.endswith(".gguf"):
        raise CheckpointError(f"{name} is a GGUF file, and a folder is needed: `hasten export {name} FOLDER` makes one")
    if found is not None:
        raise CheckpointError(f"{name} is a file; give the model's folder, the one that holds config.json")
    if not _HUB_ID.fullmatch(name):
        raise CheckpointError(f"{name!r:.200} is not a folder here, nor a hub id of the form owner/name")
    return _download(name, files)


def _existing(source: str | Path) -> Path | None:
    """What stands at a path, None: nothing."""
    if not isinstance(source, str | Path):
        raise ConfigError(f"a model is a folder or a hub id; found {type(source).__name__}")
    try:
        path = Path(source).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError) as error:  # no permission, a name too long, an unknown ~user
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{str(source)!r:.200} cannot be read: {reason}") from None


def _download(name: str, files: Sequence[str]) -> Path:
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(files), ignore_patterns=_DUPLICATES))
    except Exception as error:  # the hub's client raises many kinds, all of which mean that it cannot be had
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ResourceError(
            f"{name} is not a folder here, and the hub could not give it: {first:.300} (check the name and the "
            "network, or download it elsewhere and pass the folder)"
        ) from None

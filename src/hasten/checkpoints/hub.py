"""Where a model is: on this machine, or downloaded from the Hugging Face hub."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hasten.checkpoints.gguf.choose import models_of, parts_of, tagged
from hasten.checkpoints.published import PUBLISHED, published_file
from hasten.errors import CheckpointError, ConfigError, ResourceError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_TAGGED = re.compile(rf"(?:(?:hf\.co|huggingface\.co)/)?({_HUB_ID.pattern})(?::([\w.-]+))?")
_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt"]
# The same weights again in another layout, which a model folder is not read from.
_DUPLICATES = ["consolidated*", "original/*", "onnx/*"]


def resolve_model(source: str | Path) -> Path:
    """The local folder of a model as `resolve_folder` gives it, or its GGUF file: the path itself, the only model of a
    folder without safetensors, the file of a short name (`published.PUBLISHED`), or one of the hub:
    "owner/name:Q4_K_M", "hf.co/owner/name:Q4_K_M", or "owner/name" of a repository that has nothing else. Of a split
    model it is the first part; the others are beside it.
    """
    path = _existing(source)
    if path is None and str(source) in PUBLISHED:
        return published_file(str(source))
    if path is not None and path.name.endswith(".gguf") and path.is_file():
        return path
    match = _TAGGED.fullmatch(str(source)) if path is None else None
    if match is not None and (match[2] or match[1] != str(source)):
        return _hub_file(match[1], match[2])
    folder = resolve_folder(source)
    if any(folder.glob("*.safetensors*")):
        return folder
    if path is None:
        return _hub_file(str(source), None, otherwise=folder)
    found = models_of(file.name for file in folder.glob("*.gguf"))
    if len(found) > 1:
        raise CheckpointError(f"{folder} holds {len(found)} GGUF models: name one of them, such as {folder / found[0]}")
    return folder / found[0] if found else folder


def names_hub_folder(name: str) -> bool:
    """Whether a name may be that of a repository of the hub as it is, and is no short name."""
    return name not in PUBLISHED and _HUB_ID.fullmatch(name) is not None


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
    if name in PUBLISHED:
        raise CheckpointError(f"{name} is a GGUF file, and a folder is needed: `hasten export {name} FOLDER` makes one")
    if not _HUB_ID.fullmatch(name):
        raise CheckpointError(
            f"{name!r:.200} is not a folder here, nor a hub id (owner/name; of a GGUF file: owner/name:Q4_K_M), nor "
            f"one of the short names {', '.join(PUBLISHED)}"
        )
    return _download(name, files)


def _existing(source: str | Path) -> Path | None:
    """The path, or None if nothing is there."""
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

    patterns = {"allow_patterns": list(files), "ignore_patterns": _DUPLICATES}
    return Path(_asked(name, partial(huggingface_hub.snapshot_download, name, **patterns)))


def _hub_file(name: str, tag: str | None, *, otherwise: Path | None = None) -> Path:
    """A GGUF file of a repository, its other parts beside it; `otherwise`: what is given where it has none."""
    import huggingface_hub

    models = models_of(_asked(name, partial(_files_of, name)))
    chosen = tagged(models, tag)
    if chosen is None and tag is None and otherwise is not None:
        return otherwise
    if chosen is None:
        found = f"it has {', '.join(models[:12])}" if models else "it has no GGUF file of a model"
        raise CheckpointError(f"{name} has no GGUF file that {tag or 'a model'} names: {found}")
    parts = [_asked(name, partial(huggingface_hub.hf_hub_download, name, part)) for part in parts_of(chosen)]
    return Path(parts[0])


def _files_of(name: str) -> list[str]:
    """The files of a repository; without a network those that the cache holds."""
    import huggingface_hub

    try:
        return list(huggingface_hub.HfApi().list_repo_files(name))
    except Exception:
        found = _cached_files(name)
        if not models_of(found):
            raise
        return found


def _cached_files(name: str) -> list[str]:
    """The files of a repository's main branch in the hub's cache."""
    import huggingface_hub

    try:
        repositories = huggingface_hub.scan_cache_dir().repos
    except huggingface_hub.errors.CacheNotFound:
        return []
    main = [one for repo in repositories if repo.repo_id == name for one in repo.revisions if "main" in one.refs]
    return [str(file.file_path.relative_to(one.snapshot_path)) for one in main for file in one.files]


def _asked(name: str, call: Callable[[], Any]) -> Any:
    """Ask the hub. Raises ResourceError with one line of its client's message."""
    try:
        return call()
    except Exception as error:  # the hub's client raises many kinds, all of which mean that it cannot be had
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ResourceError(
            f"{name} is not a folder here, and the hub could not give it: {first:.300} (check the name and the "
            "network, or download it elsewhere and pass the folder)"
        ) from None

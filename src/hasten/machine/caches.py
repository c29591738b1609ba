"""Where hasten keeps what it can make again: compiled kernels, token shards, downloaded things, measurements."""

import os
from pathlib import Path

from hasten.errors import ResourceError


def cache_root() -> Path:
    """The folder of all caches: $HASTEN_CACHE, else $XDG_CACHE_HOME/hasten, else ~/.cache/hasten. Not created here."""
    if chosen := os.environ.get("HASTEN_CACHE"):
        return Path(chosen).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser() / "hasten"
    try:
        return Path.home() / ".cache" / "hasten"
    except RuntimeError as error:
        raise ResourceError("no home folder is known, so there is no place for caches; set HASTEN_CACHE") from error


def cache_folder(name: str) -> Path:
    """The folder of one cache, created when it is not there yet.

    `name` is a single path component such as "native" or "tokens".
    Raises ResourceError when the folder cannot be made or written to.
    """
    assert Path(name).name == name not in ("", ".."), f"not a cache name: {name!r}"
    folder = cache_root() / name
    advice = "set HASTEN_CACHE to a folder you can write to"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(f"cache folder {folder} cannot be made: {error.strerror}; {advice}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ResourceError(f"cache folder {folder} is not writable; {advice}")
    return folder


def cache_sizes() -> dict[str, int]:
    """Bytes of files in each cache that exists, by cache name; an empty dict where there is no cache yet."""
    root = cache_root()
    if not root.is_dir():
        return {}
    return {folder.name: _folder_size(folder) for folder in sorted(root.iterdir()) if folder.is_dir()}


def _folder_size(folder: Path) -> int:
    total = 0
    for place, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.lstat(os.path.join(place, file)).st_size
            except OSError:  # another process may be tidying up
                continue
    return total

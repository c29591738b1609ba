"""Folders for what can be recreated: compiled kernels, token shards, downloads, measurements.

A cache that cannot be written (a read-only image, a service without a home folder) is still read; new entries go to a
temporary folder of this user.
"""

import contextlib
import functools
import os
import stat
import tempfile
import warnings
from pathlib import Path

from hasten.errors import HastenWarning, ResourceError

ADVICE = "set HASTEN_CACHE to a folder you can write to"


def cache_root() -> Path:
    """The folder of all caches: $HASTEN_CACHE, else $XDG_CACHE_HOME/hasten, else ~/.cache/hasten. Not created here.

    Raises ResourceError where no home folder is known.
    """
    if chosen := os.environ.get("HASTEN_CACHE"):
        return Path(chosen).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser() / "hasten"
    try:
        return Path.home() / ".cache" / "hasten"
    except RuntimeError as error:
        raise ResourceError("no home folder is known, so there is no place for caches; set HASTEN_CACHE") from error


def cache_folder(name: str) -> Path:
    """The folder to write one cache to, created if needed: the cache's own, else a temporary one, after one warning.

    `name` is a single path component such as "native" or "tokens".
    Raises ResourceError where no folder can be written.
    """
    own, why = _own_folder(name)
    if own is not None and why is None:
        return own
    try:
        folder = _temporary_folder(_temporary_name()) / name
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ResourceError(f"{why}, and no temporary folder can be made ({error}); {ADVICE}") from error
    _warn(f"{why}; {folder.parent} is used for what is missing; {ADVICE}")
    return folder


def why_not_writable(name: str) -> str | None:
    """Why a cache cannot be written to its own folder, or None."""
    return _own_folder(name)[1]


def cache_places(name: str) -> tuple[Path, ...]:
    """The folders of one cache to search: the temporary one first if its own cannot be written, then its own."""
    own, why = _own_folder(name)
    if own is None or why is not None:
        temporary = _temporary_name()
        places = [temporary / name] if _is_ours(temporary) else []
        return tuple(place for place in [*places, *([own] if own else [])] if place.is_dir())
    return (own,)


def find_cached(name: str, file: str) -> Path | None:
    """Path of a file in a cache, or None."""
    return next((place / file for place in cache_places(name) if (place / file).exists()), None)


def cache_sizes() -> dict[str, int]:
    """Bytes of files in each cache that exists, by cache name; an empty dict where there is no cache yet."""
    root = cache_root()
    if not root.is_dir():
        return {}
    return {folder.name: _folder_size(folder) for folder in sorted(root.iterdir()) if folder.is_dir()}


def _own_folder(name: str) -> tuple[Path | None, str | None]:
    """The cache's own folder, created if possible, and why it cannot be written."""
    assert Path(name).name == name not in ("", ".."), f"not a cache name: {name!r}"
    try:
        folder = cache_root() / name
        folder.mkdir(parents=True, exist_ok=True)
    except ResourceError as error:
        return None, str(error).partition(";")[0]
    except OSError as error:
        return folder, f"the cache folder {folder.parent} cannot be written ({error.strerror})"
    if not os.access(folder, os.W_OK | os.X_OK):
        return folder, f"the cache folder {folder.parent} cannot be written"
    return folder, None


def _temporary_name() -> Path:
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir()) / f"hasten-{user}"


@functools.cache
def _temporary_folder(named: Path) -> Path:
    """Create the folder of this name, or a new one if another user could write to it.

    Compiled kernels are loaded from it.
    """
    with contextlib.suppress(FileExistsError):  # a file, or another process was first
        named.mkdir(mode=0o700)
    return named if _is_ours(named) else Path(tempfile.mkdtemp(prefix="hasten-"))


def _is_ours(folder: Path) -> bool:
    """Whether it is a folder, and only this user can write to it."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    ours = not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not found.st_mode & 0o022)
    return ours and stat.S_ISDIR(found.st_mode)


@functools.cache
def _warn(text: str) -> None:
    warnings.warn(text, HastenWarning, stacklevel=3)


def _folder_size(folder: Path) -> int:
    total = 0
    for place, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.lstat(os.path.join(place, file)).st_size
            except OSError:  # another process may be tidying up
                continue
    return total

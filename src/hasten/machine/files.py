"""Writes files atomically, takes file locks, and reads files of /proc and /sys."""

import json
import math
import os
import stat
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from hasten.errors import ResourceError


def system_file(path: Path) -> str | None:
    """Contents of a file of /proc or /sys, stripped, or None if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return None


@contextmanager
def replacing(path: Path, *, flush: bool = True) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path` to write to; it is renamed to `path` when the block succeeds.

    flush: the data is on the disk (fsync) before the rename; without it a file may be damaged after a power failure.
    After an error the temporary file is removed. Raises OSError as open() does.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}.partial")
    try:
        yield temporary
        if flush:
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, data: str | bytes) -> None:
    """Write text (UTF-8, line ends as they are) or bytes. Raises OSError as open() does."""
    with replacing(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)


def save_json(path: Path, value: object, *, indent: int = 2, sort_keys: bool = False) -> None:
    """Write `value` as JSON. Raises OSError as open() does."""
    write_atomically(path, json.dumps(value, indent=indent, sort_keys=sort_keys) + "\n")


def code_digest() -> str:
    """A short digest of the Python files of this package."""
    import hashlib

    digest = hashlib.blake2b(digest_size=8)
    root = Path(__file__).parent.parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()


def locked(path: Path, *, waiting: str | None) -> AbstractContextManager[object]:
    """Hold a file lock during the block; yields None if the file system has no locks (some network file systems).

    The system releases it when the process ends in any way. While another process holds it, `waiting` is printed to
    standard error (unless empty) and we wait; with `waiting` None the call raises filelock.Timeout instead. Raises
    OSError if the file cannot be created.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return lock.acquire(timeout=0 if waiting is None else 0.5)
    except NotImplementedError:
        return nullcontext()
    except Timeout:
        if waiting is None:
            raise
        if waiting:
            print(waiting, file=sys.stderr)
        return lock.acquire()


# JSON files of a model's folder.
MODEL_JSON = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def require_writable(target: str | None) -> None:
    """Raise ResourceError now, not after minutes of work, if a --json target cannot be written. None and "-" can."""
    if target is None or target == "-":
        return
    path = Path(target)
    folder = path.parent
    if path.is_dir():
        raise ResourceError(f"{target} is a folder; give the name of a file in it")
    if not folder.is_dir():
        raise ResourceError(f"{target} cannot be written: there is no folder {folder}")
    if path.exists() and (path.suffix in (".safetensors", ".gguf") or path.name in MODEL_JSON):
        raise ResourceError(f"{target} is a part of a model, which would be lost; give another name")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ResourceError(f"{target} cannot be written: permission denied")


def write_json(target: str | Path | None, value: object) -> None:
    """Write `value` as JSON to a file, or to standard output if the target is "-"; None: nowhere.

    A file is written atomically; its folder is created. NaN and infinity become null, because JSON has
    neither. Raises ResourceError if the file cannot be written.
    """
    if target is None:
        return
    text = json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if str(target) == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    path = Path(os.path.realpath(target))  # through a link, so that the link stays
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):  # /dev/null, a named pipe; a folder fails here
            path.write_text(text, encoding="utf-8")
            return
        write_atomically(path, text)
    except OSError as error:
        raise ResourceError(f"cannot write {target}: {error.strerror}; choose another place with --json") from error


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value

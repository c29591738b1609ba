"""Opens files that may be anything: a pipe, a device, a broken link, damaged or hostile JSON."""

import json
import stat
from pathlib import Path
from typing import Any, BinaryIO

from hasten.errors import CheckpointError

MAX_CONFIG_BYTES = 1_000_000  # published ones have a few thousand; parsing takes some forty times the size


def open_regular(path: Path, missing: str) -> tuple[BinaryIO, int]:
    """Open a file for reading and say how many bytes it has; symbolic links are followed, as in the hub's cache.

    Raises CheckpointError: with the text `missing` where there is none, and for anything that is not a regular file (a
    pipe would block for ever, a device never end).
    """
    try:
        state = path.stat()
        if not stat.S_ISREG(state.st_mode):
            kind = "a folder" if stat.S_ISDIR(state.st_mode) else "not a regular file"
            raise CheckpointError(f"{path} is {kind}; expected a file")
        return path.open("rb"), state.st_size
    except FileNotFoundError:
        target = "; it is a symbolic link to a file that is not there" if path.is_symlink() else ""
        raise CheckpointError(f"{missing}{target}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; check its permissions") from None


def read_json(path: Path, *, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Parse a JSON object of at most `limit` bytes; CheckpointError says what is missing or malformed, and where."""
    file, size = open_regular(path, f"{path.parent} has no {path.name}: it is not a whole Hugging Face model folder")
    with file:
        if size > limit:
            raise CheckpointError(f"{path}: {size:,} bytes are too many for such a file (at most {limit:,})")
        try:
            value = json.loads(file.read(limit).decode("utf-8-sig"))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        except RecursionError:
            raise CheckpointError(f"{path} is not valid JSON: nested too deeply") from None
        except ValueError as error:  # malformed JSON, bytes that are not UTF-8, a number of thousands of digits
            raise CheckpointError(f"{path} is not valid JSON: {error!s:.200}; download or copy it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object; found {type(value).__name__}")
    return value

"""Writing a file so that it is either the old one or the new one, never half of either."""

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Write text under a temporary name in the same folder, then rename. Raises OSError as open() does."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)

"""Where text comes from: the standard library's own sources, files, and Hugging Face data sets.

A source can be walked any number of times, always in the same order, and says cheaply what it is made of.
"""

import glob
import hashlib
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hasten.data.documents import Document, Item
from hasten.data.readers import RECORD_SUFFIXES, TEXT_SUFFIXES, read_items, read_text, reading
from hasten.errors import DataError

# Up to this size a source is known by its contents (a second of hashing), above it by names, sizes and times.
HASHED_BYTES = 256 << 20

# Left out of `stdlib`: what others installed, test suites, and the generated character tables, which are the same
# few lines thousands of times and would flatter every loss.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings"}


class Source(Protocol):
    """A corpus."""

    @property
    def name(self) -> str:
        """As the user gave it."""

    @property
    def skipped(self) -> int:
        """Files left out because they are not UTF-8 text."""

    @property
    def size(self) -> int | None:
        """Bytes to read, for a progress bar; None where it is not known."""

    def items(self) -> Iterator[Item]:
        """The documents and conversations, in a fixed order."""

    def fingerprint(self) -> str:
        """Hex digest that changes when the contents change."""


@dataclass(frozen=True, slots=True)
class FileSource:
    """Files, each with its name, in a fixed order. Names are relative to the place that the user named: it can move."""

    name: str
    files: tuple[tuple[str, Path], ...]
    text_field: str
    skipped: int = 0

    @property
    def size(self) -> int | None:
        # Parquet is compressed: its size on disk says nothing about the text in it.
        if any(path.suffix.lower() == ".parquet" for _, path in self.files):
            return None
        return sum(status.st_size for status in self._status())

    def items(self) -> Iterator[Item]:
        for name, path in self.files:
            yield from read_items(path, name=name, text_field=self.text_field)

    def fingerprint(self) -> str:
        status = self._status()
        by_contents = sum(one.st_size for one in status) <= HASHED_BYTES
        digest = hashlib.sha256(b"contents" if by_contents else b"names, sizes, times")
        for (name, path), one in zip(self.files, status, strict=True):
            digest.update(f"\0{name}\0{one.st_size}\0".encode("utf-8", "surrogateescape"))
            if by_contents:
                with reading(path), path.open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
            else:
                digest.update(str(one.st_mtime_ns).encode())
        return digest.hexdigest()

    def _status(self) -> list[os.stat_result]:
        status = []
        for _, path in self.files:
            with reading(path):
                status.append(path.stat())
        return status


@dataclass(frozen=True, slots=True)
class LimitedSource:
    """The first documents of another source, up to `limit` UTF-8 bytes of text.

    A text that crosses the limit is cut at its last line end before it (at a character, where there is none);
    a conversation that crosses it is left out.
    """

    inner: Source
    limit: int

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def skipped(self) -> int:
        return self.inner.skipped

    @property
    def size(self) -> int | None:
        return self.limit if self.inner.size is None else min(self.limit, self.inner.size)

    def items(self) -> Iterator[Item]:
        left = self.limit
        for item in self.inner.items():
            used = item_bytes(item, stop_after=left)
            if used <= left:
                left -= used
                yield item
                continue
            if isinstance(item, Document) and left > 0:
                yield Document.of_text(item.name, _head(item, left))
            return

    def fingerprint(self) -> str:
        return self.inner.fingerprint()


def item_bytes(item: Item, *, stop_after: int | None = None) -> int:
    """UTF-8 bytes of the text of an item; counting may stop once it has passed `stop_after`."""
    if not isinstance(item, Document):
        return sum(len(str(message["content"] or "").encode()) for message in item.messages)
    total = 0
    for piece in item.pieces():
        total += len(piece.encode())
        if stop_after is not None and total > stop_after:
            break
    return total


def _head(document: Document, limit: int) -> str:
    kept = bytearray()
    for piece in document.pieces():
        kept += piece.encode()
        if len(kept) > limit:
            break
    del kept[limit:]
    line_end = kept.rfind(b"\n")
    return bytes(kept[: line_end + 1] if line_end >= 0 else kept).decode("utf-8", "ignore")


def open_source(source: str, *, text_field: str = "text", limit_bytes: int | None = None) -> Source:
    """Find what `source` names: `stdlib`, `packages`, a file, a folder, a glob, or a Hugging Face data set.

    Raises DataError where there is nothing to read, ResourceError where the package `datasets` is needed and missing.
    """
    found = _find(source, text_field=text_field)
    return found if limit_bytes is None else LimitedSource(found, limit_bytes)


def _find(source: str, *, text_field: str) -> Source:
    from hasten.data.hub import HubSource

    if source == "stdlib":
        return stdlib_source()
    if source == "packages":
        return packages_source()
    if source.startswith("hf:"):
        return HubSource.open(source, text_field=text_field)
    path = Path(source).expanduser()
    try:
        if path.is_dir():
            return _folder_source(source, path, text_field=text_field)
        if path.is_file():
            return FileSource(source, ((path.name, path),), text_field)
        exists = path.exists()
    except (OSError, ValueError) as error:
        raise DataError(f"{source!r}: cannot be read ({error})") from error
    if exists:
        raise DataError(f"{source}: is neither a file nor a folder (a pipe or device can be read only once)")
    if glob.has_magic(source):
        return _glob_source(source, path, text_field=text_field)
    local = path.suffix.lower() in TEXT_SUFFIXES + RECORD_SUFFIXES
    if not local and re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+(:[\w.\[\]%:+-]+)?", source):
        return HubSource.open(source, text_field=text_field)
    raise DataError(
        f"{source}: there is no such file or folder; give 'stdlib', a file, a folder, a quoted glob, or a Hugging Face "
        "data set as 'hf:owner/name'"
    )


def _folder_source(source: str, folder: Path, *, text_field: str) -> FileSource:
    wanted = TEXT_SUFFIXES + RECORD_SUFFIXES
    files = _named(folder, (path for path in _walk(folder, skipped=set()) if path.suffix.lower() in wanted))
    if not files:
        raise DataError(f"{source}: the folder has no {', '.join(wanted)} file in it; give another folder, or a glob")
    return FileSource(source, files, text_field)


def _named(folder: Path, files: Iterable[Path]) -> tuple[tuple[str, Path], ...]:
    """Each with its name in the folder, sorted by it."""
    return tuple(sorted((path.relative_to(folder).as_posix(), path) for path in files))


def _glob_source(source: str, pattern: Path, *, text_field: str) -> FileSource:
    files = sorted(Path(found) for found in glob.glob(str(pattern), recursive=True) if os.path.isfile(found))
    if not files:
        raise DataError(f"{source}: no file matches this pattern (quote it, so that the shell leaves it alone)")
    # Relative to the folders before the first wildcard, so that the names do not depend on where that is.
    fixed = next(i for i, part in enumerate(pattern.parts) if glob.has_magic(part))
    return FileSource(source, tuple((Path(*path.parts[fixed:]).as_posix(), path) for path in files), text_field)


def stdlib_source() -> FileSource:
    """The running Python's own standard library: real text, and on every machine. About 9 MB in Python 3.11."""
    return _python_source("stdlib", Path(sysconfig.get_paths()["stdlib"]))


def packages_source() -> FileSource:
    """The standard library and the packages installed beside it: about 200 MB in hasten's own environment."""
    stdlib = stdlib_source()
    packages = _python_source("packages", Path(sysconfig.get_paths()["purelib"]))
    return FileSource("packages", stdlib.files + packages.files, "text", skipped=stdlib.skipped + packages.skipped)


def _python_source(name: str, folder: Path) -> FileSource:
    sources = (path for path in _walk(folder, skipped=_SKIPPED_FOLDERS) if path.suffix == ".py")
    # _sysconfigdata* holds the settings of one machine's build, not a text.
    candidates = _named(folder, (path for path in sources if "_sysconfigdata" not in path.name))
    files = tuple((name, path) for name, path in candidates if _is_text(path))
    if not files:
        kind = "standard library" if name == "stdlib" else "package"
        raise DataError(f"{folder}: this Python has no {kind} sources (.py files) there; give a text instead")
    return FileSource(name, files, "text", skipped=len(candidates) - len(files))


def _is_text(path: Path) -> bool:
    try:
        for _ in read_text(path):
            pass
    except DataError:
        return False
    return True


def _walk(folder: Path, *, skipped: set[str]) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror}); check the folder's rights") from error

    for place, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        for name in files:
            path = Path(place, name)
            # A broken link stays in, to be reported when it is read; a pipe would be waited for without end.
            if not name.startswith(".") and (path.is_file() or path.is_symlink()):
                yield path

"""Text sources: the standard library's own sources, files, and Hugging Face data sets."""

import glob
import hashlib
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from hasten.data.documents import Document, Item, Source
from hasten.data.hub import hub_source
from hasten.data.readers import RECORD_SUFFIXES, TEXT_SUFFIXES, read_items, read_text, reading
from hasten.errors import DataError

Files = tuple[tuple[str, Path], ...]  # names and places
# Folders of the running Python, by source: {what they hold: their name in sysconfig}.
PYTHON_FOLDERS = {
    "stdlib": {"standard library": "stdlib"},
    "packages": {"standard library": "stdlib", "package": "purelib"},
}
# Up to this size a source is known by its contents (a second of hashing), above it by names, sizes and times.
HASHED_BYTES = 256 << 20

# Left out of `stdlib`: what others installed, test suites, and the generated character tables, which are the same
# few lines thousands of times and would flatter every loss.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings"}


def file_source(name: str, files: Files, *, text_field: str = "text", skipped: int = 0) -> Source:
    """Files, each with its name, in a fixed order. Names are relative to the place that the user named: it can move."""
    # Parquet is compressed: its size on disk says nothing about the text in it.
    packed = any(path.suffix.lower() == ".parquet" for _, path in files)

    def items() -> Iterator[Item]:
        for file, path in files:
            yield from read_items(path, name=file, text_field=text_field)

    return Source(
        name=name,
        items=items,
        fingerprint=lambda: _digest(files),
        size=None if packed else sum(one.st_size for one in _status(files)),
        skipped=skipped,
    )


def _digest(files: Files) -> str:
    status = _status(files)
    by_contents = sum(one.st_size for one in status) <= HASHED_BYTES
    digest = hashlib.sha256(b"contents" if by_contents else b"names, sizes, times")
    for (name, path), one in zip(files, status, strict=True):
        digest.update(f"\0{name}\0{one.st_size}\0".encode("utf-8", "surrogateescape"))
        if by_contents:
            with reading(path), path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        else:
            digest.update(str(one.st_mtime_ns).encode())
    return digest.hexdigest()


def _status(files: Files) -> list[os.stat_result]:
    status = []
    for _, path in files:
        with reading(path):
            status.append(path.stat())
    return status


def limited(source: Source, limit: int) -> Source:
    """The first documents of another source, up to `limit` UTF-8 bytes of text.

    A text that crosses the limit is cut at its last line end before it (at a character, where there is none);
    a conversation that crosses it is left out.
    """

    def items() -> Iterator[Item]:
        left = limit
        for item in source.items():
            used = item_bytes(item, stop_after=left)
            if used <= left:
                left -= used
                yield item
                continue
            if isinstance(item, Document) and left > 0:
                yield Document.of_text(item.name, _head(item, left))
            return

    return replace(source, items=items, size=limit if source.size is None else min(limit, source.size))


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
    return found if limit_bytes is None else limited(found, limit_bytes)


def read_documents(source: str, *, text_field: str = "text", limit_bytes: int | None = None) -> Iterator[str]:
    """Yield the text of every document of a source (see `prepare` for what a source can be).

    Raises DataError for a source that cannot be read, or that holds conversations instead of text.
    """
    if limit_bytes is not None and limit_bytes < 1:
        raise DataError(f"limit_bytes is {limit_bytes}; it must be at least 1")
    for item in open_source(source, text_field=text_field, limit_bytes=limit_bytes).items():
        if not isinstance(item, Document):
            raise DataError(f"{item.name} is a conversation; plain text is needed here")
        yield "".join(item.pieces())


def _find(source: str, *, text_field: str) -> Source:
    if not source.strip():  # as a path it is the current folder
        raise DataError("the name of the text is empty; give 'stdlib', a file, a folder or a quoted glob")
    if source in PYTHON_FOLDERS:
        return _python_source(source)
    if source.startswith("hf:"):
        return hub_source(source, text_field=text_field)
    path = Path(source).expanduser()
    try:
        if path.is_dir():
            return _folder_source(source, path, text_field=text_field)
        if path.is_file():
            return file_source(source, ((path.name, path),), text_field=text_field)
        exists = path.exists()
    except (OSError, ValueError) as error:
        raise DataError(f"{source!r}: cannot be read ({error})") from error
    if exists:
        raise DataError(f"{source}: is neither a file nor a folder (a pipe or device can be read only once)")
    if glob.has_magic(source):
        return _glob_source(source, path, text_field=text_field)
    local = path.suffix.lower() in TEXT_SUFFIXES + RECORD_SUFFIXES
    if not local and re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+(:[\w.\[\]%:+-]+)?", source):
        return hub_source(source, text_field=text_field)
    raise DataError(
        f"{source}: there is no such file or folder; give 'stdlib', a file, a folder, a quoted glob, or a Hugging Face "
        "data set as 'hf:owner/name'"
    )


def _folder_source(source: str, folder: Path, *, text_field: str) -> Source:
    wanted = TEXT_SUFFIXES + RECORD_SUFFIXES
    files = _named(folder, (path for path in _walk(folder, skipped=set()) if path.suffix.lower() in wanted))
    if not files:
        raise DataError(f"{source}: the folder has no {', '.join(wanted)} file in it; give another folder, or a glob")
    return file_source(source, files, text_field=text_field)


def _named(folder: Path, files: Iterable[Path]) -> Files:
    """Name each path relative to its folder, and sort by these names."""
    return tuple(sorted((path.relative_to(folder).as_posix(), path) for path in files))


def _glob_source(source: str, pattern: Path, *, text_field: str) -> Source:
    files = sorted(Path(found) for found in glob.glob(str(pattern), recursive=True) if os.path.isfile(found))
    if not files:
        raise DataError(f"{source}: no file matches this pattern (quote it, so that the shell leaves it alone)")
    # Relative to the folders before the first wildcard, so that the names do not depend on where that is.
    fixed = next(i for i, part in enumerate(pattern.parts) if glob.has_magic(part))
    named = tuple((Path(*path.parts[fixed:]).as_posix(), path) for path in files)
    return file_source(source, named, text_field=text_field)


def _python_source(name: str) -> Source:
    """The .py files of the running Python: real text that every machine has."""
    files: Files = ()
    skipped = 0
    for kind, key in PYTHON_FOLDERS[name].items():
        folder = Path(sysconfig.get_paths()[key])
        sources = (path for path in _walk(folder, skipped=_SKIPPED_FOLDERS) if path.suffix == ".py")
        # _sysconfigdata* holds the settings of one machine's build, not a text.
        candidates = _named(folder, (path for path in sources if "_sysconfigdata" not in path.name))
        found = tuple((file, path) for file, path in candidates if _is_text(path))
        if not found:
            raise DataError(f"{folder}: this Python has no {kind} sources (.py files) there; give a text instead")
        files += found
        skipped += len(candidates) - len(found)
    return file_source(name, files, skipped=skipped)


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

"""Reads documents from files as streams: text, JSON lines and parquet."""

import codecs
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from hasten.data.conversations import CHAT_FIELDS, KNOWN, chat_kind, check_unicode, conversation
from hasten.data.documents import Document, Item
from hasten.errors import DataError

TEXT_SUFFIXES = (".txt", ".py", ".md")
RECORD_SUFFIXES = (".jsonl", ".json", ".parquet")
USUAL_FIELD = "text"
_BLOCK_BYTES = 1 << 20


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert OSErrors while `path` is read into a DataError that names it."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}); check the file and its rights") from error


def read_items(path: Path, *, name: str, text_field: str) -> Iterator[Item]:
    """Yield the documents of one file, in order: the text file itself, or each line, row or object of a record file."""
    match path.suffix.lower():
        case ".jsonl":
            yield from _read_jsonl(path, name=name, text_field=text_field)
        case ".json":
            yield from _read_json(path, name=name, text_field=text_field)
        case ".parquet":
            yield from _read_parquet(path, name=name, text_field=text_field)
        case _:
            with reading(path):
                empty = path.stat().st_size == 0
            if not empty:
                yield Document(name, lambda: read_text(path))


def read_text(path: Path) -> Iterator[str]:
    """Yield a UTF-8 text in blocks, with line ends unchanged and without a byte-order mark.

    Raises DataError with the position for bytes that are not UTF-8 and for zero bytes (a binary file).
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    position = 0
    with reading(path), path.open("rb") as file:
        while True:
            block = file.read(_BLOCK_BYTES)
            zero = block.find(0)
            if zero >= 0:
                raise DataError(f"{path}: is a binary file, not text (byte {position + zero} is zero); leave it out")
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                # `error.object` begins with what the decoder held back from the block before.
                at = position + len(block) - len(error.object) + error.start
                raise DataError(
                    f"{path}: is not UTF-8 text (byte {at}: {error.reason}); convert it to UTF-8 or leave it out"
                ) from error
            if text:
                yield text
            if not block:
                return
            position += len(block)


def items_of_record(record: Mapping[str, Any], *, name: str, text_field: str) -> Iterator[Item]:
    """Convert a row to a conversation (`hasten.data.conversations`) or a text; nothing if the text is empty.

    A conversation overrides the text field, because data sets with both store the rendering of another model's template
    there. A text field named by the user overrides everything but `messages`.
    """
    named = text_field != USUAL_FIELD and text_field in record
    if record.get("messages") is not None or not named:
        found = conversation(record, name=name)
        if found is not None:
            yield found
            return
    if text_field not in record:
        raise no_text(name, f"field {text_field!r}", sorted(map(str, record)))
    text = record[text_field]
    if text is not None and not isinstance(text, str):
        raise DataError(f"{name}: the field {text_field!r} is a {type(text).__name__}, expected text")
    if text:
        check_unicode(text, name=name)
        yield Document.of_text(name, text)


def no_text(where: object, wanted: str, found: Iterable[str]) -> DataError:
    """The error for rows with neither the wanted field or column nor messages."""
    return DataError(
        f"{where}: has no {wanted} (found: {', '.join(found) or 'nothing'}); name the right one with text_field "
        f"(hasten train: --data.text-field), or give {KNOWN}"
    )


def _read_jsonl(path: Path, *, name: str, text_field: str) -> Iterator[Item]:
    with reading(path), path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip(b"\xef\xbb\xbf \t\r\n"):
                continue
            where = f"{name}:{number}"
            try:
                record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}, line {number}: is not JSON ({error}); repair or remove the line") from error
            if not isinstance(record, dict):
                raise DataError(f"{path}, line {number}: is {line[:40]!r}, expected a JSON object {{...}}")
            try:
                yield from items_of_record(record, name=where, text_field=text_field)
            except DataError as error:
                raise DataError(f"{path}, line {number}: {str(error).removeprefix(where + ': ')}") from error


def _read_json(path: Path, *, name: str, text_field: str) -> Iterator[Item]:
    """Read a list of objects, or an object on each line. Raises DataError for anything else, quoting its beginning."""
    with reading(path), path.open("rb") as file:
        begin = file.read(1 << 16).removeprefix(codecs.BOM_UTF8).lstrip()
    if begin[:1] == b"{" and not _is_one_object(path, text_field=text_field):
        yield from _read_jsonl(path, name=name, text_field=text_field)
        return
    try:
        with reading(path):
            records = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: is not JSON ({error}); repair it, or name a text file") from error
    if not isinstance(records, list):
        raise DataError(
            f"{path}: is {_words(records)}; expected a list of objects [{{...}}, ...], or an object on each line"
        )
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict):
            raise DataError(f"{path}, item {number}: is {record!r:.40}, expected an object {{...}}")
        yield from items_of_record(record, name=f"{name}:{number}", text_field=text_field)


def _words(found: Any) -> str:
    """Describe JSON that is not a list of objects, and name the field that holds one."""
    if not isinstance(found, dict):
        return f"{found!r:.40}"
    lists = [name for name, value in found.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    inside = f" (write the list in {lists[0]!r} alone)" if lists else ""
    return f"an object with {', '.join(map(repr, found)):.60}{inside}"


def _is_one_object(path: Path, *, text_field: str) -> bool:
    """Whether a file that begins with an object is one object, not JSON lines: the object spans several lines, or is
    alone on its line and is no record.
    """
    with reading(path), path.open("rb") as file:
        first, *more = islice((line for line in file if line.strip(codecs.BOM_UTF8 + b" \t\r\n")), 2)
    try:
        record = json.loads(first.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return True
    holds = any(isinstance(value, list) for value in record.values())
    return not more and holds and text_field not in record and chat_kind(record) is None


def _read_parquet(path: Path, *, name: str, text_field: str) -> Iterator[Item]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    row = 0
    try:
        with reading(path), ParquetFile(path) as file:
            columns = [
                column for column in {text_field: 0} | dict.fromkeys(CHAT_FIELDS) if column in file.schema_arrow.names
            ]
            if text_field not in columns and chat_kind(columns) is None:
                raise no_text(path, f"column {text_field!r}", file.schema_arrow.names)
            for batch in file.iter_batches(batch_size=256, columns=columns):
                for record in batch.to_pylist():
                    row += 1
                    yield from items_of_record(record, name=f"{name}:{row}", text_field=text_field)
    except pyarrow.ArrowException as error:
        what = f"is damaged after row {row}" if row else "is damaged, or not a parquet file"
        raise DataError(f"{path}: {what} ({error}); fetch or write it again") from error

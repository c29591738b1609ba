"""A Hugging Face data set as a source. Needs the optional package `datasets`."""

import hashlib
from collections.abc import Iterator

from hasten.data.conversations import chat_kind
from hasten.data.documents import Item, Source
from hasten.data.readers import items_of_record, no_text
from hasten.errors import DataError, ResourceError


def hub_source(source: str, *, text_field: str) -> Source:
    """`hf:owner/name[:split]`, the split `train` unless named; `owner/name` alone where no such path exists.

    It is downloaded, or found in the library's cache. Raises ResourceError without package or network.
    """
    identifier, _, split = source.removeprefix("hf:").partition(":")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ResourceError(
            f"{source}: there is no such file or folder, and reading it as a Hugging Face data set needs the "
            "package datasets: pip install hasten[datasets]"
        ) from error
    try:
        rows = load_dataset(identifier, split=split or "train")
    except Exception as error:  # whatever the library, the network or the data set's own files bring
        raise ResourceError(
            f"{source}: the data set cannot be loaded ({type(error).__name__}: {error}); check the name, the split "
            "(hf:owner/name:split) and the network"
        ) from error
    if text_field not in rows.column_names and chat_kind(rows.column_names) is None:
        raise no_text(source, f"column {text_field!r}", rows.column_names)

    def items() -> Iterator[Item]:
        left = iter(rows)
        for number in range(1, len(rows) + 1):
            name = f"{source.removeprefix('hf:')}:{number}"
            try:
                row = next(left)
            except OSError as error:
                raise DataError(f"{name}: cannot be read ({error}); check the cache of the package datasets") from error
            yield from items_of_record(row, name=name, text_field=text_field)

    # The library's own fingerprint follows the data and every transformation of it; there is no public getter.
    known = getattr(rows, "_fingerprint", "")
    digest = hashlib.sha256(f"{source}\0{known}\0{len(rows)}".encode()).hexdigest()
    return Source(name=source, items=items, fingerprint=lambda: digest)

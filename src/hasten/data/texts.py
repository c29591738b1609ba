"""The texts of a source as they are, for measuring a model on them."""

from collections.abc import Iterator

from hasten.data.documents import Document
from hasten.data.sources import open_source
from hasten.errors import DataError


def read_documents(source: str, *, text_field: str = "text", limit_bytes: int | None = None) -> Iterator[str]:
    """Yield the text of every document of a source (see `prepare` for what a source can be).

    Raises DataError for a source that cannot be read, or that holds conversations instead of text.
    """
    if limit_bytes is not None and limit_bytes < 1:
        raise DataError(f"limit_bytes is {limit_bytes}; it must be at least 1")
    for item in open_source(source, text_field=text_field, limit_bytes=limit_bytes).items():
        if not isinstance(item, Document):
            raise DataError(f"{item.name} is a conversation; perplexity is measured on plain text")
        yield "".join(item.pieces())

"""A prepared corpus on disk: two splits of tokens, their tokenizer, the held-out texts and a manifest."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hasten.data.encode import VALIDATION_FILE
from hasten.data.shards import TokenSplit, open_split, remedy
from hasten.errors import DataError
from hasten.text.tokenizer import Tokenizer

FORMAT_VERSION = 2  # 2: .json holds records, conversations come in more forms
MANIFEST_FILE = "manifest.json"
TOKENIZER_FOLDER = "tokenizer"


@dataclass(frozen=True, slots=True)
class TokenData:
    """The prepared corpus that `hasten.data.prepare` returns and `load` opens.

    manifest: `version`, `source`, `split`, `tokenizer` (with its digest), `settings`, `dtype`, `separator`, `before`,
    and for each of `splits` the counts `documents`, `bytes`, `tokens` and the `shards`.
    """

    train: TokenSplit
    validation: TokenSplit
    tokenizer: Tokenizer
    manifest: dict[str, Any]
    folder: Path

    @classmethod
    def load(cls, folder: str | Path) -> "TokenData":
        """Open a prepared folder; tokens are memory-mapped. Raises DataError if its files are inconsistent."""
        path = Path(folder)
        manifest = _read_manifest(path)
        tokenizer = Tokenizer.from_folder(path / TOKENIZER_FOLDER)
        if tokenizer is None:
            raise DataError(f"{path / TOKENIZER_FOLDER}: the tokenizer is missing; {remedy(path)}")
        try:
            digest = str(manifest["tokenizer"]["digest"])
            train, validation = (
                open_split(path, split=split, entry=manifest["splits"][split], dtype=manifest["dtype"])
                for split in ("train", "validation")
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path / MANIFEST_FILE}: is damaged ({error!r}); {remedy(path)}") from error
        if tokenizer.digest != digest:
            raise DataError(
                f"{path / TOKENIZER_FOLDER}: is not the tokenizer that the tokens were made with (digest "
                f"{tokenizer.digest[:12]}, the manifest says {digest[:12]}); {remedy(path)}"
            )
        return cls(train=train, validation=validation, tokenizer=tokenizer, manifest=manifest, folder=path)

    def validation_documents(self) -> Iterator[tuple[str, str]]:
        """(name, text) of every held-out document, in order; a conversation as its template rendered it."""
        path = self.folder / VALIDATION_FILE
        try:
            with path.open(encoding="utf-8", newline="\n") as file:
                for line in file:
                    record = json.loads(line)
                    yield record["name"], record["text"]
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"{path}: cannot be read ({error}); {remedy(self.folder)}") from error


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST_FILE
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}), so {folder} is not prepared data; prepare it with "
            "hasten.data.prepare"
        ) from error
    except ValueError as error:
        raise DataError(f"{path}: is not JSON ({error}); {remedy(folder)}") from error
    version = manifest.get("version") if isinstance(manifest, dict) else None
    if version != FORMAT_VERSION:
        raise DataError(f"{path}: has version {version}, this hasten reads {FORMAT_VERSION}; {remedy(folder)}")
    found: dict[str, Any] = manifest
    return found

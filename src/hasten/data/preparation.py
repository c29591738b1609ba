"""`prepare`: encodes a text source into token shards in a cache, once."""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hasten.checkpoints.load import open_checkpoint
from hasten.checks import whole
from hasten.data.documents import Source
from hasten.data.encode import Encoder, training_texts
from hasten.data.sources import open_source
from hasten.data.splits import SplitPlan, plan_split
from hasten.data.token_data import FORMAT_VERSION, MANIFEST_FILE, TOKENIZER_FOLDER, TokenData
from hasten.data.tokenizers import train_bpe, train_characters
from hasten.errors import ConfigError, DataError, ResourceError
from hasten.machine.caches import cache_folder, find_cached
from hasten.machine.files import locked, save_json
from hasten.machine.progress import byte_counter
from hasten.text.tokenizer import Tokenizer

TokenizerKind = Literal["bpe", "character"]

# Merges learned from this much text do not change with more of it, and their counts fit into memory.
_BPE_TRAINING_CHARACTERS = 1 << 28
# What decides a model folder's special tokens beside the tokenizer's own files.
_MODEL_FILES = ("config.json", "generation_config.json")


@dataclass(frozen=True, slots=True)
class _Job:
    """A corpus to prepare, and how. given: the tokenizer that was named, if any.

    settings: everything besides the text that determines the tokens; with the source's fingerprint it is the cache key.
    """

    corpus: Source
    fingerprint: str
    settings: dict[str, Any]
    given: Tokenizer | None
    kind: TokenizerKind
    vocab_size: int
    progress: bool


def prepare(
    source: str | Path,
    *,
    tokenizer: str | Path | None = None,
    tokenizer_kind: TokenizerKind = "bpe",
    vocab_size: int = 4096,
    validation_fraction: float = 0.05,
    seed: int = 0,
    folder: str | Path | None = None,
    text_field: str = "text",
    limit_bytes: int | None = None,
    progress: bool = True,
) -> TokenData:
    """Tokenize a corpus into memory-mapped shards, or find those of an earlier run with the same text and settings.

    source: `stdlib`, a file, a folder, a glob (.txt, .py, .md, .jsonl, .parquet; a .jsonl line or parquet row with
    `messages` is a chat), or a Hugging Face data set (`hf:owner/name[:split]`).
    tokenizer: a folder with one, or a GGUF file; without it one of `tokenizer_kind` is trained on the training split
    (vocab_size: for "bpe"). validation_fraction: the share of documents that is held out, by a hash of name and seed.
    folder: the cache folder. text_field: the field of .jsonl and parquet rows. limit_bytes: take the first documents
    of the source up to this many bytes. progress: bars on standard error.

    Raises DataError for text that cannot be read, ConfigError for settings that cannot work, ResourceError for a disk
    that is full or a package that is missing. An interrupted run leaves nothing that a later run would use: the shards
    are written to a temporary folder, which is renamed as the last step.
    """
    source = str(source)
    vocab_size = whole("vocab_size", vocab_size)
    limit_bytes = None if limit_bytes is None else whole("limit_bytes", limit_bytes)
    _check(tokenizer_kind, validation_fraction=validation_fraction)
    given = None if tokenizer is None else load_tokenizer(Path(tokenizer))
    corpus = open_source(source, text_field=text_field, limit_bytes=limit_bytes)
    settings = {
        "tokenizer": _identity(given, kind=tokenizer_kind, vocab_size=vocab_size),
        "validation_fraction": validation_fraction,
        "seed": seed,
        "text_field": text_field,
        "limit_bytes": limit_bytes,
    }
    job = _Job(corpus, corpus.fingerprint(), settings, given, tokenizer_kind, vocab_size, progress)
    key = json.dumps([FORMAT_VERSION, job.fingerprint, settings], sort_keys=True)
    name = hashlib.sha256(key.encode()).hexdigest()[:24]
    there = find_cached("data", name) if folder is None else None
    home = there.parent if there is not None and _is_there(there) else Path(folder or cache_folder("data"))
    target = home / name
    try:
        if not _is_there(target):
            _make_alone(job, target)
    except OSError as error:
        # Reading is done under `reading`, which makes DataErrors: what comes here is about writing.
        raise ResourceError(
            f"{home}: the token shards cannot be written ({error.strerror or error}); free some space or use another "
            "folder"
        ) from error
    return TokenData.load(target)


def _check(kind: str, *, validation_fraction: float) -> None:
    if kind not in ("bpe", "character"):
        raise ConfigError(f"tokenizer_kind is {kind!r}; choose 'bpe' or 'character'")
    if not 0 <= validation_fraction < 1:
        raise ConfigError(f"validation_fraction is {validation_fraction}; it must be at least 0 and less than 1")


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a folder or a GGUF file. Raises DataError if it has none."""
    found = open_checkpoint(folder).tokenizer if folder.is_file() else Tokenizer.from_folder(folder)
    if found is None:
        raise DataError(f"{folder}: has no tokenizer (tokenizer.json, or vocab.json + merges.txt); name another folder")
    return found


def _identity(given: Tokenizer | None, *, kind: TokenizerKind, vocab_size: int) -> str:
    """The tokenizer in the cache's key: "bpe 4096", "character", or the digest of the given one."""
    if given is None:
        return f"bpe {vocab_size}" if kind == "bpe" else "character"
    # The digest leaves the chat template out, and a chat's tokens depend on it.
    return f"{given.digest} {hashlib.sha256((given.chat_template or '').encode()).hexdigest()[:16]}"


def _is_there(target: Path) -> bool:
    return (target / MANIFEST_FILE).exists()


def _make_alone(job: _Job, target: Path) -> None:
    """Create `target` from a temporary folder beside it, in one process at a time; others wait and then use it.

    On file systems without locks, several processes may do the work, and the first one renames its folder.
    """
    waiting = "another process is preparing the same data: waiting for it" if job.progress else ""
    with locked(target.with_name(f".{target.name}.lock"), waiting=waiting) as lock:
        if _is_there(target):
            return
        if lock is not None:
            for stale in target.parent.glob(f".{target.name}.*.partial"):  # what a killed process left
                shutil.rmtree(stale, ignore_errors=True)
        work = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
        try:
            work.mkdir()
            _make(job, work)
            if job.corpus.fingerprint() != job.fingerprint:
                raise DataError(
                    f"{job.corpus.name}: changed while it was being read; run again once nothing writes to it"
                )
            os.replace(work, target)
        except OSError:
            if not _is_there(target):  # another process without our lock may have been first, with the same contents
                raise
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _make(job: _Job, work: Path) -> None:
    corpus = job.corpus
    plan = plan_split(corpus, fraction=job.settings["validation_fraction"], seed=job.settings["seed"])
    tokenizer = job.given or _train(job, plan)
    tokenizer.save(work / TOKENIZER_FOLDER)
    for name in _MODEL_FILES:
        if tokenizer.source is not None and (tokenizer.source / name).is_file():
            shutil.copyfile(tokenizer.source / name, work / TOKENIZER_FOLDER / name)
    with byte_counter("tokenizing", total=corpus.size, shown=job.progress) as advance:
        encoder = Encoder(folder=work, tokenizer=tokenizer, plan=plan, advance=advance)
        encoder.run(corpus)
    splits = {name: writer.close() for name, writer in encoder.writers.items()}
    if splits["train"]["tokens"] == 0 or (plan.fraction > 0 and splits["validation"]["tokens"] == 0):
        counts = {name: entry["documents"] for name, entry in splits.items()}
        if not any(counts.values()):
            raise DataError(f"{corpus.name}: there is no text in it; name a source that has some")
        raise DataError(
            f"{corpus.name}: too little text (documents with text: {counts['train']} for training, "
            f"{counts['validation']} held out); give more, or set validation_fraction to 0"
        )
    manifest: dict[str, Any] = {
        "version": FORMAT_VERSION,
        "source": {"name": corpus.name, "fingerprint": job.fingerprint, "skipped_files": corpus.skipped},
        "split": plan.describe(),
        "tokenizer": {
            "digest": tokenizer.digest,
            "vocab_size": tokenizer.vocab_size,
            "kind": job.kind if job.given is None else "given",
        },
        "settings": job.settings,
        "dtype": encoder.writers["train"].dtype.name,
        "separator": encoder.separator,
        "before": encoder.before,
        "splits": splits,
    }
    save_json(work / MANIFEST_FILE, manifest)


def _train(job: _Job, plan: SplitPlan) -> Tokenizer:
    with byte_counter(f"learning the {job.kind} tokenizer", total=job.corpus.size, shown=job.progress) as advance:

        def texts(limit: int) -> Iterator[str]:
            for text in training_texts(job.corpus, plan, limit=limit):
                yield text
                advance(len(text.encode()))

        if job.kind == "bpe":
            return train_bpe(texts(_BPE_TRAINING_CHARACTERS), vocab_size=job.vocab_size)
        return train_characters(texts(1 << 62))

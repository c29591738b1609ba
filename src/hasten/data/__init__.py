"""Text sources -> token shards -> batches that can be resumed exactly. See docs/data.md."""

from hasten.data.batches import Batch, Batches, evaluation_windows
from hasten.data.preparation import prepare
from hasten.data.shards import TokenSplit
from hasten.data.sources import read_documents
from hasten.data.token_data import TokenData
from hasten.data.tokenizers import train_bpe, train_characters

__all__ = [
    "Batch",
    "Batches",
    "TokenData",
    "TokenSplit",
    "evaluation_windows",
    "prepare",
    "read_documents",
    "train_bpe",
    "train_characters",
]

"""Perplexity of a text: how well a model predicts each token after the first."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hasten.engine.cache import KVCache, row_format
from hasten.engine.prompts import check_ids
from hasten.errors import ConfigError
from hasten.model.context import training_context
from hasten.model.fused import is_fused
from hasten.model.interfaces import Context
from hasten.model.transformer import Transformer
from hasten.ops.attention.cache_rows import PLAIN

BATCH_TOKENS = 2048  # enough for products at the machine's rate; with more, activations leave the caches
DEFAULT_CONTEXT = 2048  # of a window, where the model has more positions


@dataclass(frozen=True, slots=True)
class Perplexity:
    """The result of `perplexity`.

    perplexity: exp of the mean loss in nats per token. bits_per_byte: total bits over the text's UTF-8 bytes (None for
    token ids), which compares models of different tokenizers. tokens: number of predicted tokens.
    """

    perplexity: float
    bits_per_byte: float | None
    tokens: int


@dataclass(frozen=True, slots=True)
class Window:
    """A window of one document: its tokens; those from `first` on are scored."""

    tokens: Tensor
    first: int


def windows(tokens: Tensor, *, context: int, stride: int) -> Iterator[Window]:
    """Cut a document into overlapping windows.

    Every token after the first is scored exactly once, with at least context - stride tokens before it wherever the
    document has them.
    """
    scored = 1
    start = 0
    while scored < len(tokens):
        end = min(start + context, len(tokens))
        yield Window(tokens[start:end], scored - start)
        scored = end
        start += stride


@torch.inference_mode()
def perplexity(
    model: Transformer,
    documents: Iterable[str | Sequence[int]],
    *,
    context: int | None = None,
    stride: int | None = None,
    kv_cache_dtype: str = "auto",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Perplexity:
    """Score documents (texts, or token ids where the model has no tokenizer), each on its own.

    context: tokens a window holds; the model's positions, at most 2,048, by default. stride: how far a window moves,
    half the context by default; the context itself means windows that do not overlap, half the work. kv_cache_dtype:
    what attention reads its keys and values from, one of `hasten.engine.params.KVCacheDtype`. progress is called
    with the number of tokens scored so far and that of all. Raises ConfigError if nothing can be predicted.
    """
    cut, size = cut_windows(model, documents, context=context, stride=stride)
    total = sum(len(window.tokens) - window.first for window in cut)
    nats, count = 0.0, 0
    for batch in batches(cut, model.device):
        pass_context = scoring_context(model, batch.positions, kv_cache_dtype)
        nats += float(model(batch.tokens, batch.positions, pass_context, rows=batch.rows, targets=batch.targets))
        count += len(batch.targets)
        progress(count, total)
    bits = nats / math.log(2) / size if size else None
    return Perplexity(exp(nats / count), bits, count)


def scoring_context(model: Transformer, positions: Tensor, kv_cache_dtype: str) -> Context:
    """The attention context for scoring whole rows, positions (B, T) from 0, through a KV cache of that format.

    In the model's own dtype no cache is needed: it would hold the same keys and values. Raises ConfigError for an
    unknown format.
    """
    rows = row_format(kv_cache_dtype)
    batch, tokens = positions.shape
    if rows == PLAIN:
        return training_context(model, tokens)
    like: dict[str, Any] = {"dtype": model.compute_dtype, "device": model.device}
    cache = KVCache.of_texts(model.config, batch=batch, capacity=tokens, **like, row_format=rows)
    return cache.step_of_texts(positions, fresh=True, masks=not is_fused(model))


def exp(mean: float) -> float:
    """e^mean, infinite where that is too large for a float; NaN stays NaN."""
    return math.inf if mean >= 700 else math.exp(mean)


def cut_windows(
    model: Transformer, documents: Iterable[str | Sequence[int]], *, context: int | None, stride: int | None
) -> tuple[list[Window], int]:
    """Cut all documents into windows, the longest first; also returns the UTF-8 bytes of the texts.

    Raises ConfigError as `perplexity` does.
    """
    if isinstance(documents, str):
        raise ConfigError("perplexity takes a list of documents; put a single text into a list")
    limit = model.config.max_positions
    context = min(limit, DEFAULT_CONTEXT) if context is None else context
    if not isinstance(context, int) or not 2 <= context <= limit:
        raise ConfigError(f"context must be from 2 to the model's {limit} positions; found {context}")
    stride = max(1, context // 2) if stride is None else stride
    if not isinstance(stride, int) or not 1 <= stride <= context:
        raise ConfigError(f"stride must be from 1 to the context ({context}); found {stride}")
    # Without overlap a window still begins with the last token of the one before: the next is predicted from it.
    stride = min(stride, context - 1)
    encoded = [(_tokens(model, document), document) for document in documents]
    size = sum(len(document.encode()) for _, document in encoded if isinstance(document, str))
    cut = [window for tokens, _ in encoded for window in windows(tokens, context=context, stride=stride)]
    # By length, so that little is padding; the longest first, so that what does not fit into memory ends at once.
    cut.sort(key=lambda window: -len(window.tokens))
    if not cut:
        raise ConfigError("the text is too short: no document has two tokens, so there is nothing to predict")
    return cut, size


def _tokens(model: Transformer, document: str | Sequence[int]) -> Tensor:
    """Token ids of a document, int32 (T,): four bytes a token, where a list takes eight or more."""
    if not isinstance(document, str) and (not hasattr(document, "__len__") or isinstance(document, bytes)):
        raise ConfigError(f"a document is a text or a list of token ids; found {document!r:.60}")
    if isinstance(document, str):
        if model.tokenizer is None:
            raise ConfigError("this model's folder has no tokenizer: give token ids")
        document = model.tokenizer.encode(document)
    check_ids(model, document)
    return torch.tensor(document, dtype=torch.int32)


@dataclass(frozen=True, slots=True)
class Padded:
    """A padded batch of windows. rows: flattened rows whose next token is scored; targets: those next tokens."""

    tokens: Tensor
    positions: Tensor
    rows: Tensor
    targets: Tensor

    @classmethod
    def of(cls, batch: Sequence[Window], device: torch.device) -> "Padded":
        """Pad windows, the longest first. Only scored rows reach the head: with half an overlap, half of them."""
        longest = len(batch[0].tokens) - 1
        inputs = torch.zeros(len(batch), longest, dtype=torch.int64)
        rows, targets = [], []
        for row, window in enumerate(batch):
            last = len(window.tokens) - 1
            inputs[row, :last] = window.tokens[:-1]
            rows.append(row * longest + torch.arange(window.first - 1, last))
            targets.append(window.tokens[window.first :])
        positions = torch.arange(longest, device=device).expand(len(batch), -1)
        return cls(inputs.to(device), positions, torch.cat(rows).to(device), torch.cat(targets).to(device, torch.int64))


def batches(cut: Sequence[Window], device: torch.device) -> Iterator[Padded]:
    """Batch windows, longest first, up to BATCH_TOKENS tokens (at least one window), padded to the first of a batch."""
    room, start = max(len(cut[0].tokens), BATCH_TOKENS), 0
    while start < len(cut):
        count = room // len(cut[start].tokens)
        yield Padded.of(cut[start : start + count], device)
        start += count

"""Perplexity of a text: how well a model predicts each token after the first."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from hasten.errors import ConfigError
from hasten.generation.ids import check_ids
from hasten.model.context import training_context
from hasten.model.transformer import Transformer


@dataclass(frozen=True, slots=True)
class Perplexity:
    """perplexity: exp of the mean loss in nats per token. bits_per_byte: total bits over the text's UTF-8 bytes
    (None for token ids), which compares models of different tokenizers. tokens: how many were predicted.
    """

    perplexity: float
    bits_per_byte: float | None
    tokens: int


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of one document: its tokens, of which those from `first` on are scored."""

    tokens: Sequence[int]
    first: int


def windows(tokens: Sequence[int], *, context: int, stride: int) -> Iterator[Window]:
    """Overlapping windows in which every token after the first is scored exactly once, with at least
    context - stride tokens before it wherever the document has them.
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
    advance: Callable[[int], None] | None = None,
) -> Perplexity:
    """Score documents (texts, or token ids where the model has no tokenizer), each on its own.

    context: tokens a window holds, the model's positions or 2,048 by default. stride: how far a window moves, half
    the context by default. advance is called with the number of tokens scored. Raises ConfigError if nothing can be
    predicted.
    """
    limit = model.config.max_positions
    context = min(limit, 2048) if context is None else context
    if not isinstance(context, int) or not 2 <= context <= limit:
        raise ConfigError(f"context must be from 2 to the model's {limit} positions; found {context}")
    stride = max(1, context // 2) if stride is None else stride
    # A window scores up to `stride` new tokens and must not skip any.
    if not isinstance(stride, int) or not 1 <= stride < context:
        raise ConfigError(f"stride must be from 1 to context - 1 ({context - 1}); found {stride}")
    nats, count, size = 0.0, 0, 0
    # Bounded by the logits, (tokens, V) in float32: about 256 MB.
    room = max(context, min(4096, (1 << 26) // model.config.vocab_size))
    for batch in _batches(_all_windows(model, documents, context, stride), room // context):
        nats += _score(model, [window for window, _ in batch])
        scored = sum(len(window.tokens) - window.first for window, _ in batch)
        size += sum(extra for _, extra in batch)
        count += scored
        if advance is not None:
            advance(scored)
    if not count:
        raise ConfigError("the text is too short: no document has two tokens, so there is nothing to predict")
    bits = nats / math.log(2) / size if size else None
    mean = nats / count
    return Perplexity(math.exp(mean) if mean < 700 else math.inf, bits, count)


def _all_windows(
    model: Transformer, documents: Iterable[str | Sequence[int]], context: int, stride: int
) -> Iterator[tuple[Window, int]]:
    """Windows of all documents, each with the bytes of text that it is the first to bring."""
    if isinstance(documents, str):
        raise ConfigError("perplexity takes a list of documents; put a single text into a list")
    for document in documents:
        if not isinstance(document, str) and (not hasattr(document, "__len__") or isinstance(document, bytes)):
            raise ConfigError(f"a document is a text or a list of token ids; found {document!r:.60}")
        if isinstance(document, str):
            if model.tokenizer is None:
                raise ConfigError("this model's folder has no tokenizer: give token ids")
            tokens: Sequence[int] = model.tokenizer.encode(document)
            size = len(document.encode())
        else:
            tokens, size = document, 0
        check_ids(model, tokens)
        for window in windows(tokens, context=context, stride=stride):
            yield window, size
            size = 0


def _batches(items: Iterable[tuple[Window, int]], size: int) -> Iterator[list[tuple[Window, int]]]:
    batch: list[tuple[Window, int]] = []
    for item in items:
        batch.append(item)
        if len(batch) >= size:
            yield batch
            batch = []
    if batch:
        yield batch


def _score(model: Transformer, batch: list[Window]) -> float:
    """The sum of the losses, in nats, of the scored tokens of a batch of windows."""
    longest = max(len(window.tokens) for window in batch) - 1
    inputs = torch.zeros(len(batch), longest, dtype=torch.int64)
    targets = torch.full((len(batch), longest), -100)
    for row, window in enumerate(batch):
        tokens = torch.tensor(window.tokens)
        inputs[row, : len(tokens) - 1] = tokens[:-1]
        targets[row, window.first - 1 : len(tokens) - 1] = tokens[window.first :]
    device = model.device
    positions = torch.arange(longest, device=device).expand(len(batch), -1)
    context = training_context(model, longest)
    return float(model(inputs.to(device), positions, context, targets=targets.to(device)))

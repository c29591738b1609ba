"""What a finished text leaves to the next one of its model on a GPU: the cache, and the steps captured over it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from hasten.engine.runner import ModelRunner
from hasten.engine.settings import EngineSettings
from hasten.model.fused import CudaStack
from hasten.model.transformer import Transformer

if TYPE_CHECKING:
    from hasten.engine.batch_runner import BatchRunner

MOST_KEPT_BYTES = 2 << 30  # of a cache that is kept for the next text


@dataclass(frozen=True, slots=True)
class Kept:
    """A cache and its captured steps. Nothing here refers to the model."""

    decoder: BatchRunner
    sequences: int
    max_length: int
    kv_cache_dtype: str
    addresses: tuple[int, ...]  # of what the steps read of the model


_KEPT: WeakKeyDictionary[Transformer, Kept] = WeakKeyDictionary()


def keep(runner: ModelRunner, settings: EngineSettings) -> None:
    """Keep the cache and the captured steps of a runner that is not used any more.

    Only of a model that is fused on a GPU, whose steps read the weights at addresses that can be compared.
    """
    model, decoder = runner.model, runner.decoder
    if decoder is None or not decoder.captures.pieces or runner.cache.bytes > MOST_KEPT_BYTES:
        return
    if isinstance(model.stack, CudaStack):
        made_for = settings.max_sequences, runner.max_length, settings.kv_cache_dtype
        _KEPT[model] = Kept(decoder, *made_for, model.stack.addresses(model))


def take(model: Transformer, settings: EngineSettings, *, blocks: int) -> Kept | None:
    """What `keep` has of this model, if it serves: as many sequences, no smaller, and at most about twice as large."""
    kept, stack, length = _KEPT.pop(model, None), model.stack, settings.max_length or 0
    if kept is None or not settings.capture or not isinstance(stack, CudaStack):
        return None
    if stack.addresses(model) != kept.addresses:
        return None
    same = kept.sequences == settings.max_sequences and kept.kv_cache_dtype == settings.kv_cache_dtype
    fits = length <= kept.max_length <= 2 * length and blocks <= kept.decoder.cache.blocks
    return kept if same and fits else None


def release(model: Transformer) -> None:
    """Free what `keep` holds of this model, before others plan with the device's memory."""
    _KEPT.pop(model, None)

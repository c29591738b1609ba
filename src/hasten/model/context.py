"""The context of a forward pass without a cache: training, evaluation, and scoring whole sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from hasten.errors import ConfigError
from hasten.model.attention import Attention
from hasten.model.mixer import new_states
from hasten.model.mixer_config import MixerConfig
from hasten.model.transformer import Transformer
from hasten.ops.attention import LayerAttention
from hasten.ops.attention.block_mask import BlockMask
from hasten.ops.attention.inputs import Intervals, document_intervals
from hasten.ops.attention.layer import Mask
from hasten.ops.attention.view import AttentionMetadata, KVView
from hasten.ops.states import SequenceGroup, State, StateView, group_sequences, in_groups


class PlainLayer:
    """Attends to the tokens of this call only: causally (None), or as mask and intervals say.

    documents int64 (B, T): the document of each token, at each of which a state begins again.
    """

    def __init__(self, mask: Mask = None, intervals: Intervals | None = None, documents: Tensor | None = None) -> None:
        self.mask, self.intervals, self.documents = mask, intervals, documents
        self._groups: list[SequenceGroup] | None = None  # of the documents

    @property
    def alone(self) -> bool:
        return True

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attention: LayerAttention,
        kept: Tensor | None = None,
        sinks: Tensor | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        return attention(q, k, v, mask=self.mask, intervals=self.intervals, sinks=sinks, dropout=dropout)

    def recur(self, run: Callable[..., tuple[Tensor, State]], *inputs: Tensor) -> Tensor:
        if self.documents is None:
            return run(None, *inputs)[0]
        if self._groups is None:
            self._groups = _groups_of(self.documents)
        return in_groups(self._groups, lambda group, *own: run(None, *own)[0], inputs)

    def view(self, *, batch: int, tokens: int, kv_heads: int, head_dim: int, like: Tensor | None = None) -> KVView:
        """A cache for this call alone, for a kernel that writes and reads the cache itself.

        like: a tensor of its device and dtype; by default it is on the CPU, in bfloat16.
        """
        like = torch.empty(0, dtype=torch.bfloat16) if like is None else like
        metadata = self._metadata(batch, tokens, like.device)
        k = like.new_zeros(batch * tokens + 1, kv_heads, head_dim)
        mask = self.mask
        assert not isinstance(mask, Tensor), "those of documents are refused"
        return KVView(k, torch.zeros_like(k), metadata, None if mask is None else mask.native())

    def state_view(self, *, batch: int, tokens: int, sizes: MixerConfig) -> StateView:
        """States for this call alone, as `view`."""
        metadata = self._metadata(batch, tokens, torch.device("cpu"))
        held = new_states(sizes, batch, torch.bfloat16, torch.device("cpu"))
        return StateView(held, torch.arange(batch), None, metadata)

    def _metadata(self, batch: int, tokens: int, device: torch.device) -> AttentionMetadata:
        """Where the tokens of texts of one length are that nothing comes before."""
        if isinstance(self.mask, Tensor) or self.intervals is not None or self.documents is not None:
            raise ConfigError("the fused kernels know no packed documents; give each its own row, or load unfused")
        first_rows = torch.arange(batch + 1, device=device) * tokens
        seq_lens = torch.full((batch,), tokens, device=device)
        slots = torch.arange(batch * tokens, device=device)
        return AttentionMetadata(slots, first_rows, seq_lens, first_rows[:-1], max_query=tokens, longest=tokens)


class TrainingContext:
    """The context of a pass without a cache. Stateless: each layer makes its own view.

    documents (B, T): the document number of each token; attention stays inside a document.

    intervals: pass documents to the kernels as the first and last key of each token, not as a (B, T, T) mask. blocks:
    the block mask of each layer, for the number of tokens of the pass; with them documents are always intervals.
    """

    metadata = plan = stretched = state_slots = certain = None
    k = v = views = ()
    layers: Sequence[PlainLayer]

    def __init__(
        self,
        windows: Sequence[int | None],
        documents: Tensor | None = None,
        *,
        intervals: bool = False,
        blocks: Sequence[BlockMask] | None = None,
    ) -> None:
        if blocks is not None:
            own = None if documents is None else document_intervals(documents)
            self.layers = [PlainLayer(mask, own) for mask in blocks]
            return
        by_window = {window: _layer(documents, window, intervals) for window in set(windows)}
        self.layers = [by_window[window] for window in windows]


def _layer(documents: Tensor | None, window: int | None, intervals: bool) -> PlainLayer:
    if documents is None:
        return PlainLayer()
    own = document_intervals(documents, window)
    if intervals:
        return PlainLayer(intervals=own, documents=documents)
    return PlainLayer(own.dense(documents.shape[1]), documents=documents)


def _groups_of(documents: Tensor) -> list[SequenceGroup]:
    """The documents of all rows (B, T), in groups of one length."""
    counts: list[int] = []
    for row in documents:
        counts += torch.unique_consecutive(row, return_counts=True)[1].tolist()
    first = [0, *accumulate(counts)][:-1]
    return group_sequences(first, counts, tokens=documents.numel(), device=documents.device)


def training_context(
    model: Transformer, tokens: int, documents: Tensor | None = None, *, device: torch.device | None = None
) -> TrainingContext:
    """The context in which `model` computes rows of `tokens` tokens without a cache, its sparse pattern included.

    device: where the blocks are computed, if not on the model's device. documents: int64 (B, T), as in
    `TrainingContext`; passed as intervals if every layer's kernel supports them.

    Raises ConfigError for documents in a model with a sparse pattern whose kernel cannot separate them (on CUDA).
    """
    if not model.bound:
        model.bind_once()
    config, pattern = model.config, model.config.attention_pattern
    windows = [layer.window for layer in config.layers]
    attending = [block for block, layer in zip(model.blocks, config.layers, strict=True) if layer.attends]
    attentions = [getattr(block, "attention", None) for block in attending]  # None: a fused block
    fits = all(isinstance(attention, Attention) and attention.supports_segments for attention in attentions)
    if pattern is None:
        return TrainingContext(windows, documents, intervals=fits)
    by_flex = any(isinstance(one, Attention) and one.kernels.tokens.name == "flex" for one in attentions)
    if documents is not None and by_flex:
        raise ConfigError("the kernel flex of this model's sparse pattern cannot keep packed documents apart")
    masks = [
        BlockMask.of(pattern, tokens, heads=config.heads, layer=layer, window=window)
        for layer, window in enumerate(windows)
    ]
    for mask in masks:  # ready for the layers' kernels
        mask.prepare(model.device if device is None else device)
    return TrainingContext(windows, documents, blocks=masks)


class TrainingContexts:
    """The training contexts of one model: one kept for each length, and a new one for packed documents."""

    def __init__(self, model: Transformer) -> None:
        self._model = model
        self._plain: dict[int, TrainingContext] = {}  # by the number of tokens in a row

    def of(self, tokens: int, documents: Tensor | None = None) -> TrainingContext:
        """`training_context(model, tokens, documents)`, kept for the next call where there are no documents."""
        if documents is not None:
            return training_context(self._model, tokens, documents)
        if tokens not in self._plain:
            self._plain[tokens] = training_context(self._model, tokens)
        return self._plain[tokens]

"""The context of a forward pass without a cache: training, evaluation, and scoring whole sequences."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hasten.errors import ConfigError
from hasten.ops.attention.masks import visible
from hasten.ops.attention.view import KVView


class PlainLayer:
    """Attends only to the tokens at hand; with documents packed into a row, only to one's own document."""

    def __init__(self, mask: Tensor | None = None) -> None:
        self.mask = mask

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        return k, v, self.mask

    def view(self, *, batch: int, tokens: int, kv_heads: int, head_dim: int) -> KVView:
        """A cache for just this call, for a kernel that writes and reads one itself (on the CPU, in bfloat16)."""
        if self.mask is not None:
            raise ConfigError("the fused kernels know no packed documents; give each its own row, or load unfused")
        rows = batch * tokens
        k = torch.zeros(rows + 1, kv_heads, head_dim, dtype=torch.bfloat16)
        first = torch.arange(batch) * tokens
        lengths = torch.full((batch,), tokens)
        starts = torch.arange(batch + 1) * tokens
        return KVView(k, torch.zeros_like(k), torch.arange(rows), starts, lengths, first)


class TrainingContext:
    """Stateless; each layer makes its own view, so there is none of all `together`.

    documents (B, T), if given, numbers the document of each token; attention stays inside it.
    """

    together = None

    def __init__(self, windows: Sequence[int | None], documents: Tensor | None = None) -> None:
        if documents is None:
            self.layers = [PlainLayer()] * len(windows)
            return
        places = torch.arange(documents.shape[-1], device=documents.device)
        same = documents.unsqueeze(-1) == documents.unsqueeze(-2)  # (B, T, T)
        by_window = {window: PlainLayer(same & visible(places, places, window)) for window in set(windows)}
        self.layers = [by_window[window] for window in windows]

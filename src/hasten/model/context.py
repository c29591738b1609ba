"""The context of a forward pass without a cache: training, evaluation, and scoring whole sequences."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hasten.ops.attention.masks import visible


class PlainLayer:
    """Attends only to the tokens at hand; with documents packed into a row, only to one's own document."""

    def __init__(self, mask: Tensor | None = None) -> None:
        self.mask = mask

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        return k, v, self.mask


class TrainingContext:
    """Stateless. documents (B, T), if given, numbers the document of each token; attention stays inside it."""

    def __init__(self, windows: Sequence[int | None], documents: Tensor | None = None) -> None:
        if documents is None:
            self.layers = [PlainLayer()] * len(windows)
            return
        places = torch.arange(documents.shape[-1], device=documents.device)
        same = documents.unsqueeze(-1) == documents.unsqueeze(-2)  # (B, T, T)
        by_window = {window: PlainLayer(same & visible(places, places, window)) for window in set(windows)}
        self.layers = [by_window[window] for window in windows]

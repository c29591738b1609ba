"""A checkpoint's weights one at a time, for ranks that each keep some rows of every one."""

import torch
from torch import Tensor, nn

from hasten.checkpoints.checkpoint import check_finite
from hasten.checkpoints.load import own_dtype, planned
from hasten.checkpoints.source import ModelSource
from hasten.machine.pages import release_pages
from hasten.model.initialize import Put, Weights
from hasten.model.transformer import Transformer
from hasten.ops.linear import PackedLinear


def unfilled_model(checkpoint: ModelSource) -> tuple[Transformer, Weights]:
    """The model of a checkpoint without its weights, on the meta device, and what reads them.

    checkpoint: of plain weights. Of a file that is mapped only the rows are read that are kept, and these are checked.
    Raises CheckpointError as `load` does.
    """
    model, pieces = planned(checkpoint)
    model.generation, model.tokenizer, model.origin = checkpoint.generation, checkpoint.tokenizer, str(checkpoint.path)
    model.stored_dtype = checkpoint.dtype or own_dtype([checkpoint.stored[piece.name] for piece in pieces.values()])
    head, embedding = pieces.get("head.weight"), pieces["embedding.weight"]
    if model.config.tie_embeddings and head is not None and head != embedding:
        if torch.equal(checkpoint.read(head.name), checkpoint.read(embedding.name)):
            del pieces["head.weight"]
        else:  # the file contradicts its config
            model.head.weight = torch.nn.Parameter(torch.empty_like(model.head.weight))

    def read(put: Put) -> None:
        for ours, piece in pieces.items():
            whole = checkpoint.read(piece.name)
            check_finite(piece.name, put(ours, piece.of(whole)), checkpoint.stored[piece.name].file)
            release_pages(whole)

    return model, read


class RowsOfPacked:
    """One rank's rows of packed weights, taken out of each layer when it is loaded (`on_packed`).

    The layers stay without memory until ranks divide the model; then this puts the rows into them (`Weights`). rank: of
    those that have a part each, of `parts`.
    """

    def __init__(self, rank: int, parts: int) -> None:
        self.rank, self.parts = rank, parts
        self._kept: dict[str, tuple[torch.Size, Tensor]] = {}  # sizes of the whole tensor, and the rows

    def take(self, name: str, layer: PackedLinear) -> None:
        """Keep the rank's rows of a layer, and leave its parameters on the meta device."""
        layer.hold_as_parameters()
        for leaf, whole in list(layer.named_parameters()):
            self._kept[f"{name}.{leaf}"] = (whole.shape, whole.detach()[self._rows(whole.shape)].clone())
            setattr(layer, leaf, nn.Parameter(torch.empty_like(whole, device="meta"), requires_grad=False))

    def __call__(self, put: Put) -> None:
        while self._kept:
            name, (shape, rows) = self._kept.popitem()
            whole = rows.new_empty(shape)  # only the pages of this rank's rows are written, and take memory
            whole[self._rows(shape)] = rows
            put(name, whole)

    def _rows(self, shape: torch.Size) -> slice:
        most = -(-shape[0] // self.parts)
        return slice(most * self.rank, most * (self.rank + 1))

"""A checkpoint's weights one at a time, for ranks that each keep some rows of every one."""

import torch

from hasten.checkpoints.checkpoint import check_finite
from hasten.checkpoints.load import own_dtype, planned
from hasten.checkpoints.source import ModelSource
from hasten.model.initialize import Put, Weights
from hasten.model.transformer import Transformer
from hasten.ops.pages import release_pages


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

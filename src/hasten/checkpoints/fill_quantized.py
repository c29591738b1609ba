"""Filling a model's skeleton with the layers of a quantized folder."""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from hasten.checkpoints.formats.file_format import QuantizedFolder, QuantizedModule
from hasten.errors import HastenWarning
from hasten.machine.pages import release_pages, return_freed_memory
from hasten.model.families.slices import TensorSlice
from hasten.model.layer_format import LayerFormat
from hasten.model.sharded import RowsOfRank
from hasten.model.shares import Cut, Share
from hasten.model.transformer import Transformer
from hasten.ops.linear import PackedEmbedding, PackedLinear, QuantizedWeight

SPLIT = ".kv_up"  # ends the names of layers that are multiplied head by head, with plain weights
OnPacked = Callable[[str, PackedLinear], None]  # is given the name of a layer and the layer, which is in its place
NO_KERNEL = "no kernel takes a quantized weight"  # how the warning about them begins
ROUND = "hasten.quantize(model, hasten.Int8())"
MOST_UNPACKED = 1 << 24  # numbers of several layers, a byte or two each, before their memory is given back


def fill_quantized(
    model: Transformer,
    pieces: Mapping[str, TensorSlice],
    folder: QuantizedFolder,
    *,
    dtype: torch.dtype,
    device: torch.device | None,
    share: Share | None = None,
    on_packed: OnPacked | None = None,
) -> None:
    """Fill each layer of `pieces` straight from the mapped tensors: with a packed one or, after one warning, with a
    plain weight where no kernel takes its format.

    Biases are in place already. dtype: of the activations to come. One module at a time is unpacked; int4 words and, on
    a CPU, the blocks of a GGUF file go to the kernel's layout as they are. share: the part that this rank holds.
    on_packed: called with each packed layer before the next one is read.
    """
    layers: dict[str, LayerFormat] = {}
    plain: list[str] = []
    plain_bytes, stored_bytes = 0, 0.0  # of those
    embedding, head = pieces.get("embedding.weight"), pieces.get("head.weight")
    tied = embedding is not None and (head == embedding or (head is None and model.head.weight.is_meta))
    if tied:  # one matrix, which the head holds
        pieces = {"head.weight" if ours == "embedding.weight" else ours: piece for ours, piece in pieces.items()}
    beside: dict[str, list[str]] = {}  # the tensors of each module
    for stored in folder.stored:
        beside.setdefault(stored.rpartition(".")[0], []).append(stored)
    module: QuantizedModule | None = None
    unpacked = 0  # numbers since memory was given back
    whole_rows = share is None and device is None  # as blocks go to a CPU's panels
    # The head first: it is the largest, and little else is held yet.
    for ours, piece in sorted(pieces.items(), key=lambda one: one[0] != "head.weight"):
        name = ours.removesuffix(".weight")
        if folder.modules[piece.name] is not module:
            module = folder.modules[piece.name]
            # Several layers may share one (Phi-3): its numbers are kept until the next one's turn.
            dequantize, read = lru_cache(1)(folder.dequantize), lru_cache(1)(folder.read)
        place: Any = model.get_submodule(name)
        if module.type:
            model.stored_types[name] = module.type
        cut = None if share is None else share.cut(ours)
        own = partial(_own, piece=piece, cut=cut, device=device)  # what belongs to this layer, and this rank
        if module.layer is None:
            whole = dequantize(module, dtype)
            weight = piece.of(whole).to(device)
            place.weight = nn.Parameter(weight if cut is None else cut.of(weight))
            if not name.endswith(SPLIT):
                plain_bytes += place.weight.nbytes
                stored_bytes += folder.values(module).nbytes * place.weight.numel() / whole.numel()
                plain.append(f"{module.name} ({module.type or module.stored})")
            packed = None
        else:
            layers[name], rows = _written_as(module), None
            options: dict[str, Any] = {"activations": module.layer.activations, "dtype": dtype}
            blocks = folder.blocks(module) if whole_rows else None
            if blocks is not None:
                blocks = replace(blocks, rows=piece.of(blocks.rows))
            if name == "embedding":
                layers[name] = replace(layers[name], activations="none")
                if blocks is None:
                    model.embedding = PackedEmbedding.from_weight(own(read(module)), dtype=dtype)
                else:  # to panels, whose rows one native call reads
                    table = PackedLinear.from_blocks(blocks, activations="float", dtype=dtype)
                    model.embedding = PackedEmbedding(table, own=True)
                name, packed = "embedding.table", model.embedding.table
            elif blocks is not None:
                packed = PackedLinear.from_blocks(blocks, place.bias, **options)
            elif (words := folder.int4_words(module)) is None:
                held = own(read(module))
                rows = cut.rows if cut is not None and cut.takes_rows(held) else None
                packed = PackedLinear.from_weight(held, place.bias if rows is None else None, **options)
            else:
                options["in_features"] = place.in_features
                packed = PackedLinear.from_int4_words(own(words), place.bias, **options)
            if name != "embedding.table":
                model.set_submodule(name, packed.eval() if rows is None else RowsOfRank(packed, rows, place))
        # Release the file's pages, unless the layer's kernel reads the mapping itself. (`values` maps them again: were
        # it ever a copy instead, nobody else would hold it.)
        mapped, data = folder.values(module), place.weight if packed is None else packed.data
        if data.untyped_storage().data_ptr() != mapped.untyped_storage().data_ptr():
            release_pages(mapped)
        del data
        for stored in beside.get(module.name, ()):  # its scales and zeros; a kernel that uses them reads them again
            if stored != module.values:
                release_pages(folder.tensor(stored))
        if on_packed is not None and packed is not None:
            on_packed(name, packed)
        unpacked += math.prod(module.shape[-2:])
        if unpacked > MOST_UNPACKED:
            return_freed_memory()  # what was unpacked, or copied of a share, is gone
            unpacked = 0
    return_freed_memory()
    if tied:
        model.tie()
    if layers:
        model.quantization = layers
    if plain:
        warnings.warn(
            f"{NO_KERNEL} like {plain[0]}: {len(plain)} of {len(pieces)} are held as plain "
            f"{str(dtype).removeprefix('torch.')}: {plain_bytes / 1e9:.2f} GB, {plain_bytes / stored_bytes:.1f} times "
            f"as stored, which every token reads; {ROUND} rounds them to 8 bits, with one scale a row",
            HastenWarning,
            stacklevel=5,
        )


def _written_as(module: QuantizedModule) -> LayerFormat:
    """The format that a layer is saved in again: as its kernel holds it, but 3 and 2 bits, held as 4, as they were."""
    assert module.layer is not None
    few = module.stored.bits < module.layer.weight.bits and not module.stored.permuted
    return replace(module.layer, weight=module.stored) if few else module.layer


def _own(
    weight: QuantizedWeight, *, piece: TensorSlice, cut: Cut | None, device: torch.device | None
) -> QuantizedWeight:
    part = weight.map(lambda tensor: piece.of(tensor).to(device))
    return part if cut is None else cut.of_weight(part)

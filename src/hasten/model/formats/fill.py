"""Filling a model's skeleton with the packed layers of a quantized folder."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hasten.model.families.family import Piece
from hasten.model.formats.pages import release_pages
from hasten.model.formats.pieces import take, take_weight
from hasten.model.formats.quantized_folder import QuantizedFolder
from hasten.model.formats.record import LayerFormat, Quantization
from hasten.model.transformer import Transformer
from hasten.ops.linear import PackedLinear, QuantizedWeight


def fill_quantized(
    model: Transformer,
    pieces: Mapping[str, Piece],
    folder: QuantizedFolder,
    tensors: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device | None,
) -> None:
    """Replace each linear layer whose weight stands in `pieces` by a packed one, straight from the mapped tensors.

    Its bias, where it has one, is in place already. dtype: of the activations to come. One module at a time is unpacked
    (none of int4 that is not fused: its words go to the kernel's layout as they are).
    """
    layers: dict[str, LayerFormat] = {}
    fused: tuple[str, QuantizedWeight] | None = None
    for ours, piece in pieces.items():
        name = ours.removesuffix(".weight")
        module = folder.modules[piece.name]
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        layers[name] = module.layer
        whole_rows = piece.interleaved is None and piece.expert is None
        if module.packed and module.layer.bits == 4 and whole_rows:
            scales, zeros = folder.scales(module, tensors)
            parts = (tensors[f"{module.name}.weight_packed"], scales, zeros)
            own = [None if part is None else _on(take(part, piece), device) for part in parts]
            assert own[0] is not None
            assert own[1] is not None
            packed = PackedLinear.from_int4_words(
                own[0],
                own[1],
                own[2],
                linear.bias,
                in_features=module.shape[1],
                group_size=module.layer.group_size,
                activations=module.layer.activations,
                dtype=dtype,
            )
        else:
            if fused is None or fused[0] != module.name:
                fused = module.name, folder.read(module, tensors)
            weight = take_weight(fused[1], piece)
            weight = QuantizedWeight(
                bits=weight.bits,
                group_size=weight.group_size,
                values=_on(weight.values, device),
                scales=_on(weight.scales, device),
                zeros=None if weight.zeros is None else _on(weight.zeros, device),
            )
            packed = PackedLinear.from_weight(weight, linear.bias, activations=module.layer.activations, dtype=dtype)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, packed.eval())
        # The layer has a copy of its own, unless its kernel reads rows as they stand in the file. (Read anew from the
        # mapping: were it ever a copy instead, nobody else would hold it.)
        mapped = tensors[f"{module.name}.weight{'_packed' if module.packed else ''}"]
        if packed.data.untyped_storage().data_ptr() != mapped.untyped_storage().data_ptr():
            release_pages(mapped)
    model.quantization = Quantization(layers=layers)


def _on(tensor: Tensor, device: torch.device | None) -> Tensor:
    return tensor if device is None else tensor.to(device)

"""Filling a model's skeleton with the layers of a quantized folder."""

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hasten.errors import HastenWarning
from hasten.model.families.family import TensorSlice
from hasten.model.formats.file_format import QuantizedFolder, QuantizedModule
from hasten.model.formats.pages import release_pages
from hasten.model.formats.pieces import take, take_weight
from hasten.model.formats.record import LayerFormat, Quantization
from hasten.model.transformer import Transformer
from hasten.ops.linear import PackedLinear, QuantizedWeight


def fill_quantized(
    model: Transformer,
    pieces: Mapping[str, TensorSlice],
    folder: QuantizedFolder,
    *,
    dtype: torch.dtype,
    device: torch.device | None,
) -> None:
    """Fill each layer whose weight stands in `pieces` straight from the mapped tensors: with a packed one, or, where
    no kernel takes its format, with its plain weight, of which one warning tells.

    Its bias, where it has one, is in place already. dtype: of the activations to come. One module at a time is unpacked
    (none of int4 that is not fused: its words go to the kernel's layout as they are).
    """
    filler = _Filler(folder, dtype, device)
    layers: dict[str, LayerFormat] = {}
    plain: list[str] = []
    for ours, piece in pieces.items():
        name = ours.removesuffix(".weight")
        module = folder.modules[piece.name]
        place = model.get_submodule(name)
        if module.layer is None or not isinstance(place, nn.Linear):  # an embedding is read by row, not multiplied
            place.weight = nn.Parameter(filler.plain(module, piece))
            plain.append(f"{module.name} ({module.stored})")
        else:
            packed = filler.packed(module, module.layer, piece, place.bias)
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, packed.eval())
            layers[name] = module.layer
        filler.release(module, model.get_submodule(name))
    if layers:
        model.quantization = Quantization(layers=layers)
    if plain:
        warnings.warn(
            f"no kernel takes a quantized weight like {plain[0]}: {len(plain)} of {len(pieces)} are held as plain "
            f"{str(dtype).removeprefix('torch.')}, larger and slower; where all of them are, --quantize int8 rounds "
            "them anew, with one scale a row",
            HastenWarning,
            stacklevel=4,
        )


class _Filler:
    """Makes one layer after the other; keeps the last module's numbers, which several layers may share (Phi-3)."""

    def __init__(self, folder: QuantizedFolder, dtype: torch.dtype, device: torch.device | None) -> None:
        self.folder, self.dtype, self.device = folder, dtype, device
        self._last: tuple[str, QuantizedWeight | Tensor] | None = None

    def plain(self, module: QuantizedModule, piece: TensorSlice) -> Tensor:
        """The part of a weight that belongs to one layer, (N, K)."""
        if self._last is None or self._last[0] != module.name:
            self._last = module.name, self.folder.dequantize(module, self.dtype)
        assert isinstance(self._last[1], Tensor)
        return self._on_device(take(self._last[1], piece))

    def packed(
        self, module: QuantizedModule, layer: LayerFormat, piece: TensorSlice, bias: Tensor | None
    ) -> PackedLinear:
        words = self.folder.int4_words(module) if piece.interleaved is None and piece.expert is None else None
        if words is not None:
            own, scales, zeros = words
            return PackedLinear.from_int4_words(
                self._on_device(take(own, piece)),
                self._on_device(take(scales, piece)),
                None if zeros is None else self._on_device(take(zeros, piece)),
                bias,
                in_features=module.shape[1],
                format=layer.weight,
                activations=layer.activations,
                dtype=self.dtype,
            )
        if self._last is None or self._last[0] != module.name:
            self._last = module.name, self.folder.read(module)
        assert isinstance(self._last[1], QuantizedWeight)
        weight = take_weight(self._last[1], piece).map(self._on_device)
        return PackedLinear.from_weight(weight, bias, activations=layer.activations, dtype=self.dtype)

    def release(self, module: QuantizedModule, layer: nn.Module) -> None:
        """Let go of the file's pages, unless the layer's kernel reads rows as they stand in the file.

        (Read anew from the mapping: were it ever a copy instead, nobody else would hold it.)
        """
        mapped = self.folder.values(module)
        data = layer.data if isinstance(layer, PackedLinear) else layer.weight
        assert isinstance(data, Tensor)
        if data.untyped_storage().data_ptr() != mapped.untyped_storage().data_ptr():
            release_pages(mapped)

    def _on_device(self, tensor: Tensor) -> Tensor:
        return tensor if self.device is None else tensor.to(self.device)

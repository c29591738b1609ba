"""Bytes of a checkpoint's weights once loaded, from its headers alone."""

from collections.abc import Container
from math import prod

from hasten.checkpoints.checkpoint import StoredTensor
from hasten.checkpoints.source import ModelSource


def held_bytes(source: ModelSource, *, itemsize: int | None = None, names: Container[str] | None = None) -> int:
    """Bytes of all weights after loading.

    A quantized layer that no kernel supports is counted unpacked, in 16 bits, or in `itemsize` bytes. itemsize: bytes
    of a weight that is not quantized, if it is loaded in another dtype than the stored one. names: of these tensors
    alone.
    """
    modules = {} if source.quantized is None else source.quantized.modules
    bits = sum(
        prod(one.shape) * (8 * (itemsize or 2) if one.layer is None else one.layer.weight.bits_of(one.shape[-1]))
        for name, one in modules.items()
        if names is None or name in names
    )
    plain = [one for one in plain_tensors(source) if names is None or one.name in names]
    return int(bits / 8) + sum(one.bytes if itemsize is None else itemsize * prod(one.shape) for one in plain)


def plain_tensors(source: ModelSource) -> list[StoredTensor]:
    """Stored tensors that are not quantized."""
    if source.quantized is None:
        return list(source.stored.values())
    return [tensor for name, tensor in source.quantized.logical.items() if name not in source.quantized.modules]

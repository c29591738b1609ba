"""What identifies a model: everything that changes a bit of what it computes."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

from hasten.model.fused_native import FusedBlock
from hasten.model.lora import LoRALinear
from hasten.model.transformer import Transformer
from hasten.ops.linear import PackedLinear


def weights_digest(model: Transformer) -> str:
    """A digest of every weight's name and bytes. CRC-32 reads them as fast as mapped pages are read."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {_checksum(tensor)} ".encode())
    return digest.hexdigest()


def fingerprint(model: Transformer) -> str:
    """A digest of the weights, the config, the dtypes, how each layer is multiplied, and the adapters."""
    digest = hashlib.sha256(weights_digest(model).encode())
    digest.update(f"{model.dtype} {model.compute_dtype} {model.config!r}".encode())
    for name, module in model.named_modules():
        for part in _beside_weights(module):
            digest.update(f"{name} {part}\n".encode())
    return digest.hexdigest()


def _beside_weights(module: torch.nn.Module) -> Iterator[str]:
    """What a layer computes with and its state does not hold."""
    if isinstance(module, PackedLinear):
        yield f"{module.format} {module.activations} {module.kernel}"
    if isinstance(module, LoRALinear):
        yield f"{module.places} {module.kinds}"
    if isinstance(module, FusedBlock):
        for name, factors in module.factors.items():
            yield f"{name} {[(tuple(one.shape), _checksum(one)) for one in factors]}"


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)

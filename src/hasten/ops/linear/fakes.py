"""Output shapes of the linear operator's native functions, for torch.compile. Read by hasten.ops.native."""

import torch
from torch import Tensor

from hasten.ops.linear.layouts import PANELS, PackedShape
from hasten.ops.linear.weights import BFLOAT16, INT8, int4_format


def linear(
    x: Tensor,
    data: Tensor,
    scales: Tensor | None,
    zeros: Tensor | None,
    bias: Tensor | None,
    out_features: int,
    group_size: int,
    digits: int,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


def pack_bf16(w: Tensor) -> Tensor:
    n, k = w.shape
    return w.new_empty(PANELS.data_size(PackedShape(n, k, BFLOAT16)))


def pack_int8(q: Tensor) -> Tensor:
    n, k = q.shape
    return q.new_empty(PANELS.data_size(PackedShape(n, k, INT8)), dtype=torch.uint8)


def pack_int4(q: Tensor, group_size: int) -> Tensor:
    n, k = q.shape
    return q.new_empty(PANELS.data_size(PackedShape(n, k, int4_format(group_size))), dtype=torch.uint8)


def pack_int4_words(words: Tensor, group_size: int) -> Tensor:
    n, k = words.shape[0], words.shape[1] * 8
    return words.new_empty(PANELS.data_size(PackedShape(n, k, int4_format(group_size))), dtype=torch.uint8)

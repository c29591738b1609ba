"""Output shapes of the linear operator's native functions, for torch.compile. Read by hasten.ops.native."""

from typing import Any

from torch import Tensor

from hasten.ops.linear.layouts import empty_panels
from hasten.ops.linear.weights import BFLOAT16, INT8, int4_format


def linear(x: Tensor, data: Tensor, scales: Any, zeros: Any, bias: Any, out_features: int, *rest: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


def pack_bf16(w: Tensor) -> Tensor:
    return empty_panels(w, w.shape[1], BFLOAT16)


def pack_int8(q: Tensor) -> Tensor:
    return empty_panels(q, q.shape[1], INT8)


def pack_int4(q: Tensor, group_size: int) -> Tensor:
    return empty_panels(q, q.shape[1], int4_format(group_size))


def pack_int4_words(words: Tensor, group_size: int) -> Tensor:
    return empty_panels(words, words.shape[1] * 8, int4_format(group_size))

"""int4 values as compressed-tensors' "pack-quantized" layout stores them: eight to an int32, the first one lowest.

A value is stored plus 8, as 0 … 15, which is what QuantizedWeight holds anyway; so are zero points, which are packed
along the rows (N) and not along the columns. On a little-endian machine eight nibbles of an int32 are four bytes with
the earlier value in the low half.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad


def pack_columns(values: Tensor) -> Tensor:
    """uint8 (R, C) of 0 … 15 -> int32 (R, ceil(C / 8)); missing values are 0."""
    if values.shape[1] % 8:
        values = pad(values, (0, -values.shape[1] % 8))
    packed = values[:, 1::2] << 4
    packed |= values[:, 0::2]
    return packed.view(torch.int32)


def unpack_columns(packed: Tensor, columns: int) -> Tensor:
    """int32 (R, ceil(columns / 8)) -> uint8 (R, columns) of 0 … 15."""
    pairs = packed.contiguous().view(torch.uint8)  # (R, C / 2)
    values = torch.empty(*pairs.shape, 2, dtype=torch.uint8, device=packed.device)
    torch.bitwise_and(pairs, 15, out=values[..., 0])
    torch.bitwise_right_shift(pairs, 4, out=values[..., 1])
    values = values.flatten(1)
    return values if values.shape[1] == columns else values[:, :columns].contiguous()


def pack_rows(values: Tensor) -> Tensor:
    """uint8 (R, C) of 0 … 15 -> int32 (ceil(R / 8), C), packed along the rows."""
    return pack_columns(_turned(values)).t().contiguous()


def unpack_rows(packed: Tensor, rows: int) -> Tensor:
    """int32 (ceil(rows / 8), C) -> uint8 (rows, C) of 0 … 15."""
    return unpack_columns(_turned(packed), rows).t().contiguous()


def _turned(matrix: Tensor) -> Tensor:
    # contiguous() leaves a matrix of one column as it is, with a stride that forbids a view of another element size.
    return matrix.t().clone(memory_format=torch.contiguous_format)


def pack_bytes(values: Tensor) -> Tensor:
    """8-bit values in the same layout, four to an int32 and each stored plus 128: int8 (R, C) -> (R, ceil(C / 4))."""
    raised = values.contiguous().view(torch.uint8) ^ 0x80
    return pad(raised, (0, -values.shape[1] % 4)).view(torch.int32)


def unpack_bytes(packed: Tensor, columns: int) -> Tensor:
    """int32 (R, ceil(columns / 4)) -> int8 (R, columns)."""
    values = (packed.contiguous().view(torch.uint8) ^ 0x80).view(torch.int8)
    return values if values.shape[1] == columns else values[:, :columns].contiguous()

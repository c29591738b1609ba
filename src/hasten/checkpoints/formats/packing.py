"""Values of few bits as compressed-tensors' "pack-quantized" layout stores them: in int32 words, the first one lowest.

A value is stored without its sign (of int4 plus 8, as 0 … 15), which QuantizedWeight holds anyway but for int8; so are
zero points, which are packed along the rows (N) and not along the columns. On a little-endian machine eight nibbles of
an int32 are four bytes with the earlier value in the low half; a value of 3 bits may cross from one word into the next.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad


def pack_columns(values: Tensor, bits: int = 4) -> Tensor:
    """uint8 (R, C) of `bits` each -> int32 (R, ceil(C · bits / 32)); missing values are 0."""
    if bits == 8:
        return pad(values.contiguous(), (0, -values.shape[1] % 4)).view(torch.int32)
    if bits != 4:
        if values.is_meta:
            return values.new_empty(values.shape[0], -(-values.shape[1] * bits // 32), dtype=torch.int32)
        single = (values.numpy()[:, :, None] >> np.arange(bits, dtype=np.uint8)) & 1  # (R, C, bits), the lowest first
        packed_bytes = torch.from_numpy(np.packbits(single.reshape(len(values), -1), axis=1, bitorder="little"))
        return pad(packed_bytes, (0, -packed_bytes.shape[1] % 4)).view(torch.int32)
    if values.shape[1] % 8:
        values = pad(values, (0, -values.shape[1] % 8))
    packed = values[:, 1::2] << 4
    packed |= values[:, 0::2]
    return packed.view(torch.int32)


def unpack_columns(packed: Tensor, columns: int, bits: int = 4) -> Tensor:
    """int32 (R, ceil(columns · bits / 32)) -> uint8 (R, columns)."""
    values = packed.contiguous().view(torch.uint8)
    if bits in (2, 3):
        single = np.unpackbits(values.numpy(), axis=1, count=columns * bits, bitorder="little")
        each = np.packbits(single.reshape(len(packed), columns, bits), axis=2, bitorder="little")
        return torch.from_numpy(each[..., 0])
    if bits == 4:
        pairs, values = values, torch.empty(*values.shape, 2, dtype=torch.uint8, device=packed.device)  # (R, C / 2, 2)
        torch.bitwise_and(pairs, 15, out=values[..., 0])
        torch.bitwise_right_shift(pairs, 4, out=values[..., 1])
        values = values.flatten(1)
    return values if values.shape[1] == columns else values[:, :columns].contiguous()


def pack_rows(values: Tensor, bits: int = 4) -> Tensor:
    """uint8 (R, C) of `bits` each -> int32 (ceil(R · bits / 32), C), packed along the rows."""
    return pack_columns(_turned(values), bits).t().contiguous()


def unpack_rows(packed: Tensor, rows: int, bits: int = 4) -> Tensor:
    """int32 (ceil(rows · bits / 32), C) -> uint8 (rows, C)."""
    return unpack_columns(_turned(packed), rows, bits).t().contiguous()


def _turned(matrix: Tensor) -> Tensor:
    # contiguous() leaves a matrix of one column as it is, with a stride that forbids a view of another element size.
    return matrix.t().clone(memory_format=torch.contiguous_format)


def unsigned(values: Tensor) -> Tensor:
    """Values as they are packed: int8 plus 128; those of fewer bits are unsigned already."""
    return values.view(torch.uint8) ^ 0x80 if values.dtype == torch.int8 else values


def signed(values: Tensor, bits: int) -> Tensor:
    """Unpacked values as QuantizedWeight holds them."""
    return (values ^ 0x80).view(torch.int8) if bits == 8 else values

"""Products of 16-bit matrices that are added to a float32 one within the product itself."""

from functools import cache

import torch
from torch import Tensor


def add_product(total: Tensor | None, a: Tensor, b: Tensor, wide: torch.dtype) -> Tensor:
    """total += a·b, or a·b where there is no total yet, with the sum in `wide`."""
    in_one = a.is_cuda and a.dtype != wide and adds_wide(a.dtype, a.device)
    if total is None:
        return torch.mm(a, b, out_dtype=wide) if in_one else (a @ b).to(wide)
    if a.dtype == wide:
        total.addmm_(a, b)
    elif in_one:
        torch.addmm(total, a, b, out_dtype=wide, out=total)
    else:
        total += a @ b
    return total


@cache
def adds_wide(dtype: torch.dtype, device: torch.device) -> bool:
    """cuBLAS multiplies 16-bit matrices onto a float32 one; this torch passes that on."""
    a = torch.eye(16, dtype=dtype, device=device)
    total = torch.ones(16, 16, dtype=torch.float32, device=device)
    try:
        torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
        torch.mm(a, a, out_dtype=torch.float32)
    except (RuntimeError, TypeError):
        return False
    return bool(total.sum().item() == 16 * 16 + 16)

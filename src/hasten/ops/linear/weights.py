"""A quantized weight as numbers: what quantization chooses, files hold, and kernels pack."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """W[n, k] ≈ scales[n, g] · (values[n, k] - zeros[n, g]) with g = k // group_size.

    bits 8: values int8 (N, K) in -128 … 127, scales float32 (N, 1), group_size 0 (one scale a row), zeros None.
    bits 4: values uint8 (N, K) in 0 … 15, scales float16 or bfloat16 (N, ceil(K / group_size)), zeros uint8 of the same
    shape for asymmetric quantization, or None: then the zero is 8 everywhere.
    """

    bits: int
    group_size: int
    values: Tensor
    scales: Tensor
    zeros: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(output features N, input features K)."""
        return self.values.shape[0], self.values.shape[1]

    def map(self, fn: Callable[[Tensor], Tensor]) -> "QuantizedWeight":
        """The weight of what `fn` makes of values, scales and zeros alike: some of the rows, or another device."""
        zeros = None if self.zeros is None else fn(self.zeros)
        return replace(self, values=fn(self.values), scales=fn(self.scales), zeros=zeros)

    @staticmethod
    def joined(
        weights: Sequence["QuantizedWeight"], join: Callable[[list[Tensor]], Tensor] = torch.cat
    ) -> "QuantizedWeight":
        """One weight of the rows of several of the same bits and groups, put together by `join`."""
        zeros = [weight.zeros for weight in weights if weight.zeros is not None]
        return replace(
            weights[0],
            values=join([weight.values for weight in weights]),
            scales=join([weight.scales for weight in weights]),
            zeros=join(zeros) if zeros else None,
        )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight (N, K) that the integers stand for."""
        _, k = self.shape
        size = self.group_size or k
        group = torch.arange(k, device=self.values.device) // size  # (K,)
        if self.zeros is not None:
            zero = self.zeros.float()[:, group]
        else:
            zero = torch.tensor(0.0 if self.bits == 8 else 8.0, device=self.values.device)
        return ((self.values.float() - zero) * self.scales.float()[:, group]).to(dtype)

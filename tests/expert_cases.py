"""Random experts for Triton's kernels, compared with float64: interpreted on a CPU, and unchanged on a GPU."""

import torch

from hasten.ops.experts import ExpertWeights
from hasten.ops.experts.operator import reference
from hasten.ops.linear import BFLOAT16
from hasten.ops.linear.fused import activated
from hasten.ops.linear.layouts import CHUNKS, Operands
from hasten.ops.linear.weights import FLOAT16
from linear_cases import make_weight, rms
from triton_cases import plain_linear

PLAIN = ("plain", 0, True)
FORMATS = [PLAIN, ("int8", 0, True), ("int8", 32, False), ("int4", 32, True), ("int4", 32, False), ("int4", 128, True)]
FORMATS += [("int8", 128, True), ("int4", 64, False), ("int4", 256, True)]


def routes(rows, top, count, generator):
    """Shares (R, k) float32 and the numbers of the experts that rows take, int64 (R, k)."""
    return torch.rand(rows, count, generator=generator).softmax(-1).topk(top, -1)


class ExpertCase:
    """Random experts of one format (and `down_format`, if down's is another one) on a device."""

    def __init__(self, format, *, count, hidden, inner, dtype, device, activation="silu", down_format=None, seed=0):
        self.count, self.hidden, self.dtype, self.device = count, hidden, dtype, device
        self.activation = activation
        sizes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        self.full, operands = {}, {}  # by name: of each expert
        for j, (name, (n, k)) in enumerate(sizes.items()):
            own = (down_format or format) if name == "down" else format
            self.full[name], operands[name] = [], []
            for i in range(count):
                matrix, packed = self._weight(own, n, k, seed=seed + 3 * i + j)
                self.full[name].append(matrix)
                operands[name].append(packed)
        self.weights = ExpertWeights(**operands, activation=activation)

    def _weight(self, format, n, k, seed):
        """In float32, and as kernels read it; outputs have about the size of inputs."""
        element, group_size, symmetric = format
        if element == "plain":
            values = make_weight(n, k, format="bfloat16", seed=seed).float().div(k**0.5).to(self.device, self.dtype)
            kind = FLOAT16 if self.dtype == torch.float16 else BFLOAT16
            return values.float(), Operands(values, None, None, None, None, n, kind)
        weight = make_weight(n, k, format=element, group_size=group_size, symmetric=symmetric, seed=seed)
        size = weight.dequantize().square().mean().sqrt().item() * k**0.5
        weight.scales.div_(size)
        weight = weight.map(lambda tensor: tensor.to(self.device))
        return weight.dequantize(), Operands(*CHUNKS.pack(weight), None, n, weight.format)

    def rows(self, count, top, seed=0):
        generator = torch.Generator().manual_seed(seed)
        x = torch.full((count + 1, self.hidden), float("nan"), dtype=self.dtype, device=self.device)
        x = x[:count].copy_(torch.randn(count, self.hidden, generator=generator))  # what is behind it is not read
        shares, chosen = routes(count, top, self.count, generator)
        return x, shares.to(self.device), chosen.to(self.device)

    def one_by_one(self, x, shares, chosen, dtype):
        """As `Experts` computes them in a dtype, one expert after the other."""
        out = torch.zeros(x.shape, dtype=dtype, device=x.device)
        for number in range(self.count):
            row, slot = torch.where(chosen == number)
            gate, up, down = (self.full[name][number].to(dtype) for name in ("gate", "up", "down"))
            own = x[row].to(dtype)
            inner = activated(plain_linear(own, gate, None), self.activation) * plain_linear(own, up, None)
            out.index_add_(0, row, plain_linear(inner, down, None) * shares[row, slot, None].to(dtype))
        return out

    def check(self, found, x, shares, chosen):
        """The kernels err at most twice what PyTorch's products in 16 bits err, against float64."""
        assert found.dtype == self.dtype
        assert found.shape == x.shape
        exact = self.one_by_one(x, shares, chosen, torch.float64)
        usual = self.one_by_one(x, shares, chosen, self.dtype)
        # One unit in the last place of the largest output: with a handful of outputs PyTorch may err by chance little.
        unit = torch.finfo(self.dtype).eps * exact.abs().max().item() * max(0.0, 1 - found.numel() / 200)
        assert rms(found - exact) <= 2 * rms(usual - exact) + unit
        assert rms(reference(x, shares, chosen, self.weights) - exact) <= 2 * rms(usual - exact) + unit

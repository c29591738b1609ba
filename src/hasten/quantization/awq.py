"""AWQ (arXiv 2306.00978): input channels that matter are scaled up before rounding, and back down where they come from.

A column of a weight times s, and whatever produces its input divided by s, is the same model; but the rounding error of
that column is divided by s too. The scales are s = (mean |x|)^a for each input channel x, with the a out of 20 that
gives the layers' outputs the least error; a = 0 changes nothing. What is divided is a norm's weight, the rows of the
value projection (before the attention's output) or of `up` (before `down`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import ClassVar

import torch
from torch import Tensor, nn

from hasten.model.norms import RMSNorm
from hasten.model.transformer import MLP, Attention
from hasten.ops.linear.weights import QuantizedWeight
from hasten.quantization.blocks import each_slice, on_one_thread
from hasten.quantization.gptq import ROWS, InputStatistics, output_error
from hasten.quantization.rounding import round_weight
from hasten.quantization.sequential import BlockTask
from hasten.quantization.walk import inputs_of

EXPONENTS = 20  # that are tried, from 0 to 1


class ChannelStatistics(InputStatistics):
    """H of a layer's inputs, and the mean |x| of each channel; both follow when the inputs are divided."""

    def __init__(self, task: BlockTask, name: str) -> None:
        """Of what the submodule `name` of the block is given, before any of its layers is rounded."""
        inputs = inputs_of(task.block, name, task.calls)
        first = next(inputs)
        super().__init__(first.shape[1], device=first.device)
        self.mean, rows = torch.zeros_like(self.gram[0]), 0
        for x in chain([first], inputs):
            self.add(x)
            self.mean += on_one_thread(partial(torch.sum, x.float().abs(), dim=0))
            rows += len(x)
        self.finish()
        self.mean /= rows
        self.divisor = torch.ones_like(self.mean)

    def divide(self, scales: Tensor) -> None:
        """The inputs are from now on divided by these, (K,)."""
        self.gram /= scales[:, None] * scales
        self.mean /= scales
        self.divisor *= scales

    def before_division(self) -> Tensor:
        """H of the inputs as they were."""
        return self.gram * (self.divisor[:, None] * self.divisor)


@dataclass(frozen=True, slots=True, kw_only=True)
class AWQ:
    """The method has no settings: the search decides. Scales of groups are searched for the inputs' sizes, too."""

    needs_before: ClassVar[bool] = False  # only the inputs that the quantized blocks before give are looked at

    def quantize_block(self, task: BlockTask) -> None:
        """Choose the scales of all places in the block, then round its layers."""
        if not task.prefix:
            inputs = ChannelStatistics(task, "head")
            self._round(task, ["head"], inputs)
            return
        block = task.before
        attention = block.attention
        assert isinstance(attention, Attention)
        mlp = block.mlp if isinstance(block.mlp, MLP) else None  # None: experts
        first = [name for name in task.layers if name.startswith("mlp.") and not name.endswith(".down")]
        of_mlp = ChannelStatistics(task, "mlp.router" if mlp is None else first[0])
        of_qkv, of_output = ChannelStatistics(task, "attention.q"), ChannelStatistics(task, "attention.output")
        of_down = None if mlp is None else ChannelStatistics(task, "mlp.down")
        # From the back: what a layer's rows are divided by belongs to the weight that is then scaled itself.
        spec = attention.spec
        self._fold_rows(task, "attention.v", "attention.output", of_output, repeats=spec.groups, size=spec.head_dim)
        qkv = ["attention.q", "attention.k", "attention.v"]
        self._fold_norm(task, "attention_norm", qkv, [], of_qkv)
        if of_down is not None and mlp is not None and mlp.gate is not None:
            self._fold_rows(task, "mlp.up", "mlp.down", of_down)
        self._fold_norm(task, "mlp_norm", first, ["mlp.router"] if mlp is None else [], of_mlp)
        self._round(task, qkv, of_qkv)
        self._round(task, ["attention.output"], of_output)
        self._round(task, first, of_mlp)
        if of_down is not None:
            self._round(task, ["mlp.down"], of_down)
        note = "rounded to nearest: the inputs of an expert's `down` are not looked at"
        for name in [name for name in task.layers if name not in task.weights]:
            task.place(name, task.nearest(name), note=note)

    def _fold_norm(
        self, task: BlockTask, norm: str, names: Sequence[str], plain: Sequence[str], inputs: ChannelStatistics
    ) -> None:
        """Divide a norm by the best scales, and multiply the columns behind it; `plain` ones are not quantized."""
        scales = self._best(task, names, inputs)
        module = task.before.get_submodule(norm)
        offset = module.offset if isinstance(module, RMSNorm) else 0.0
        weight = module.get_parameter("weight").detach()
        exact = weight.float() + offset
        divided = (exact / scales - offset).to(weight.dtype)
        # The norm's weight is rounded to its dtype: the columns are multiplied by what it was really divided by.
        real = torch.where(divided.float() + offset == 0, 1.0, exact / (divided.float() + offset))
        task.change(f"{norm}.weight", torch.where(real == 1, weight, divided))
        if isinstance(module, nn.LayerNorm):
            task.change(f"{norm}.bias", (module.bias.detach().float() / real).to(module.bias.dtype))
        for name in (*names, *plain):
            task.change(f"{name}.weight", task.tensor(f"{name}.weight").float() * real)
        inputs.divide(real)

    def _fold_rows(
        self, task: BlockTask, producer: str, name: str, inputs: ChannelStatistics, *, repeats: int = 1, size: int = 1
    ) -> None:
        """Divide the rows of a layer, of whose outputs each head of `size` stands `repeats` times in the inputs."""
        rows = scales = self._best(task, [name], inputs)
        if repeats > 1:  # heads that share a value share its scale: their geometric mean
            by_head = scales.log().view(-1, repeats, size).mean(dim=1)
            rows = by_head.flatten().exp()
            scales = by_head.unsqueeze(1).expand(-1, repeats, -1).flatten().exp()
        task.change(f"{producer}.weight", task.tensor(f"{producer}.weight").float() / rows[:, None])
        bias = getattr(task.before.get_submodule(producer), "bias", None)
        if bias is not None:
            task.change(f"{producer}.bias", (bias.detach().float() / rows).to(bias.dtype))
        task.change(f"{name}.weight", task.tensor(f"{name}.weight").float() * scales)
        inputs.divide(scales)

    def _best(self, task: BlockTask, names: Sequence[str], inputs: ChannelStatistics) -> Tensor:
        """The scales of the input channels, (K,)."""
        mean = inputs.mean
        usual = torch.where(mean > 0, mean, 1.0)
        best, least = torch.ones_like(usual), math.inf
        for step in range(EXPONENTS):
            scales = usual ** (step / EXPONENTS)
            scales = torch.where(mean > 0, scales / (scales.max() * scales.min()).sqrt(), 1.0)
            error = 0.0
            for name in names:
                weight = task.tensor(f"{name}.weight").float()
                rounded = self._rounded(task, name, weight * scales, inputs.gram.diagonal() / scales**2)
                back = rounded.dequantize() / scales
                error += _squared_error(weight - back, inputs.gram)
            if error < least:
                best, least = scales, error
        return best

    def _rounded(self, task: BlockTask, name: str, weight: Tensor, importance: Tensor) -> QuantizedWeight:
        return round_weight(weight, task.layers[name].weight, search=task.search, importance=importance)

    def _round(self, task: BlockTask, names: Sequence[str], inputs: ChannelStatistics) -> None:
        """Round layers for inputs as they now are."""
        for name in names:
            weight = task.tensor(f"{name}.weight").float()
            rounded = self._rounded(task, name, weight, inputs.gram.diagonal())
            original = output_error(task.weight(name), task.nearest(name), inputs.before_division())
            now = output_error(weight, rounded, inputs.gram)
            task.place(name, rounded, output_error=now, nearest_output_error=original)


def _squared_error(wrong: Tensor, gram: Tensor) -> float:
    def work(rows: slice) -> float:
        return float(((wrong[rows] @ gram) * wrong[rows]).sum())

    return math.fsum(each_slice(wrong, ROWS, work))

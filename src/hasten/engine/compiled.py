"""torch.compile for inference: each block compiled once, the one graph serving every block of a kind."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hasten.errors import ConfigError
from hasten.model.experts import experts_of
from hasten.model.fused import CudaBlock
from hasten.model.grouped_experts import could_run
from hasten.model.last_rows import LayerOfRows
from hasten.model.sharded import NormOfRanks, RowsOfRank, ShardedTransformer, SumOfRanks
from hasten.model.swap import replace_modules, swap_kinds, take_over
from hasten.model.transformer import Transformer
from hasten.ops.linear.wide import WideLinear, wide_linear


class OneRowLinear(nn.Linear):
    """nn.Linear that writes the product of a single row out as products and sums, for a compiler to make one loop of.

    On a CPU the loop that Inductor makes of it streams half-precision weights faster than PyTorch's matrix product of
    one row, which it would call otherwise. Sums are in float32. Not for eager use: there the float32 products would be
    written to memory.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) -> (..., out)."""
        if x.dim() < 3 or x.numel() > self.in_features:  # the (R, in) rows scored after a prompt are not compiled
            return wide_linear(x, self.weight, self.bias)
        y = (self.weight.float() * x.flatten().float()).sum(-1)  # (out,)
        if self.bias is not None:
            y = y + self.bias.float()
        return y.to(x.dtype).view(*x.shape[:-1], -1)


class CompiledForOneToken(nn.Module):
    """Stands before the class of a block or a head: steps of one token a row run `compiled`, others as they did."""

    compiled: Callable[..., Tensor]

    def forward(self, x: Tensor, *rest: Any, **more: Any) -> Any:
        """x (B, T, C), or the (R, C) rows that the head scores."""
        one = x.dim() == 3 and x.shape[1] == 1 and not any(isinstance(given, LayerOfRows) for given in rest)
        if one and could_run(x.device) and (experts := experts_of(self)) is not None:
            experts.bound()  # a graph takes the kernel that is chosen, and looks for no replaced weight
        return (self.compiled if one else super().forward)(x, *rest, **more)


def compile_blocks(model: Transformer) -> None:
    """Compile every block and the head in place for decoding; the first step of each cache size takes seconds.

    Per block rather than the whole model: the graph is compiled once instead of once a layer, because a block's
    weights, cache and context are its inputs. Only steps of one token a row are compiled. Prompts have every length,
    and eager blocks are as fast on them: their time is in large matrix products, which a compiler leaves as they are.
    Inductor needs a C++ compiler on a CPU; on a GPU it tunes its products by measuring (a 7 B model in bfloat16 on an
    H100: 194 tokens/s instead of 165). Blocks that are fused on a GPU stay as they are. Of a model that several ranks
    hold, the sums of ranks are called between graphs. Raises ConfigError for one whose layers keep states.
    """
    if model.config.keeps_states:
        raise ConfigError(f"layers of a {model.config.family} keep states and are not compiled; leave --compile out")
    if not model.bound:
        model.bind_once()
    if model.device.type == "cpu" and model.dtype != torch.float32:
        # Plain ones only: another kind would lose what it adds.
        swap_kinds(model, {nn.Linear: OneRowLinear, WideLinear: OneRowLinear})
    # Each cache size and batch size is a graph of its own; past the default of 8 a full graph would be refused.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    parts = [block for block in model.blocks if not isinstance(block, CudaBlock)]
    if model.stack is None:
        parts.append(model.head)
    # Searching the tiles of each kernel, one size after the other: what makes products of one row fast.
    options: dict[str, Any] | None = {"coordinate_descent_tuning": True} if model.device.type == "cuda" else None
    for module in model.modules():
        if isinstance(module, SumOfRanks | NormOfRanks):
            module.summed = torch.compiler.disable(module.group.sum)
        elif isinstance(module, RowsOfRank):
            module.gathered = torch.compiler.disable(module.gathered)
    one_by_one = model.config.experts and model.device.type == "cpu"  # the experts that are taken break a graph
    whole = not isinstance(model, ShardedTransformer) and not one_by_one
    new = {part: take_over(_compiled_kind(type(part)), part) for part in parts}  # type: ignore[arg-type]
    for part in new.values():
        part.compiled = torch.compile(
            super(CompiledForOneToken, part).forward, fullgraph=whole, dynamic=False, options=options
        )
    replace_modules(model, new)


@functools.cache
def _compiled_kind(kind: type[nn.Module]) -> type[CompiledForOneToken]:
    """One class for all parts of a kind, of every model: a graph serves what is of one class."""
    return type(f"Compiled{kind.__name__}", (CompiledForOneToken, kind), {})

"""torch.compile for inference: each block compiled once, the one graph serving every block of a kind."""

from collections.abc import Callable

import torch
from torch import Tensor

from hasten.model.transformer import Block, LayerContext, Transformer


def compile_blocks(model: Transformer) -> None:
    """Compile every block in place for decoding; the first decode step of each capacity and batch size takes seconds.

    Per block rather than the whole model: the graph is compiled once instead of once a layer, because a block's
    weights, cache and context are its inputs. Only steps of one token a row are compiled. Prompts have every length,
    each would be compiled anew, and their time is in large matrix products that a compiler does not make faster.
    Raises nothing by itself; Inductor needs a C++ compiler on a CPU.
    """
    for block in model.blocks:
        assert isinstance(block, Block)
        block.forward = _decode_compiled(block)  # type: ignore[method-assign]


def _decode_compiled(block: Block) -> Callable[[Tensor, tuple[Tensor, Tensor] | None, LayerContext], Tensor]:
    eager = block.forward
    compiled = torch.compile(eager, fullgraph=True, dynamic=False)

    def forward(x: Tensor, rope: tuple[Tensor, Tensor] | None, layer: LayerContext) -> Tensor:
        return (compiled if x.shape[1] == 1 else eager)(x, rope, layer)

    return forward

"""torch.compile for inference: each block compiled once, the one graph serving every block of a kind."""

import torch

from hasten.model.transformer import Transformer


def compile_blocks(model: Transformer) -> None:
    """Compile every block in place; the first call of each new shape then takes seconds.

    Per block rather than the whole model: the graph is compiled once instead of once a layer, because a block's
    weights, cache and context are its inputs. Raises nothing by itself; Inductor needs a C++ compiler on a CPU.
    """
    torch._dynamo.config.cache_size_limit = max(torch._dynamo.config.cache_size_limit, 32)
    for block in model.blocks:
        block.compile(fullgraph=True, dynamic=False)

"""Native attention for training on a CPU: dense causal, windows, packed documents and block patterns, with gradients.

FlashAttention-2 (arXiv 2307.08691) in C++, see train.cpp: what no query sees is skipped in forward and backward, and
nothing larger than a tile of scores is ever in memory.
"""

from typing import Any

import torch
from torch import Tensor

from hasten.errors import ConfigError
from hasten.ops.attention.block_mask import TILE, BlockMask, MaskTiles
from hasten.ops.attention.inputs import PLAIN, AttentionInputs, as_autocast, document_bounds, with_sinks
from hasten.ops.attention.spec import AttentionSpec
from hasten.ops.native import NativeLibrary, library, with_gradients

DTYPES = (torch.float32, torch.bfloat16)


def native(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs = PLAIN) -> Tensor:
    """Causal, windowed or full attention; packed documents, intervals and block masks. Hidden keys are skipped."""
    q, k, v = as_autocast(q, k, v)
    dtype = q.dtype
    if dtype not in DTYPES:  # float16, which only autocast brings here
        q, k, v = q.float(), k.float(), v.float()
    causal, window, intervals = spec.causal, spec.window, inputs.intervals_of(q.shape[1], k.shape[1], q.device)
    if inputs.documents is not None:  # whose intervals have causality inside
        causal, window, intervals = False, None, document_bounds(inputs.documents, q.shape[1], spec)
    low, high = (None, None) if intervals is None else (x.expand(q.shape[:2]).contiguous() for x in intervals)
    hidden: dict[str, Any] = {"causal": causal, "window": window, "low": low, "high": high}
    hidden["block_mask"] = inputs.block_mask
    out, lse = native_attention(q, k, v, scale=spec.scale, dropout=inputs.dropout, **hidden)
    return with_sinks(out, lse, inputs.sinks).to(dtype)


def native_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    low: Tensor | None = None,
    high: Tensor | None = None,
    block_mask: BlockMask | None = None,
    dropout: float = 0.0,
    isa: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of q (B, T, H, D) over k, v (B, S, Hkv, D): the output (B, T, H, D) and the log-sum-exp (B, H, T).

    float32 or bfloat16, on the CPU, D up to 512; both results have gradients. The T queries are the last of the S
    positions. A query sees the keys that all of these allow: `causal`, the last `window` keys, its interval
    low … high (int32 (B, T), both included), and the block mask, which brings its own causality. A query that sees
    nothing gives zeros and a log-sum-exp of -inf. Sums run in an order that only the shapes decide: the same bits on
    any number of threads. dropout: of probabilities, decided by one number of PyTorch's generator and by the place.

    Raises ConfigError for dtypes and lengths that do not fit, ResourceError where there are no native kernels.
    """
    if q.dtype not in DTYPES:
        raise ConfigError(f"the native attention takes float32 and bfloat16; found {q.dtype}")
    tiles: MaskTiles | None = None
    if block_mask is not None:
        block_mask.check(q.shape[1], k.shape[1])
        if block_mask.heads not in (1, q.shape[2]):
            raise ConfigError(f"the block mask has {block_mask.heads} heads; found {q.shape[2]} query heads")
        tiles, causal = block_mask.tiles(), block_mask.causal
    if q.shape[1] > k.shape[1] and (causal or window or tiles is not None):
        raise ConfigError(f"{q.shape[1]} queries are the last ones of {k.shape[1]} keys: there are too few keys")
    layout = (None,) * 3 if tiles is None else (tiles.starts, tiles.columns, tiles.cells)
    numbers = (causal, window or 0, q.shape[3] ** -0.5 if scale is None else scale, dropout)
    seed = torch.randint(1 << 62, ()) if dropout else None
    return getattr(torch.ops, _ready(isa)).train_attention.default(q, k, v, low, high, *layout, *numbers, seed)


def _register(native: NativeLibrary, space: str) -> None:
    backward_operator = native.ops.train_attention_backward.default

    def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.causal, ctx.window, ctx.scale, ctx.dropout, seed = inputs
        ctx.save_for_backward(*tensors[:3], *output, seed, *tensors[3:])
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, seed, *sight = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        if dlse is not None:
            dlse = dlse.contiguous()
        numbers = (ctx.causal, ctx.window, ctx.scale, ctx.dropout)
        gradients = backward_operator(dout, q, k, v, out, lse, dlse, *sight, *numbers, seed)
        return (*gradients, *(None,) * 10)

    torch.library.register_autograd(f"{space}::train_attention", backward, setup_context=remember)


_ready = with_gradients(_register)  # the namespace of one instruction set's operators


def flop_formulas() -> dict[Any, Any]:
    """The `custom_mapping` with which torch.utils.flop_counter.FlopCounterMode counts the native attention.

    Empty where there are no native kernels. (Registering them for every counter would import 80 MB of modules.)
    """
    native = library(part="training")
    if native is None:
        return {}
    return {native.ops.train_attention: _forward_flops, native.ops.train_attention_backward: _backward_flops}


def _forward_flops(q: torch.Size, k: torch.Size, v: torch.Size, *rest: Any, **named: Any) -> int:
    """Two products over the pairs of query and key that are seen; the operator's arguments, tensors as their sizes."""
    _low, _high, starts, columns, _cells, causal, window, *_ = rest
    batch, queries, heads, size = q
    keys = k[1]
    if starts is not None:
        pairs = heads * columns[0] // starts[0] * TILE * TILE
    else:
        first = keys - queries + 1  # keys that the first query sees
        seen = [min(n if causal else keys, window or keys) for n in range(first, keys + 1)]
        pairs = heads * sum(seen)
    return batch * pairs * 4 * size


def _backward_flops(dout: torch.Size, q: torch.Size, k: torch.Size, v: torch.Size, *rest: Any, **named: Any) -> int:
    """Five products where the forward pass has two."""
    return _forward_flops(q, k, v, *rest[3:]) * 5 // 2

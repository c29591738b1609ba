"""FlashAttention-2 in Triton, forward and backward (arXiv 2307.08691): never a T × S matrix in memory.

Tiles of keys stream past a tile of queries; the softmax is kept as a running maximum and a running sum, and only the
log-sum-exp of each row is stored. The backward pass computes the probabilities again from it: the queries' gradient
tile of queries by tile of queries, then the keys' and values' tile of keys by tile of keys, each sum in a fixed order,
so that it gives the same bits every time. Derived in docs/in-depth/flash-attention.md.

Import this file only where the kernel is taken; it imports Triton and registers the operator.
"""

from typing import Any

import torch
from torch import Tensor

from hasten.errors import ConfigError
from hasten.ops.attention.checks import check_causal, check_numbers, check_tensors
from hasten.ops.attention.flash_launch import Problem, backward, forward, wide
from hasten.ops.attention.inputs import AttentionInputs
from hasten.ops.attention.spec import LARGEST_HEAD, AttentionSpec


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    query_starts: Tensor | None = None,
    key_starts: Tensor | None = None,
    key_bounds: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of q (B, T, H, D) over k, v (B, S, Hkv, D): the result (B, T, H, D) and the log-sum-exp (B, H, T).

    bfloat16 or float16 on CUDA, also float32 and float64 in Triton's interpreter; D up to 256. The T queries are the
    last of the S positions; a query that sees no key has zeros and a log-sum-exp of -inf. The log-sum-exp is float32 of
    the scaled (and capped) scores, and differentiable like the result. query_starts and key_starts, integers
    (documents + 1,) from 0 to T and to S, pack documents that do not see each other into a batch of one. key_bounds,
    int32 (B, 2): the first key of each sequence that exists, and one past the last. Raises ConfigError for what does
    not fit.
    """
    check_tensors(q, k, v)
    check_numbers(window=window, softcap=softcap, scale=scale)
    check_causal(queries=q.shape[1], keys=k.shape[1], window=window, causal=causal, masked=True)
    taken = [torch.bfloat16, torch.float16] + [torch.float32, torch.float64] * (q.device.type == "cpu")
    if q.dtype not in taken or q.shape[3] > LARGEST_HEAD:
        raise ConfigError(f"flash attention wants {taken}, D up to {LARGEST_HEAD}; found {q.dtype}, D = {q.shape[3]}")
    if scale is not None and scale <= 0:
        raise ConfigError(f"scale must be positive; found {scale}")
    if (query_starts is None) != (key_starts is None):
        raise ConfigError("packed documents want the starts of the queries and of the keys")
    for x in (query_starts, key_starts):
        if x is not None and (x.dim() != 1 or len(x) < 2 or x.is_floating_point() or q.shape[0] != 1):
            raise ConfigError(
                f"starts of documents are integers (documents + 1,) beside a batch of one; found {x.dtype} "
                f"{tuple(x.shape)}, a batch of {q.shape[0]}"
            )
    if key_bounds is not None and (key_bounds.shape != (q.shape[0], 2) or key_bounds.dtype != torch.int32):
        raise ConfigError(f"key_bounds are int32 ({q.shape[0]}, 2); found {key_bounds.dtype} {tuple(key_bounds.shape)}")
    key_bounds = None if key_bounds is None else key_bounds.contiguous()
    scale = q.shape[3] ** -0.5 if scale is None else scale
    out, lse = operator(q, k, v, query_starts, key_starts, key_bounds, scale, causal, window or 0, softcap or 0.0)
    return out, lse


def flash_triton(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
    """Same contract as `reference`, with packed documents or one interval of keys a sequence, and nothing else."""
    starts = (None, None) if inputs.documents is None else inputs.documents
    there = inputs.intervals
    known: dict[str, Any] = {"causal": spec.causal, "window": spec.window, "softcap": spec.softcap, "scale": spec.scale}
    known["key_bounds"] = None if there is None else torch.cat([there.low, there.high + 1], dim=1)
    return flash_attention(q, k, v, query_starts=starts[0], key_starts=starts[1], **known)[0]


# The fields of `Problem`, as torch's schemas have them.
PROBLEM = "Tensor? query_starts, Tensor? key_starts, Tensor? key_bounds, "
PROBLEM += "float scale, bool causal, int window, float softcap"


@torch.library.custom_op(
    "hasten_triton::flash_attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {PROBLEM}) -> (Tensor, Tensor)",
)
def operator(q: Tensor, k: Tensor, v: Tensor, *problem: Any) -> tuple[Tensor, Tensor]:
    """`flash_attention` without its checks; window, softcap 0: none."""
    return forward(q, k, v, problem=Problem(*problem))


@torch.library.custom_op(
    "hasten_triton::flash_attention_backward",
    mutates_args=(),
    schema="(Tensor d_out, Tensor? d_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{PROBLEM}) -> (Tensor, Tensor, Tensor)",
)
def backward_operator(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v from those of the result and, if it was used, of the log-sum-exp."""
    return backward(*arguments[:7], problem=Problem(*arguments[7:]))


@operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=wide(q.dtype))
    return q.new_empty(q.shape), lse


@backward_operator.register_fake
def _(d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:6])
    ctx.options = inputs[6:]
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, *where = ctx.saved_tensors
    if d_out is None and d_lse is None:
        return (None,) * 10
    d_out = torch.zeros_like(out) if d_out is None else d_out
    found = backward_operator(d_out, d_lse, q, k, v, out, lse, *where, *ctx.options)
    return (*found, *(None,) * 7)


operator.register_autograd(_gradients, setup_context=_save)

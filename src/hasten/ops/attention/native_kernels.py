"""What the native training attention and flex_attention support, and when they must be requested by name."""

from collections.abc import Callable

import torch
from torch import Tensor

from hasten.ops.attention.block_mask import tiles_refusal
from hasten.ops.attention.inputs import PLAIN, AttentionInputs
from hasten.ops.attention.sdpa import sdpa
from hasten.ops.attention.spec import LARGEST_NATIVE, AttentionRequest, AttentionSpec
from hasten.ops.attention.train import DTYPES, native
from hasten.ops.build import is_built
from hasten.ops.native import MISSING, choose_isa, library, obtainable, slower_than_pytorch

# What neither the native attention nor flex takes, beside a block mask or without.
BESIDE_BLOCKS = ("softcap", "mask", "key_padding", "bias", "alibi")


def flex(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs = PLAIN) -> Tensor:
    """A block pattern through PyTorch's flex_attention, compiled: absent blocks are skipped."""
    # Imported here, because it brings the compiler's symbolic mathematics along.
    from torch.nn.attention.flex_attention import flex_attention

    assert inputs.block_mask is not None, "refused before"
    run = flex_attention if torch.compiler.is_compiling() else torch.compile(flex_attention)
    out = run(
        q.transpose(1, 2),  # (B, H, T, D)
        k.transpose(1, 2),
        v.transpose(1, 2),
        block_mask=inputs.block_mask.flex(q.shape[1], q.device),
        scale=spec.scale,
        enable_gqa=spec.groups > 1,
    )
    return out.transpose(1, 2)


def native_unsupported(request: AttentionRequest) -> str | None:
    """Why the native attention cannot serve a request of dense attention."""
    if request.block_mask:
        return "it takes no block mask; native-sparse does"
    return _unsupported(request)


def native_opt_in(request: AttentionRequest) -> str | None:
    """Why the native attention is only used by name, or None."""
    if request.queries == 1:
        return "for one query it brings the keys into tiles that are used only once"
    if request.sinks:  # PyTorch's have none
        return None
    return _slower(request.dtype_name, request.gradient is not False, request.layer)


def native_sparse_unsupported(request: AttentionRequest) -> str | None:
    """Why the native attention cannot serve a request of a block pattern."""
    if request.block_size is None:
        return "it is for block masks of hasten.ops.attention.block_mask (BlockMask.of makes one)"
    return _unsupported(request) or tiles_refusal(request.block_size)


def flex_unsupported(request: AttentionRequest) -> str | None:
    """Why flex_attention cannot serve a request of a block pattern."""
    if request.block_size is None:
        return "it is for block masks of hasten.ops.attention.block_mask (BlockMask.of makes one)"
    if request.device.type not in ("cuda", "cpu"):
        return f"it needs a CUDA GPU; the tensors are on {request.device}"
    if request.device.type == "cpu" and request.gradient:
        return "flex_attention has no backward pass on a CPU"
    if (found := request.given(*BESIDE_BLOCKS, "key_lengths", "documents", "dropout", "sinks")) is not None:
        return f"with a block mask it takes no {found}"
    return None


def flex_opt_in(request: AttentionRequest) -> str | None:
    """Why flex is only used by name, or None."""
    return "on a CPU it has a forward pass only" if request.device.type == "cpu" else None


def _unsupported(request: AttentionRequest) -> str | None:
    if request.device.type != "cpu":
        return f"it needs a CPU; the tensors are on {request.device}"
    if (reason := request.outside(*DTYPES, largest=LARGEST_NATIVE)) is not None:
        return reason
    if (found := request.given(*BESIDE_BLOCKS)) is not None:
        return f"it takes no {found}"
    enough = request.queries is None or request.keys is None or request.queries <= request.keys
    if request.spec.causal and not request.documents and not enough:
        return f"it has the queries as the last of the keys; {request.queries} are more than {request.keys}"
    return MISSING if _missing(request.layer) else None


def _missing(layer: bool) -> bool:
    """Whether the native library is missing. A call compiles it; for binding a layer it only has to be possible."""
    return not obtainable("training") if layer else library(part="training") is None


# A graph holds its result, as `with_gradients` has it: a compiled function may choose its kernel inside.
_missing._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _slower(dtype: str, gradient: bool, layer: bool) -> str | None:
    """Why PyTorch's attention is faster on this processor, by timing a small layer, or None."""
    if layer and not is_built(choose_isa(), "training"):  # who only loads a model need not wait for a compiler
        return None
    what = f"attention of 2 × 256 tokens, 4 heads of 64, {dtype}{', and its gradients' if gradient else ''}"
    return slower_than_pytorch(what, lambda: _contenders(getattr(torch, dtype), gradient), "training")


_slower._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _contenders(dtype: torch.dtype, gradient: bool) -> dict[str, Callable[[], object]]:
    spec = AttentionSpec(heads=4, kv_heads=4, head_dim=64, scale=0.125)
    values = torch.randn(4, 2, 256, 4, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    q, k, v = (x.requires_grad_(gradient) for x in values[:3])

    def run(kernel: Callable[..., Tensor]) -> Callable[[], object]:
        def call() -> object:
            out = kernel(q, k, v, spec)
            return torch.autograd.grad(out, (q, k, v), values[3]) if gradient else out

        return call

    return {"native": run(native), "PyTorch's": run(sdpa)}

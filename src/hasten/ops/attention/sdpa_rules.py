"""When PyTorch's SDPA backends support a request: their rules, so that they can be evaluated for any machine.

From aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and sdp_utils_cpp.cpp (PyTorch 2.11 to 2.13). A request of a
layer is judged by what is known of it; what differs from call to call is judged by PyTorch at the call.
"""

import torch

from hasten.ops.attention.spec import HALVES, AttentionRequest
from hasten.ops.triton_support import LEAST_CAPABILITY

TOP_LEFT = (
    "is_causal is aligned top left there: with {queries} queries and {keys} keys it is not our causal attention "
    "(bottom right)"
)
NOTHING_ELSE = "and it takes no mask instead"
MASKS = ("mask", "key_padding", "key_lengths", "intervals", "bias", "alibi", "documents", "block_mask")
BY_A_MASK = "and needs a mask of queries x keys instead"
HOPPER = (9, 0)
LEAST_QUERIES = 512
WIDE_HEADS = 91_000  # the cuDNN that takes heads above 128 on Hopper


def any_backend(request: AttentionRequest) -> str | None:
    """Why none of PyTorch's backends supports the request, or None."""
    if request.spec.softcap is not None:
        return "PyTorch's SDPA has no soft-capping of scores"
    if request.sinks:
        return "PyTorch's SDPA has no attention sinks"
    if request.device.type == "cuda" and request.alibi and request.dtype in HALVES:
        return f"on CUDA it adds a bias in the inputs' own dtype, and {request.dtype_name} rounds ALiBi's distances"
    return None


def masked(request: AttentionRequest) -> str | None:
    """What would reach PyTorch as an explicit mask, or None: nothing, or no more than `is_causal`."""
    if (given := request.given(*MASKS)) is not None:
        return given
    if request.windowed:
        return "window"
    # PyTorch's fused kernels hide later keys before they scale: -infinity times a scale below zero is no longer hidden.
    return f"scale of {request.spec.scale:g}" if request.spec.causal and not request.spec.scale > 0 else None


def unequal(request: AttentionRequest) -> bool:
    """Causal with other than equal lengths (one query that sees everything needs no mask at all)."""
    return request.spec.causal and not request.layer and request.queries not in (request.keys, 1) and not request.mask


def flash(request: AttentionRequest) -> str | None:
    reason = any_backend(request)
    if reason is not None:
        return reason
    if request.device.type == "cpu":
        if request.dropout:
            return "on a CPU it has no dropout"
        return "on a CPU it gives a bias no gradient" if request.bias_gradient else None
    if request.device.type != "cuda":
        return f"it needs a CUDA GPU or a CPU; the tensors are on {request.device}"
    if (reason := request.outside(*HALVES) or _too_old(request)) is not None:
        return reason
    if (name := masked(request)) is not None:
        return f"on CUDA it takes no explicit mask, only `causal`; found: {name}"
    if unequal(request):
        return f"{TOP_LEFT.format(queries=request.queries, keys=request.keys)}, {NOTHING_ELSE}"
    return None


def memory_efficient(request: AttentionRequest) -> str | None:
    if request.device.type == "cpu":
        return "PyTorch has no memory-efficient backend on a CPU; `chunked` is ours"
    reason = any_backend(request) or _on_cuda(request)
    if reason is not None:
        return reason
    if request.dtype == torch.float64:
        return "it takes float32, bfloat16 and float16, not float64"
    if request.dtype == torch.bfloat16 and (reason := _too_old(request, "bfloat16")) is not None:
        return reason
    multiple = 8 if request.dtype in HALVES else 4
    if request.spec.head_dim % multiple:
        return f"the head size must be a multiple of {multiple} in {request.dtype_name}; it is {request.spec.head_dim}"
    return None


def cudnn(request: AttentionRequest) -> str | None:
    if request.device.type == "cpu":
        return "cuDNN is NVIDIA's library: there is none on a CPU"
    reason = any_backend(request) or _on_cuda(request) or request.outside(*HALVES) or _too_old(request)
    if reason is not None:
        return reason
    wide = request.compute_capability() == HOPPER and (torch.backends.cudnn.version() or WIDE_HEADS) >= WIDE_HEADS
    largest = 256 if wide else 128
    if request.spec.head_dim > largest or request.spec.head_dim % 8:
        return f"the head size must be a multiple of 8 up to {largest}; it is {request.spec.head_dim}"
    if request.keys == 1 or 0 in (request.queries, request.keys):
        return "it does not take a single key, nor none"
    if request.queries == 1 and request.dropout:
        return "it has no dropout for a single query"
    if request.bias_gradient:
        return "it gives a bias no gradient"
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        return "torch.use_deterministic_algorithms is on, and PyTorch does not count on the same bits from it"
    return None


def one_by_one(request: AttentionRequest) -> str | None:
    """Why a single backend is only used by name."""
    if request.layer:
        return "a layer's calls differ; sdpa lets PyTorch choose at each"
    if unequal(request):
        return f"{TOP_LEFT.format(queries=request.queries, keys=request.keys)}, {BY_A_MASK}"
    return None


def not_measured(request: AttentionRequest) -> str | None:
    """Why a kernel that was compared with the others on an H100 is only used by name on this device, or None."""
    if request.device.type == "cuda" and request.compute_capability() == HOPPER:
        return None
    return "it was measured on Hopper GPUs only: elsewhere by name"


def cudnn_opt_in(request: AttentionRequest) -> str | None:
    """Why cuDNN is only used by name; without a mask it is the fastest on a Hopper GPU (docs/in-depth/attention.md)."""
    if (reason := one_by_one(request) or not_measured(request)) is not None:
        return reason
    if (name := masked(request)) is not None:
        return f"it reads an explicit mask of queries x keys for this; found: {name}"
    if request.queries is None or request.queries < LEAST_QUERIES:
        return f"on fewer than {LEAST_QUERIES:,} queries it saves less than planning for each length costs the host"
    if request.gradient is False:
        return "it makes a plan for each length: 74 ms of the host, more than hundreds of forward passes save"
    return None


def flash_opt_in(request: AttentionRequest) -> str | None:
    if request.device.type == "cpu" and request.dtype == torch.float16 and request.gradient:
        return "on a CPU its backward pass is slow in float16"
    return one_by_one(request)


def named_instead(request: AttentionRequest) -> str | None:
    """Why `sdpa` is only used by name if the request is fully known."""
    if request.layer or unequal(request):
        return None
    return "PyTorch's choice among the backends, each of which is listed here by itself"


def never_first(request: AttentionRequest) -> str | None:
    return "it writes all T x S scores to memory"


def _on_cuda(request: AttentionRequest) -> str | None:
    return None if request.device.type == "cuda" else f"it needs a CUDA GPU; the tensors are on {request.device}"


def _too_old(request: AttentionRequest, what: str = "it") -> str | None:
    found = request.compute_capability()
    if found >= LEAST_CAPABILITY:
        return None
    return f"{what} needs compute capability 8.0 or later, the device has {'.'.join(map(str, found))}"

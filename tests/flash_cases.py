"""Checks of FlashAttention in Triton that run in its interpreter on a CPU and, unchanged, on a GPU."""

import torch

from hasten.ops.attention.flash_launch import Problem, backward, forward
from hasten.ops.attention.flash_triton import flash_attention

NAMES = ("out", "lse", "dq", "dk", "dv")


def explicit(q, k, v, *, causal=True, window=None, softcap=None, scale=None, key_bounds=None):
    """The result and the log-sum-exp with all T × S scores, in the inputs' own precision; nothing seen: 0 and -inf."""
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    queries, keys = q.shape[1], k.shape[1]
    behind = torch.arange(queries, device=q.device)[:, None] + keys - queries - torch.arange(keys, device=q.device)
    seen = torch.ones_like(behind, dtype=torch.bool) if not causal else behind >= 0  # (T, S)
    if window is not None:
        seen &= behind < window
    seen = seen[None, None]
    if key_bounds is not None:
        places, (low, high) = torch.arange(keys, device=q.device), key_bounds[:, :, None, None, None].unbind(1)
        seen = seen & (places >= low) & (places < high)  # (B, 1, T, S)
    empty = ~seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~seen & ~empty, -torch.inf)
    out = torch.einsum("bhts,bshd->bthd", scores.softmax(-1).masked_fill(empty, 0), v)
    return out, scores.logsumexp(-1).masked_fill(empty[..., 0], -torch.inf)


def tensors(*, queries, keys, heads, kv_heads, head_dim, dtype, device="cpu", batch=2, size=1.0, seed=0):
    """q, k, v, and weights of the result and of the log-sum-exp in a loss."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, n, h, head_dim) for n, h in ((queries, heads), (keys, kv_heads), (keys, kv_heads))]
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    weights = torch.randn(shapes[0], generator=generator), torch.randn(batch, heads, queries, generator=generator)
    return [x.to(dtype).to(device) for x in (q * size, k * size, v, *weights)]


def all_of(run, q, k, v, weight, lse_weight, **options):
    """The result, the log-sum-exp, and the gradients of q, k, v from both."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out, lse = run(*leaves, **options)
    used = lse.masked_fill(lse == -torch.inf, 0)  # that of a row which sees nothing has no gradient
    ((out * weight.to(out.dtype)).sum() + (used * lse_weight.to(lse.dtype)).sum()).backward()
    return [out.detach(), lse.detach(), *(x.grad for x in leaves)]


def with_tiles(tiles, backward_tiles):
    """`flash_attention` by other tiles than those of the table: every number at once, as `all_of` gives them."""

    def run(q, k, v, weight, lse_weight, *, scale=None, window=None, softcap=None, causal=True, key_bounds=None):
        scale = q.shape[3] ** -0.5 if scale is None else scale
        problem = Problem(None, None, key_bounds, scale, causal=causal, window=window or 0, softcap=softcap or 0.0)
        out, lse = forward(q, k, v, problem=problem, tiles=tiles)
        return [out, lse, *backward(weight, lse_weight, q, k, v, out, lse, problem=problem, tiles=backward_tiles)]

    return run


def check_flash(*inputs, tiles=None, **options):
    """Everything errs at most twice what plain PyTorch errs in the inputs' precision, both against float64."""
    dtype = inputs[0].dtype
    exact = all_of(explicit, *(x.double() for x in inputs), **options)
    plain = all_of(explicit, *inputs, **options)
    found = all_of(flash_attention, *inputs, **options) if tiles is None else with_tiles(*tiles)(*inputs, **options)
    for name, one, other, right in zip(NAMES, found, plain, exact, strict=True):
        assert one.dtype == (torch.promote_types(dtype, torch.float32) if name == "lse" else dtype)
        assert one.shape == right.shape
        assert torch.isfinite(one[torch.isfinite(right)]).all(), name
        assert torch.equal(one == -torch.inf, right == -torch.inf), name
        # One rounding of the largest is allowed: with few numbers plain PyTorch may err by chance not at all.
        unit = torch.finfo(dtype).eps * largest(right)
        assert rms(one, right) <= 2 * rms(other, right) + unit, (name, rms(one, right), rms(other, right), unit)


def rms(found, exact):
    error = torch.where(exact == -torch.inf, 0, found.double() - exact)
    return error.square().mean().sqrt().item() if error.numel() else 0.0


def largest(x):
    return x[torch.isfinite(x)].abs().max().item() if torch.isfinite(x).any() else 0.0


def error(found, exact):
    """The largest, of all numbers; -inf must be -inf."""
    return max(
        torch.where(one == two, 0, one - two).abs().max().item() if one.numel() else 0.0
        for one, two in zip(found, exact, strict=True)
    )

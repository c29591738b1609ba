"""How exact the attention kernels are: against float64, and which order of scaling each of PyTorch's backends has.

The scores can be scaled before the product, (q/√√d)(k/√√d)ᵀ, or after it, (q kᵀ)/√d. In exact arithmetic that is the
same. In half precision the prescaled products stay small and cannot overflow, and the last bits differ. The appendix of
PyTorch's article on nanoGPT (blog, April 2023) shows that SDPA equalled the prescaled form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DTYPES = ("float32", "bfloat16", "float16")
FORMS = ("prescaled", "post-scaled", "prescaled in float32", "post-scaled in float32")
TINY = 1e-12


def prescaled(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
    """Attention of q, k, v (B, H, T, D) with both factors scaled by d^-¼ before the product."""
    root = q.shape[-1] ** -0.25
    return _attend((q * root) @ (k * root).transpose(-1, -2), v, seen)


def post_scaled(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
    """The same with the product divided by √d."""
    return _attend((q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5, v, seen)


def _attend(scores: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    return scores.softmax(-1) @ v


def scaling_orders(device: str = "cpu", *, seeds: int = 5, sizes: tuple[int, ...] = (64, 80, 128)) -> list[dict]:
    """For each backend and dtype, which forms it equals bit for bit, over seeds, head sizes, causal and not."""
    import torch

    from hasten.ops.attention import KERNELS, AttentionRequest, AttentionSpec

    rows = []
    for kernel in KERNELS:
        if kernel.name not in ("flash", "memory-efficient", "cudnn", "math"):
            continue
        for name in DTYPES:
            dtype = getattr(torch, name)
            equal = dict.fromkeys(FORMS, 0)
            cases = 0
            for size in sizes:
                spec = AttentionSpec(heads=2, kv_heads=2, head_dim=size, scale=size**-0.5)
                request = AttentionRequest(
                    spec=spec, device=torch.device(device), dtype=dtype, batch=2, queries=128, keys=128
                )
                if kernel.unsupported_reason(request) is not None:
                    continue
                for seed in range(seeds):
                    for causal in (False, True):
                        cases += 1
                        q, k, v = _random(seed, (3, 2, 2, 128, size), dtype, device)
                        found = _outside(kernel.run, q, k, v, causal)
                        for form, expected in _forms(q, k, v, causal).items():
                            equal[form] += torch.equal(found, expected)
            if cases:
                rows.append({"kernel": kernel.name, "dtype": name, "cases": cases, "equal": equal})
    return rows


def _random(seed: int, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def _outside(run: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """A kernel's result on q, k, v (B, H, T, D)."""
    from hasten.ops.attention import AttentionSpec

    heads, size = q.shape[1], q.shape[3]
    spec = AttentionSpec(heads=heads, kv_heads=k.shape[1], head_dim=size, scale=size**-0.5, causal=causal)
    return run(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), spec).transpose(1, 2)


def _forms(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, Tensor]:
    import torch

    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril() if causal else None
    wide = (q.float(), k.float(), v.float())
    return {
        "prescaled": prescaled(q, k, v, seen),
        "post-scaled": post_scaled(q, k, v, seen),
        "prescaled in float32": prescaled(*wide, seen).to(q.dtype),
        "post-scaled in float32": post_scaled(*wide, seen).to(q.dtype),
    }


def overflow(device: str = "cpu") -> list[dict[str, Any]]:
    """float16 inputs whose products are past 65,504 while their scaled scores are not: the result of every way."""
    import torch

    q = torch.full((1, 2, 16, 128), 40.0)  # 40 · 40 · 128 = 204,800; divided by √128 it is 18,102
    k = q.clone()
    for i in range(16):
        k[:, :, i, :i] += 2**-5  # float16's next number after 40: the scores differ by 0.11 from key to key
    v = _random(0, (1, 2, 16, 128), torch.float32, "cpu")
    q, k, v = (x.half().to(device) for x in (q, k, v))
    exact = prescaled(q.double(), k.double(), v.double(), None)
    ways: dict[str, Callable[[], Tensor]] = {
        "post-scaled": lambda: post_scaled(q, k, v, None),
        "prescaled": lambda: prescaled(q, k, v, None),
    }
    for name, run in _kernels(torch.float16, device, causal=False, queries=16, size=128, heads=(2, 2)).items():
        ways[name] = lambda run=run: _outside(run, q, k, v, False)  # type: ignore[misc]
    rows = []
    for name, way in ways.items():
        found = way()
        finite = bool(found.isfinite().all())
        rows.append({"way": name, "finite": finite, "error": _largest(found, exact) if finite else None})
    return rows


def _kernels(
    dtype: torch.dtype, device: str, *, causal: bool, queries: int, size: int, heads: tuple[int, int]
) -> dict[str, Callable[..., Tensor]]:
    """All kernels that serve a plain call with gradients here, but for those that wait for a decode step."""
    import torch

    from hasten.ops.attention import KERNELS, AttentionRequest, AttentionSpec

    spec = AttentionSpec(heads=heads[0], kv_heads=heads[1], head_dim=size, scale=size**-0.5, causal=causal)
    where = torch.device(device)
    request = AttentionRequest(
        spec=spec, device=where, dtype=dtype, batch=2, queries=queries, keys=queries, gradient=True
    )
    fitting = [kernel for kernel in KERNELS if kernel.unsupported_reason(request) is None]
    return {kernel.name: kernel.run for kernel in fitting if kernel.name not in ("triton", "sdpa")}


def errors(
    device: str = "cpu", *, tokens: int = 512, size: int = 64, heads: tuple[int, int] = (4, 2), seeds: int = 3
) -> list[dict[str, Any]]:
    """Every kernel's error against float64, causal, forward and gradients, beside plain PyTorch's in the same dtype.

    Root mean square and largest error, each over that of the exact values; `ratio` and `largest_ratio` are over plain
    PyTorch's (post-scaled scores, softmax and products in the inputs' dtype), the mean over the seeds of both first.
    """
    import torch

    rows = []
    for name in DTYPES:
        dtype = getattr(torch, name)
        runs = {"plain": _plain, **_kernels(dtype, device, causal=True, queries=tokens, size=size, heads=heads)}
        sums: dict[str, dict[str, list[float]]] = {run: {} for run in runs}
        for seed in range(seeds):
            generator = torch.Generator().manual_seed(seed)
            shapes = [(2, tokens, n, size) for n in (heads[0], heads[1], heads[1], heads[0])]
            *inputs, weights = (torch.randn(shape, generator=generator).to(dtype).to(device) for shape in shapes)
            exact = _results(_plain, [x.double() for x in inputs], weights.double())
            for run, function in runs.items():
                for part, found, expected in zip(
                    ("forward", "dq", "dk", "dv"), _results(function, inputs, weights), exact, strict=True
                ):
                    error = (found.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
                    sums[run].setdefault(part, []).append(error.item())
                    sums[run].setdefault(f"{part} largest", []).append(_largest(found, expected))
        means = {run: {part: sum(values) / seeds for part, values in parts.items()} for run, parts in sums.items()}
        for run, parts in means.items():
            row: dict[str, Any] = {"kernel": run, "dtype": name, "errors": parts}
            if run != "plain":
                # Where plain PyTorch errs by less than a rounding of float64 there is nothing to compare with.
                row["ratios"] = {part: value / max(means["plain"][part], TINY) for part, value in parts.items()}
            rows.append(row)
    return rows


def _results(run: Callable[..., Tensor], inputs: list[Tensor], weights: Tensor) -> list[Tensor]:
    """Output and the gradients of q, k and v (B, T, H, D)."""
    import torch

    from hasten.ops.attention import AttentionSpec

    q, k, v = (x.detach().clone().requires_grad_() for x in inputs)
    spec = AttentionSpec(heads=q.shape[2], kv_heads=k.shape[2], head_dim=q.shape[3], scale=q.shape[3] ** -0.5)
    out = run(q, k, v, spec)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), weights)]


def _plain(q: Tensor, k: Tensor, v: Tensor, spec: Any) -> Tensor:
    import torch

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(spec.groups, dim=1) for x in (k, v))
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    return post_scaled(q, k, v, seen).transpose(1, 2)


def _largest(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).abs().max() / exact.abs().max()).item()

"""How exact and how fast attention is.

    python benchmarks/attention.py errors --output benchmarks/results/attention-errors.json
    python benchmarks/attention.py prefill --output benchmarks/results/prefill-attention.json
    python benchmarks/attention.py decode --output benchmarks/results/decode-attention.json

The scores can be scaled before the product, (q/√√d)(k/√√d)ᵀ, or after it, (q kᵀ)/√d. In exact arithmetic that is the
same. In half precision the prescaled products stay small and cannot overflow, and the last bits differ. The appendix of
PyTorch's article on nanoGPT (blog, April 2023) shows that SDPA equalled the prescaled form.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hasten.engine.cache import row_format
from hasten.machine import matrix_rate
from hasten.machine.measure import read_bandwidth
from hasten.machine.pages import zeros_in_large_pages
from hasten.measure.script import Report, Script, TimedScript, main, markdown
from hasten.measure.timing import timed_warm
from hasten.ops.attention import KERNELS, AttentionRequest, AttentionSpec
from hasten.ops.native import choose_isa, library


@dataclass(frozen=True, kw_only=True)
class Errors(Script):
    """Every attention kernel's error, and the order of scaling that each of PyTorch's backends has."""

    result = "attention-errors"
    device: str = "cpu"
    """cpu or cuda."""
    tokens: int = 512
    """T and S of the table of errors."""

    def measure(self) -> Report:
        return {
            "scaling": scaling_orders(self.device),
            "overflow": overflow(self.device),
            "errors": errors(self.device, tokens=self.tokens),
        }


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
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def _outside(run: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """A kernel's result on q, k, v (B, H, T, D)."""
    heads, size = q.shape[1], q.shape[3]
    spec = AttentionSpec(heads=heads, kv_heads=k.shape[1], head_dim=size, scale=size**-0.5, causal=causal)
    return run(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), spec).transpose(1, 2)


def _forms(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, Tensor]:
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
    q, k, v = (x.detach().clone().requires_grad_() for x in inputs)
    spec = AttentionSpec(heads=q.shape[2], kv_heads=k.shape[2], head_dim=q.shape[3], scale=q.shape[3] ** -0.5)
    out = run(q, k, v, spec)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), weights)]


def _plain(q: Tensor, k: Tensor, v: Tensor, spec: Any) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(spec.groups, dim=1) for x in (k, v))
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    return post_scaled(q, k, v, seen).transpose(1, 2)


def _largest(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).abs().max() / exact.abs().max()).item()


@dataclass(frozen=True, kw_only=True)
class Prefill(TimedScript):
    """The cache's attention reading a prompt, beside the machine's matrix rate and PyTorch's flash attention.

    Causal attention of a whole prompt over a contiguous bf16 cache, in interleaved rounds; FLOPs are those of the
    scores that are seen (4·H·D for each), and the matrix rate is measured in every round. A call is repeated for 50 ms.
    Shares are formed within a round. On a processor with AMX, without it (the matrix rate too):
    HASTEN_ISA=avx512_vnni ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16.
    """

    result = "prefill-attention"
    tokens: tuple[int, ...] = (512, 2048, 8192)
    heads: tuple[tuple[int, int, int], ...] = ((32, 4, 64), (32, 8, 128))
    """Query heads, key/value heads, head size."""
    rounds: int = 7

    def measure(self) -> Report:
        rows = [self.row(shape, tokens) for shape in self.heads for tokens in self.tokens]
        return {"settings": self.settings() | {"dtype": "bfloat16", "isa": choose_isa()}, "rows": rows}

    def row(self, shape: tuple[int, int, int], tokens: int) -> dict[str, Any]:
        native = library()
        assert native is not None
        heads, kv_heads, size = shape
        q = torch.randn(tokens, heads, size).bfloat16()
        k, v = torch.randn(2, kv_heads, tokens + 1, size).bfloat16().transpose(1, 2)  # as the cache has them
        starts, lengths, first = torch.tensor([0, tokens]), torch.tensor([tokens]), torch.tensor([0])
        whole = [t.transpose(0, 1)[None].contiguous() for t in (q, k[:tokens], v[:tokens])]

        def ours() -> torch.Tensor:
            return native.ops.attention(q, k, v, starts, lengths, first, None, 0, False, size**-0.5, 0, 0.0)

        def flash() -> torch.Tensor:
            return F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)

        torch.testing.assert_close(ours(), flash()[0].transpose(0, 1), rtol=0.05, atol=0.02)
        flops = 4 * heads * size * tokens * (tokens + 1) / 2
        found = []
        for _ in range(self.rounds):
            rate, own, theirs = matrix_rate("bfloat16", seconds=0.2), timed_warm(ours), timed_warm(flash)
            found.append((flops / own, flops / own / rate, flops / theirs / rate))
        speed, share, flash_share = (median(column) for column in zip(*found, strict=True))
        what = {"heads": heads, "kv_heads": kv_heads, "head_dim": size, "tokens": tokens}
        return what | {"flops_per_second": speed, "share": share, "flash_share": flash_share}


@dataclass(frozen=True, kw_only=True)
class Decode(TimedScript):
    """The cache's attention for one new token, beside the memory's bandwidth and PyTorch's attention.

    Layers take turns whose keys and values are more than the processor's caches hold, as in a decode step; of each
    format of the cache, in interleaved rounds, with the bandwidth measured in every round.
    """

    result = "decode-attention"
    tokens: tuple[int, ...] = (128, 512, 4096)
    heads: tuple[tuple[int, int, int], ...] = ((9, 3, 64), (32, 8, 128), (32, 32, 128))
    """Query heads, key/value heads, head size."""
    formats: tuple[str, ...] = ("auto", "int8")
    """Formats of the cache; auto is bfloat16."""
    megabytes: int = 300
    """Size of all layers' keys and values in bfloat16."""
    rounds: int = 7

    def measure(self) -> Report:
        rows = [self.row(shape, tokens) for shape in self.heads for tokens in self.tokens]
        return {"settings": self.settings() | {"isa": choose_isa()}, "rows": rows}

    def row(self, shape: tuple[int, int, int], tokens: int) -> dict[str, Any]:
        heads, kv_heads, size = shape
        layers = max(2, self.megabytes * 10**6 // (4 * tokens * kv_heads * size))
        scale, q = size**-0.5, torch.randn(1, heads, size)
        calls = {name: self.call(name, layers, shape, tokens, q) for name in self.formats}
        whole = torch.randn(layers, 2, 1, kv_heads, tokens, size).bfloat16()
        wide = q.bfloat16()[None].transpose(1, 2)  # (1, H, 1, D)

        def pytorch() -> None:
            for k, v in whole:
                F.scaled_dot_product_attention(wide, k, v, enable_gqa=True, scale=scale)

        found: dict[str, list[tuple[float, float]]] = {name: [] for name in (*calls, "PyTorch")}
        for _ in range(self.rounds):
            bandwidth = read_bandwidth(seconds=0.3)
            for name, (call, read) in {**calls, "PyTorch": (pytorch, whole.nbytes / layers)}.items():
                seconds = timed_warm(call) / layers
                found[name].append((seconds, read / seconds / bandwidth))
        medians = {
            name: dict(zip(("seconds", "share"), map(median, zip(*own, strict=True)), strict=True))
            for name, own in found.items()
        }
        return {"heads": heads, "kv_heads": kv_heads, "head_dim": size, "tokens": tokens, "medians": medians}

    def call(
        self, name: str, layers: int, shape: tuple[int, int, int], tokens: int, q: Tensor
    ) -> tuple[Callable[[], None], float]:
        """Create what attends in every layer; returns it, and the bytes that it reads of each."""
        _, kv_heads, size = shape
        native, rows = library(), row_format(name)
        assert native is not None
        attend = native.ops.attention.default
        slots = -(-tokens // _BLOCK) * _BLOCK
        like = {"dtype": rows.element(torch.bfloat16), "device": "cpu"}
        held = zeros_in_large_pages((layers, 2, kv_heads, slots + 1, rows.length(size)), **like)
        for layer in held:
            layer[:, :, :-1] = rows.write(torch.randn(2, slots, kv_heads, size).bfloat16()).transpose(1, 2)
        places = (torch.tensor([0, 1]), torch.tensor([tokens]), None, torch.randperm(slots // _BLOCK)[None], _BLOCK)
        pairs = [layer.transpose(1, 2).unbind() for layer in held]

        def run() -> None:
            for k, v in pairs:
                attend(q, k, v, *places, rows.rotated, size**-0.5, 0, 0.0)

        return run, 2 * tokens * kv_heads * rows.bytes(size, torch.bfloat16)


_BLOCK = 16  # tokens


def growth_table(report: Report) -> str:
    """`hasten bench attention`: time and memory of each kernel at the two largest lengths."""
    points = {(one["kernel"], one["tokens"]): one for one in report["points"]}
    short, long = sorted(report["settings"]["lengths"])[-2:]

    def memory(kernel: str, tokens: int) -> str:
        found = points[kernel, tokens].get("forward_backward_peak_bytes")
        if found is None:
            return "does not fit"
        return f"{found / 2**30:.1f} GiB" if found >= 2**30 else f"{found / 2**20:.0f} MiB"

    flash = points["flash", short]["forward_backward_seconds"]
    rows = []
    for kernel in dict.fromkeys(kernel for kernel, _ in points):
        found = points[kernel, short]
        time = f"{found['forward_backward_seconds'] / flash:.2f}×"
        speed = f"{found['forward_backward_gflops']:.0f}"
        rows.append([f"`{kernel}`", time, speed, memory(kernel, short), memory(kernel, long)])
    head = ["kernel", "time, of `flash`", "GFLOP/s", f"memory at {short:,} tokens", f"memory at {long:,}"]
    return markdown(head, rows)


def speed_table(report: Report) -> str:
    """`hasten bench attention --kernels native,flash`: GFLOP/s of both at each length."""
    points = {(one["kernel"], one["tokens"]): one for one in report["points"]}
    rows = []
    for tokens in report["settings"]["lengths"]:
        cells = [f"{tokens:,}"]
        for part in ("forward", "forward_backward"):
            ours, theirs = points["native", tokens], points["flash", tokens]
            seconds, speed = f"{part}_seconds", f"{part}_gflops"
            rounds = zip(ours["rounds"], theirs["rounds"], strict=True)  # a ratio is formed within a round
            ratio = median(other[seconds] / one[seconds] for one, other in rounds)
            cells += [f"{ours[speed]:.0f}", f"{theirs[speed]:.0f}", f"{ratio:.1f}×"]
        rows.append(cells)
    head = ["tokens", "forward: `native`", "`flash`", "ratio", "forward and backward: `native`", "`flash`", "ratio"]
    return markdown(head, rows)


def error_table(report: Report) -> str:
    """`errors`: each kernel's error against float64, and its largest ratio to plain PyTorch's."""
    plain = {one["dtype"]: one["errors"] for one in report["errors"] if one["kernel"] == "plain"}
    parts = ["forward", "dq", "dk", "dv"]
    rows = []
    for one in report["errors"]:
        ratio = max(one["errors"][part] / plain[one["dtype"]][part] for part in parts)
        name, worst = ("plain PyTorch", "") if one["kernel"] == "plain" else (f"`{one['kernel']}`", f"{ratio:.2f}")
        rows.append([name, one["dtype"], *(f"{one['errors'][part]:.1e}" for part in parts), worst])
    return markdown(["kernel", "dtype", *parts, "largest ratio to plain"], rows, left=2)


def scaling_table(report: Report) -> str:
    """`errors`: which order of scaling each backend equals in every case, bit for bit."""
    ways = ["prescaled", "prescaled in float32", "post-scaled", "post-scaled in float32"]
    rows = [
        [f"`{one['kernel']}`", one["dtype"], *("equal" if one["equal"][way] == one["cases"] else "no" for way in ways)]
        for one in report["scaling"]
    ]
    return markdown(["backend", "dtype", *ways], rows, left=2 + len(ways))


def overflow_table(report: Report) -> str:
    """`errors`: float16 scores past 65,504."""
    rows = []
    for one in report["overflow"]:
        name = f"`{one['way']}`" if "scaled" not in one["way"] else f"{one['way']}, plain PyTorch"
        rows.append([name, f"{one['error']:.1e}" if one["finite"] else "not finite"])
    return markdown(["", "error"], rows)


def prefill_table(report: Report) -> str:
    """`prefill`."""
    rows = []
    for one in report["rows"]:
        heads = f"{one['heads']} of {one['head_dim']} values, {one['kv_heads']} key/value heads"
        speed = f"{one['flops_per_second'] / 1e9:,.0f}"
        rows.append([heads, f"{one['tokens']:,}", speed, f"{one['share']:.0%}", f"{one['flash_share']:.0%}"])
    head = ["query heads", "tokens", "GFLOP/s", "of the matrix rate", "PyTorch's flash, of the same rate"]
    return markdown(head, rows)


def decode_table(report: Report) -> str:
    """`decode`."""
    named = {"auto": "bfloat16"}
    formats = [*report["rows"][0]["medians"]]
    rows = []
    for one in report["rows"]:
        heads = f"{one['heads']} of {one['head_dim']} values, {one['kv_heads']} key/value heads"
        found = [one["medians"][name] for name in formats]
        cells = [f"{own['seconds'] * 1e6:,.0f} µs, {own['share']:.0%}" for own in found]
        rows.append([heads, f"{one['tokens']:,}", *cells])
    return markdown(["query heads", "tokens", *(named.get(name, name) for name in formats)], rows)


TABLES = {
    **dict.fromkeys(("decode-attention", "decode-attention-amx"), decode_table),
    "attention-growth": growth_table,
    **dict.fromkeys(("attention-bfloat16", "attention-bfloat16-amx"), speed_table),
    "attention-errors": error_table,
    "attention-errors scaling": scaling_table,
    "attention-errors overflow": overflow_table,
    **dict.fromkeys(("prefill-attention", "prefill-attention-avx512", "prefill-attention-amx"), prefill_table),
}


if __name__ == "__main__":
    main({"errors": Errors, "prefill": Prefill, "decode": Decode}, TABLES)

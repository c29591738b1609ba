"""The machine's two ceilings, and llama-7b's matrices alone: cold weights, in a CUDA graph."""

import time
from typing import Any

import torch
import torch.nn.functional as F

from gpu.worker import DEVICE, TINY, graph_ms, seconds_of, serve, tidy

SHAPES = ((4096, 4096), (11_008, 4096), (4096, 11_008), (32_000, 4096)) if not TINY else ((64, 64),)
ROWS = (1, 4, 16, 64, 256, 1024) if not TINY else (1, 4)
ROUNDED, FROM_ROWS = "int8-rounded", 64  # with fewer rows activations are never rounded
COLD = (224 << 20) if not TINY else 1  # more than any cache holds


def baseline() -> None:
    """Bytes a second of a copy and of a read, FLOP/s of a large product."""
    torch.empty(1, device=DEVICE)

    def measure() -> dict[str, Any]:
        n, size = ((1 << 30) // 4, 8192) if not TINY else (1 << 16, 64)
        source, target = torch.rand(n, device=DEVICE), torch.empty(n, device=DEVICE)
        copy = 2 * source.nbytes / seconds_of(lambda: target.copy_(source), 10, 3)
        read = source.nbytes / seconds_of(lambda: source.sum(), 10, 3)
        rates = {}
        for name in ("bfloat16", "float16"):
            a, b = (torch.randn(size, size, device=DEVICE, dtype=getattr(torch, name)) for _ in range(2))
            rates[name] = 2 * size**3 / seconds_of(lambda a=a, b=b: a @ b, 10, 3)
        tidy()
        found = {"copy_bytes_per_s": copy, "read_bytes_per_s": read, "flops": rates, "torch": torch.__version__}
        if DEVICE != "cpu":
            from hasten.machine import describe

            found["gpu"] = torch.cuda.get_device_name()
            found["machine"] = describe().to_json()
        return found

    serve({"measure": measure})


def packed_layers(n: int, k: int, format: str, group: int, activations: str) -> list[Any]:
    """As many random layers as are never all in a cache."""
    from gpu.models import BITS
    from hasten.ops.linear import INT8, PackedLinear, int4_format

    stored = INT8 if format == "int8" else int4_format(group, scale_dtype=torch.float16)
    found = []
    for _ in range(COLD // (n * k * BITS[format] // 8) + 1):
        layer = PackedLinear(k, n, stored, activations=activations, device=DEVICE)
        layer.data.random_()
        layer.scales.uniform_(0, 1e-3)
        found.append(layer)
    return found


def torch_int4(n: int, k: int, group: int) -> list[tuple[Any, Any]]:
    """Weights of PyTorch's own int4 kernel, which gpt-fast calls."""
    low, high, shape = -(1 << 31), (1 << 31) - 1, (n // 8, k // 128, 32, 4)
    return [
        (
            torch.randint(low, high, shape, device=DEVICE, dtype=torch.int32),
            torch.full((k // group, n, 2), 1e-3, device=DEVICE, dtype=torch.bfloat16),
        )
        for _ in range(COLD // (n * k // 2) + 1)
    ]


def kinds_of(n: int, k: int) -> dict[str, tuple[list[Any], Any, int]]:
    """Name -> weights, product, bytes of one weight with its scales."""
    plain = [torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16) for _ in range(COLD // (2 * n * k) + 1)]
    found: dict[str, tuple[list[Any], Any, int]] = {"bf16": (plain, F.linear, plain[0].nbytes)}
    for name, format, group, activations in (
        ("int8", "int8", 0, "float"),  # the default, as for int4, whose activations no kernel rounds
        (ROUNDED, "int8", 0, "int8"),
        ("int4-g128", "int4", 128, "int8"),
        ("int4-g32", "int4", 32, "int8"),
    ):
        if group <= k:
            layers = packed_layers(n, k, format, group, activations)
            size = layers[0].data.nbytes + layers[0].scales.nbytes
            found[name] = layers, lambda x, layer: layer(x), size
    if DEVICE != "cpu":
        for group in (128, 32):
            weights = torch_int4(n, k, group)
            size = weights[0][0].nbytes + weights[0][1].nbytes
            found[f"torch-int4-g{group}"] = weights, _torch_int4_product(group), size
    return found


def rows_of(name: str) -> list[int]:
    """The rows of x that a kind is measured with."""
    return [rows for rows in ROWS if name != ROUNDED or rows >= FROM_ROWS]


def _torch_int4_product(group: int) -> Any:
    return lambda x, w: torch.ops.aten._weight_int4pack_mm(x, w[0], group, w[1])


@torch.inference_mode()
def table(budget: float = 40) -> None:
    """Microseconds and GB/s of its own weight bytes for each matrix, format and number of rows."""
    for n, k in SHAPES[:2]:  # compile
        for name, (weights, run, _) in kinds_of(n, k).items():
            for count in rows_of(name):
                try:
                    run(torch.randn(count, k, device=DEVICE, dtype=torch.bfloat16), weights[0])
                except Exception as error:
                    print(name, count, error, flush=True)
        tidy()

    @torch.inference_mode()
    def measure() -> dict[str, Any]:
        begin, found = time.perf_counter(), []
        for n, k in SHAPES:
            for name, (weights, run, size) in kinds_of(n, k).items():
                for count in rows_of(name):
                    if time.perf_counter() - begin > budget:
                        continue
                    x = torch.randn(count, k, device=DEVICE, dtype=torch.bfloat16)

                    def call(run: Any = run, x: Any = x, weights: Any = weights) -> None:
                        for weight in weights:
                            run(x, weight)

                    try:
                        ms = graph_ms(call, span=12) / len(weights)
                        found.append([n, k, name, count, round(1e3 * ms, 2), round(size / ms / 1e6, 1)])
                    except Exception as error:
                        found.append([n, k, name, count, f"{type(error).__name__}: {error}"[:120], None])
            tidy()
        return {"columns": "n, k, format, rows, us, GB/s", "rows": found}

    serve({"measure": measure})

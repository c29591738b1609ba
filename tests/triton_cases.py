"""Checks of the Triton kernels that run in the interpreter on a CPU and, unchanged, on a GPU.

Triton decides when it is imported, once for a process, whether its functions are interpreted, and other tests import it
too (torch.compile does). So the interpreted tests are files of their own, which pytest does not collect, and
`run_interpreted` runs one of them in a process of its own, whatever the order of tests and the number of workers.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.nn.functional as F

from hasten.ops.attention import attention
from hasten.ops.linear import BFLOAT16, NormArguments, PackedLinear, fused_linear
from hasten.ops.linear.fused import activated, normed
from hasten.ops.linear.layouts import CHUNKS, Operands
from linear_cases import make_weight, rms

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")


def raised_by_triton(error: Exception) -> NoReturn:
    """Raise an error as Triton's launcher would, from a module of Triton's."""
    own: dict[str, Any] = {"__name__": "triton.backends.nvidia.driver"}
    exec("def launch(error):\n    raise error", own)
    own["launch"](error)
    raise AssertionError


def no_room() -> RuntimeError:
    """What Triton raises where the GPU has no room for all programs of a cooperative launch at once."""
    return RuntimeError("Triton Error [CUDA]: too many blocks in cooperative launch")


def run_interpreted(file: str) -> None:
    """Run the tests of a file under Triton's interpreter; fail with their output."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton has no wheel for this platform")
    path = Path(__file__).parent / file
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:xdist", str(path)],
        env=os.environ | {"TRITON_INTERPRET": "1", "HASTEN_ISA": "none"},
        cwd=path.parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def compile_for_hopper(kernel, types, constants, cache, **options):
    """What the real compiler makes of a kernel; types: pointers and integers by name, left-out arguments are None."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    values = {(i,): constants.get(name) for i, name in enumerate(names) if name not in types}
    # Torch's allocations are aligned, and strides that 16 divides are known to the compiler when called.
    divisible = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name][0] == "*" or name.endswith(("_size", "_stride"))
    }
    source = ASTSource(kernel, signature, values, divisible)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(cache))
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4} | options)


def plain_linear(x, weight, bias):
    """PyTorch's product in x's dtype. On a GPU its float32 sums are rounded once, as a CPU's are: cuBLAS may round
    parts of them."""
    if x.device.type == "cpu" or x.dtype == torch.float64:
        return F.linear(x, weight, bias)
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


def check_linear(weight, *, rows, dtype, with_bias, device):
    """The Triton product errs at most twice what plain PyTorch errs, against float64; the weight comes back exactly."""
    n, k = weight.shape
    generator = torch.Generator().manual_seed(n * 1000 + k)
    x = torch.randn(rows, k, generator=generator).to(dtype).to(device)
    bias = torch.randn(n, generator=generator).to(device) if with_bias else None
    weight = weight.map(lambda tensor: tensor.to(device))
    layer = PackedLinear.from_weight(weight, bias, dtype=dtype, activations="float", kernel="triton")
    kept = layer.to_weight()
    assert torch.equal(kept.values, weight.values)
    assert torch.equal(kept.scales, weight.scales)
    assert weight.zeros is None or torch.equal(kept.zeros, weight.zeros)
    exact = F.linear(x.double(), weight.dequantize().double(), None if bias is None else bias.double())
    plain = plain_linear(x, weight.dequantize(dtype), None if bias is None else bias.to(dtype))
    y = layer(x)
    assert y.dtype == dtype
    assert y.shape == (rows, n)
    # One unit in the last place of the largest output: with a handful of outputs PyTorch may err by chance not at all.
    unit = torch.finfo(dtype).eps * exact.abs().max().item() * max(0.0, 1 - y.numel() / 200)
    assert rms(y - exact) <= 2 * rms(plain - exact) + unit


FUSED_CASES = (
    {"norm": "rms", "activation": "silu", "gated": True, "dtype": torch.float16},
    {"norm": "rms", "dtype": torch.bfloat16},
    {"norm": "layer", "activation": "gelu_tanh", "dtype": torch.bfloat16, "with_bias": True},
    {"residual": True, "dtype": torch.bfloat16, "with_bias": True},
    {"activation": "gelu", "gated": True, "dtype": torch.bfloat16, "with_bias": True},
    {"activation": "relu", "residual": True, "dtype": torch.float16},
    {"residual": True, "in_place": True, "dtype": torch.bfloat16},
)


def check_fused(
    format,
    *,
    rows,
    dtype,
    device,
    n=128,
    k=328,
    norm=None,
    activation=None,
    gated=False,
    residual=False,
    with_bias=False,
    norm_dtype=None,
    in_place=False,
):
    """`fused_linear` errs at most twice what PyTorch's operations in 16 bits err, against float64."""
    generator = torch.Generator().manual_seed(n + k + rows)
    weight = make_weight(n, k, format=format[0], group_size=format[1], symmetric=format[2])
    plain = isinstance(weight, torch.Tensor)
    weight = weight.to(device, dtype) if plain else weight.map(lambda tensor: tensor.to(device))
    if plain:
        operands = Operands(weight, None, None, None, None, n, BFLOAT16)
    else:
        operands = Operands(*CHUNKS.pack(weight), None, n, weight.format, planes=2)
    full = weight.float() if plain else weight.dequantize()
    size = (full.square().mean() * k).sqrt().item()  # of an output: float16 has to hold it
    bias = torch.randn(n, generator=generator).to(device) if with_bias else None
    x = torch.randn(rows, k, generator=generator).to(device) / size
    x = x if norm else x.to(dtype)
    arguments = None
    if norm:
        scale = ((torch.rand(k, generator=generator) + 0.5) / size).to(device, norm_dtype or dtype)
        shift = torch.randn(k, generator=generator).to(scale) / size if norm == "layer" else None
        arguments = NormArguments(scale, shift, 1e-5, 0.0 if norm == "layer" else 0.25 / size, norm == "layer")
    outputs = n // 2 if gated else n
    added = torch.randn(rows, outputs, generator=generator).to(device) if residual else None

    def pytorch(wide, narrow):
        """In `wide`, rounded to `narrow` wherever PyTorch's layers of that dtype would round."""
        y = x.to(wide)
        if arguments is not None:
            own = (None if t is None else t.to(wide) for t in (arguments.weight, arguments.bias))
            y = normed(y, arguments._replace(**dict(zip(("weight", "bias"), own, strict=True)))).to(narrow)
        y = plain_linear(y.to(narrow), full.to(narrow), None if bias is None else bias.to(narrow))
        if gated:
            gate, up = y.unflatten(-1, (-1, 2, 32)).unbind(-2)
            y = (activated(gate, activation) * up).flatten(-2)
        else:
            y = activated(y, activation)
        return y if added is None else added.to(wide) + y

    exact, usual = pytorch(torch.float64, torch.float64), pytorch(torch.float32, dtype)

    y = fused_linear(
        x,
        operands._replace(bias=bias),
        norm=arguments,
        activation=activation,
        gated=gated,
        residual=None if added is None else added.clone(),
        out_dtype=dtype,
        in_place=in_place,
    )
    assert y.dtype == (torch.float32 if residual else dtype)
    assert tuple(y.shape) == (rows, outputs)
    unit = torch.finfo(dtype).eps * exact.abs().max().item() * max(0.0, 1 - y.numel() / 200)
    assert rms(y - exact) <= 2 * rms(usual - exact) + unit


def check_attention(*, heads, kv_heads, head_dim, keys, window, softcap, dtype, device, batch=2):
    """Decode attention with a mask errs at most twice what PyTorch's own errs."""
    generator = torch.Generator().manual_seed(keys)
    q = torch.randn(batch, 1, heads, head_dim, generator=generator).to(dtype)
    k, v = torch.randn(2, batch, keys, kv_heads, head_dim, generator=generator).to(dtype).unbind()
    lengths = [keys - (3 * b) % keys for b in range(batch)]
    exact, plain = [], []
    for b, n in enumerate(lengths):  # each sequence alone, by its own length
        one = [t[b : b + 1, :size] for t, size in ((q, 1), (k, n), (v, n))]
        options = {"window": window, "softcap": softcap}
        exact.append(attention(*(t.double() for t in one), **options, kernel="reference"))
        plain.append(attention(*one, **options, kernel="sdpa" if softcap is None else "reference"))
    exact, plain = torch.cat(exact), torch.cat(plain)
    places, ends = torch.arange(keys), torch.tensor(lengths)[:, None]
    mask = places < ends if window is None else (places < ends) & (places >= ends - window)  # (B, S)
    bound = 2 * rms(plain - exact)
    y = attention(
        q.to(device), k.to(device), v.to(device), mask=mask[:, None].to(device), softcap=softcap, kernel="triton"
    )
    assert rms(y.cpu() - exact) <= bound

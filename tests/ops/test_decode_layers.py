"""A decode step's blocks in one launch: values on the CPU, machine code of a Hopper GPU, and the step on one."""

import copy
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from gluon_on_torch import launch_blocks
from hasten.ops.attention.view import AttentionMetadata, KVView
from triton_cases import needs_gpu

pytest.importorskip("triton", reason="Triton has no wheel for this platform")
if sys.platform != "linux":
    pytest.skip("Triton's compiler is for Linux", allow_module_level=True)
from hasten.ops.block import decode


@pytest.fixture(scope="module")
def kernels():
    return pytest.importorskip("hasten.ops.block.decode_kernels", reason="no Gluon for Hopper GPUs")


def turn(x, cos, sin):
    half = len(cos)
    a, b = x[..., :half], x[..., half : 2 * half]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]), -1)


def reference(x, layers, k_rows, v_rows, cos, sin, sizes, scale, eps, offset):
    """The blocks in float32. layers: matrices and small ones as DecodeLayers has them; k_rows, v_rows: (S, Hkv, D)."""

    def normed(x, weight):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight.float() + offset)

    new, heads, kv_heads = [], sizes.heads, sizes.kv_heads
    for (qkv, output, inner, down, first, second, bias, *of_heads), k, v in zip(layers, k_rows, v_rows, strict=True):
        y = qkv.float() @ normed(x, first)
        if bias is not None:
            y += bias.float()
        q, own_k, own_v = y.view(-1, sizes.head_dim).split([heads, kv_heads, kv_heads])
        if sizes.normed:
            q, own_k = normed(q, of_heads[0]), normed(own_k, of_heads[1])
        q, own_k = turn(q, cos, sin), turn(own_k, cos, sin)
        new.append((own_k, own_v))
        k, v = (
            torch.cat((t.float(), own[None])).repeat_interleave(heads // kv_heads, 1)
            for t, own in ((k, own_k), (v, own_v))
        )
        seen = torch.einsum("hd,shd->hs", q, k).mul(scale).softmax(-1)
        x = x + output.float() @ torch.einsum("hs,shd->hd", seen, v).flatten()
        y = (inner.float() @ normed(x, second)).view(-1, 2, 32)
        x = x + down.float() @ (F.silu(y[:, 0]) * y[:, 1]).flatten()
    return x, new


def random(*shape, dtype):
    return (torch.randn(shape) * (shape[-1] ** -0.5 if len(shape) > 1 else 1)).to(dtype)


@pytest.mark.parametrize(
    ("programs", "length", "heads", "kv_heads", "size", "hidden", "inner", "rows", "features", "stages"),
    [
        (3, 21, 1, 1, 64, 64, 96, 16, 64, 4),
        (5, 40, 4, 2, 16, 80, 64, 8, 64, 3),
        (4, 1, 2, 1, 64, 136, 160, 16, 128, 5),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "paged", "more"),
    [(torch.float16, False, True), (torch.bfloat16, True, False), (torch.float16, True, True)],
)
def test_values(
    kernels, monkeypatch, programs, length, heads, kv_heads, size, hidden, inner, rows, features, stages, dtype, paged,
    more,
):  # fmt: skip
    """more: a bias of q, k and v, and norms of the heads of q and k."""
    torch.manual_seed(programs)
    monkeypatch.setattr(decode.DecodeLayers, "launch", launch_blocks)
    count, slots, first = 3, 64, 8
    widths = {"hidden": hidden, "heads": heads, "kv_heads": kv_heads, "head_dim": size, "inner": inner}
    sizes = decode.Sizes(layers=count, turned=size // 2, activation=1, biased=more, normed=more, **widths)
    cut = decode.Tiling(
        programs=programs, rows=rows, words=features, across=2, staged=256, stages=stages,
        splits=programs // heads, keys=8,
    )  # fmt: skip
    shapes = (sizes.qkv, hidden), (hidden, heads * size), (2 * inner, hidden), (hidden, inner)
    weights = [[random(*shape, dtype=dtype) for shape in shapes] for _ in range(count)]
    lengths = (hidden, hidden, sizes.qkv, size, size) if more else (hidden, hidden)
    small = [[*(random(n, dtype=dtype) for n in lengths), *[None] * (5 - len(lengths))] for _ in range(count)]
    caches = [[random(kv_heads, slots, size, dtype=dtype).transpose(0, 1) for _ in range(2)] for _ in range(count)]
    order, pages = torch.arange(first, first + length), None
    if paged:
        pages = torch.randperm(slots // 4)[: -(-length // 4)]
        order = (pages[:, None] * 4 + torch.arange(4)).flatten()[:length]
    metadata = AttentionMetadata(
        order[-1:].clone(),
        torch.tensor([0, 1]),
        torch.tensor([length]),
        None if paged else torch.tensor([first]),
        None if pages is None else pages[None],
        4 if paged else 0,
    )
    old = [[cache[order[:-1]].clone() for cache in both] for both in caches]
    cos, sin = torch.randn(2, size // 4).unbind()
    x, numbers = torch.randn(hidden), {"scale": size**-0.5, "eps": 1e-5, "offset": 0.5}
    layers = [[*own, *others] for own, others in zip(weights, small, strict=True)]
    expected, new = reference(x, layers, *zip(*old, strict=True), cos, sin, sizes, **numbers)
    layers = decode.DecodeLayers(sizes, weights, small, cut=cut, **numbers)
    y = x.clone()
    assert layers(y, cos, sin, [KVView(*both, metadata) for both in caches])
    unit = 2**-11 if dtype == torch.float16 else 2**-8
    assert (y - expected).norm() <= 4 * unit * expected.norm()
    assert layers.counter.item() == 0
    for cache, own in zip(caches, new, strict=True):
        for held, wanted in zip(cache, own, strict=True):
            assert (held[order[-1]].float() - wanted).norm() <= 4 * unit * wanted.norm()


# hidden, inner, heads, and their size
SHAPES = [(4096, 11_008, 32, 32, 128), (2048, 5632, 32, 4, 64), (5120, 27_648, 40, 8, 128)]


def sizes_of(shape):
    hidden, inner, heads, kv_heads, size = shape
    widths = {"hidden": hidden, "inner": inner, "heads": heads, "kv_heads": kv_heads, "head_dim": size, "turned": size}
    return decode.Sizes(layers=32, activation=1, **widths)


@pytest.mark.parametrize(
    ("shape", "rows", "stages"),
    [
        (SHAPES[0], 16, 5),
        (SHAPES[1], 8, 10),  # so that all programs have work
        (SHAPES[2], 8, 6),  # Qwen2.5-32B: so that tiles fit beside x
        ((8192, 28_672, 64, 8, 128), 8, 6),  # Llama 3.1 70B
    ],
)
def test_tiles_are_as_large_as_sizes_allow(shape, rows, stages):
    cut = decode.cut_for(sizes_of(shape), 132)
    assert (cut.programs, cut.rows, cut.stages) == (132, rows, stages)
    held = -(-max(shape[0], shape[1]) // 2048) * 2048 * 4 + stages * rows * cut.words * 4
    assert held <= decode.SHARED - decode.SPARE


def test_sizes_that_are_not_served_say_why():
    assert decode.cut_for(sizes_of((16_384, 53_248, 128, 8, 128)), 132) == (
        "its kernel has no shared memory for tiles of weights beside 53,248 features"
    )
    assert decode.cut_for(sizes_of((256, 1024, 4, 4, 64)), 132) == (
        "its kernel has work for 32 of 132 multiprocessors, with 4 heads"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "page"), list(zip(SHAPES, (0, 16, 16), strict=True)))
def test_machine_code(kernels, monkeypatch, tmp_path, shape, page):
    """Tiles are copied 16 bytes at a time, nothing is spilled, and a program's shared memory is enough."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sizes = sizes_of(shape)
    cut = decode.cut_for(sizes, 132)
    kernel, known = kernels.decode_layers, decode.constants(sizes, cut) | {"PAGE": page}
    pointers = {"w": "i32", "half": "bf16", "qkv": "bf16", "inner": "bf16", "parts": "bf16", "counter": "i32"}
    pointers |= dict.fromkeys(("table", "slot_mapping", "lengths", "pages" if page else "first"), "i64")
    pointers |= dict.fromkeys(("x", "peaks", "sums", "cos", "sin"), "fp32")
    kinds = {name: f"*{kind}" for name, kind in pointers.items()} | dict.fromkeys(("eps", "offset", "factor"), "fp32")
    kinds |= dict.fromkeys(("layers", "slots", "blocks", "row_stride", "head_stride"), "i32")
    names = kernel.arg_names
    signature = {name: kinds.get(name, "constexpr") for name in names}
    values = {(i,): known.get(name) for i, name in enumerate(names) if name not in kinds}
    even = ("row_stride", "head_stride")
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in pointers or name in even}
    source = GluonASTSource(kernel, signature, values, aligned)
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": cut.warps})
    assert result.metadata.shared <= decode.SHARED
    assert result.asm["ptx"].count("cp.async.cg.shared.global") == len(
        re.findall(r"cp\.async\.\w+\.shared", result.asm["ptx"])
    )
    ptx, cubin = tmp_path / "kernel.ptx", tmp_path / "kernel.cubin"
    ptx.write_text(result.asm["ptx"])
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    command = [ptxas, "-v", "--gpu-name", "sm_90a", ptx, "-o", cubin]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert " 0 bytes spill stores" in said


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("size", [(2048, 1024, 32, 4, 64), (1056, 1088, 8, 8, 128)])
def test_the_step_on_a_gpu(monkeypatch, size):
    """What the blocks do one by one, the same bits each time, captured."""
    import hasten
    from hasten.engine.given_texts import GivenTexts
    from hasten.model import fused_cuda, fused_decode
    from tiny_model import tiny_llama

    hidden, inner, heads, kv_heads, head_dim = size
    widths = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    exact = tiny_llama(hidden_size=hidden, intermediate_size=inner, initializer_range=0.03, **widths)
    model = copy.deepcopy(exact).to("cuda", torch.bfloat16)
    model.bind()
    model = hasten.fuse(model)
    prompt, tokens, found = [[i * 7 % 200 for i in range(300)]], (3, 60, 7), {}
    for at_once in (False, True):
        monkeypatch.setattr(fused_cuda.CudaStack, "one_launch", at_once)
        decoder = GivenTexts(model, batch=1, capacity=320)
        runs = []
        for _ in range(22):
            decoder.truncate(0)
            decoder.prefill(prompt)
            runs.append(torch.stack([decoder.decode(torch.tensor([token], device="cuda")).clone() for token in tokens]))
        runs = runs[2:]  # before, steps were captured
        found[at_once] = runs[0].double()
        assert all(torch.equal(run, runs[0]) for run in runs)
    served = fused_decode.multiprocessors_for(model.device) > 0
    assert (model.stack._decode is not None) == served
    assert (found[True] - found[False]).norm() <= 0.02 * found[False].norm()

"""FlashAttention's Triton kernels through the real compiler to machine code of a Hopper GPU; that needs no GPU."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton has no wheel for this platform")
if sys.platform != "linux":
    pytest.skip("Triton's compiler is for Linux", allow_module_level=True)

from hasten.ops.attention.flash_tiles import BACKWARD_KEYS, BACKWARD_KEYS_CAPPED, BACKWARD_QUERIES, FORWARD, side

SHARED = 227 << 10  # bytes that a program of a Hopper GPU can have
FLOATS = ("lse", "d_lse", "log2_lse", "delta")
KERNELS = {"forward": FORWARD, "backward_queries": BACKWARD_QUERIES, "backward_keys": BACKWARD_KEYS}


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """compiled(kernel's name, head size, options) -> what came out, and its machine code as text."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hasten.ops.attention import flash_triton_backward, flash_triton_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def build(name, head_dim, *, dtype="bf16", causal=True, window=False, softcap=False, group=4, **more):
        packed, padded = (more.get(option, False) for option in ("packed", "padded"))
        kernel = getattr(flash_triton_kernels if name == "forward" else flash_triton_backward, name)
        table = BACKWARD_KEYS_CAPPED if softcap and name == "backward_keys" else KERNELS[name]
        tiles = next(tiles for largest, tiles in table.items() if head_dim <= largest)
        known = flash_triton_kernels.Constants(
            scale=0.09,
            factor=0.13,
            inner=0.01 if softcap else 0.0,
            causal=causal,
            has_window=window,
            padded=padded,
            group=group,
            d=head_dim,
            d_side=side(head_dim),
            block_q=tiles.queries,
            block_k=tiles.keys,
        )
        constants = {"C": known} | ({} if packed else {"plan": None, "d_lse": None})
        constants |= {} if padded else {"bounds": None}
        signature, values, aligned = {}, {}, {}
        for i, argument in enumerate(kernel.arg_names):
            if argument in constants:
                signature[argument], values[i,] = "constexpr", constants[argument]
            elif argument.endswith("strides"):  # as those of torch's tensors with such a head size: 16 divides them
                signature[argument] = ("i32",) * 3
                aligned |= {(i, j): [["tt.divisibility", 16]] for j in range(3)}
            elif argument in ("queries", "keys", "window"):
                signature[argument] = "i32"
            else:
                kind = "i32" if argument in ("plan", "bounds") else "fp32" if argument in FLOATS else dtype
                signature[argument] = f"*{kind}"
                aligned[i,] = [["tt.divisibility", 16]]
        options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
        source = ASTSource(kernel, signature, values, aligned)
        result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        cubin = tmp_path / "kernel.cubin"
        cubin.write_bytes(result.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
        return result, subprocess.run([tool, "--no-dataflow", cubin], capture_output=True, text=True, check=True).stdout

    return build


def loops(assembly):
    """The bodies of the innermost loops that multiply matrices, in their order: masked tiles, whole ones."""
    lines = assembly.splitlines()
    labels = {line.strip()[:-1]: i for i, line in enumerate(lines) if line.startswith(".L_") and line.endswith(":")}
    spans = []
    for i, line in enumerate(lines):
        target = re.search(r"BRA.*`\((\.L_\w+)\)", line)
        if target and labels.get(target[1], i) < i and any("HGMMA" in x for x in lines[labels[target[1]] : i]):
            spans.append((labels[target[1]], i))
    inner = [(a, b) for a, b in spans if not any((a, b) != (c, d) and a <= c and d <= b for c, d in spans)]
    return [lines[a:b] for a, b in sorted(inner)]


def spilled(lines):
    return sum(bool(re.search(r"\b(LDL|STL)\b", line)) for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", KERNELS)
def test_the_main_loop(compiled, name, head_dim):
    """Tensor cores as Hopper has them, 16-byte asynchronous copies, nothing spilled where the time is spent."""
    result, assembly = compiled(name, head_dim)
    assert result.metadata.shared <= SHARED
    assert "wgmma.mma_async" in result.asm["ptx"]
    assert "mma.sync" not in result.asm["ptx"]  # the tensor cores of earlier GPUs
    assert "cp.async.cg.shared.global" in result.asm["ptx"]
    masked, whole = loops(assembly)
    assert spilled(whole) == 0
    assert spilled(masked) <= 4  # the diagonal's tiles, a few of many: what is spilled is a pointer or two
    assert len(whole) < len(masked)  # no masks there


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"head_dim": 128, "dtype": "fp16", "window": True, "group": 1},
        {"head_dim": 128, "causal": False, "packed": True},
        {"head_dim": 96, "softcap": True, "padded": True},
        {"head_dim": 256, "softcap": True, "window": True},
    ],
)
@pytest.mark.parametrize("name", KERNELS)
def test_every_option(compiled, name, options):
    result, assembly = compiled(name, **options)
    assert result.metadata.shared <= SHARED
    assert "wgmma.mma_async" in result.asm["ptx"]
    assert max(map(spilled, loops(assembly))) <= 4


HOPPERS = ("forward", "backward_queries", "backward_keys")


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", HOPPERS)
def test_the_kernels_for_hopper(monkeypatch, tmp_path, name, head_dim):
    """Every part has its registers, and the products of a tile are on their way while other work is done."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.experimental.gluon.language import NVMMASharedLayout

    from hasten.ops.attention import flash_hopper, flash_hopper_backward, flash_hopper_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(flash_hopper_kernels if name == "forward" else flash_hopper_backward, name)
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    tile, stages, *how = getattr(flash_hopper, name.upper())[head_dim]
    walked = ("q_rows", "d_out_rows") if name == "backward_keys" else ("k_rows", "v_rows")
    known = {"H": 16, "GROUP": 4, "D": head_dim, "STAGES": stages, "CAUSAL": True}
    known |= {"BLOCK_Q": tile, "BLOCK_K": tile} | {option: how[0] for option in ("AHEAD", "OVERLAP") if how}
    kinds = {"lse": "*fp32", "log2_lse": "*fp32", "delta": "*fp32", "queries": "i32", "keys": "i32"}
    kinds |= {"factor": "fp32", "scale": "fp32"}
    for argument in kernel.arg_names:
        if argument.endswith("_rows"):
            kinds[argument] = f"tensordesc<bf16[{tile if argument in walked else 64}, {head_dim}],{layout!r}>"
    signature = {argument: kinds.get(argument, "constexpr") for argument in kernel.arg_names}
    values = {(i,): known[argument] for i, argument in enumerate(kernel.arg_names) if argument not in kinds}
    source = GluonASTSource(kernel, signature, values, {})
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=flash_hopper.LAUNCH)
    assert result.metadata.shared <= SHARED
    ptx = tmp_path / "kernel.ptx"
    ptx.write_text(result.asm["ptx"])
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    command = [tools / "ptxas", "-v", "--gpu-name", "sm_90a", ptx, "-o", tmp_path / "kernel.cubin"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled_bytes = int(re.search(r"(\d+) bytes spill stores", said)[1])
    assert spilled_bytes <= (64 if (name, head_dim) == ("backward_keys", 128) else 0)
    assert "Performance" not in said  # such as products that wait for each other

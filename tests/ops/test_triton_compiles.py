"""The Triton kernels go through the real compiler to machine code of a Hopper GPU; that needs no GPU.

The interpreter takes programs that the compiler refuses, and says nothing about how memory is read.
"""

import re
import sys

import pytest

pytestmark = pytest.mark.slow  # dozens of kernels through a compiler

pytest.importorskip("triton", reason="Triton has no wheel for this platform")
if sys.platform != "linux":
    pytest.skip("Triton's compiler is for Linux", allow_module_level=True)


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """compiled(kernel, pointers and integers by name, constants) -> what came out; left-out arguments are None."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def build(kernel, types, constants, multiples=(), warps=4):
        names = kernel.arg_names
        signature = {name: types.get(name, "constexpr") for name in names}
        values = {(i,): constants.get(name) for i, name in enumerate(names) if name not in types}
        # Torch's allocations are aligned, and sizes and strides that 16 divides are known to the compiler when called.
        aligned = [["tt.divisibility", 16]]
        divisible = {
            (i,): aligned
            for i, name in enumerate(names)
            if signature[name][0] == "*" or name.endswith(("_size", "_stride")) or name in multiples
        }
        source = ASTSource(kernel, signature, values, divisible)
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})

    return build


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("one_row", [True, False])
@pytest.mark.parametrize(("bits", "block_j", "zeros"), [(8, 128, False), (8, 32, True), (4, 16, True), (4, 64, False)])
def test_product(compiled, dtype, one_row, bits, block_j, zeros):
    from hasten.ops.linear.triton_kernels import product
    from hasten.ops.linear.triton_linear import choose

    grouped = bits == 4 or zeros
    config = choose(1 if one_row else 16, 4096, block_j if grouped else 0, bits)
    assert config.block_j == (block_j if grouped or not one_row else 64)
    types = {
        "x": f"*{dtype}",
        "data": "*i8" if bits == 8 else "*u8",
        "scales": "*fp16" if grouped else "*fp32",
        "out": "*fp32",
        **dict.fromkeys(("n_size", "k_size", "pieces", "steps_per_split"), "i32"),
        **({} if one_row else {"rows": "i32"}),
        **({"zeros": "*i8" if bits == 8 else "*u8"} if zeros else {}),
    }
    constants = {
        "BITS": bits,
        "GROUPED": grouped,
        "ONE_ROW": one_row,
        "M": 1 if one_row else 16,
        "rows": 1,
        "BLOCK_N": config.block_n,
        "BLOCK_J": config.block_j,
        "STAGES": config.stages,
        "WIDE": False,
    }
    code = compiled(product, types, constants).asm["ptx"]
    # The weights come 16 bytes a thread, some steps ahead; the tensor cores multiply several rows.
    if (block_j, one_row) != (32, False):  # there Triton 3.7 takes 8 bytes, whatever the tile
        assert "cp.async.cg.shared.global" in code or "ld.global.v4.b32" in code
    assert ("wgmma" in code or "mma.sync" in code) != one_row
    # Nothing is kept in local memory: the tile fits into the registers.
    assert not re.search(r"(ld|st)\.local", code)


@pytest.mark.parametrize("bias", [True, False])
def test_adding_the_parts(compiled, bias):
    from hasten.ops.linear.triton_kernels import add_splits

    types = {"parts": "*fp32", "out": "*bf16", "size": "i32", "n_size": "i32"} | ({"bias": "*fp32"} if bias else {})
    assert compiled(add_splits, types, {"SPLITS": 4, "BLOCK": 1024}).asm["cubin"]


@pytest.mark.parametrize(("bits", "block_j", "zeros"), [(8, 64, False), (8, 64, True), (4, 16, False)])
def test_dequantizing(compiled, bits, block_j, zeros):
    from hasten.ops.linear.triton_kernels import dequantize

    types = {"data": "*i8" if bits == 8 else "*u8", "scales": "*fp16", "out": "*bf16", "n_size": "i32", "k_size": "i32"}
    types |= {"zeros": "*i8"} if zeros else {}
    constants = {"BITS": bits, "GROUPED": bits == 4 or zeros, "BLOCK_N": 32, "BLOCK_J": block_j}
    assert compiled(dequantize, types, constants).asm["cubin"]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("source", ["mask", "view", "table", "int8 table", "all keys"])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 128), (8, 64), (8, 256)])
def test_decode_attention(compiled, dtype, source, group, head_dim):
    from hasten.ops.attention.triton_kernels import attend

    integers = ("keys", "splits", "blocks", "block_size", "sequence_stride", "row_stride", "head_stride", "mask_stride")
    types = dict.fromkeys(("q", "k", "v"), f"*{dtype}") | dict.fromkeys(("parts", "peaks", "sums"), "*fp32")
    types |= dict.fromkeys(integers, "i32") | {"scale": "fp32"}
    int8 = source == "int8 table"
    if int8:
        types |= {"k": "*i8", "v": "*i8", "k_scales": "*fp32", "v_scales": "*fp32"}
    given = {"mask": ["mask"], "view": ["first", "lengths"], "all keys": []}.get(source, ["lengths", "table"])
    types |= {name: "*i1" if name == "mask" else "*i64" for name in given}
    constants = {
        "GROUP": group,
        "GROUP_SIDE": 16,
        "D": head_dim,
        "D_SIDE": head_dim,
        "KEYS": 128,
        "BLOCK": 64 if head_dim <= 128 else 32,
        "WINDOW": 100 if source == "view" else 0,
        "SOFTCAP": 30.0 if source == "all keys" else 0.0,
    }
    result = compiled(attend, types, constants)
    assert "mma" in result.asm["ptx"]
    if not int8:  # rows of D + 4 bytes begin anywhere
        assert re.search(r"cp\.async\.cg\.shared\.global|ld\.global\S*\.v4", result.asm["ptx"])
    assert result.metadata.shared <= 227 << 10  # bytes that a program of a Hopper GPU can have


def test_combining_the_parts(compiled):
    from hasten.ops.attention.triton_kernels import combine

    types = {"parts": "*fp32", "peaks": "*fp32", "sums": "*fp32", "out": "*bf16", "splits": "i32"}
    assert compiled(combine, types, {"D": 96, "D_SIDE": 128, "SPLITS_SIDE": 8}).asm["cubin"]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("need", [True, False])
def test_loss(compiled, bias, need):
    from hasten.ops.loss.triton_loss import BLOCK, kernel

    types = {"logits": "*bf16", "targets": "*i64", "losses": "*fp32", "vocabulary": "i32", "row_stride": "i32"}
    types |= {"bias": "*fp32"} if bias else {}
    code = compiled(kernel, types, {"IGNORED": -100, "NEED": need, "BLOCK": BLOCK}).asm["ptx"]
    assert "ld.global.v4" in code, "16 bytes a thread, wherever the vocabulary ends"
    assert ("st.global.v4" in code) == need
    assert not re.search(r"(ld|st)\.local", code)


def check_streams(code):
    """16 bytes a thread in and out, and nothing in local memory."""
    assert "ld.global.v4" in code
    assert "st.global.v" in code
    assert not re.search(r"(ld|st)\.local", code)


def test_add_norm(compiled):
    from hasten.ops.residual.triton_add_norm import backward_kernel, forward_kernel

    wide = dict.fromkeys(("stream", "branch_bias", "weight", "bias", "total", "means", "scales"), "*fp32")
    types = wide | {"branch": "*bf16", "normed": "*bf16", "width": "i32", "eps": "fp32", "offset": "fp32"}
    check_streams(compiled(forward_kernel, types, {"CENTRED": True, "BLOCK": 1024}, {"width"}).asm["ptx"])
    wide = dict.fromkeys(("d_total", "total", "means", "scales", "weight", "d_stream", "parts"), "*fp32")
    types = wide | {"d_normed": "*bf16", "d_branch": "*bf16", "rows": "i32", "width": "i32", "offset": "fp32"}
    check_streams(compiled(backward_kernel, types, {"CENTRED": True, "BLOCK": 1024}, {"width"}).asm["ptx"])


def test_bias_gelu(compiled):
    from hasten.ops.activation.triton_gelu import backward_kernel, forward_kernel

    tile = {"ROWS": 4, "COLUMNS": 512}
    types = {"z": "*bf16", "bias": "*fp32", "out": "*bf16", "rows": "i32", "width": "i32"}
    check_streams(compiled(forward_kernel, types, tile, {"width"}).asm["ptx"])
    types = {
        "d_out": "*bf16",
        "z": "*bf16",
        "bias": "*fp32",
        "dz": "*bf16",
        "parts": "*fp32",
        "rows": "i32",
        "width": "i32",
    }
    check_streams(compiled(backward_kernel, types, tile, {"width"}).asm["ptx"])


def test_rows_to_fp8(compiled):
    from hasten.ops.fp8.triton_rows import gelu_backward_kernel, gelu_kernel, rows_kernel

    narrow, sizes = {"narrow": "*fp8e4nv", "scales": "*fp32", "width": "i32"}, {"LARGEST": 448.0, "BLOCK": 4096}
    for kernel, types in (
        (rows_kernel, {"x": "*bf16"}),
        (gelu_kernel, {"z": "*bf16", "bias": "*fp32", "out": "*bf16"}),
        (
            gelu_backward_kernel,
            {"d_out": "*bf16", "z": "*bf16", "bias": "*fp32", "dz": "*bf16", "parts": "*fp32", "rows": "i32"},
        ),
    ):
        code = compiled(kernel, types | narrow, sizes, {"width"}, 8).asm["ptx"]
        check_streams(code)
        assert "e4m3x2" in code


def test_adamw(compiled):
    import triton.language as tl

    from hasten.training.triton_adamw import BLOCK, FIELDS, adamw_kernel, squares_kernel

    constants = {"DTYPE": tl.bfloat16, "FIELDS": FIELDS, "BLOCK": BLOCK}
    tables = {"table": "*i64", "blocks": "*i64"}
    numbers = dict.fromkeys(("beta1", "rest1", "beta2", "rest2", "eps", "clip"), "fp32") | {"groups": "i32"}
    types = tables | numbers | dict.fromkeys(("scalars", "decays", "norm"), "*fp32")
    check_streams(compiled(adamw_kernel, types, constants).asm["ptx"])
    assert "ld.global.v4" in compiled(squares_kernel, tables | {"parts": "*fp32"}, constants).asm["ptx"]

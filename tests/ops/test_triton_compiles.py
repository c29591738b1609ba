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

    def build(kernel, types, constants, options=None, *, multiples=()):
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
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4} | (options or {}))

    return build


def longest_loop(ptx):
    """Its text, from a label to the jump back to it."""
    lines = ptx.splitlines()
    labels = {found[1]: i for i, line in enumerate(lines) if (found := re.match(r"(\$\w+):", line))}
    jumps = [(i, labels[found[1]]) for i, line in enumerate(lines) if (found := re.search(r"bra\S*\s+(\$\w+);", line))]
    start, end = max(((to, i) for i, to in jumps if to < i), key=lambda loop: loop[1] - loop[0])
    return "\n".join(lines[start:end])


def stack_bytes(result):
    """Local memory of a thread: what does not fit into the registers, counted by the assembler."""
    import subprocess
    import tempfile
    from pathlib import Path

    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(result.asm["cubin"])
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", usage)[1])


FORMATS = [(8, 0, False), (8, 32, True), (4, 32, False), (4, 32, True), (4, 128, False), (16, 0, False)]
SIZES = ("outputs", "n_size", "k_size", "row_stride", "groups")


def operand_types(bits, group_size, zeros, out):
    """Pointers and sizes that the products of one and of several rows share."""
    types = dict.fromkeys(SIZES, "i32") | {"data": "*i32", "out": f"*{out}"}
    if bits == 16:
        del types["groups"]
        return types
    types["scales"] = "*fp16" if group_size else "*fp32"
    return types | ({"zeros": "*i8" if bits == 8 else "*u8"} if zeros else {})


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("beside", ["norm and gate", "residual", "layer norm"])
@pytest.mark.parametrize(("bits", "group_size", "zeros"), FORMATS)
def test_product_of_one_row(compiled, dtype, stages, beside, bits, group_size, zeros):
    from hasten.ops.linear.triton_choice import choose_one_row
    from hasten.ops.linear.triton_gemv import one_row_packed, one_row_plain

    config = choose_one_row(bits, group_size, 4096, 4096)
    types = operand_types(bits, group_size, zeros, "fp32" if beside == "residual" else dtype)
    types |= {"x": "*i32" if beside == "residual" else "*i64", "eps": "fp32", "offset": "fp32"}
    types |= {"residual": "*fp32"} if beside == "residual" else {"norm_weight": "*i32"}
    types |= {"norm_bias": "*i32"} if beside == "layer norm" else {}
    constants = {
        "XBITS": 16 if beside == "residual" else 32,
        "GBITS": 16,
        "HALF": dtype == "fp16",
        "NORM": {"norm and gate": 1, "layer norm": 2}.get(beside, 0),
        "ACTIVATION": int(beside == "norm and gate"),
        "GATED": beside == "norm and gate",
        "BLOCK": config.block,
        "T": config.threads,
        "EARLY": stages == 1,
    }
    if bits < 16:
        types["magic"] = "i32"
        constants |= {"BITS": bits, "GROUP": group_size, "STAGES": stages}
    else:
        stages = 1
    options = {"num_warps": config.threads // 32, "num_stages": stages}
    result = compiled(one_row_plain if bits == 16 else one_row_packed, types, constants, options)
    code = result.asm["ptx"]
    loop = longest_loop(code)
    if stages == 1:  # threads keep their own sums: nothing is exchanged before the last step is done
        assert len(re.findall(r"ld\.global\S*\.v4\.b32", loop)) >= config.block
        assert "bar.sync" not in loop
        assert "shared" not in loop
    else:
        assert len(re.findall(r"cp\.async\.cg\S* .*0x10", loop)) >= config.block
    check_start(code, constants["EARLY"], config.block)
    assert stack_bytes(result) == 0


def check_start(code, early, loads):
    """What may start early loads weights, 16 bytes a thread, then waits once, before all that reads or writes more."""
    assert code.count("griddepcontrol.wait") == code.count("griddepcontrol.launch_dependents") == int(early)
    if early:
        before, after = code.split("griddepcontrol.wait")
        assert len(re.findall(r"ld\.global\S*\.v4\.b32", before)) == loads
        assert "st.global" not in before
        assert after.index("griddepcontrol.launch_dependents") < after.index("st.global")


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("rows", [4, 16, 64])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("bits", "group_size", "zeros"), FORMATS[:-1])
def test_product_of_few_rows(compiled, dtype, rows, gated, bits, group_size, zeros):
    from hasten.ops.linear.triton_choice import choose_few_rows
    from hasten.ops.linear.triton_few import few_rows

    config = choose_few_rows(bits, group_size, rows, 4096, 4096, gated=gated)
    types = operand_types(bits, group_size, zeros, dtype)
    types["k_pairs"] = types.pop("k_size")
    types |= {"x": "*i32", "rows": "i32", "chunks": "i32", "bias": "*fp32"}
    constants = {
        "BITS": bits,
        "GROUP": group_size,
        "HALF": dtype == "fp16",
        "ACTIVATION": int(gated),
        "GATED": gated,
        "TILES": min(config.tiles, rows // 8 or 1),
        "AHEAD": config.ahead,
        "WARPS": config.warps,
        "SIDE": config.side,
        "WIDE": False,
        "EARLY": True,
    }
    options = {"num_warps": config.warps * config.side, "num_stages": 1, "maxnreg": config.registers}
    result = compiled(few_rows, types, constants, options, multiples={"k_pairs"})
    loop = longest_loop(result.asm["ptx"])
    pairs = 4 if bits == 4 else 2
    quarters = pairs * config.ahead * constants["TILES"]
    assert loop.count("mma.sync.aligned.m16n8k16") == 4 * quarters
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", loop)) == 4 * config.ahead + quarters
    assert "bar.sync" not in loop
    assert "shared" not in loop
    check_start(result.asm["ptx"], True, 4 * config.ahead)
    assert stack_bytes(result) <= 64
    # The assembly takes four registers of each thread, and a warp's threads in their order.
    layouts = dict(re.findall(r"(#\w+) = #ttg\.blocked<{(.*?)}>", result.asm["ttgir"]))
    used = re.findall(r"mma\.sync.*?-> tensor<\d+x4xf32, (#\w+)>", result.asm["ttgir"])
    assert used
    for name in used:
        assert "sizePerThread = [1, 4], threadsPerWarp = [32, 1]" in layouts[name]
        assert f"warpsPerCTA = [{config.warps * config.side}, 1], order = [1, 0]" in layouts[name]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("rows", [64, 256])
@pytest.mark.parametrize(("bits", "group_size", "zeros"), FORMATS[:-1])
def test_product_of_several_rows(compiled, dtype, rows, bits, group_size, zeros):
    from hasten.ops.linear.triton_choice import choose_several_rows
    from hasten.ops.linear.triton_gemm import several_rows

    config = choose_several_rows(bits, group_size, rows, 4096, 4096)
    types = operand_types(bits, group_size, zeros, dtype)
    types |= {"x": f"*{dtype}", "rows": "i32", "steps_per_split": "i32"}
    types |= {"parts": "*fp32", "counters": "*i32"} if config.splits > 1 else {}
    constants = {
        "BITS": bits,
        "GROUP": group_size,
        "HALF": dtype == "fp16",
        "ACTIVATION": 1,
        "GATED": True,
        "N": config.n,
        "M": config.m,
        "CHUNKS": config.chunks,
        "SPLIT": config.splits > 1,
        "STAGES": config.stages,
        "SCALED": config.scaled,
        "WHOLE": True,
        "WIDE": False,
    }
    options = {"num_warps": config.threads // 32, "num_stages": config.stages}
    result = compiled(several_rows, types, constants, options)
    code = result.asm["ptx"]
    assert "wgmma" in code
    assert "mma.sync" not in code
    assert "cp.async.cg.shared.global" in code, "weights come 16 bytes a thread, some steps ahead"
    assert result.metadata.shared <= 227 << 10
    assert stack_bytes(result) == 0
    # Weights are words in shared memory and are spread in registers: never stored as 16-bit numbers.
    assert not re.search(r"st\.shared\S*", code[code.index("wgmma") : code.rindex("wgmma.mma_async")])


@pytest.mark.parametrize("kernel", ["norm", "rounding", "activation"])
def test_beside_products_of_many_rows(compiled, kernel):
    from hasten.ops.linear.triton_rows import activate_rows, norm_row

    if kernel == "norm":
        types = {"x": "*fp32", "weight": "*bf16", "out": "*bf16", "k_size": "i32", "out_size": "i32"}
        types |= {"eps": "fp32", "offset": "fp32"}
        code = compiled(norm_row, types, {"CENTRED": False, "BLOCK": 4096, "EARLY": True}).asm["ptx"]
        assert code.index("griddepcontrol.wait") < code.index("ld.global")
        assert "ld.global.v4" in code
    elif kernel == "rounding":
        types = {"x": "*bf16", "out": "*i8", "k_size": "i32", "scales": "*fp32", "out_size": "i32"}
        code = compiled(norm_row, types, {"CENTRED": False, "BLOCK": 4096, "EARLY": True}, {"num_warps": 8}).asm["ptx"]
        assert re.search(r"st\.global\.(v\d\.)?b32", code), "integers are stored 4 bytes at a time"
    else:
        types = {"y": "*bf16", "out": "*bf16", "outputs": "i32", "n_size": "i32"}
        constants = {"ACTIVATION": 1, "GATED": True, "BLOCK": 512}
        code = compiled(activate_rows, types, constants, {"num_warps": 2}, multiples=("outputs",)).asm["ptx"]
        assert len(re.findall(r"ld\.global\.v4", code)) == 2, "gate and up come 16 bytes a thread"
        assert "st.global.v4" in code


@pytest.mark.parametrize(("bits", "group_size", "zeros"), FORMATS[:-1])
def test_weights_as_a_16_bit_matrix(compiled, bits, group_size, zeros):
    from hasten.ops.linear.triton_rows import dequantize_chunks

    types = operand_types(bits, group_size, zeros, "bf16")
    types = {name: types[name] for name in ("data", "scales", "zeros") if name in types}
    types |= {"out": "*bf16"} | dict.fromkeys(("n_size", "k_size", "words", "groups"), "i32")
    constants = {"BITS": bits, "GROUP": group_size, "BLOCKS": 4, "CHUNKS": 4}
    result = compiled(dequantize_chunks, types, constants)
    assert re.search(r"ld\.global\S*\.v4\.b32", result.asm["ptx"])
    assert stack_bytes(result) == 0


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("source", ["mask", "all keys"])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 128), (8, 64), (8, 256)])
def test_decode_attention(compiled, dtype, source, group, head_dim):
    from hasten.ops.attention.triton_kernels import attend

    integers = ("keys", "splits", "sequence_stride", "row_stride", "head_stride", "mask_stride")
    types = dict.fromkeys(("q", "k", "v"), f"*{dtype}") | dict.fromkeys(("parts", "peaks", "sums"), "*fp32")
    types |= dict.fromkeys(integers, "i32") | {"scale": "fp32"}
    types |= {"mask": "*i1"} if source == "mask" else {}
    constants = {
        "GROUP": group,
        "GROUP_SIDE": 16,
        "D": head_dim,
        "D_SIDE": head_dim,
        "KEYS": 128,
        "BLOCK": 64 if head_dim <= 128 else 32,
        "WINDOW": 100 if source == "all keys" else 0,
        "SOFTCAP": 30.0 if source == "all keys" else 0.0,
    }
    result = compiled(attend, types, constants)
    assert "mma" in result.asm["ptx"]
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
    types |= {"bias": "*fp32"} if bias else {"scale": "*fp32"}
    code = compiled(kernel, types, {"IGNORED": -100, "NEED": need, "BLOCK": BLOCK}).asm["ptx"]
    assert "ld.global.v4" in code, "16 bytes a thread, wherever the vocabulary ends"
    assert ("st.global.v4" in code) == need
    assert not re.search(r"(ld|st)\.local", code)


def test_loss_in_fp8(compiled):
    from hasten.ops.loss.triton_loss import BLOCK, WARPS, kernel

    types = {"logits": "*bf16", "targets": "*i64", "losses": "*fp32", "vocabulary": "i32", "row_stride": "i32"}
    types |= {"scale": "*fp32", "narrow": "*fp8e4nv", "narrow_scale": "*fp32"}
    constants = {"IGNORED": -100, "NEED": True, "BLOCK": BLOCK}
    code = compiled(kernel, types, constants, {"num_warps": WARPS}).asm["ptx"]
    check_streams(code)
    assert "e4m3x2" in code


def check_streams(code):
    """16 bytes a thread in and out, and nothing in local memory."""
    assert "ld.global.v4" in code
    assert "st.global.v" in code
    assert not re.search(r"(ld|st)\.local", code)


def test_add_norm(compiled):
    from hasten.ops.residual.triton_add_norm import backward_kernel, forward_kernel

    wide = dict.fromkeys(("stream", "branch_bias", "weight", "bias", "total", "means", "scales"), "*fp32")
    types = wide | {"branch": "*bf16", "normed": "*bf16", "width": "i32", "eps": "fp32", "offset": "fp32"}
    check_streams(compiled(forward_kernel, types, {"CENTRED": True, "BLOCK": 1024}, multiples={"width"}).asm["ptx"])
    wide = dict.fromkeys(("d_total", "total", "means", "scales", "weight", "d_stream", "parts"), "*fp32")
    types = wide | {"d_normed": "*bf16", "d_branch": "*bf16", "rows": "i32", "width": "i32", "offset": "fp32"}
    check_streams(compiled(backward_kernel, types, {"CENTRED": True, "BLOCK": 1024}, multiples={"width"}).asm["ptx"])


@pytest.mark.parametrize("learned", [True, False])
def test_embedding(compiled, learned):
    from hasten.ops.residual.triton_embed import embed_kernel, scatter_kernel

    wide = dict.fromkeys(("table", "weight", "bias", "total", "means", "scales"), "*fp32")
    types = wide | {"tokens": "*i64", "normed": "*bf16", "entries": "i32", "width": "i32"}
    types |= {"positions": "*i64", "position_table": "*fp32", "period": "i32"} if learned else {}
    types |= {"eps": "fp32", "offset": "fp32"}
    constants = {"CENTRED": True, "BLOCK": 1024} | ({} if learned else {"period": 1})
    check_streams(compiled(embed_kernel, types, constants, multiples={"width"}).asm["ptx"])
    types = {"tokens": "*i64", "d_stream": "*fp32", "gradient": "*fp32", "entries": "i32", "width": "i32"}
    code = compiled(scatter_kernel, types, {"BLOCK": 1024}, multiples={"width"}).asm["ptx"]
    assert "ld.global.v4" in code
    assert re.search(r"(red|atom)\S*\.relaxed\S*\.add\S*\.f32", code), "float32 sums in the L2 cache"


def test_joined_gradients(compiled):
    from hasten.ops.residual.triton_join import COLUMNS, ROWS, WARPS, join_kernel

    types = dict.fromkeys("abc", "*bf16") | {"out": "*bf16", "parts": "*fp32", "rows": "i32"}
    types |= dict.fromkeys(("a_width", "b_width", "width"), "i32")
    tile = {"ROWS": ROWS, "COLUMNS": COLUMNS}
    sizes = {"a_width", "b_width", "width"}
    check_streams(compiled(join_kernel, types, tile, {"num_warps": WARPS}, multiples=sizes).asm["ptx"])


@pytest.mark.parametrize("out", ["fp32", "bf16"])
def test_sums_of_rows(compiled, out):
    from hasten.ops.columns import COLUMNS, ROWS, add_rows

    types = {"parts": "*fp32", "out": f"*{out}", "rows": "i32", "width": "i32"}
    code = compiled(add_rows, types, {"COLUMNS": COLUMNS, "ROWS": ROWS}, {"num_warps": 8}, multiples={"width"})
    assert "ld.global.v4" in code.asm["ptx"]
    assert not re.search(r"(ld|st)\.local", code.asm["ptx"])


def test_bias_gelu(compiled):
    from hasten.ops.activation.triton_gelu import backward_kernel, forward_kernel

    tile = {"ROWS": 4, "COLUMNS": 512}
    types = {"z": "*bf16", "bias": "*fp32", "out": "*bf16", "rows": "i32", "width": "i32"}
    check_streams(compiled(forward_kernel, types, tile, multiples={"width"}).asm["ptx"])
    types = {
        "d_out": "*bf16",
        "z": "*bf16",
        "bias": "*fp32",
        "dz": "*bf16",
        "parts": "*fp32",
        "rows": "i32",
        "width": "i32",
    }
    check_streams(compiled(backward_kernel, types, tile, multiples={"width"}).asm["ptx"])


def check_pairs(code):
    """Nothing takes a rounded pair apart that is stored whole, too: ptxas reads the second byte before it is there."""
    pairs = re.findall(r"cvt\.rn\.satfinite\.e4m3x2\.f32\s+(%rs\d+)", code)
    apart = {found for found in pairs if re.search(rf"shr\.u16\s+%rs\d+, {found}, 8", code)}
    whole = {found for found in pairs if re.search(rf"mov\.b32\s+%r\d+, {{[^}}]*{found}\b", code)}
    assert not apart & whole


def test_rows_to_fp8(compiled):
    from hasten.ops.fp8.triton_rows import gelu_backward_kernel, gelu_kernel, join_kernel, rows_kernel

    narrow = {"narrow": "*fp8e4nv", "scales": "*fp32", "width": "i32"}
    sums = {"parts": "*fp32", "rows": "i32"}
    joined = dict.fromkeys("abc", "*bf16") | dict.fromkeys(("a_width", "b_width"), "i32")
    for kernel, types in (
        (rows_kernel, {"x": "*bf16"}),
        (gelu_kernel, {"z": "*bf16", "bias": "*fp32"}),
        (gelu_backward_kernel, {"d_out": "*bf16", "z": "*bf16", "bias": "*fp32"} | sums),
        (join_kernel, joined | sums),
    ):
        multiples = {"width", "a_width", "b_width"}
        code = compiled(kernel, types | narrow, {"BLOCK": 4096}, {"num_warps": 8}, multiples=multiples).asm["ptx"]
        check_streams(code)
        check_pairs(code)
        assert "e4m3x2" in code


def test_add_norm_in_fp8(compiled):
    from hasten.ops.residual.triton_add_norm import backward_kernel, forward_kernel

    narrow = {"narrow": "*fp8e4nv", "narrow_scales": "*fp32", "width": "i32", "offset": "fp32"}
    wide = dict.fromkeys(("stream", "branch_bias", "weight", "bias", "total", "means", "scales"), "*fp32")
    sizes = {"CENTRED": True, "BLOCK": 1024}
    code = compiled(forward_kernel, wide | narrow | {"branch": "*bf16", "eps": "fp32"}, sizes, multiples={"width"}).asm[
        "ptx"
    ]
    check_streams(code)
    assert "e4m3x2" in code
    wide = dict.fromkeys(("d_total", "total", "means", "scales", "weight", "d_stream", "parts"), "*fp32")
    types = wide | narrow | {"d_normed": "*bf16", "rows": "i32"}
    code = compiled(backward_kernel, types, sizes, multiples={"width"}).asm["ptx"]
    check_streams(code)
    assert "e4m3x2" in code


def test_columns_of_fp8(compiled):
    """Rows are read, and columns written, 16 bytes a thread."""
    import triton.language as tl

    from hasten.ops.fp8 import triton_columns, triton_weights

    scales = dict.fromkeys(("scales", "other_scales", "parts"), "*fp32") | {"rows": "i32", "width": "i32"}
    tile = {"ROWS": triton_columns.ROWS, "COLUMNS": triton_columns.COLUMNS}
    options, multiples = {"num_warps": triton_columns.WARPS}, {"rows", "width"}
    types = scales | {"x": "*u8", "out": "*u8"}
    check_streams(compiled(triton_columns.bytes_kernel, types, tile, options, multiples=multiples).asm["ptx"])
    types = scales | {"x": "*fp8e4nv", "out": "*fp8e4nv", "found": "*fp32", "count": "i32"}
    constants = tile | {"PARTS": 256}
    code = compiled(triton_columns.moved_kernel, types, constants, options, multiples=multiples).asm["ptx"]
    check_streams(code)
    check_pairs(code)
    types = {"table": "*i64", "blocks": "*i64"}
    constants = {"DTYPE": tl.float32, "NARROW": tl.float8e4nv, "FIELDS": triton_weights.FIELDS}
    constants |= {"ROWS": triton_weights.ROWS, "COLUMNS": triton_weights.COLUMNS}
    options = {"num_warps": triton_weights.WARPS}
    codes = [compiled(triton_weights.rows_kernel, types, constants, options).asm["ptx"]]
    del constants["DTYPE"], constants["NARROW"]
    codes.append(compiled(triton_weights.columns_kernel, types, constants, options).asm["ptx"])
    for code in codes:
        check_streams(code)
        check_pairs(code)
        assert "st.global.b8" not in code


def test_adamw(compiled):
    import triton.language as tl

    from hasten.training.triton_adamw import BLOCK, FIELDS, adamw_kernel, squares_kernel

    constants = {"DTYPE": tl.bfloat16, "FIELDS": FIELDS, "BLOCK": BLOCK}
    tables = {"table": "*i64", "blocks": "*i64"}
    numbers = dict.fromkeys(("beta1", "rest1", "beta2", "rest2", "eps", "clip"), "fp32") | {"groups": "i32"}
    types = tables | numbers | dict.fromkeys(("scalars", "decays", "norm"), "*fp32")
    check_streams(compiled(adamw_kernel, types, constants).asm["ptx"])
    assert "ld.global.v4" in compiled(squares_kernel, tables | {"parts": "*fp32"}, constants).asm["ptx"]

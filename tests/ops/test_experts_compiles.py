"""Triton's kernels of experts go through the real compiler to machine code of a Hopper GPU; that needs no GPU."""

import re
import sys

import pytest

from expert_cases import PLAIN
from triton_cases import compile_for_hopper

pytestmark = pytest.mark.slow  # several kernels through a compiler

pytest.importorskip("triton", reason="Triton has no wheel for this platform")
if sys.platform != "linux":
    pytest.skip("Triton's compiler is for Linux", allow_module_level=True)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("format", [("int4", 32, False), ("int8", 0, True), PLAIN], ids=str)
@pytest.mark.parametrize("rows", [1, 64, 2048])
def test_products(rows, format, gated, tmp_path):
    import triton.language as tl

    from hasten.ops.experts import triton_kernels
    from hasten.ops.experts.triton_experts import cut_for

    element, group_size, symmetric = format
    bits = {"plain": 16, "int8": 8, "int4": 4}[element]
    cut = cut_for(rows, 8, 128, bits)
    scales = tl.float16 if group_size else tl.float32
    form = {"BITS": bits, "GROUP": group_size, "ZEROS": not symmetric, "SCALES": scales}
    types = {"addresses": "*i64", "out": "*bf16", "n_size": "i32", "k_size": "i32", "top": "i32"}
    constants = {"ACTIVATION": int(gated), "GATED": gated}
    if rows == 1 and bits == 16:
        kernel = triton_kernels.plain_rows
        types |= {"x": "*bf16", "chosen": "*i64"}
        constants |= {"BLOCK": cut.n, "T": cut.k}
    elif rows == 1:
        kernel = triton_kernels.packed_rows
        types |= {"x": "*i32", "chosen": "*i64", "words": "i32", "groups": "i32", "magic": "i32"}
        constants |= form | {"XBITS": 16, "HALF": False, "BLOCK": cut.n // 4, "T": 128}
    else:
        kernel = triton_kernels.tiles_of_experts
        types |= {"x": "*bf16", "order": "*i32", "tiles": "*i32", "words": "i32", "groups": "i32"}
        constants |= form | {"N": cut.n, "M": cut.m, "K": cut.k, "STAGES": cut.stages, "WHOLE": True, "WIDE": False}
    code = compile_for_hopper(kernel, types, constants, tmp_path, num_warps=cut.warps).asm["ptx"]
    assert re.search(r"ld\.global\S*\.v4\.b32" if rows == 1 else r"cp\.async\.cg\S* .*0x10", code), "16 bytes a thread"
    assert ("wgmma" in code) == (rows > 1)
    assert not re.search(r"(ld|st)\.local", code)


def test_the_sort_and_the_sum(tmp_path):
    from hasten.ops.experts import triton_experts, triton_kernels

    types = {"chosen": "*i64", "order": "*i32", "tiles": "*i32", "pairs": "i32"}
    constants = {"M": 64, "BLOCK": triton_experts.SORTED}
    assert compile_for_hopper(triton_kernels.sort_pairs, types, constants, tmp_path, num_warps=8).asm["cubin"]
    types = {"parts": "*bf16", "shares": "*fp32", "out": "*bf16", "n_size": "i32"}
    code = compile_for_hopper(triton_kernels.add_shares, types, {"TOP": 8, "BLOCK": 1024}, tmp_path).asm["ptx"]
    assert "ld.global.v4" in code

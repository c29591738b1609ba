"""The Triton kernels of a GPU's fused block go through the real compiler to machine code of a Hopper GPU."""

import re
import sys

import pytest

from triton_cases import compile_for_hopper

pytestmark = pytest.mark.slow  # a compiler runs

pytest.importorskip("triton", reason="Triton has no wheel for this platform")
if sys.platform != "linux":
    pytest.skip("Triton's compiler is for Linux", allow_module_level=True)

LARGEST_SHARED = 227 << 10  # bytes that a program of a Hopper GPU can have


def attention(tmp_path, *, tokens, sequences, max_query, group, head_dim, source="table", dtype="bf16", **changes):
    from hasten.ops.attention.flash_tiles import side
    from hasten.ops.attention.ragged import at_once, plan_for
    from hasten.ops.attention.ragged_kernels import attend

    plan = plan_for(
        tokens=tokens,
        sequences=sequences,
        kv_heads=8,
        group=group,
        head_dim=head_dim,
        max_query=max_query,
        longest=2048,
    )
    types = dict.fromkeys(("q", "k", "v", "out"), f"*{dtype}") | dict.fromkeys(("parts", "peaks", "sums"), "*fp32")
    types |= {"lengths": "*i64", "counters": "*i32", "factor": "fp32"}
    types |= dict.fromkeys(("rows", "sequences", "blocks", "slots", "q_stride", "row_stride", "head_stride"), "i32")
    types |= {"block_size": "i32", "table" if "table" in source else "first": "*i64"}
    if max_query > 1:
        types["starts"] = "*i64"
    if "int8" in source:
        types |= {"k": "*i8", "v": "*i8", "k_scales": "*fp32", "v_scales": "*fp32"}
    if changes.pop("softcap", False):
        types["inner"] = "fp32"
    constants = {
        "WINDOW": changes.pop("window", 0),
        "GROUP": group,
        "QUERIES": 1 if max_query == 1 else plan.queries,
        "M": plan.rows,
        "D": head_dim,
        "D_SIDE": side(head_dim),
        "BLOCK": plan.keys,
        "PAGE": 16,
        "SPLIT": plan.splits > 1,
        "CHUNK": at_once(plan.rows, side(head_dim)),
    }
    known = {"rows", "sequences", "blocks", "block_size", "slots"}  # else an argument of 1 would be a constant
    assert known <= set(attend.do_not_specialize)
    return plan, compile_for_hopper(
        attend,
        types,
        constants,
        tmp_path,
        num_warps=plan.warps,
        num_stages=plan.stages_of(paged="table" in source),
        **changes,
    )


@pytest.mark.parametrize("source", ["table", "first", "int8 table"])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 128), (8, 64), (7, 128), (8, 256)])
def test_decoding(tmp_path, source, group, head_dim):
    sizes = {"tokens": 1, "sequences": 1, "max_query": 1, "group": group, "head_dim": head_dim}
    plan, result = attention(tmp_path, **sizes, source=source)
    assert plan.splits > 1
    code = result.asm["ptx"]
    assert "mma.sync" in code
    if "int8" not in source:  # rows of D + 4 bytes begin anywhere
        assert "cp.async.cg.shared.global" in code
    assert not re.search(r"(ld|st)\.local", code)
    assert result.metadata.shared <= LARGEST_SHARED // 2  # two programs on a multiprocessor


@pytest.mark.parametrize(
    ("source", "window", "softcap"), [("table", 0, False), ("first", 0, False), ("first", 500, True)]
)
@pytest.mark.parametrize(("group", "head_dim"), [(1, 128), (8, 64), (1, 64), (1, 96), (2, 256)])
def test_prompts(tmp_path, source, window, softcap, group, head_dim):
    sizes = {"tokens": 2048, "sequences": 1, "max_query": 2048, "group": group, "head_dim": head_dim}
    _, result = attention(tmp_path, **sizes, source=source, window=window, softcap=softcap)
    code = result.asm["ptx"]
    assert "wgmma" in code
    assert "cp.async.cg.shared.global" in code
    assert not re.search(r"(ld|st)\.local", code)
    assert result.metadata.shared <= LARGEST_SHARED


@pytest.mark.parametrize("source", ["table", "first"])
@pytest.mark.parametrize(
    ("group", "head_dim", "half"), [(1, 128, 64), (8, 64, 32), (7, 128, 64), (8, 256, 128), (4, 80, 16)]
)
def test_a_decode_step(tmp_path, source, group, head_dim, half):
    from hasten.ops.attention.flash_tiles import side
    from hasten.ops.attention.ragged import at_once, plan_for
    from hasten.ops.attention.step_kernels import attend_new

    sizes = {"kv_heads": 8, "group": group, "head_dim": head_dim, "max_query": 1, "longest": 2048}
    plan = plan_for(tokens=1, sequences=1, **sizes)
    types = dict.fromkeys(("qkv", "k", "v", "out"), "*bf16")
    types |= dict.fromkeys(("cos", "sin", "parts", "peaks", "sums"), "*fp32") | {"counters": "*i32"}
    types |= dict.fromkeys(("q_weight", "k_weight"), "*bf16") if group == 8 else {}
    types |= dict.fromkeys(("slot_mapping", "lengths", source), "*i64") | dict.fromkeys(
        ("eps", "offset", "factor"), "fp32"
    )
    integers = ("rows", "blocks", "block_size", "slots", "qkv_stride", "row_stride", "head_stride")
    types |= dict.fromkeys(integers, "i32") | ({"first": "*i64"} if source == "first" else {"table": "*i64"})
    constants = {
        "WINDOW": 100 if group == 4 else 0,
        "GROUP": group,
        "M": plan.rows,
        "D": head_dim,
        "D_SIDE": side(head_dim),
        "HALF": half,
        "BLOCK": plan.keys,
        "PAGE": 16,
        "SPLIT": True,
        "ROWS": (rows := 1 << (group - 1).bit_length()),
        "CHUNK": at_once(rows, side(head_dim)),
    }
    options = {"num_warps": plan.warps, "num_stages": plan.stages_of(paged=source == "table")}
    result = compile_for_hopper(attend_new, types, constants, tmp_path, **options)
    code = result.asm["ptx"]
    assert "cp.async.cg.shared.global" in code
    assert not re.search(r"(ld|st)\.local", code)
    assert result.metadata.shared <= LARGEST_SHARED // 2  # two programs on a multiprocessor


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("half", "head_dim"), [(64, 128), (16, 80), (0, 64)])
def test_placing_heads(tmp_path, normed, half, head_dim):
    from hasten.ops.attention.flash_tiles import side
    from hasten.ops.block.triton_kernels import place_heads

    types = dict.fromkeys(("qkv", "q_out", "k", "v"), "*bf16") | {"slots": "*i64", "eps": "fp32", "offset": "fp32"}
    types |= dict.fromkeys(("qkv_stride", "row_stride", "head_stride"), "i32")
    types |= dict.fromkeys(("cos", "sin"), "*fp32") if half else {}
    types |= dict.fromkeys(("q_weight", "k_weight"), "*bf16") if normed else {}
    constants = {
        "HEADS": 32,
        "KV_HEADS": 8,
        "D": head_dim,
        "D_SIDE": side(head_dim),
        "HALF": half,
        "BLOCK": 2,
    }
    code = compile_for_hopper(place_heads, types, constants, tmp_path, num_warps=1).asm["ptx"]
    assert not re.search(r"(ld|st)\.local", code)


@pytest.mark.parametrize("centred", [True, False])
def test_adding_what_is_normed(tmp_path, centred):
    from hasten.ops.block.triton_kernels import add_normed

    types = {"x": "*fp32", "y": "*bf16", "weight": "*bf16", "out": "*fp32", "size": "i32"}
    types |= {"eps": "fp32", "offset": "fp32"} | ({"bias": "*bf16"} if centred else {})
    code = compile_for_hopper(add_normed, types, {"CENTRED": centred, "BLOCK": 4096}, tmp_path, num_warps=8).asm["ptx"]
    assert not re.search(r"(ld|st)\.local", code)

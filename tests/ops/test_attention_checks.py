"""What `attention` and its relatives refuse, in words; and numbers that once gave NaN or another tensor's memory."""

import numpy as np
import pytest
import torch

from hasten.errors import ConfigError, HastenWarning
from hasten.ops.activation import bias_gelu, silu_mul
from hasten.ops.attention import KERNELS, AttentionRequest, AttentionSpec, attention
from hasten.ops.attention.block_mask import BlockMask
from hasten.ops.attention.patterns import BigBird, BSLongformer, Fixed, Local, SlidingWindow, Strided, Variable
from hasten.ops.picker import pick
from instruction_sets import needs_native


def tensors(queries=8, keys=8, heads=4, size=16, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, queries, heads, size), (1, keys, heads, size), (1, keys, heads, size))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


ELSEWHERE = {
    "mask": torch.ones(8, 8, dtype=torch.bool),
    "key_padding_mask": torch.ones(1, 8, dtype=torch.bool),
    "bias": torch.zeros(8, 8),
    "alibi": torch.ones(4),
    "sinks": torch.zeros(4),
    "cu_seqlens": torch.tensor([0, 8]),
}


@pytest.mark.parametrize("name", ["k", "v", *ELSEWHERE])
def test_tensors_of_two_devices_are_refused(name):
    given = dict(zip("qkv", tensors(), strict=True))
    given[name] = (given | ELSEWHERE)[name].to("meta")
    with pytest.raises(ConfigError, match=f"{name} is on meta and q on cpu"):
        attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)


@needs_native
def test_the_longest_heads_of_the_native_kernel_are_computed_and_longer_ones_refused():
    q, k, v = tensors(size=576)
    exact = attention(q.double(), k.double(), v.double(), kernel="reference").float()
    torch.testing.assert_close(attention(q, k, v, kernel="native"), exact, rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigError, match="the head size is 577; it goes up to 576"):
        attention(*tensors(size=577), kernel="native")


def test_activations_of_two_devices_are_refused():
    z = torch.randn(3, 8)
    with pytest.raises(ConfigError, match="cpu and meta"):
        bias_gelu(z, torch.zeros(8, device="meta"))
    with pytest.raises(ConfigError, match="cpu and meta"):
        silu_mul(z, z.to("meta"))


def test_on_meta_there_is_a_shape():
    q, k, v = (x.to("meta") for x in tensors())
    assert attention(q, k, v).shape == q.shape


@pytest.mark.parametrize("scale", [-1.0, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_no_scale_gives_nan(scale, dtype):
    q, k, v = tensors(dtype=dtype)
    expected = attention(q.double(), k.double(), v.double(), scale=scale, kernel="reference")
    for kernel in (None, "flash", "sdpa", "math", "chunked"):
        out = attention(q, k, v, scale=scale, kernel=kernel).double()
        torch.testing.assert_close(out, expected, rtol=0, atol=5e-3 if dtype == torch.float16 else 1e-5)


def test_flash_on_cuda_wants_no_mask_and_so_a_scale_above_zero():
    spec = AttentionSpec(heads=4, kv_heads=4, head_dim=64, scale=-1.0)
    request = AttentionRequest(spec=spec, device=torch.device("cuda"), dtype=torch.float16, batch=1, queries=8, keys=8)
    with pytest.raises(ConfigError, match="scale of -1"):
        pick(KERNELS, request, forced="flash")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 2.5}, "window must be a whole number .* found 2.5"),
        ({"window": True}, "window must be a whole number"),
        ({"softcap": float("inf")}, "softcap must be a finite number above 0.* found inf"),
        ({"softcap": float("nan")}, "softcap must be a finite"),
        ({"scale": float("nan")}, "scale must be a finite number.* found nan"),
        ({"mask": [[True]]}, "mask must be a torch.Tensor; found list"),
        ({"key_padding_mask": np.ones((1, 8), dtype=bool)}, "key_padding_mask must be a torch.Tensor; found ndarray"),
        ({"cu_seqlens": [0, 8]}, "cu_seqlens must be a torch.Tensor; found list"),
        ({"alibi": [1.0]}, "alibi must be True, or a tensor of slopes; found list"),
        ({"sinks": [1.0]}, "sinks must be a torch.Tensor; found list"),
        ({"sinks": torch.zeros(3)}, r"sinks must be floating, one logit a head, \(4,\); found torch.float32, \(3,\)"),
        ({"sinks": torch.zeros(4, dtype=torch.int64)}, "sinks must be floating.*found torch.int64"),
        ({"block_mask": Local(block=16)}, r"BlockMask.of\(pattern, keys\) makes it; found Local"),
        (
            {"block_mask": BlockMask.of(BigBird(block=16, per_head=True), 8, heads=3), "kernel": "reference"},
            "3 heads; found 4 query heads",
        ),
    ],
)
def test_options_that_are_not_what_they_must_be(change, message):
    with pytest.raises(ConfigError, match=message):
        attention(*tensors(), **change)


ENDS = torch.tensor([0, 3, 8])
MASK = BlockMask.of(Local(block=16), 8)


@pytest.mark.parametrize(
    "given",
    [
        {"softcap": 5.0},
        {"bias": torch.zeros(1, 4, 8, 8)},
        {"bias": torch.zeros(8, 8)},
        {"key_padding_mask": torch.ones(1, 8, dtype=torch.bool)},
        {"key_padding_mask": torch.tensor([8])},
        {"cu_seqlens": ENDS},
        {"cu_seqlens": ENDS, "cu_seqlens_k": ENDS.clone()},
        {"cu_seqlens": ENDS, "block_mask": MASK},
    ],
)
def test_options_that_hide_nothing_of_a_document_are_taken(given):
    """What is checked is also what is right: the same as one document after the other."""
    q, k, v = tensors()
    parts = [slice(0, 3), slice(3, 8)] if "cu_seqlens" in given else [slice(0, 8)]
    softcap = given.get("softcap")
    expected = [attention(q[:, p], k[:, p], v[:, p], softcap=softcap, kernel="reference") for p in parts]
    torch.testing.assert_close(attention(q, k, v, **given), torch.cat(expected, dim=1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"softcap": 0.0}, "softcap must be"),
        ({"softcap": -1.0}, "softcap must be"),
        ({"dropout": 1.0}, "below 1; found 1.0"),
        ({"dropout": -0.5}, "at least 0.*found -0.5"),
        ({"bias": torch.zeros(1, 8, 8, 8)}, "bias must be floating"),
        ({"key_padding_mask": torch.ones(8, 8, dtype=torch.bool)}, r"bool of shape \(1, 8\)"),
        ({"key_padding_mask": torch.ones(16, 8, dtype=torch.bool)}, r"bool of shape \(1, 8\)"),
        ({"cu_seqlens": torch.tensor([0])}, "at least 2"),
        ({"cu_seqlens": torch.tensor([0, 7])}, "must rise from 0 to the 8 tokens"),
        ({"cu_seqlens": torch.tensor([0, 5, 3, 8])}, "must rise from 0 to the 8 tokens"),
        ({"cu_seqlens": ENDS, "bias": torch.zeros(8, 8)}, "packed documents"),
        ({"cu_seqlens": ENDS, "mask": torch.ones(8, 8, dtype=torch.bool)}, "packed documents"),
        ({"cu_seqlens": ENDS, "cu_seqlens_k": ENDS.clone(), "block_mask": MASK}, "give no cu_seqlens_k"),
    ],
)
def test_numbers_and_shapes_out_of_bounds_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        attention(*tensors(), **given)


def test_heads_may_share_a_single_key_head():
    q, k, v = tensors()
    shared = attention(q, k[:, :, :1], v[:, :, :1])
    torch.testing.assert_close(shared, attention(q, k[:, :, :1].expand_as(k), v[:, :, :1].expand_as(v)))


def test_document_ends_on_a_device_are_not_read():
    q, k, v = (x.to("meta") for x in tensors())
    assert attention(q, k, v, cu_seqlens=ENDS.to("meta"), kernel="reference").shape == q.shape


def test_inputs_that_are_not_what_they_must_be():
    q, k, v = tensors()
    with pytest.raises(ConfigError, match=r"q must be a torch.Tensor; found list"):
        attention(q.tolist(), k, v)
    with pytest.raises(ConfigError, match="a head has a size of at least 1"):
        attention(q[..., :0], k[..., :0], v[..., :0])
    with pytest.raises(ConfigError, match="found 0 heads over 4"):
        attention(q[:, :, :0], k, v, kernel="chunked")
    eighth = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    with pytest.raises(ConfigError, match=r"found torch.float8_e4m3fn"):
        attention(*eighth)


@pytest.mark.parametrize("kernel", [None, "chunked", "math", "reference"])
def test_queries_over_no_keys_are_zeros(kernel):
    q, k, v = tensors(keys=0)
    assert not attention(q, k, v, causal=False, kernel=kernel).any()


def test_native_sparse_by_name_computes_no_absent_block_or_refuses():
    q, k, v = tensors(queries=96, keys=96)
    mask = BlockMask.of(Local(block=48), 96)
    with pytest.raises(ConfigError, match=r"its blocks have 48 positions|native library"):
        attention(q, k, v, block_mask=mask, kernel="native-sparse")
    with pytest.warns(HastenWarning, match="not skipped, all scores are computed: .*48 positions|native library"):
        out = attention(q, k, v, block_mask=mask)
    torch.testing.assert_close(out, attention(q, k, v, block_mask=mask, kernel="reference"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("queries", [256, 100, 1])
def test_on_cuda_flex_takes_block_masks(queries):
    request = AttentionRequest(
        spec=AttentionSpec(heads=4, kv_heads=4, head_dim=64, scale=0.125, causal=False),
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        batch=1,
        queries=queries,
        keys=256,
        block_mask=True,
        block_size=64,
    )
    assert pick(KERNELS, request).name == "flex"


def test_sizes_of_a_pattern_may_be_any_number():
    huge = 10**9
    dense = Local(radius=8, block=16).layout(6).heads
    assert Variable(global_ends=(huge,), block=16).layout(6).heads == dense
    assert Variable(windows=(huge,), block=16).layout(6).heads == dense
    assert BSLongformer(global_ends=(huge,), block=16).layout(6).heads == dense
    assert BigBird(global_blocks=huge, block=16).layout(6).heads == dense
    assert SlidingWindow(window=huge, block=16).layout(6).heads == dense
    assert Strided(radius=huge, block=16).layout(6).heads == dense
    assert Fixed(local_blocks=huge, global_blocks=huge, block=16).layout(6).heads == dense
    assert Local(radius=huge, block=16).layout(6).heads == dense


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BSLongformer(global_indices=3), "BSLongformer: global_indices must be a tuple of integers; found 3"),
        (lambda: Variable(windows=4), "Variable: windows must be a tuple of integers; found 4"),
        (lambda: Variable(global_ends=1), "Variable: global_ends must be a tuple of integers; found 1"),
    ],
)
def test_lists_of_a_pattern_are_lists(make, message):
    with pytest.raises(ConfigError, match=message):
        make()

"""What the native attention for training is taken for, and what it refuses."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from attention_cases import inputs
from hasten.errors import HastenWarning
from hasten.ops.attention import KERNELS, AttentionRequest, AttentionSpec, attention
from hasten.ops.attention.block_mask import BlockMask
from hasten.ops.attention.patterns import BigBird, Local
from hasten.ops.attention.train import flop_formulas, native_attention
from hasten.ops.picker import explain
from instruction_sets import needs_native

CPU = torch.device("cpu")


def request(**options):
    spec = {"heads": 4, "kv_heads": 2, "head_dim": 64, "scale": 0.125}
    own = {name: options.pop(name) for name in ("softcap", "head_dim") if name in options}
    given = {"device": CPU, "dtype": torch.bfloat16, "batch": 1, "queries": 8, "keys": 8} | options
    return AttentionRequest(spec=AttentionSpec(**spec | own), **given)


@pytest.mark.parametrize(
    ("options", "kernel", "words"),
    [
        ({}, "native-sparse", "it is for block masks"),
        ({"block_mask": True}, "native-sparse", "block masks of hasten.ops.attention.block_mask"),
        ({"block_mask": True, "block_size": 64}, "native", "native-sparse does"),
        ({"mask": True}, "native", "it takes no explicit mask"),
        ({"softcap": 5.0}, "native", "it takes no soft-capping"),
        ({"dtype": torch.float16}, "native", "float32 and bfloat16, not float16"),
        ({"head_dim": 584}, "native", "head size is 584"),
        ({"queries": 9}, "native", "9 are more than 8"),
        ({"device": torch.device("cuda")}, "native", "the tensors are on cuda"),
        ({"block_mask": True, "block_size": 64, "dtype": torch.float64}, "native-sparse", "not float64"),
        ({"block_mask": True, "block_size": 64, "gradient": True}, "flex", "no backward pass on a CPU"),
        ({"block_mask": True, "block_size": 64}, "flex", "on a CPU it has a forward pass only"),
    ],
)
def test_what_it_refuses(options, kernel, words):
    choice = explain(KERNELS, request(**options))
    assert choice.kernel != kernel
    assert words in dict(choice.others)[kernel]


@needs_native
@pytest.mark.parametrize(
    ("options", "kernel"),
    [
        ({}, "native"),
        ({"key_lengths": True}, "native"),
        ({"key_lengths": True, "gradient": True}, "native"),
        ({"key_lengths": True, "dtype": torch.float16, "gradient": True}, "chunked"),  # which native does not take
        ({"key_lengths": True, "softcap": 5.0}, "chunked"),
        ({"batch": None, "queries": None, "keys": None}, "native"),
        ({"block_mask": True, "block_size": 64}, "native-sparse"),
    ],
)
def test_what_it_is_taken_for(options, kernel):
    assert explain(KERNELS, request(**options)).kernel == kernel


@needs_native
def test_sparse_attention_through_the_operator():
    tensors = inputs(11, 1, 200, 4, 2, 32)
    mask = BlockMask.of(BigBird(block=32, per_head=True), 200, heads=4)
    upstream = torch.randn(1, 200, 4, 32, generator=torch.Generator().manual_seed(0))
    found, expected = (
        torch.autograd.grad((attention(*tensors, block_mask=mask, kernel=name) * upstream).sum(), tensors)
        for name in (None, "reference")
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@needs_native
def test_blocks_that_cannot_be_skipped_are_computed_with_a_warning():
    tensors = inputs(12, 1, 20, 2, 2, 16)
    mask = BlockMask.of(Local(block=3), 20)
    with pytest.warns(HastenWarning, match="its blocks have 3 positions"):
        found = attention(*tensors, block_mask=mask)
    torch.testing.assert_close(found, attention(*tensors, block_mask=mask, kernel="reference"))


def test_autocast_casts_as_for_pytorch():
    q, k, v = inputs(13, 1, 70, 2, 2, 32)
    with torch.autocast("cpu", torch.bfloat16):
        found = attention(q, k.bfloat16().float(), v)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, attention(q.bfloat16(), k.bfloat16(), v.bfloat16()))


@needs_native
def test_flops_are_counted_where_something_is_seen():
    q, k, v = inputs(14, 2, 128, 4, 2, 32)
    mask = BlockMask.of(Local(block=64, radius=0), 128)
    pairs = {"dense": 128 * 129 // 2, "window": 128 * 10 - 45, "everything": 128 * 128, "blocks": 2 * 64 * 64}
    options = {"window": {"window": 10}, "everything": {"causal": False}, "blocks": {"block_mask": mask}}
    for name, count in pairs.items():
        with FlopCounterMode(display=False, custom_mapping=flop_formulas()) as counter:
            native_attention(q, k, v, **options.get(name, {}))[0].sum().backward()
        assert counter.get_total_flops() == 2 * 4 * count * 4 * 32 * 7 // 2, name

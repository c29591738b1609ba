"""Weights that are packed in parts, into large pages, are the same as packed whole."""

import pytest
import torch

from hasten.machine.pages import LARGE_PAGE, SHARED_PAGES, SharedPages, in_large_pages, joined_in_large_pages
from hasten.ops.linear import layouts
from hasten.ops.linear.layouts import PANELS
from hasten.ops.linear.weights import INT8, K_QUANTS, QuantizedWeight, group_format
from hasten.ops.native import library


@pytest.mark.parametrize("rows", [1, 3000])
def test_joined_is_concatenated(rows):
    parts = [torch.randn(rows, 300) for _ in range(3)]
    joined = joined_in_large_pages(iter(parts), 3 * rows)
    assert torch.equal(joined, torch.cat(parts))
    if rows > 1:
        assert joined.data_ptr() % LARGE_PAGE == 0
        assert in_large_pages(joined) is joined


def test_small_tensors_share_large_pages():
    sizes = [1, 100, 3 << 19, SHARED_PAGES, 3 << 18]
    tensors = [torch.randint(-128, 128, (size,), dtype=torch.int8) for size in sizes] + [torch.randn(7, 33).bfloat16()]
    pages = SharedPages()
    moved = [pages.move(tensor) for tensor in tensors]
    for ours, theirs in zip(moved, tensors, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.data_ptr() % 64 == 0
    assert moved[3].data_ptr() % LARGE_PAGE == 0
    shared = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in (*moved[:3], *moved[4:])}
    assert len(shared) == 2  # of which the second began when the first was full
    assert sum(shared.values()) <= 3 * LARGE_PAGE + 2 * 64


@pytest.mark.skipif(library() is None, reason="the native kernels cannot be built here")
@pytest.mark.parametrize("format", [INT8, group_format("int4", 32), K_QUANTS[3], None])
def test_a_weight_packed_in_parts_is_the_same(format, monkeypatch):
    if format is None:
        weight = QuantizedWeight.plain(torch.randn(300, 256).bfloat16())
    else:
        weight = layouts.empty_weight((300, 256), format, torch.device("cpu"))
        most = 127 if format == INT8 else (1 << format.bits) - 1
        weight.values.copy_(torch.randint(0, most + 1, (300, 256)))
        for part in (weight.scales, weight.zeros, weight.outer):
            if part is not None:
                part.fill_(1)
    whole = PANELS.pack(weight)
    monkeypatch.setattr(layouts, "LARGE", 4 * 64 * 256)
    for found, expected in zip(PANELS.pack(weight), whole, strict=True):
        assert (found is None) == (expected is None)
        assert found is None or torch.equal(found.view(torch.uint8), expected.view(torch.uint8))

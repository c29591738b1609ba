"""Weights that are packed in parts, into large pages, are the same as packed whole."""

import mmap
import sys

import pytest
import torch

from hasten.errors import ResourceError
from hasten.machine import pages
from hasten.machine.pages import (
    LARGE_PAGE,
    SHARED_PAGES,
    SharedPages,
    empty_in_large_pages,
    in_large_pages,
    joined_in_large_pages,
    mapped_files,
    release_file_pages,
    release_pages,
    zeros_in_large_pages,
)
from hasten.ops.linear import layouts
from hasten.ops.linear.layouts import PANELS
from hasten.ops.linear.weights import INT8, K_QUANTS, QuantizedWeight, group_format
from hasten.ops.native import library

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="pages are released on Linux only")


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


def unaligned(size: int) -> torch.Tensor:
    """Random bytes that begin behind a page's beginning."""
    memory = empty_in_large_pages((size + LARGE_PAGE,), dtype=torch.uint8)
    return memory[64 : 64 + size].random_(1, 256)


@on_linux
def test_a_moved_tensor_is_left_alone_unless_nobody_needs_it():
    tensor = unaligned(2 * LARGE_PAGE + 5)
    before = tensor.clone()
    assert torch.equal(in_large_pages(tensor), before)
    assert torch.equal(tensor, before)
    assert torch.equal(in_large_pages(tensor, taken=True), before)
    assert not tensor[mmap.PAGESIZE : LARGE_PAGE - mmap.PAGESIZE].any(), "pages that are one piece's own"


@on_linux
def test_whole_pages_are_released_and_no_others():
    page = mmap.PAGESIZE
    memory = empty_in_large_pages((LARGE_PAGE,), dtype=torch.uint8).fill_(1)
    for kept in (memory[100 : 100 + page], memory[: 8 * page : 2]):
        release_pages(kept)
        assert memory.all()
    release_pages(memory[100 : 100 + 3 * page])
    assert not memory[page : 3 * page].any()
    assert memory[:page].all()
    assert memory[3 * page :].all()


@on_linux
def test_pages_of_a_mapped_file_are_released_unless_somebody_uses_them(tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(pages, "release_pages", lambda tensor: found.append(tensor.data_ptr()))
    tensors = []
    for name in ("alone", "named", "viewed"):
        (tmp_path / name).write_bytes(b"1" * 8192)
        tensors.append(torch.from_file(str(tmp_path / name), shared=True, size=8192, dtype=torch.uint8))
    alone, named, view = tensors[0].data_ptr(), tensors[1], tensors[2][:10]
    tensors.append(torch.ones(8192))  # of no file
    release_file_pages(tensors, mapped_files())
    assert tensors == []
    assert found == [alone]
    assert named.sum() == 8192 * ord("1")
    assert view.sum() == 10 * ord("1")


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="there are no large pages here")
def test_a_tensor_of_one_large_page_gets_it():
    zeros = zeros_in_large_pages((LARGE_PAGE // 8,), dtype=torch.float64, device="cpu")
    assert zeros.data_ptr() % LARGE_PAGE == 0
    assert not zeros.any()
    small = zeros_in_large_pages((LARGE_PAGE // 8 - 1,), dtype=torch.float64, device="cpu")
    assert not small.any()
    assert small.untyped_storage().nbytes() < LARGE_PAGE
    assert zeros_in_large_pages((LARGE_PAGE,), dtype=torch.float64, device="meta").is_meta


def test_more_memory_than_there_are_addresses_is_refused():
    with pytest.raises(ResourceError, match=r"does not give [\d,]+ bytes of memory in one piece"):
        empty_in_large_pages((1 << 62,), dtype=torch.float64)

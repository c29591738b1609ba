"""Values of few bits in int32 words, against the package whose layout it is."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hasten.checkpoints.formats.packing import pack_columns, pack_rows, unpack_columns, unpack_rows


@given(
    rows=st.integers(1, 9), columns=st.integers(1, 200), bits=st.sampled_from([2, 3, 4]), seed=st.integers(0, 1 << 20)
)
def test_words_are_those_of_compressed_tensors(rows, columns, bits, seed):
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    values = torch.randint(0, 1 << bits, (rows, columns), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    signed = (values.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)
    packed = pack_columns(values, bits)
    assert torch.equal(packed, helpers.pack_to_int32(signed, bits))
    assert torch.equal(unpack_columns(packed, columns, bits), values)
    assert pack_columns(values.to("meta"), bits).shape == packed.shape
    turned = pack_rows(values, bits)
    assert torch.equal(turned, helpers.pack_to_int32(signed, bits, packed_dim=0))
    assert torch.equal(unpack_rows(turned, rows, bits), values)

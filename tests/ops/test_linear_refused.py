"""What no layer can be made of, or multiplies, is refused in words."""

from dataclasses import replace

import pytest
import torch

from hasten.errors import ConfigError
from hasten.ops.linear import BFLOAT16, INT8, PackedLinear, QuantizedWeight, WeightFormat, int4_format
from hasten.ops.linear.weights import Scales
from instruction_sets import NATIVE, needs_native
from linear_cases import int4_weight, layer_of, make_weight

pytestmark = pytest.mark.usefixtures("two_threads")


def test_what_does_not_fit_is_refused_in_words():
    layer = layer_of(make_weight(8, 96, format="int8"))
    with pytest.raises(ConfigError, match=r"takes 96 features; found x of shape \(2, 95\)"):
        layer(torch.randn(2, 95))
    with pytest.raises(ConfigError, match="element='int3'"):
        PackedLinear(8, 8, WeightFormat(element="int3"))
    with pytest.raises(ConfigError, match="int4 in groups"):
        PackedLinear(8, 8, int4_format(0))
    for wrong in ("int8", None, WeightFormat(element="foo"), WeightFormat(element=""), int4_format(32.0)):
        with pytest.raises(ConfigError, match=r"found 'int8'|found None|use bfloat16, float16, int8"):
            PackedLinear(64, 8, wrong)
    for dtype in (torch.int32, torch.float64):
        with pytest.raises(ConfigError, match="no linear layer"):
            PackedLinear(64, 8, int4_format(32, scale_dtype=dtype))
    with pytest.raises(ConfigError, match="no linear layer"):
        PackedLinear(64, 8, replace(INT8, scales=(Scales(torch.float16),)))
    words = QuantizedWeight(format=INT8, values=torch.zeros(8, 4, dtype=torch.int32), scales=torch.ones(8, 1))
    with pytest.raises(ConfigError, match="use int4"):
        PackedLinear.from_int4_words(words, in_features=32)
    with pytest.raises(ConfigError, match="use float8_e4m3fn or int8"):
        PackedLinear.from_weight(replace(make_weight(8, 96, format="int8"), format=BFLOAT16))
    weight = make_weight(8, 96, format="int4", group_size=32)
    wrong = replace(weight, format=int4_format(64, scale_dtype=weight.scales.dtype))
    with pytest.raises(ConfigError, match=r"scales \(8, 2\) in torch.float16; found .*\(8, 3\)"):
        PackedLinear.from_weight(wrong)
    with pytest.raises(ConfigError, match="bias of shape"):
        PackedLinear.from_weight(weight, torch.zeros(9))
    with pytest.raises(ConfigError, match="int32 words"):
        PackedLinear.from_int4_words(replace(weight, values=torch.zeros(8, 5, dtype=torch.int32)), in_features=96)
    with pytest.raises(ConfigError, match="holds no quantized weight"):
        layer_of(torch.randn(8, 8).bfloat16()).to_weight()


@pytest.mark.parametrize("kernel", [*(["native"] if NATIVE else []), "pytorch"])
@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.tensor(1.0), "takes 65 features"),
        (torch.ones(2, 65, dtype=torch.int32), "no int32 activations"),
        (torch.ones(2, 65, dtype=torch.bool), "no bool activations"),
    ],
)
def test_an_input_that_no_kernel_takes_is_refused_in_words(kernel, x, words):
    layer = PackedLinear.from_weight(int4_weight(), kernel=kernel)
    with torch.no_grad(), pytest.raises(ConfigError, match=words):
        layer(x)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_the_native_kernel_refuses_other_floats_until_the_layer_is_cast(dtype):
    layer = PackedLinear.from_weight(int4_weight())
    x = torch.randn(2, 65).to(dtype)
    with torch.no_grad():
        with pytest.raises(ConfigError, match=r"'native'.*no float\d\d.*convert x"):
            layer(x)
        assert layer.to(dtype)(x).dtype == dtype


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"values": torch.zeros(65, dtype=torch.uint8)}, r"values of a weight are \(N, K\)"),
        ({"values": torch.full((70, 65), 200, dtype=torch.uint8)}, "0 to 15; found 200"),
        ({"zeros": torch.full((70, 3), 16, dtype=torch.uint8)}, "zero points of an int4 weight are 0 to 15; found 16"),
        ({"zeros": torch.zeros(70, 3, dtype=torch.int32)}, "torch.uint8; found .* in torch.int32"),
        ({"zeros": torch.zeros(70, 2, dtype=torch.uint8)}, r"wants zero points \(70, 3\)"),
        ({"scales": torch.ones(70, 3, dtype=torch.int32)}, "found torch.int32"),
        ({"scales": torch.ones(70, 2)}, r"wants scales \(70, 3\)"),
        ({"format": replace(INT8, zero="point")}, "use float8_e4m3fn or int8"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused_before_anything_is_packed(changes, words):
    with pytest.raises(ConfigError, match=words):
        PackedLinear.from_weight(int4_weight(**changes))


@pytest.mark.parametrize("changes", [{"zeros": torch.full((64, 1), 16, dtype=torch.uint8)}, {"values": torch.ones(8)}])
def test_words_are_checked_as_values_are(changes):
    parts = {
        "values": torch.zeros(64, 4, dtype=torch.int32),
        "scales": torch.ones(64, 1).half(),
        "zeros": None,
    } | changes
    format = int4_format(32, symmetric=parts["zeros"] is None, scale_dtype=torch.float16)
    with pytest.raises(ConfigError, match=r"0 to 15; found 16|int32 words a row"):
        PackedLinear.from_int4_words(QuantizedWeight(**parts, format=format), in_features=32)


@pytest.mark.parametrize("kernel", [*(["native"] if NATIVE else []), "pytorch"])
@pytest.mark.parametrize("ids", [[70], [127], [-1], [3, 5000]])
def test_a_row_that_is_not_there_is_not_read_as_padding(kernel, ids):
    layer = PackedLinear.from_weight(int4_weight(), kernel=kernel)
    with pytest.raises(ConfigError, match="rows 0 to 69"):
        layer.rows(torch.tensor(ids))
    assert layer.rows(torch.tensor([[0, 69]])).shape == (1, 2, 65)
    assert layer.rows(torch.empty(0, dtype=torch.int64)).shape == (0, 65)


def test_only_a_linear_layer_is_packed():
    with pytest.raises(ConfigError, match=r"made of an nn.Linear; found Conv1d"):
        PackedLinear.from_linear(torch.nn.Conv1d(8, 3, 1))

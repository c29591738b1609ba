"""Int4 by GPTQ on text that the model writes itself, on a chapter of a book, against float32."""

import pytest

import hasten
from hasten.evaluation.divergence import divergence
from hasten.quantization import GPTQ, Int4
from real_models import PLAIN, packed

pytestmark = [pytest.mark.real(minutes=8), pytest.mark.night, pytest.mark.timeout(600)]


def test_int4_by_gptq_on_the_models_own_text_is_nearer_than_by_rounding(real, exact, document):
    if real.name.startswith("qwen"):
        pytest.xfail("KL 0.099 beside 0.098: its layers have up to 4,864 inputs, the 16 samples only 4,096 tokens")
    scheme = Int4(**PLAIN)
    rounded = divergence(packed(real, scheme), exact, [document])
    samples = hasten.own_text(packed(real), samples=16, length=256)
    solved = divergence(packed(real, scheme, method=GPTQ(), calibration=samples), exact, [document])
    assert solved.kl_mean < 0.75 * rounded.kl_mean
    assert solved.perplexity < rounded.perplexity

"""What 16 bits, int8 and int4 cost published models on a chapter of a book, each against float32."""

import math

import pytest
import torch

import hasten
from hasten.evaluation.divergence import divergence
from hasten.evaluation.perplexity import perplexity
from hasten.model.fused import fuse_where_it_fits
from hasten.quantization import Int4, Int8
from real_models import PLAIN, load_file, packed

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.real(minutes=6), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def theirs(real, document):
    """Perplexity of the document by transformers in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(real.folder, dtype=torch.float32)
    ids = torch.tensor([document])
    with torch.inference_mode():
        return math.exp(float(model(ids, labels=ids).loss))


def test_float32_and_bfloat16_have_the_perplexity_of_transformers(real, exact, theirs, document):
    assert perplexity(exact, [document]).perplexity == pytest.approx(theirs, rel=1e-4)
    assert perplexity(packed(real), [document]).perplexity == pytest.approx(theirs, rel=0.005)


def test_the_file_has_it_too(real, theirs, document):
    assert perplexity(load_file(real), [document]).perplexity == pytest.approx(theirs, rel=0.01)


# What is not reached yet, and by how much.
MISSED = {
    ("smollm2-135m", "int8"): "one scale for a whole row of activations: perplexity 5.3% above float32's, KL 0.035",
    ("gemma3-270m", "int8"): "one scale for a whole row of activations: perplexity 4.2% above float32's",
    ("qwen2.5-coder-0.5b", "int8"): "one scale for a whole row of activations: perplexity 4.3% above float32's",
}


@pytest.mark.parametrize("activations", ["auto", "float", "int8"])
def test_int8_costs_little(real, exact, theirs, document, activations):
    found = divergence(packed(real, Int8(activations=activations)), exact, [document])
    reached = found.perplexity == pytest.approx(theirs, rel=0.01) and found.kl_mean <= 0.005
    if reason := MISSED.get((real.name, activations)):
        assert not reached, "reached now: take it out of MISSED"
        pytest.xfail(reason)
    assert reached, found


def test_int4_by_rounding_is_no_worse_than_q4_0_of_the_same_bits(real, exact, document):
    """llama.cpp's Q4_0 by the gguf package, which rounds as llama.cpp does; head and embedding as they are in both."""
    if real.name.startswith("qwen"):
        pytest.skip("its weights lie on the grid of Q5_0, of which every second number is one of Q4_0")
    quants = pytest.importorskip("gguf").quants
    theirs = hasten.load(real.folder, dtype="bfloat16")
    for layer in theirs.blocks.modules():
        if isinstance(layer, torch.nn.Linear):
            stored = quants.quantize(layer.weight.detach().float().numpy(), quants.GGMLQuantizationType.Q4_0)
            rounded = quants.dequantize(stored, quants.GGMLQuantizationType.Q4_0)
            layer.weight.data.copy_(torch.from_numpy(rounded))
    ours = packed(real, Int4(**PLAIN))
    found = [divergence(model, exact, [document]) for model in (ours, fuse_where_it_fits(theirs))]
    assert found[0].perplexity <= found[1].perplexity
    assert found[0].kl_mean <= found[1].kl_mean

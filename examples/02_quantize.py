"""Quantize a model in three ways, and measure what each costs in perplexity.

python examples/02_quantize.py [MODEL]
"""

import sys
import tempfile

import hasten
from hasten.data.book import book, texts
from hasten.model.transformer import Transformer

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"


def load_plain(folder: str) -> Transformer:
    """Load the model with plain weights; a published GGUF file is usually quantized, so it is unpacked first."""
    model = hasten.load(MODEL)
    if model.quantization:
        hasten.save(model, folder, dequantize=True)
        model = hasten.load(folder)
    return model


with tempfile.TemporaryDirectory() as folder:
    model = load_plain(f"{folder}/plain")
    test = [book()[:3000]]
    print(f"plain: perplexity {hasten.perplexity(model, test).perplexity:.2f}")

    # Rounding to nearest: seconds, no data needed.
    for scheme in (hasten.Int8(), hasten.Int4(group_size=32)):
        model = hasten.quantize(load_plain(f"{folder}/plain"), scheme)
        print(f"{scheme}: perplexity {hasten.perplexity(model, test).perplexity:.2f}")

    # GPTQ chooses the integers by calibration text, block by block. Take text like that which the model will see.
    model = load_plain(f"{folder}/plain")
    others = [text for name, text in texts().items() if name != "alice"]
    calibration = hasten.calibration_tokens(model.tokenizer, others, samples=16, length=128)
    hasten.quantize(model, hasten.Int4(group_size=32), method=hasten.GPTQ(), calibration=calibration)
    print(f"int4 by GPTQ: perplexity {hasten.perplexity(model, test).perplexity:.2f}")

    # A folder in compressed-tensors' layout, which transformers and vLLM read too.
    hasten.save(model, f"{folder}/int4")
    print(hasten.generate(hasten.load(f"{folder}/int4"), ["Once upon a time"], max_new_tokens=16)[0].text)

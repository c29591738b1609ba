"""How good is a model, and what did a change to it cost? Perplexity, and the KL divergence from another model.

    python examples/10_evaluate.py [MODEL] [TEXT FILE]

Tasks of lm-evaluation-harness: hasten eval MODEL --tasks arc_easy,hellaswag (pip install 'hasten[eval]').
"""

import sys
import tempfile
from pathlib import Path

import hasten
from hasten.data.book import BOOK
from hasten.evaluation.divergence import divergence

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
TEXT = Path(sys.argv[2] if len(sys.argv) > 2 else BOOK).read_text(encoding="utf-8")[:4000]

model = hasten.load(MODEL)
score = hasten.perplexity(model, [TEXT], context=512)
print(f"{MODEL}: perplexity {score.perplexity:.2f} over {score.tokens} tokens, {score.bits_per_byte:.3f} bits per byte")

# A smaller KV cache is a change too: keys and values in 8 bits.
small = hasten.perplexity(model, [TEXT], context=512, kv_cache_dtype="int8")
print(f"with its KV cache in int8: {small.perplexity:.2f}")

# What rounding the weights changes, token by token, measured against the model with plain weights.
with tempfile.TemporaryDirectory() as folder:
    hasten.save(model, folder, dequantize=True)
    plain, rounded = hasten.load(folder), hasten.quantize(hasten.load(folder), hasten.Int4(group_size=128))
    cost = divergence(rounded, plain, [TEXT], context=512)
    print(f"in int4: perplexity {cost.perplexity:.2f} against {cost.against_perplexity:.2f}")
    print(f"KL divergence {cost.kl_mean:.4f} nats a token, the same most likely token in {cost.top1:.1%} of them")

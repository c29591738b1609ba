"""Load a model, stream an answer, then answer several prompts in one batch.

python examples/01_load_and_stream.py [MODEL]      # MODEL: a folder, a GGUF file, a hub id or a short name
"""

import sys

import hasten

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"

model = hasten.load(MODEL)  # weights are mapped from the file; device="cuda" copies them to a GPU
print(f"{model.config.family}: {len(model.blocks)} blocks of width {model.config.hidden_size}, on {model.device}")

# One text, piece by piece, as its tokens are sampled.
for piece in hasten.stream(model, "The capital of France is", temperature=0, max_new_tokens=24):
    print(piece, end="", flush=True)
print()

# Several texts at once. Every prompt gets the same answer as it would alone.
params = hasten.SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_new_tokens=24)
for output in hasten.generate(model, ["Once upon a time", "The sea is"], params):
    print(f"{output.prompt_tokens} + {len(output.tokens)} tokens, ended by {output.finish_reason}: {output.text!r}")

# Many texts of different lengths: the engine of `hasten serve`, with continuous batching and a paged cache.
llm = hasten.LLM(model, max_sequences=8)
for answer in llm.generate([f"{number} plus {number} is" for number in range(1, 5)], params):
    print(repr(answer.text))

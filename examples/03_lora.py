"""Finetune a LoRA adapter on a text, over whatever weights the model has (QLoRA if they are quantized), and use it.

    python examples/03_lora.py [MODEL] [TEXT FILE] [STEPS]

The command that does the same: hasten train finetune --init MODEL --data.source FILE --lora.rank 16 …
"""

import sys
import tempfile
from dataclasses import replace

import hasten
from hasten.data.book import BOOK
from hasten.training import RECIPES, Data, Lora, Optimizer, Run, Techniques

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
TEXT = sys.argv[2] if len(sys.argv) > 2 else str(BOOK)
STEPS = int(sys.argv[3]) if len(sys.argv) > 3 else 20

with tempfile.TemporaryDirectory() as folder:
    recipe = replace(
        RECIPES["finetune"],
        name="my-adapter",
        init=MODEL,
        data=Data(source=TEXT, context=128, batch_size=4, validation_fraction=0.0),
        lora=Lora(rank=16),  # narrow matrices A and B beside every linear layer; only these are trained and saved
        optimizer=Optimizer(learning_rate=2e-4, weight_decay=0.0),
        techniques=Techniques(pad_vocabulary_to=1, compile=False),  # compiling takes longer than a few steps
        run=Run(steps=STEPS, folder=folder, checkpoint_every=STEPS),
    )
    result = hasten.train(recipe, on_step=lambda line: print(f"step {line['step']}: loss {line['loss']:.3f}"))
    print(f"the adapter, in peft's layout: {result.model_folder}")

    # Several adapters can share one model: each request names the one that it wants.
    llm = hasten.LLM(MODEL, adapters={"book": result.model_folder})
    greedy = hasten.SamplingParams(temperature=0, max_new_tokens=24)
    for adapter in ("", "book"):
        (answer,) = llm.generate("Alice was beginning to", greedy, adapter=adapter)
        print(f"{adapter or 'no adapter'}: {answer.text!r}")

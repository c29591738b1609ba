"""Read a GGUF file, write one, and read that again: for llama.cpp, or from it.

pip install 'hasten[gguf]'                         # only writing needs the package
python examples/09_gguf.py [MODEL]                 # MODEL: a GGUF file, or anything else that hasten loads
"""

import sys
import tempfile
from pathlib import Path

import hasten
from hasten.checkpoints.gguf.write import write_gguf

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
PROMPT = "Once upon a time"


def answer(source: str | Path) -> str:
    return hasten.generate(hasten.load(source), [PROMPT], temperature=0, max_new_tokens=24)[0].text


with tempfile.TemporaryDirectory() as work:
    print(f"{MODEL}: {answer(MODEL)!r}")

    # GGUF's quantized types become hasten's own packed layers. As plain weights they make a Hugging Face folder.
    folder = Path(work, "plain")
    hasten.save(hasten.load(MODEL), folder, dequantize=True)

    # The other way: a folder as a GGUF file, its plain matrices in one of BF16, F16, Q8_0 and Q4_0.
    for kind in ("BF16", "Q8_0"):
        file = Path(work, f"model-{kind}.gguf")
        write_gguf(hasten.load(folder), file, kind)
        print(f"{kind}, {file.stat().st_size / 2**20:.1f} MiB: {answer(file)!r}")

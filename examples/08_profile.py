"""Measure where the time of a decode step goes, and how far each part is from the machine's limit.

    python examples/08_profile.py [MODEL] [OUTPUT FOLDER]

The command with a picture of it: hasten profile generate MODEL; hasten profile train RECIPE for a training step.
"""

import sys
import tempfile
from pathlib import Path

import hasten

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
FOLDER = Path(sys.argv[2] if len(sys.argv) > 2 else tempfile.mkdtemp())

model = hasten.fuse(hasten.load(MODEL))  # as everything that generates does; without it readable blocks are profiled
found = hasten.profile(model, FOLDER, prompt_tokens=64, steps=3)
for phase in found.phases:  # reading the prompt, then one token
    print(f"\n{phase.name}: {phase.tokens} tokens in {1e3 * phase.seconds:.2f} ms")
    leaves = [row for row in phase.rows if row.leaf]
    for row in sorted(leaves, key=lambda row: row.limit - row.seconds)[:6]:  # the most to gain first
        print(f"  {row.name:32} {1e3 * row.seconds:8.3f} ms, at the limit {1e3 * row.limit:8.3f} ms")

# Which kernel each operator runs, and why not the others.
for binding in {(one.operator, one.kernel): one for one in found.kernels}.values():
    print(f"{binding.operator}: {binding.kernel}")
print(f"pictures, and traces for ui.perfetto.dev: {', '.join(sorted(path.name for path in FOLDER.iterdir()))}")

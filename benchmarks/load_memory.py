"""How much memory `hasten.load` takes at its peak, above what importing torch takes, for a checkpoint of a given size.

    python benchmarks/load_memory.py --gigabytes 1.1 --output benchmarks/results/load-memory.json

Writes a random Llama into a temporary folder, a shard at a time, loads it in a process of its own and reads that
process's peak resident memory (VmHWM), in which the pages of mapped files count.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

LAYER_WIDTH = 2048
LIMIT = 1.15  # times the checkpoint's size

# The child measures itself. Its baseline is taken after importing torch, before importing anything else of ours.
CHILD = """
import json, sys
import torch
from hasten.machine import peak_memory, process_memory
baseline = process_memory()
import hasten
model = hasten.load(sys.argv[1])
peak, tensors = peak_memory(), sum(p.nbytes for p in model.parameters())
print(json.dumps({"baseline_bytes": baseline, "peak_bytes": peak, "tensor_bytes": tensors}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadMemory:
    """Measure the peak memory of loading a checkpoint."""

    gigabytes: float = 1.1
    """Size of the checkpoint in GB (10^9 bytes)."""

    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Dtype of the checkpoint, and of the loaded model."""

    shards: int = 2
    """Number of safetensors files."""

    output: Path | None = None
    """Where to write the JSON; printed in any case."""

    def run(self) -> None:
        with tempfile.TemporaryDirectory(prefix="hasten-load-memory-") as name:
            folder = Path(name)
            size = write_random_llama(
                folder, bytes_wanted=int(self.gigabytes * 1e9), dtype=self.dtype, shards=self.shards
            )
            result = measure(folder)
        from hasten.machine import describe
        from hasten.machine.files import write_json

        row: dict[str, Any] = {
            "checkpoint_bytes": size,
            "dtype": self.dtype,
            "shards": self.shards,
            "limit": LIMIT,
        } | result
        row["ratio"] = round((result["peak_bytes"] - result["baseline_bytes"]) / size, 4)
        report = {"schema": 1, "machine": describe().to_json(), "rows": [row]}
        write_json("-", report)
        write_json(self.output, report)
        if row["ratio"] > LIMIT:
            sys.exit(f"the peak is {row['ratio']:.3f} × the checkpoint's size; at most {LIMIT} is allowed")


def measure(folder: Path) -> dict[str, int]:
    """Baseline and peak in bytes of a fresh process that loads the folder."""
    command = [sys.executable, "-c", CHILD, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"loading failed:\n{done.stderr}")
    result: dict[str, int] = json.loads(done.stdout)
    return result


def write_random_llama(folder: Path, *, bytes_wanted: int, dtype: str, shards: int, width: int = LAYER_WIDTH) -> int:
    """Write a Llama with random weights of at least `bytes_wanted` bytes, and return the size of its files.

    One shard is in memory at a time.
    """
    import torch
    from safetensors.torch import save_file

    kind = getattr(torch, dtype)
    vocab, size, kv = 16 * width, 11 * width // 4, width // 8
    per_layer = width * (2 * width + 2 * kv + 3 * size + 2)
    layers = max(1, -(-(bytes_wanted // kind.itemsize - 2 * vocab * width) // per_layer))
    shapes = {
        "model.embed_tokens.weight": (vocab, width),
        "model.norm.weight": (width,),
        "lm_head.weight": (vocab, width),
    }
    for i in range(layers):
        start = f"model.layers.{i}"
        for name, rows, columns in (
            ("self_attn.q_proj", width, width),
            ("self_attn.k_proj", kv, width),
            ("self_attn.v_proj", kv, width),
            ("self_attn.o_proj", width, width),
            ("mlp.gate_proj", size, width),
            ("mlp.up_proj", size, width),
            ("mlp.down_proj", width, size),
        ):
            shapes[f"{start}.{name}.weight"] = (rows, columns)
        shapes |= {f"{start}.{name}.weight": (width,) for name in ("input_layernorm", "post_attention_layernorm")}
    config = {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": size,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": width // 16,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    names, weight_map, total = list(shapes), {}, 0
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: torch.randn(shapes[name], dtype=torch.float32).mul_(0.02).to(kind) for name in names[i::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
        total += (folder / file).stat().st_size
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return total


if __name__ == "__main__":
    import tyro

    tyro.cli(LoadMemory).run()

"""What loading, quantizing and checkpointing take: peak resident memory, and seconds.

    python benchmarks/memory.py load --output benchmarks/results/load-memory.json
    python benchmarks/memory.py quantize --output benchmarks/results/quantize-memory.json
    python benchmarks/memory.py quantize-time --output benchmarks/results/quantize-time.json
    python benchmarks/memory.py checkpoint --output benchmarks/results/checkpoint-memory.json

Each measurement is a process of its own, whose peak (VmHWM) counts the pages of mapped files too.
"""

import ctypes
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from hasten.bench.models import BenchmarkModel
from hasten.checkpoints.export import save
from hasten.data import Batch, read_documents, train_bpe
from hasten.distributed.launch import joined
from hasten.machine import peak_memory, process_memory, reset_peak_memory
from hasten.measure.script import Report, Script, Table, main, markdown
from hasten.measure.workers import child_command, hasten_json, last_json, on_ranks
from hasten.model.initialize import initialize
from hasten.training import build, checkpoints
from hasten.training.checkpoint_state import RandomState, TrainingState
from hasten.training.recipe import Data, Parallel, Recipe, Shape, Techniques

KEPT = ("seconds", "peak_memory_bytes", "predicted_memory_bytes", "bits_per_weight")
LIMIT = 1.15  # times the checkpoint's size, of loading
# Measured by the process itself. Its baseline is taken after importing torch, before importing anything else of ours.
LOAD = """
import json, sys, time
import torch
from hasten.machine import peak_memory, process_memory
baseline = process_memory()
start = time.perf_counter()
import hasten
model = hasten.load(sys.argv[1])
peak, tensors = peak_memory(), sum(p.nbytes for p in model.parameters())
found = {"baseline_bytes": baseline, "peak_bytes": peak, "tensor_bytes": tensors}
print(json.dumps(found | {"seconds": time.perf_counter() - start}))
"""


@dataclass(frozen=True, kw_only=True)
class CheckpointMemory(Script):
    """Writing a checkpoint beside training: resident memory of each of two ranks, in shares of what it writes.

    Moments: when `save` has returned, which is when training goes on; and the most until the checkpoint counts. A
    synchronous one may take 0.1 shards, one in the background, which stages a copy, 1.1. On a GPU the tensor that is
    being written is copied to the host, so the largest one is reported too. Then steps are taken with and without
    checkpoints.
    """

    result = "checkpoint-memory"

    def measure(self) -> Report:
        with tempfile.TemporaryDirectory() as folder:
            on_ranks(2, child_command(__file__, "checkpoint", folder))
            rows = [row for rank in range(2) for row in json.loads((Path(folder) / f"{rank}.json").read_text())]
        passed = all(row["peak"] <= ALLOWED[row["background"]] * row["shard"] for row in rows)
        return {"kind": "checkpoint memory", "shape": SHAPE, "passed": passed, "rows": rows}


def checkpoint_rank(out: str) -> None:
    """One rank: every case, and a file with its lines."""
    torch.set_num_threads(1)
    with joined() as ranks:
        found = []
        for number, case in enumerate(CASES):
            found.append(checkpointed(**case, ranks=ranks, folder=Path(out) / str(number)))
            gc.collect()
        (Path(out) / f"{ranks.rank}.json").write_text(json.dumps(found))


def in_a_process(code: str, *arguments: object) -> dict[str, Any]:
    """What the last line of a process that runs this code says."""
    return last_json([sys.executable, "-W", "ignore", "-c", code, *arguments])


def write_checkpoint(shape: str, folder: Path, *, tokenizer: bool = False) -> Any:
    """Write the shape with random bfloat16 weights, and byte pairs learnt from the standard library; the model."""
    model: Any = BenchmarkModel(shape=shape).build(dtype=torch.bfloat16, device="cpu", seed=0)
    if tokenizer:
        model.tokenizer = train_bpe(read_documents("stdlib", limit_bytes=2_000_000), vocab_size=4096)
    save(model, folder)
    return model


LAYER_WIDTH = 2048

# The child measures itself. Its baseline is taken after importing torch, before importing anything else of ours.


@dataclass(frozen=True, kw_only=True)
class LoadMemory(Script):
    """The peak of `hasten.load` above what importing torch takes, for a random Llama of a given size."""

    result = "load-memory"
    gigabytes: float = 1.1
    """Size of the checkpoint in GB (10^9 bytes)."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Dtype of the checkpoint, and of the loaded model."""
    shards: int = 2
    """Number of safetensors files."""

    def measure(self) -> Report:
        with tempfile.TemporaryDirectory(prefix="hasten-load-memory-") as name:
            folder, size = Path(name), int(self.gigabytes * 1e9)
            written = write_random_llama(folder, bytes_wanted=size, dtype=self.dtype, shards=self.shards)
            found = last_json([sys.executable, "-W", "ignore", "-c", LOAD, folder])
        ratio = round((found["peak_bytes"] - found["baseline_bytes"]) / written, 4)
        print(f"the peak is {ratio:.3f} × the checkpoint's size; {LIMIT} is allowed")
        what = {"checkpoint_bytes": written, "dtype": self.dtype, "shards": self.shards, "limit": LIMIT}
        return {"rows": [what | found | {"ratio": ratio}], "passed": ratio <= LIMIT}


def write_random_llama(folder: Path, *, bytes_wanted: int, dtype: str, shards: int, width: int = LAYER_WIDTH) -> int:
    """Write a Llama with random weights of at least `bytes_wanted` bytes, and return the size of its files.

    One shard is in memory at a time.
    """
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


# Both children take their baseline after importing torch, before importing anything else of ours.
QUANTIZE = """
import json, sys
import torch
from hasten.machine import peak_memory, process_memory
baseline = process_memory()
from hasten.cli.main import main
main(["quantize", *sys.argv[2:], "--json", sys.argv[1]])
print(json.dumps({"baseline_bytes": baseline, "peak_bytes": peak_memory()}))
"""

G128 = ("--scheme", "int4", "--group-size", "128")
SCHEMES = {
    "int8": ["--scheme", "int8"],
    "int4 g128 mse": [*G128],
    "int4 g128 minmax": [*G128, "--search", "minmax"],
    "int4 g32 mse": ["--scheme", "int4"],
    "int4 g128 mse asymmetric": [*G128, "--asymmetric"],
}


@dataclass(frozen=True, kw_only=True)
class QuantizeMemory(Script):
    """Time, size, errors and peak memory of quantizing a checkpoint of a named shape, and of loading the result.

    The peak of quantizing should exceed the checkpoint by little more than what the largest layer takes, whatever the
    output's size; that of loading should be the output's size.
    """

    result = "quantize-memory"
    shape: str = "llama-1.1b"
    """A shape of `hasten bench`."""

    def measure(self) -> Report:
        with tempfile.TemporaryDirectory(prefix="hasten-quantize-memory-") as name:
            checkpoint = Path(name) / "checkpoint"
            model = write_checkpoint(self.shape, checkpoint)
            rows = [self.row(label, options, checkpoint, Path(name) / "out") for label, options in SCHEMES.items()]
        size = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
        largest = max(m.weight.nbytes for m in model.modules() if isinstance(m, torch.nn.Linear))
        for row in rows:
            row["checkpoint_bytes"], row["largest_layer_bytes"] = size, largest
            over = row["quantize"]["peak_bytes"] - row["quantize"]["baseline_bytes"] - size
            row["quantize"]["over_checkpoint_bytes"] = over
            loaded = row["load"]["peak_bytes"] - row["load"]["baseline_bytes"]
            row["load"]["ratio"] = round(loaded / row["bytes"], 4)
        return {"rows": rows}

    def row(self, label: str, options: list[str], checkpoint: Path, out: Path) -> dict[str, Any]:
        """Quantize and load again, each in a fresh process."""
        report = out.parent / "report.json"
        memory = in_a_process(QUANTIZE, report, checkpoint, *options, "--output", out, "--overwrite")
        done = json.loads(report.read_text())
        errors = [layer["relative_error"] for layer in done["layers"] if layer["name"] != "head"]
        return {
            "name": label,
            "bytes": done["bytes"],
            "seconds": round(done["seconds"], 2),
            "relative_error": {"mean": sum(errors) / len(errors), "largest": max(errors)},
            "quantize": memory,
            "load": in_a_process(LOAD, out),
        }


TEXT = ("--calibration", "stdlib")
METHODS = {
    "gptq": ["--scheme", "int4", "--method", "gptq", *TEXT],
    "gptaq": ["--scheme", "int3", "--group-size", "128", "--method", "gptq", "--gptaq", *TEXT],
}


@dataclass(frozen=True, kw_only=True)
class QuantizeTime(Script):
    """How long calibrated quantization of a named shape takes here, and its memory, beside what was predicted."""

    result = "quantize-time"
    shape: str = "llama-1.1b"
    """A shape of `hasten bench`."""
    methods: tuple[str, ...] = tuple(METHODS)
    """Which methods; rows of others that the output has stay."""
    samples: int = 64
    """Calibration samples, of 512 tokens of the standard library."""
    device: str = "cpu"
    """Where it is computed."""

    def measure(self) -> Report:
        rows = [row for row in self.before().get("rows", []) if row["method"] not in self.methods]
        with tempfile.TemporaryDirectory(prefix="hasten-quantize-time-") as name:
            checkpoint = Path(name) / "checkpoint"
            write_checkpoint(self.shape, checkpoint, tokenizer=True)
            for method in self.methods:
                options = [*METHODS[method], "--samples", str(self.samples), "--length", "512"]
                where = ["--device", self.device, "--output", str(Path(name) / method)]
                found = hasten_json(["quantize", str(checkpoint), *options, *where])
                rows.append({"method": method, "options": options} | {key: found[key] for key in KEPT})
                print(rows[-1], flush=True)
        return {"rows": rows}


SHAPE = {"layers": 8, "hidden_size": 512, "heads": 8}
VOCABULARY, CONTEXT, ROWS = 4096, 16, 2
STEPS, EVERY = 16, 4
CASES = [{"zero": zero, "background": background} for zero in (0, 3) for background in (False, True)]
ALLOWED = {False: 0.1, True: 1.1}


def checkpointed(zero: int, background: bool, ranks: Any, folder: Path) -> dict[str, Any]:
    """One layout on this rank."""
    techniques = Techniques(precision="float32", compile=False, keep_memory=False)
    data = Data(batch_size=ROWS, context=CONTEXT)
    recipe = Recipe(name="memory", model=Shape(**SHAPE), data=data, techniques=techniques)
    recipe = replace(recipe, parallel=Parallel(zero=zero))  # type: ignore[arg-type]
    config = build.shape_config(recipe.model, vocab_size=VOCABULARY, positions=CONTEXT)
    step = build.training_step(initialize(config, seed=0), recipe, ranks=ranks)
    tokens = torch.randint(VOCABULARY, (ranks.rows(ROWS), CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    batches = [Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), None)]
    step.run(batches)
    values = {"progress": TrainingState(step=1).to_json(), "data": "", "scaler": {}, "recipe": recipe.to_json()}
    random = RandomState.capture(torch.device("cpu"))

    def save() -> checkpoints.Pending | None:
        about = {"placement": step.where, "optimizer": step.optimizer, "random": random, "values": values}
        return checkpoints.save(folder, **about, background=background)  # type: ignore[arg-type]

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free in the heap would hide what is taken
    reset_peak_memory()
    before = process_memory()
    pending = save()
    returned = process_memory()
    sizes = [] if pending is None else [part.data.nbytes for own in pending.files.values() for part in own]
    if pending is not None:
        pending.finish()
    peak = peak_memory() - before
    written = sum(path.stat().st_size for path in folder.glob(f"*-{ranks.rank}.safetensors"))
    found = {"zero": zero, "background": background, "rank": ranks.rank, "shard": written, "peak": peak}
    found |= {"returned": returned - before} | ({"largest": max(sizes)} if sizes else {})
    alone, _ = steps(step, batches, lambda: None, every=STEPS + 1)
    waits: list[float] = []

    def timed() -> checkpoints.Pending | None:
        start, pending = time.perf_counter(), save()
        waits.append(time.perf_counter() - start)
        return pending

    together, meanwhile = steps(step, batches, timed, every=EVERY)
    step_seconds, lost = alone / STEPS, (together - alone) / len(waits)
    return found | {"seconds": median(waits), "steps": meanwhile, "step_seconds": step_seconds, "lost_seconds": lost}


def steps(step: Any, batches: Any, save: Callable[[], Any], *, every: int) -> tuple[float, int]:
    """Seconds of `STEPS` steps with a checkpoint after each `every` of them, and how many were taken while one was
    written. As in the loop of training, one counts after the first step that finds it written."""
    start, pending, meanwhile = time.perf_counter(), None, 0
    for number in range(1, STEPS + 1):
        step.run(batches)
        if pending is not None:
            meanwhile += 1
            if pending.written():
                pending = pending.finish()
        if number % every == 0:
            if pending is not None:
                pending.finish()
            pending = save()
    if pending is not None:
        pending.finish()
    return time.perf_counter() - start, meanwhile


def checkpoint_table(report: Report) -> str:
    """The rank that takes more."""
    rows = []
    for case in CASES:
        own = [row for row in report["rows"] if all(row[key] == value for key, value in case.items())]
        worst = max(own, key=lambda row: row["peak"] / row["shard"])
        shown = [f"{worst[key] / worst['shard']:.2f}" for key in ("returned", "peak")]
        how = "in the background" if case["background"] else "synchronous"
        shown += [f"{ALLOWED[bool(case['background'])]}", f"{worst['step_seconds']:.2f} s"]
        shown += [f"{worst['seconds']:.2f} s", f"{worst['lost_seconds']:.2f} s", str(worst["steps"])]
        rows.append([f"zero {case['zero']}, {how}", f"{worst['shard'] / 1e6:.0f}", *shown])
    head = ["two ranks", "shard, MB", "when training goes on, shards", "at the peak, shards", "at most"]
    head += ["a step", "training waits", "lost in all", f"steps while {STEPS // EVERY} are written"]
    return markdown(head, rows)


def quantize_table(report: Report) -> str:
    """`memory.py quantize`."""
    rows = []
    for one in report["rows"]:
        error, over = one["relative_error"]["mean"], one["quantize"]["over_checkpoint_bytes"]
        size, ratio = f"{one['bytes'] / 1e9:.3f} GB", f"{one['load']['ratio']:.2f}"
        rows.append([one["name"], size, f"{one['seconds']:.0f}", f"{error:.2%}", f"{over / 1e6:.0f} MB", ratio])
    head = ["", "size", "seconds", "relative error", "quantize: over the checkpoint", "load: peak / size"]
    return markdown(head, rows)


def load_table(report: Report) -> str:
    """`memory.py load`."""
    rows = []
    for one in report["rows"]:
        size, peak = one["checkpoint_bytes"], one["peak_bytes"] - one["baseline_bytes"]
        cells = [f"{one['dtype']}, {one['shards']} shards", f"{size / 1e9:.2f} GB", f"{peak / 1e9:.2f} GB"]
        rows.append([*cells, f"{one['ratio']:.2f}"])
    return markdown(["checkpoint", "size", "peak above `import torch`", "peak / size"], rows)


TABLES: dict[str, Table] = {
    "load-memory": load_table,
    "quantize-memory": quantize_table,
    "checkpoint-memory": checkpoint_table,
}


if __name__ == "__main__":
    main(
        {"load": LoadMemory, "quantize": QuantizeMemory, "quantize-time": QuantizeTime, "checkpoint": CheckpointMemory},
        TABLES,
        {"checkpoint": checkpoint_rank},
    )

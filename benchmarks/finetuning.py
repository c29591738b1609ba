"""LoRA beside full finetuning, and a deeper model to start from.

    python benchmarks/finetuning.py lora --text '/usr/include/**/*.h' --output benchmarks/results/lora.json
    python benchmarks/finetuning.py deepen --model runs/code-25m/model --layers 12 --folder runs/code-45m-start

LoRA's quality: a small model of characters that was trained on Python's standard library is finetuned on C headers:
all weights, or an adapter beside a base in float32 or int4; the same steps and held-out files for all, three seeds. The
gain is what the held-out loss falls by; an int4 base begins with another loss, so that all gains count from the float32
model's. The adapters beside int4 are merged into it too, by rounding again (`hasten merge`).

Its memory and speed: a shape with random weights, a process for each way to train: its peak resident memory above that
after one step of a tiny model, which loads the libraries; and the bytes of weights, gradients and optimizer state,
counted. The processes take turns, and the median of all their steps counts.
"""

import json
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import hasten
from hasten.checkpoints.adapter_files import load_adapter
from hasten.checkpoints.export import export_model
from hasten.data import Batch
from hasten.machine import describe
from hasten.measure.script import Report, Script, Table, main, markdown
from hasten.measure.workers import child_command, last_json, reply
from hasten.model.initialize import initialize
from hasten.quantization import Int4, Int8, quantize
from hasten.quantization.merge import merge
from hasten.training import build
from hasten.training.build import shape_config
from hasten.training.recipe import Data, Lora, Optimizer, Recipe, Run, Schedule, Shape, Techniques
from hasten.training.recipes import FINETUNE
from hasten.training.session import train
from hasten.training.setup import set_up

WAYS = ("full", "float32", "int4")
B_RATE = ("*.b.*:rate=4",)
SPEED_WAYS = ("full", "float32", "bfloat16", "int8", "int4")
# Characters, because their embedding is small: a frozen one of a new domain's words would hold any adapter back.
BASE = Recipe(
    name="base",
    model=Shape(layers=4, hidden_size=128, heads=4),
    data=Data(source="stdlib", tokenizer_kind="character", limit_bytes=4_000_000, context=128, batch_size=8),
    optimizer=Optimizer(kind="muon", learning_rate=3e-3, beta2=0.99),
    schedule=Schedule(kind="wsd", warmup_steps=20, final_fraction=0.0, decay_fraction=0.3),
    techniques=Techniques(compile=False, precision="float32"),
    run=Run(steps=700, validate_every=350, validation_batches=10, checkpoint_every=350, device="cpu"),
)


@dataclass(frozen=True, kw_only=True)
class LoraBenchmark(Script):
    """Measure the quality, the memory and the speed of LoRA."""

    result = "lora"
    base: Path | None = None
    """The model to finetune, in float32; one is trained on Python's standard library (BASE) where none is named."""
    text: str = "/usr/include/**/*.h"
    """The new domain."""
    megabytes: float = 2.0
    """Size of the text."""
    steps: int = 250
    """Steps of 8 rows of 128 characters."""
    rank: int = 32
    learning_rate: float = 1.4e-3
    """Rate of A; B's is four times that (LoRA+, arXiv 2402.12354)."""
    full_learning_rate: float = 2e-3
    """Rate of full finetuning."""
    seeds: tuple[int, ...] = (0, 1, 2)
    layers: int = 3
    hidden_size: int = 768
    speed_steps: int = 2
    rounds: int = 2
    threads: int = 2
    """One, where others use the machine."""
    parts: tuple[str, ...] = ("quality", "cost")
    """What is measured; the rest of the output is kept."""

    def measure(self) -> Report:
        hidden = ("base", "parts", "text")
        settings = {name: value for name, value in self.settings().items() if name not in hidden}
        with TemporaryDirectory() as folder:
            found = {part: getattr(self, part)(Path(folder)) for part in self.parts}
        return self.before() | {"machine": describe().to_json(), "settings": settings} | found

    def quality(self, folder: Path) -> list[dict[str, Any]]:
        plain = self.base
        if plain is None:
            run = replace(BASE.run, folder=str(folder / "runs"), threads=self.threads)
            plain = train(replace(BASE, run=run), progress=False).model_folder
        hasten.save(quantize(hasten.load(plain), Int4(group_size=64)), folder / "int4")
        rows: list[dict[str, Any]] = []
        begun: dict[str, dict[str, Any]] = {}
        for seed in self.seeds:
            for way in WAYS:
                base = folder / way if way == "int4" else plain
                rate = self.full_learning_rate if way == "full" else self.learning_rate
                recipe = replace(
                    FINETUNE,
                    name=f"{way}-{seed}",
                    init=str(base),
                    lora=Lora(rank=None if way == "full" else self.rank),
                    data=replace(
                        FINETUNE.data,
                        source=self.text,
                        limit_bytes=int(self.megabytes * 1e6),
                        context=128,
                        batch_size=8,
                        accumulation=1,
                        validation_fraction=0.1,
                        separate_documents=False,
                    ),
                    optimizer=replace(FINETUNE.optimizer, learning_rate=rate, groups=() if way == "full" else B_RATE),
                    schedule=replace(FINETUNE.schedule, warmup_steps=30),
                    techniques=replace(FINETUNE.techniques, compile=False, precision="float32"),
                    run=replace(
                        FINETUNE.run,
                        folder=str(folder / "runs"),
                        epochs=None,
                        steps=self.steps,
                        validate_every=self.steps,
                        validation_batches=25,
                        checkpoint_every=self.steps,
                        device="cpu",
                        threads=self.threads,
                        seed=seed,
                    ),
                )
                if way not in begun:  # the same for every seed
                    setup = set_up(recipe, progress=False)
                    count = sum(p.numel() for p in setup.step.parameters)
                    begun[way] = {"trained": count, "before": setup.validation.loss(setup.step)}
                result = train(recipe, progress=False)
                rows.append({"way": way, "seed": seed, **begun[way], "after": result.validation_loss})
                print(rows[-1], flush=True)
                if way == "int4":
                    model, merged = hasten.load(base), folder / f"merged-{seed}"
                    lost = merge(model, load_adapter(result.model_folder, model), merged)
                    setup = set_up(replace(recipe, init=str(merged)), progress=False)  # a new adapter adds nothing yet
                    after = setup.validation.loss(setup.step)
                    error = {"lost": median(one.lost for one in lost)}
                    rows.append({"way": "int4 merged", "seed": seed, **begun[way], "after": after, **error})
                    print(rows[-1], flush=True)
        return rows

    def cost(self, folder: Path) -> list[dict[str, Any]]:
        for kind, layers, hidden in (("tiny", 1, 64), ("cost", self.layers, self.hidden_size)):
            shape = Shape(layers=layers, hidden_size=hidden, heads=hidden // 64)
            config = shape_config(shape, vocab_size=4096, positions=512)
            model = initialize(config, seed=0)
            for name, dtype in (("float32", None), ("bfloat16", torch.bfloat16)):
                export_model(model, folder / f"{kind}-{name}", dtype=dtype)
            for name, scheme in (("int8", Int8()), ("int4", Int4(group_size=64))):
                export_model(quantize(hasten.load(folder / f"{kind}-bfloat16"), scheme), folder / f"{kind}-{name}")
        found: dict[str, list[dict[str, Any]]] = {way: [] for way in SPEED_WAYS}
        for _ in range(self.rounds):
            for way, own in found.items():
                asked = {
                    "init": str(folder / f"cost-{'float32' if way == 'full' else way}"),
                    "tiny": str(folder / f"tiny-{'float32' if way == 'full' else way}"),
                    "rank": None if way == "full" else self.rank,
                    "steps": self.speed_steps,
                    "threads": self.threads,
                }
                own.append(last_json(child_command(__file__, "cost", json.dumps(asked))))
                print(way, own[-1], flush=True)
        return [
            {
                "way": way,
                "trained": own[0]["trained"],
                "counted_bytes": own[0]["counted_bytes"],
                "peak_bytes": median(one["peak_bytes"] for one in own),
                "step_seconds": [one["step_seconds"] for one in own],
                "tokens_per_second": own[0]["tokens"] / median(s for one in own for s in one["step_seconds"]),
            }
            for way, own in found.items()
        ]


def step_cost(given: str) -> None:
    """In a process of its own: some steps on random tokens; seconds, peak memory, and the bytes of what is held."""
    import resource

    asked = json.loads(given)
    torch.set_num_threads(asked["threads"])

    def make(init: str) -> build.TrainStep:
        recipe = replace(FINETUNE, init=init, lora=Lora(rank=asked["rank"]))
        recipe = replace(recipe, techniques=replace(recipe.techniques, precision="float32", compile=False))
        model = build.pretrained_model(init, recipe, device=torch.device("cpu"))
        return build.training_step(model, recipe)

    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    step, seconds, libraries = make(asked["tiny"]), [], 0
    for number in range(-1, asked["steps"] + 1):
        if number == 0:
            libraries = peak()
            step = make(asked["init"])
        model = step.model
        tokens = torch.randint(
            0, model.config.vocab_size, (4, 257), generator=torch.Generator().manual_seed(1 + number)
        )
        batch = Batch(inputs=tokens[:, :-1], targets=tokens[:, 1:].clone(), documents=None)
        start = time.perf_counter()
        step.run([batch])
        seconds.append(time.perf_counter() - start)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in model.state_dict().values()}
    gradients = sum(p.nbytes for p in step.parameters)
    moments = sum(t.nbytes for state in step.optimizer.state.values() for t in state.values() if t.dim())
    found = {
        "trained": sum(p.numel() for p in step.parameters),
        "counted_bytes": {"weights": sum(storages.values()), "gradients": gradients, "optimizer": moments},
        "peak_bytes": peak() - libraries,
        "step_seconds": seconds[2:],
        "tokens": 4 * 256,
    }
    reply(found)


@dataclass(frozen=True, kw_only=True)
class Deepen:
    """A Llama with more blocks that computes the same: between its blocks come new ones that add nothing yet.

    A new block is a copy of the one before it whose two output projections are zero (LLaMA Pro, arXiv 2401.02415), so
    training goes on from the loss that the model has.
    """

    model: Path
    """A Llama's folder, not quantized, in one file."""
    layers: int
    """Blocks of the result: a multiple of the model's."""
    folder: Path
    """The new one."""

    def run(self) -> None:
        config = json.loads((self.model / "config.json").read_text())
        layers = config["num_hidden_layers"]
        copies, rest = divmod(self.layers, layers)
        if rest or copies < 2:
            raise SystemExit(f"--layers {self.layers} is not two or more times the model's {layers}")
        if (self.folder / "config.json").exists():  # which is written last
            raise SystemExit(f"{self.folder} is there already")
        weights = {}
        for name, weight in load_file(self.model / "model.safetensors").items():
            before, inside_layers, after = name.partition(".layers.")
            if not inside_layers:
                weights[name] = weight
                continue
            number, _, inside = after.partition(".")
            adds = "o_proj." in inside or "down_proj." in inside
            for copy in range(copies):
                new = torch.zeros_like(weight) if copy and adds else weight.clone()
                weights[f"{before}.layers.{int(number) * copies + copy}.{inside}"] = new
        self.folder.mkdir(parents=True, exist_ok=True)
        save_file(weights, self.folder / "model.safetensors", metadata={"format": "pt"})
        for file in (*self.model.glob("tokenizer*"), *self.model.glob("generation_config.json")):
            shutil.copy(file, self.folder)
        (self.folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": self.layers}, indent=2))


LORA_WAYS = {"full": "all weights, float32"}
LORA_WAYS |= {name: f"adapter, base in {name}" for name in ("float32", "bfloat16", "int8", "int4")}
LORA_WAYS["int4 merged"] = "the same, merged into int4"


def quality_table(report: Report) -> str:
    """`finetuning.py lora`: what is kept of the gain of full finetuning, seed by seed."""
    rows = report["quality"]
    found = {(row["way"], row["seed"]): row for row in rows}
    start = {row["seed"]: row["before"] for row in rows if row["way"] == "full"}
    gains = {key: start[key[1]] - row["after"] for key, row in found.items()}
    lines = []
    for way in dict.fromkeys(row["way"] for row in rows):
        own = [row for row in rows if row["way"] == way]
        kept = " ".join(f"{gains[way, row['seed']] / gains['full', row['seed']]:.1%}" for row in own)
        losses = [" ".join(f"{row[key]:.3f}" for row in own) for key in ("before", "after")]
        gain = " ".join(f"{gains[way, row['seed']]:.3f}" for row in own)
        lines.append([LORA_WAYS[way], f"{own[0]['trained']:,}", *losses, gain, kept])
    return markdown(["", "trained", "loss before", "after", "gain", "of full finetuning's"], lines)


def cost_table(report: Report) -> str:
    """`finetuning.py lora`: memory and speed."""
    full = report["cost"][0]
    rows = []
    for one in report["cost"]:
        counted = one["counted_bytes"]
        held = [f"{counted[name] / 1e6:.1f} MB" for name in ("weights", "gradients", "optimizer")]
        speed = f"{one['tokens_per_second'] / full['tokens_per_second']:.2f}×"
        rows.append([LORA_WAYS[one["way"]], *held, f"{one['peak_bytes'] / 1e6:.0f} MB", speed])
    return markdown(["", "weights", "gradients", "AdamW", "peak of the process", "tokens/s"], rows)


TABLES: dict[str, Table] = {
    "lora": quality_table,
    "lora cost": cost_table,
}


if __name__ == "__main__":
    main({"lora": LoraBenchmark, "deepen": Deepen}, TABLES, {"cost": step_cost})

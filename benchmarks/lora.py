"""LoRA beside full finetuning: what it keeps of the gain on a new domain, the memory it takes, and its speed.

    python benchmarks/lora.py --text '/usr/include/**/*.h' --output benchmarks/results/lora.json

Quality: a small model of characters that was trained on Python's standard library is finetuned on C headers: all
weights, or an adapter beside a base in float32 or int4; the same steps and held-out files for all, three seeds. The
gain is what the held-out loss falls by; an int4 base begins with another loss, so that all gains count from the float32
model's. The adapters beside int4 are merged into it too, by rounding anew (`hasten merge`).

Memory and speed: a shape with random weights, a process for each way to train: its peak resident memory above that
after one step of a tiny model, which loads the libraries; and the bytes of weights, gradients and optimizer state,
counted. The processes take turns, and the median of all their steps counts.
"""

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import tyro

from hasten.training.recipe import Data, Optimizer, Recipe, Run, Schedule, Shape, Techniques

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraBenchmark:
    """Measure, print, and write."""

    base: Path | None = None
    """The model to finetune, in float32; one is trained on Python's standard library (BASE) where none is named."""
    text: str = "/usr/include/**/*.h"
    """The new domain."""
    megabytes: float = 2.0
    """Of it."""
    steps: int = 250
    """Of 8 rows of 128 characters."""
    rank: int = 32
    learning_rate: float = 1.4e-3
    """Of A; B's is four times that (LoRA+, arXiv 2402.12354)."""
    full_learning_rate: float = 2e-3
    """Of all weights."""
    seeds: tuple[int, ...] = (0, 1, 2)
    layers: int = 3
    hidden_size: int = 768
    speed_steps: int = 2
    rounds: int = 2
    threads: int = 2
    """One, where others use the machine."""
    parts: tuple[str, ...] = ("quality", "cost")
    """What is measured; the rest of the output is kept."""
    output: Path | None = None
    """Where to write the JSON; the rows are printed in any case."""
    one: str | None = None
    """Of a child: what it is to measure, as JSON."""

    def run(self) -> None:
        if self.one is not None:
            print(json.dumps(step_cost(json.loads(self.one))))
            return
        from hasten.machine import describe
        from hasten.machine.files import write_json

        settings = {
            name: getattr(self, name)
            for name in self.__slots__
            if name not in ("base", "parts", "output", "one", "text")
        }
        result: dict[str, Any] = {"schema": 1, "machine": describe().to_json(), "settings": settings}
        with TemporaryDirectory() as folder:
            for part in self.parts:
                result[part] = getattr(self, part)(Path(folder))
        if self.output:
            before = json.loads(self.output.read_text()) if self.output.exists() else {}
            write_json(self.output, before | result)

    def quality(self, folder: Path) -> list[dict[str, Any]]:
        import hasten
        from hasten.checkpoints.adapter_files import load_adapter
        from hasten.quantization import Int4, quantize
        from hasten.quantization.merge import merge
        from hasten.training.recipe import Lora
        from hasten.training.recipes import FINETUNE
        from hasten.training.session import train
        from hasten.training.setup import set_up

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
        import torch

        import hasten
        from hasten.checkpoints.export import export_model
        from hasten.model.initialize import initialize
        from hasten.quantization import Int4, Int8, quantize
        from hasten.training.build import shape_config
        from hasten.training.recipe import Shape

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
                command = [sys.executable, __file__, "--one", json.dumps(asked)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                own.append(json.loads(done.stdout.splitlines()[-1]))
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


def step_cost(asked: dict[str, Any]) -> dict[str, Any]:
    """In a process of its own: some steps on random tokens; seconds, peak memory, and the bytes of what is held."""
    import resource
    import time

    import torch

    from hasten.data import Batch
    from hasten.training import build
    from hasten.training.recipe import Lora
    from hasten.training.recipes import FINETUNE

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
    return {
        "trained": sum(p.numel() for p in step.parameters),
        "counted_bytes": {"weights": sum(storages.values()), "gradients": gradients, "optimizer": moments},
        "peak_bytes": peak() - libraries,
        "step_seconds": seconds[2:],
        "tokens": 4 * 256,
    }


if __name__ == "__main__":
    tyro.cli(LoraBenchmark).run()

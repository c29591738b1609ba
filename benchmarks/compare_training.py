"""Our training beside nanoGPT's, at nanoGPT's own configuration: the same batches, the same weights at the start.

    python benchmarks/compare_training.py --nanogpt FOLDER --output benchmarks/results/train-nanogpt.json

FOLDER is a checkout of github.com/karpathy/nanoGPT; only its model.py and what train.py does with it are used:
compiled, float32 (its choice on a CPU), 6 layers, 384 wide, 6 heads, block 256, batch 64, character tokens (of Python's
own library), dropout 0, no biases, AdamW with a rate of 1e-3 after 100 steps of warm-up, clipping at 1.

Each side trains in a process of its own that waits while the other one works. A round measures the machine's matrix
rates, then --steps steps of each. Ratios and utilisations are formed within a round; medians are over the rounds. Then
both go on, without being timed, until --total steps, and the losses of the last ones and on held-out text are compared.
"""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import tyro

LAYERS, HEADS, WIDTH, BLOCK, BATCH = 6, 6, 384, 256, 64
RATE, WARMUP = 1e-3, 100
VALIDATION = 4  # batches


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Train both in turn."""

    nanogpt: Path
    """A checkout of nanoGPT."""
    rounds: int = 6
    """0: only the losses, of --total steps."""
    steps: int = 2
    """Steps of each in a round."""
    total: int = 0
    """Go on to so many steps for the losses (0: stop after the rounds)."""
    micro_batch: int = 32
    """Rows of a micro-batch of ours; the step has 64 whatever this is."""
    threads: int = 2
    output: Path | None = None
    """Write the JSON here."""
    side: str | None = None
    """Be one of the two (what this program starts)."""
    work: Path | None = None

    def run(self) -> None:
        if self.side is not None:
            assert self.work is not None
            serve(self, self.side, self.work)
            return
        with tempfile.TemporaryDirectory(prefix="hasten-compare-") as folder:
            report = measure(self, Path(folder))
        text = json.dumps(report, indent=2) + "\n"
        print(text)
        if self.output is not None:
            self.output.write_text(text)


def measure(options: Compare, work: Path) -> dict[str, Any]:
    """Both sides, round by round."""
    import numpy as np
    import torch

    from hasten.machine import configure, describe, matrix_rate

    configure(threads=options.threads)
    vocab = write_batches(work, max(options.total, options.rounds * options.steps + 1))
    sides = {name: Side(options, name, work) for name in ("nanogpt", "hasten")}
    flops = 0.0
    rounds: list[dict[str, Any]] = []
    try:
        for side in sides.values():
            flops = side.read().get("flops_per_token", flops)
        for side in sides.values():  # compile, outside the rounds
            side.ask(1)
        for index in range(options.rounds):
            rates = {name: matrix_rate(getattr(torch, name), seconds=0.5) for name in ("float32", "bfloat16")}
            found: dict[str, Any] = {"rates": rates}
            for name, side in sides.items():
                seconds = side.ask(options.steps)["seconds"]
                speed = options.steps * BATCH * BLOCK / seconds
                found[name] = {"tokens_per_second": speed, "mfu": flops * speed / rates["bfloat16"]}
            found["ratio"] = found["hasten"]["tokens_per_second"] / found["nanogpt"]["tokens_per_second"]
            rounds.append(found)
            print(f"round {index + 1}: {json.dumps(found)}", file=sys.stderr, flush=True)
        taken = 1 + options.rounds * options.steps
        if options.total > taken:
            for side in sides.values():
                side.ask(options.total - taken)
            taken = options.total
        ends = {name: side.finish() for name, side in sides.items()}
    finally:
        for side in sides.values():
            side.close()
    last = max(1, taken // 10)
    losses = {name: mean(end["losses"][-last:]) for name, end in ends.items()}
    validation = {name: end["validation_loss"] for name, end in ends.items()}
    return {
        "schema": 1,
        "machine": describe().to_json(),
        "what": (
            f"{LAYERS} layers, {WIDTH} wide, block {BLOCK}, batch {BATCH}, {vocab} character tokens; nanoGPT compiled "
            f"in float32; ours in bfloat16, micro-batches of {options.micro_batch} rows"
        ),
        "threads": options.threads,
        "flops_per_token": flops,
        **timing(rounds),
        "steps": taken,
        "tokens": taken * BATCH * BLOCK,
        "loss_of_the_last_tenth": losses | {"difference": losses["hasten"] / losses["nanogpt"] - 1},
        "validation_loss": validation | {"difference": validation["hasten"] / validation["nanogpt"] - 1},
        "losses": {name: [round(float(np.float32(loss)), 5) for loss in end["losses"]] for name, end in ends.items()},
        "rounds": rounds,
    }


def timing(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians over the rounds, where there were any."""
    if not rounds:
        return {}
    names = ("nanogpt", "hasten")
    medians = {
        name: {key: median(r[name][key] for r in rounds) for key in ("tokens_per_second", "mfu")} for name in names
    }
    return {"ratio": median(r["ratio"] for r in rounds), "medians": medians}


def write_batches(work: Path, steps: int) -> int:
    """The batches that both train on, and held-out ones, as arrays in a folder; the size of the vocabulary."""
    import numpy as np

    from hasten.data import prepare

    data = prepare("stdlib", tokenizer_kind="character", limit_bytes=4_000_000, validation_fraction=0.1, progress=False)
    generator = np.random.default_rng(0)
    for name, split, count in (("train", data.train, steps), ("validation", data.validation, VALIDATION)):
        tokens = np.asarray(split.tokens)
        starts = generator.integers(0, len(tokens) - BLOCK - 1, count * BATCH)
        rows = np.stack([tokens[start : start + BLOCK + 1] for start in starts])
        np.save(work / f"{name}.npy", rows.reshape(count, BATCH, BLOCK + 1))
    (work / "vocab").write_text(str(data.tokenizer.vocab_size))
    return data.tokenizer.vocab_size


class Side:
    """The parent's end of one process."""

    def __init__(self, options: Compare, name: str, work: Path) -> None:
        self.name = name
        own = ["--side", name, "--work", str(work), "--nanogpt", str(options.nanogpt)]
        own += ["--threads", str(options.threads), "--micro-batch", str(options.micro_batch)]
        self.process = subprocess.Popen(
            [sys.executable, __file__, *own], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):  # nanoGPT prints to the same place
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise SystemExit(f"{self.name} ended with status {self.process.wait()}")

    def ask(self, steps: int) -> dict[str, Any]:
        """Have it take some steps."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        return self.read()

    def finish(self) -> dict[str, Any]:
        return self.ask(0)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def serve(options: Compare, name: str, work: Path) -> None:
    """Be one side: take as many steps as the parent says, 0 for the end."""
    import numpy as np
    import torch

    torch.set_num_threads(options.threads)
    torch.manual_seed(1337)
    vocab = int((work / "vocab").read_text())
    batches = np.load(work / "train.npy", mmap_mode="r")
    trainer = (NanoGPT if name == "nanogpt" else Hasten)(options, vocab, work)
    print(json.dumps({"flops_per_token": trainer.flops} if trainer.flops else {}), flush=True)
    losses: list[float] = []
    for line in sys.stdin:
        count = int(line)
        if not count:
            break
        start = time.perf_counter()
        for _ in range(count):
            rows = torch.from_numpy(batches[len(losses)].astype(np.int64))
            rate = RATE * min(1.0, (len(losses) + 1) / (WARMUP + 1))
            losses.append(trainer.step(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), rate))
        print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)
    held = torch.from_numpy(np.load(work / "validation.npy").astype(np.int64))
    validation = mean(trainer.evaluate(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in held)
    print(json.dumps({"losses": losses, "validation_loss": validation}), flush=True)


class NanoGPT:
    """Its model.py, and the body of its train.py's loop."""

    flops: float = 0.0

    def __init__(self, options: Compare, vocab: int, work: Path) -> None:
        import torch

        sys.path.insert(0, str(options.nanogpt))
        from model import GPT, GPTConfig  # type: ignore[import-not-found]

        self.plain = GPT(
            GPTConfig(
                block_size=BLOCK, vocab_size=vocab, n_layer=LAYERS, n_head=HEADS, n_embd=WIDTH, dropout=0.0, bias=False
            )
        )
        torch.save(self.plain.state_dict(), work / "start.part")
        (work / "start.part").rename(work / "start.pt")
        self.optimizer = self.plain.configure_optimizers(0.1, RATE, (0.9, 0.99), "cpu")
        self.model = torch.compile(self.plain)

    def step(self, inputs: Any, targets: Any, rate: float) -> float:
        import torch

        for group in self.optimizer.param_groups:
            group["lr"] = rate
        _, loss = self.model(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.plain.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.item())

    def evaluate(self, inputs: Any, targets: Any) -> float:
        import torch

        self.plain.eval()
        with torch.no_grad():
            return float(self.plain(inputs, targets)[1].item())


class Hasten:
    """Ours: the recipe shakespeare-char without dropout, started from the same weights."""

    def __init__(self, options: Compare, vocab: int, work: Path) -> None:
        from dataclasses import replace

        import torch

        from hasten.planning.cost import training_flops_per_token
        from hasten.training import RECIPES, Precision, TrainStep, build, make_optimizer

        recipe = replace(RECIPES["shakespeare-char"], dropout=0.0)
        config = build.shape_config(recipe.model, vocab_size=vocab, positions=BLOCK)
        self.flops = training_flops_per_token(config, BLOCK)
        self.micro = options.micro_batch
        model = build.new_model(build.training_config(recipe, config), seed=0, device=torch.device("cpu"))
        while not (work / "start.pt").exists():
            time.sleep(0.1)
        take_over(model, torch.load(work / "start.pt"), vocab)
        build.apply_techniques(model, recipe)
        precision = Precision(recipe.techniques.precision, "cpu")
        self.trainer = TrainStep(model, make_optimizer(model, recipe.optimizer), precision, clip=1.0)

    def step(self, inputs: Any, targets: Any, rate: float) -> float:
        from hasten.data import Batch

        batches = [
            Batch(inputs=inputs[i : i + self.micro], targets=targets[i : i + self.micro], documents=None)
            for i in range(0, len(inputs), self.micro)
        ]
        result = self.trainer.run(batches, learning_rate=rate)
        assert result is not None
        return float(result.loss)

    def evaluate(self, inputs: Any, targets: Any) -> float:
        import torch

        from hasten.data import Batch

        self.trainer.model.eval()
        with torch.no_grad():
            total = self.trainer.loss(Batch(inputs=inputs, targets=targets, documents=None))
        return float(total) / targets.numel()


def take_over(model: Any, start: dict[str, Any], vocab: int) -> None:
    """nanoGPT's weights in our model; what it has no counterpart for, the biases, is zero at the start."""
    import torch

    with torch.no_grad():
        model.embedding.weight[:vocab] = start["transformer.wte.weight"]
        model.positions.weight.copy_(start["transformer.wpe.weight"])
        for index, block in enumerate(model.blocks):
            theirs = f"transformer.h.{index}."
            joined = start[f"{theirs}attn.c_attn.weight"].chunk(3)
            for layer, weight in zip((block.attention.q, block.attention.k, block.attention.v), joined, strict=True):
                layer.weight.copy_(weight)
            block.attention.output.weight.copy_(start[f"{theirs}attn.c_proj.weight"])
            block.mlp.up.weight.copy_(start[f"{theirs}mlp.c_fc.weight"])
            block.mlp.down.weight.copy_(start[f"{theirs}mlp.c_proj.weight"])


if __name__ == "__main__":
    tyro.cli(Compare).run()

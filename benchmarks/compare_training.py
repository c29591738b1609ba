"""Our training beside nanoGPT's, at nanoGPT's own configuration: the same batches, the same weights at the start.

    python benchmarks/compare_training.py --nanogpt FOLDER --output benchmarks/results/train-nanogpt.json
    python benchmarks/compare_training.py --device cuda --shape gpt2-124m --nanogpt HEAD --others B3C17C6 77E7E04 \\
        --steps 20 --output benchmarks/results/train-nanogpt-gpt2-124m.json

Each folder is a checkout of github.com/karpathy/nanoGPT; only its model.py and what train.py does with it are used.
On a CPU: compiled, float32 (its choice there; --nanogpt-bf16 patches it to bfloat16 autocast), 6 layers, 384 wide, 6
heads, block 256, batch 64, character tokens (of Python's own library), dropout 0, no biases, AdamW with a rate of 1e-3
after 100 steps of warm-up, clipping at 1.

The shape gpt2-124m: 12 layers, 768 wide, block 1024, batch 12, random tokens, each checkout's own vocabulary (50,257
rows before 77e7e04, 50,304 from there), and on CUDA its own bfloat16 autocast, TF32 and fused AdamW. The checkouts
under --others, such as the article's two commits, only have their speed measured.

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
from typing import Any, Literal

import tyro
from training_sides import RATE, Hasten, NanoGPT

WARMUP = 100
VALIDATION = 4  # batches


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A model and its batch. vocab None: the characters of the text."""

    recipe: str
    layers: int
    heads: int
    width: int
    block: int
    batch: int
    vocab: int | None = None


SHAPES = {
    "character": Sizes(recipe="shakespeare-char", layers=6, heads=6, width=384, block=256, batch=64),
    "gpt2-124m": Sizes(recipe="gpt2-124m", layers=12, heads=12, width=768, block=1024, batch=12, vocab=50_257),
    "tiny": Sizes(recipe="gpt2-124m", layers=2, heads=2, width=32, block=16, batch=4, vocab=250),  # a dry run
}


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Train both in turn."""

    nanogpt: Path
    """A checkout of nanoGPT."""
    others: tuple[Path, ...] = ()
    """Further checkouts, named by their folders, whose speed is measured too."""
    shape: Literal["character", "gpt2-124m", "tiny"] = "character"
    """What is trained."""
    device: str = "cpu"
    """cpu, or cuda."""
    rounds: int = 6
    """0: only the losses, of --total steps."""
    steps: int = 2
    """Steps of each in a round."""
    total: int = 0
    """Go on to so many steps for the losses (0: stop after the rounds)."""
    nanogpt_bf16: bool = False
    """On a CPU, where train.py ignores its dtype, patch nanoGPT to run its forward pass under bfloat16 autocast."""
    micro_batch: int = 32
    """Rows of a micro-batch of ours at most; the step has the whole batch whatever this is."""
    threads: int = 2
    output: Path | None = None
    """Write the JSON here."""
    side: str | None = None
    """Be one of the two (what this program starts)."""
    work: Path | None = None

    @property
    def sizes(self) -> Sizes:
        return SHAPES[self.shape]

    @property
    def nanogpt_autocast(self) -> bool:
        return self.nanogpt_bf16 or self.device != "cpu"

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

    from hasten.machine import configure, describe, matrix_rate, training_precision

    configure(threads=options.threads)
    sizes = options.sizes
    vocab = write_batches(sizes, work, max(options.total, options.rounds * options.steps + 1))
    others = {path.name: path for path in options.others}
    if len(others) < len(options.others) or {"nanogpt", "hasten"} & set(others):
        raise SystemExit(
            f"the folders under --others need names of their own; found {sorted(map(str, options.others))}"
        )
    checkouts = {"nanogpt": options.nanogpt, **others, "hasten": options.nanogpt}
    sides = {name: Side(options, name, checkout, work) for name, checkout in checkouts.items()}
    flops, dtype = 0.0, training_precision(options.device).dtype  # ours; utilisation is of its rate, for both
    rounds: list[dict[str, Any]] = []
    try:
        for side in sides.values():
            flops = side.read().get("flops_per_token", flops)
        for side in sides.values():  # compile, outside the rounds
            side.ask(1)
        for index in range(options.rounds):
            dtypes = ("float32", "bfloat16")
            rates = {name: matrix_rate(getattr(torch, name), device=options.device, seconds=0.5) for name in dtypes}
            found: dict[str, Any] = {"rates": rates}
            for name, side in sides.items():
                seconds = side.ask(options.steps)["seconds"]
                speed = options.steps * sizes.batch * sizes.block / seconds
                found[name] = {"tokens_per_second": speed, "mfu": flops * speed / rates[dtype]}
            ours = found["hasten"]["tokens_per_second"]
            found["ratio"] = ours / found["nanogpt"]["tokens_per_second"]
            found["ratios"] = {name: ours / found[name]["tokens_per_second"] for name in others}
            rounds.append(found)
            print(f"round {index + 1}: {json.dumps(found)}", file=sys.stderr, flush=True)
        taken = 1 + options.rounds * options.steps
        if options.total > taken:
            for name in ("nanogpt", "hasten"):
                sides[name].ask(options.total - taken)
            taken = options.total
        ends = {name: sides[name].finish() for name in ("nanogpt", "hasten")}
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
            f"{sizes.layers} layers, {sizes.width} wide, block {sizes.block}, batch {sizes.batch}, {vocab} "
            f"{'character' if sizes.vocab is None else 'random'} tokens; nanoGPT compiled "
            f"in {'bfloat16' if options.nanogpt_autocast else 'float32'}; ours in {dtype}, micro-batches of "
            f"{min(options.micro_batch, sizes.batch)} rows"
        ),
        "device": options.device,
        "threads": options.threads,
        "flops_per_token": flops,
        **timing(rounds),
        "steps": taken,
        "tokens": taken * sizes.batch * sizes.block,
        "loss_of_the_last_tenth": losses | {"difference": losses["hasten"] / losses["nanogpt"] - 1},
        "validation_loss": validation | {"difference": validation["hasten"] / validation["nanogpt"] - 1},
        "losses": {name: [round(float(np.float32(loss)), 5) for loss in end["losses"]] for name, end in ends.items()},
        "rounds": rounds,
    }


def timing(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians over the rounds, where there were any."""
    if not rounds:
        return {}
    others = tuple(rounds[0]["ratios"])
    names = ("nanogpt", *others, "hasten")
    medians = {
        name: {key: median(r[name][key] for r in rounds) for key in ("tokens_per_second", "mfu")} for name in names
    }
    ratios = {name: median(r["ratios"][name] for r in rounds) for name in others}
    return {"ratio": median(r["ratio"] for r in rounds), "ratios": ratios, "medians": medians}


def write_batches(sizes: Sizes, work: Path, steps: int) -> int:
    """The batches that all train on, and held-out ones, as arrays in a folder; the size of the vocabulary."""
    import numpy as np

    from hasten.data import prepare

    generator = np.random.default_rng(0)
    shape = (sizes.batch, sizes.block + 1)
    if sizes.vocab is not None:
        for name, count in (("train", steps), ("validation", VALIDATION)):
            np.save(work / f"{name}.npy", generator.integers(0, sizes.vocab, (count, *shape), dtype=np.uint16))
        (work / "vocab").write_text(str(sizes.vocab))
        return sizes.vocab
    data = prepare("stdlib", tokenizer_kind="character", limit_bytes=4_000_000, validation_fraction=0.1, progress=False)
    for name, split, count in (("train", data.train, steps), ("validation", data.validation, VALIDATION)):
        tokens = np.asarray(split.tokens)
        starts = generator.integers(0, len(tokens) - sizes.block - 1, count * sizes.batch)
        rows = np.stack([tokens[start : start + sizes.block + 1] for start in starts])
        np.save(work / f"{name}.npy", rows.reshape(count, *shape))
    (work / "vocab").write_text(str(data.tokenizer.vocab_size))
    return data.tokenizer.vocab_size


class Side:
    """The parent's end of one process."""

    def __init__(self, options: Compare, name: str, checkout: Path, work: Path) -> None:
        self.name = name
        own = ["--side", name, "--work", str(work), "--nanogpt", str(checkout)]
        own += ["--shape", options.shape, "--device", options.device]
        own += ["--threads", str(options.threads), "--micro-batch", str(options.micro_batch)]
        own += ["--nanogpt-bf16"] * options.nanogpt_bf16
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
    if options.device != "cpu":  # as train.py does; ours takes it the same way
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    trainer = (
        Hasten(options, vocab, work) if name == "hasten" else NanoGPT(options, vocab, work, first=name == "nanogpt")
    )
    print(json.dumps({"flops_per_token": trainer.flops} if trainer.flops else {}), flush=True)
    losses: list[float] = []
    for line in sys.stdin:
        count = int(line)
        if not count:
            break
        start = time.perf_counter()
        found = []
        for index in range(len(losses), len(losses) + count):
            rows = torch.from_numpy(batches[index].astype(np.int64)).to(options.device)
            rate = RATE * min(1.0, (index + 1) / (WARMUP + 1))
            found.append(trainer.step(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), rate))
        losses += [float(loss) for loss in found]  # waits for the device
        print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)
    held = torch.from_numpy(np.load(work / "validation.npy").astype(np.int64)).to(options.device)
    validation = mean(trainer.evaluate(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in held)
    print(json.dumps({"losses": losses, "validation_loss": validation}), flush=True)


if __name__ == "__main__":
    tyro.cli(Compare).run()

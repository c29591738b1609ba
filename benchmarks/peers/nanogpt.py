"""Our training beside nanoGPT's, at nanoGPT's own configuration: the same batches, the same weights at the start.

    python benchmarks/peers/nanogpt.py --nanogpt FOLDER --output benchmarks/results/train-nanogpt.json
    python benchmarks/peers/nanogpt.py --device cuda --shape gpt2-124m --nanogpt HEAD --others B3C17C6 77E7E04 \\
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

import inspect
import json
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal

import numpy as np
import torch

from hasten.data import Batch, prepare
from hasten.machine import configure, matrix_rate, training_precision
from hasten.measure.script import Report, Script, Table, main, markdown
from hasten.measure.workers import Worker, child_command, reply
from hasten.model.initialize import initialize
from hasten.planning.cost import training_flops_per_token
from hasten.training import RECIPES, build

RATE = 1e-3


class NanoGPT:
    """Its model.py, and the body of its train.py's loop."""

    flops: float = 0.0

    def __init__(self, options: Any, vocab: int, work: Path, *, first: bool) -> None:
        sys.path.insert(0, str(options.nanogpt))
        from model import GPT, GPTConfig  # type: ignore[import-not-found]

        sizes = options.sizes
        own = {"block_size": sizes.block, "n_layer": sizes.layers, "n_head": sizes.heads, "n_embd": sizes.width}
        if options.shape != "gpt2-124m":  # there the checkout's own default is what the article changed
            own["vocab_size"] = vocab
        self.plain = GPT(GPTConfig(**own, dropout=0.0, bias=False))
        if first:
            torch.save(self.plain.state_dict(), work / "start.part")
            (work / "start.part").rename(work / "start.pt")
        self.plain.to(options.device)
        kind = options.device.partition(":")[0]
        settings = [0.1, RATE, (0.9, 0.99), kind]
        known = len(inspect.signature(self.plain.configure_optimizers).parameters)
        self.optimizer = self.plain.configure_optimizers(*settings[:known])  # once without the device
        self.autocast = torch.autocast(kind, dtype=torch.bfloat16, enabled=options.nanogpt_autocast)
        self.model = torch.compile(self.plain)

    def step(self, inputs: Any, targets: Any, rate: float) -> Any:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with self.autocast:
            _, loss = self.model(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.plain.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def evaluate(self, inputs: Any, targets: Any) -> float:
        self.plain.eval()
        with torch.no_grad(), self.autocast:
            return float(self.plain(inputs, targets)[1].item())


class Hasten:
    """Ours: the shape's recipe without dropout, started from the same weights."""

    def __init__(self, options: Any, vocab: int, work: Path) -> None:
        sizes = options.sizes
        recipe = RECIPES[sizes.recipe]
        shape = replace(recipe.model, layers=sizes.layers, hidden_size=sizes.width, heads=sizes.heads)
        optimizer = replace(recipe.optimizer, learning_rate=RATE, beta2=0.99)
        recipe = replace(recipe, dropout=0.0, model=shape, optimizer=optimizer)
        config = build.shape_config(recipe.model, vocab_size=vocab, positions=sizes.block)
        self.flops = training_flops_per_token(config, sizes.block)
        self.micro = options.micro_batch
        model = initialize(build.training_config(recipe, config), seed=0, device=torch.device(options.device))
        while not (work / "start.pt").exists():
            time.sleep(0.1)
        take_over(model, torch.load(work / "start.pt", map_location=options.device), vocab)
        self.trainer = build.training_step(model, recipe)

    def step(self, inputs: Any, targets: Any, rate: float) -> Any:
        batches = [
            Batch(inputs=inputs[i : i + self.micro], targets=targets[i : i + self.micro], documents=None)
            for i in range(0, len(inputs), self.micro)
        ]
        result = self.trainer.run(batches, learning_rate=rate)
        assert result is not None
        return result.loss

    def evaluate(self, inputs: Any, targets: Any) -> float:
        self.trainer.model.eval()
        with torch.no_grad():
            total = self.trainer.loss(Batch(inputs=inputs, targets=targets, documents=None))
        return float(total) / targets.numel()


def take_over(model: Any, start: dict[str, Any], vocab: int) -> None:
    """nanoGPT's weights in our model; what it has no counterpart for, the biases, is zero at the start."""
    with torch.no_grad():
        model.embedding.weight[:vocab] = start["transformer.wte.weight"][:vocab]  # theirs may be padded
        model.positions.weight.copy_(start["transformer.wpe.weight"])
        for index, block in enumerate(model.blocks):
            theirs = f"transformer.h.{index}."
            joined = start[f"{theirs}attn.c_attn.weight"].chunk(3)
            for layer, weight in zip((block.attention.q, block.attention.k, block.attention.v), joined, strict=True):
                layer.weight.copy_(weight)
            block.attention.output.weight.copy_(start[f"{theirs}attn.c_proj.weight"])
            block.mlp.up.weight.copy_(start[f"{theirs}mlp.c_fc.weight"])
            block.mlp.down.weight.copy_(start[f"{theirs}mlp.c_proj.weight"])


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
class BesideNanoGPT(Script):
    """Train both in turn."""

    result = "train-nanogpt"
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
    """Go on to this many steps for the losses (0: stop after the rounds)."""
    nanogpt_bf16: bool = False
    """On a CPU, where train.py ignores its dtype, patch nanoGPT to run its forward pass under bfloat16 autocast."""
    micro_batch: int = 32
    """Rows of a micro-batch of ours at most; the step has the whole batch whatever this is."""
    threads: int = 2

    @property
    def sizes(self) -> Sizes:
        return SHAPES[self.shape]

    @property
    def nanogpt_autocast(self) -> bool:
        return self.nanogpt_bf16 or self.device != "cpu"

    def measure(self) -> Report:
        with tempfile.TemporaryDirectory(prefix="hasten-compare-") as folder:
            return trained_in_turns(self, Path(folder))

    def of_side(self, name: str, checkout: Path, work: Path) -> tuple[str, str]:
        """What a side's process is given."""
        names = ("shape", "device", "threads", "micro_batch", "nanogpt_bf16")
        values = {name: getattr(self, name) for name in names} | {"nanogpt": str(checkout), "work": str(work)}
        return name, json.dumps(values)


def trained_in_turns(options: BesideNanoGPT, work: Path) -> dict[str, Any]:
    """Both sides, round by round."""
    configure(threads=options.threads)
    sizes = options.sizes
    vocab = write_batches(sizes, work, max(options.total, options.rounds * options.steps + 1))
    others = {path.name: path for path in options.others}
    if len(others) < len(options.others) or {"nanogpt", "hasten"} & set(others):
        raise SystemExit(
            f"the folders under --others need names of their own; found {sorted(map(str, options.others))}"
        )
    checkouts = {"nanogpt": options.nanogpt, **others, "hasten": options.nanogpt}
    sides = {
        name: Worker(name, child_command(__file__, "side", *options.of_side(name, checkout, work)))
        for name, checkout in checkouts.items()
    }
    flops, dtype = 0.0, training_precision(options.device).dtype  # ours; utilisation is of its rate, for both
    rounds: list[dict[str, Any]] = []
    try:
        for side in sides.values():
            flops = side.answer().get("flops_per_token", flops)
        for side in sides.values():  # compile, outside the rounds
            side.ask("1")
        for index in range(options.rounds):
            dtypes = ("float32", "bfloat16")
            rates = {name: matrix_rate(getattr(torch, name), device=options.device, seconds=0.5) for name in dtypes}
            found: dict[str, Any] = {"rates": rates}
            for name, side in sides.items():
                seconds = side.ask(str(options.steps))["seconds"]
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
                sides[name].ask(str(options.total - taken))
            taken = options.total
        ends = {name: sides[name].ask("0") for name in ("nanogpt", "hasten")}
    finally:
        for side in sides.values():
            side.close()
    last = max(1, taken // 10)
    losses = {name: mean(end["losses"][-last:]) for name, end in ends.items()}
    validation = {name: end["validation_loss"] for name, end in ends.items()}
    return {
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


def train_side(name: str, given: str) -> None:
    """Be one side: take as many steps as the parent says, 0 for the end."""
    values = json.loads(given)
    work = Path(values.pop("work"))
    options = BesideNanoGPT(**values | {"nanogpt": Path(values["nanogpt"])})
    torch.set_num_threads(options.threads)
    torch.manual_seed(1337)
    vocab = int((work / "vocab").read_text())
    batches = np.load(work / "train.npy", mmap_mode="r")
    if options.device != "cpu":  # as train.py does; ours takes it the same way
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    trainer = (
        Hasten(options, vocab, work) if name == "hasten" else NanoGPT(options, vocab, work, first=name == "nanogpt")
    )
    reply({"flops_per_token": trainer.flops} if trainer.flops else {})
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
        reply({"seconds": time.perf_counter() - start})
    held = torch.from_numpy(np.load(work / "validation.npy").astype(np.int64)).to(options.device)
    validation = mean(trainer.evaluate(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in held)
    reply({"losses": losses, "validation_loss": validation})


def nanogpt_table(report: Report) -> str:
    """The medians of both, the ratio of each round, the losses."""
    ratios, loss = [one["ratio"] for one in report["rounds"]], report["loss_of_the_last_tenth"]["difference"]
    rows = []
    for name, found in report["medians"].items():
        shares = [one[name]["mfu"] for one in report["rounds"]]
        spread = f"{found['mfu']:.0%} ({min(shares):.0%} to {max(shares):.0%})"
        rows.append([name, f"{found['tokens_per_second']:,.0f}", spread])
    end = f"{report['ratio']:.2f} times as many ({min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} rounds). "
    end += f"After {report['steps']} steps ({report['tokens']:,} tokens) the losses differ by {abs(loss):.2%} on the "
    end += f"batch and {abs(report['validation_loss']['difference']):.2%} on held-out text."
    return f"{markdown(['', 'tokens/s', 'of the matrix rate'], rows)}\n\n{end}"


TABLES: dict[str, Table] = {
    **dict.fromkeys(("train-nanogpt", "train-nanogpt-bf16", "train-nanogpt-avx2"), nanogpt_table),
}


if __name__ == "__main__":
    main({"compare": BesideNanoGPT}, TABLES, {"side": train_side})

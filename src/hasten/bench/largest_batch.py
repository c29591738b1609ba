"""The largest batch that a training step fits into a given memory, at different rungs of the ladder of training.

Each try is a process of its own that may take so many bytes more than it has after importing torch; one that is refused
memory does not fit. Doubled until it does not fit, then halved in between.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten.bench.child import Child, ChildError
from hasten.bench.measure import BenchmarkOptions, say
from hasten.bench.models import choose_rungs
from hasten.bench.race import first_and_last
from hasten.bench.train import TrainLadder, TrainRung, recipe_and_config
from hasten.bench.train_rungs import possible, switched_on, techniques
from hasten.bench.worker import Task
from hasten.errors import ConfigError

if TYPE_CHECKING:
    from hasten.training.recipe import Recipe

# What a process mostly says that was refused memory (in lower case), wherever in torch, Python or the C library it
# noticed. Whatever else it says is put down to the limit only if the same batch passes without one.
REFUSALS = ("memory", "bad_alloc", "resource temporarily", "sigkill", "sigabrt", "sigsegv", "ended by itself")
STEPS = 2  # the second one has the optimizer's state too


@dataclass(frozen=True, kw_only=True)
class LargestBatch(BenchmarkOptions):
    """Training: the largest batch that fits a given memory, before and after all techniques."""

    rungs: tuple[str, ...] = ()
    """Rungs of bench train, separated by commas; the first and the fastest by default."""
    shape: str | None = None
    """A named shape, as for bench train."""
    recipe: str | None = None
    """The model of a recipe instead."""
    memory: float = 2.0
    """GiB that a process may take, above what it has with torch imported."""
    sequence_length: int | None = None
    """Tokens in a row (T)."""
    most: int = 1024
    """Try no larger batch."""
    timeout: float = 600.0
    """Seconds that one try may take."""

    def run(self, *, tell: Callable[[str], None] = say) -> dict[str, Any]:
        """Search and return the report. tell: called with a line about each try. Raises ConfigError."""
        from hasten.machine import describe, resolve_device

        if not (math.isfinite(self.memory) and self.memory > 0):
            raise ConfigError(f"--memory is {self.memory:g} GiB; it must be a finite number above 0")
        if self.most < 1:
            raise ConfigError(f"--most is {self.most}; it must be at least 1")
        device = str(resolve_device(self.device))
        ladder = TrainLadder(
            shape=self.shape, recipe=self.recipe, batch_size=1, sequence_length=self.sequence_length, seed=self.seed
        )
        recipe, config = recipe_and_config(ladder)
        wanted = self.rungs or first_and_last(device)
        active = possible(device, vocab_size=config.vocab_size, wanted=wanted)
        rows = []
        for name in choose_rungs(active, wanted):
            tries: dict[int, bool] = {}
            with tempfile.TemporaryDirectory(prefix="hasten-compile-") as cache:
                own = replace(recipe, techniques=techniques(name, active))

                def fits(
                    size: int, own: Recipe = own, name: str = name, cache: str = cache, tries: dict[int, bool] = tries
                ) -> bool:
                    tries[size] = self._fits(name, own, size, device, cache)
                    tell(f"{name}: a batch of {size} {'fits' if tries[size] else 'does not fit'}")
                    return tries[size]

                largest = search(fits, self.most)
            rows.append(
                {
                    "name": name,
                    "techniques": list(switched_on(name, active)),
                    "largest_batch": largest,
                    "tries": {str(size): fit for size, fit in sorted(tries.items())},
                }
            )
        return {
            "schema": 1,
            "kind": "largest-batch",
            "machine": describe().to_json(),
            "settings": {
                "model": f"{recipe.name} (random weights), rows of {recipe.data.context} tokens",
                "memory_bytes": self.memory_bytes,
                "vocabulary": config.vocab_size,
                "sequence_length": recipe.data.context,
                "most": self.most,
                "device": device,
                "seed": self.seed,
            },
            "rows": rows,
        }

    @property
    def memory_bytes(self) -> int:
        return int(self.memory * (1 << 30))

    def draw(self, report: Mapping[str, Any], path: str | Path) -> None:
        """The largest batch of each rung, as a PNG."""
        from hasten.bench.train_pictures import draw_batches

        draw_batches(report, path)

    def show(self, report: Mapping[str, Any]) -> bool:
        """Print a line for each rung; whether any batch fits."""
        for row in report["rows"]:
            say(f"{row['name']}: a batch of {row['largest_batch']} fits {self.memory:g} GiB")
        return any(row["largest_batch"] for row in report["rows"])

    def _fits(self, name: str, recipe: Recipe, size: int, device: str, cache: str) -> bool:
        arguments = {
            "recipe": replace(recipe, data=replace(recipe.data, batch_size=size)).to_json(),
            "shape": self.shape,
            "steps": STEPS,
            "device": device,
            "compile_cache": os.path.join(cache, name),
        }
        failure = self._failure(arguments | {"memory": self.memory_bytes})
        if failure is None:
            return True
        if any(word in failure.lower() for word in REFUSALS):
            return False
        failure = self._failure(arguments | {"memory": None})
        if failure is not None:
            raise ConfigError(f"{name} with a batch of {size} failed, without a limit too: {failure}")
        return False

    def _failure(self, arguments: dict[str, Any]) -> str | None:
        """What a process of its own says that could not train with these arguments of LimitedRung, or None."""
        task = Task("hasten.bench.largest_batch:LimitedRung", arguments, arguments["device"], self.threads, self.seed)
        try:
            with Child(task, timeout=self.timeout) as child:
                child.wait_ready()
                child.measure()
        except ChildError as error:
            return error.message
        return None


def search(fits: Callable[[int], bool], most: int) -> int:
    """The largest size up to `most` that fits, if every smaller one does; 0 where not even 1 does."""
    good, size = 0, 1
    while size <= most and fits(size):
        good, size = size, size * 2
    bad = min(size, most + 1)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


class LimitedRung(TrainRung):
    """A rung of training in a process that may take `memory` bytes more than it has (None: what it wants)."""

    def __init__(self, *, memory: int | None, **rest: Any) -> None:
        import hasten.training.profile  # noqa: F401 - the compiler's modules are no part of the model

        if memory is not None:
            limit(memory, rest["device"])
        super().__init__(**rest)


def limit(memory: int, device: str) -> None:
    """Let this process take only so many bytes more on a device. Raises ConfigError where the system cannot."""
    import torch

    if device != "cpu":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory / total), device)
        return
    try:
        import resource
    except ImportError:
        raise ConfigError("this system has no limits for a process's memory (Linux has)") from None
    torch.ones(1 << 20).sum()  # starts the threads, whose stacks count
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    taken = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (taken + memory, taken + memory))

"""The largest batch that a training step fits into a given memory, at different rungs of the ladder of training.

Each try is a process of its own that may take a given number of bytes above what it has after importing torch; one that
is refused memory does not fit. The batch is doubled until it does not fit, then halved in between.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hasten.bench.race import first_and_last
from hasten.bench.train import StepOptions, TrainRung
from hasten.bench.train_rungs import recipes
from hasten.errors import ConfigError
from hasten.machine import describe, resolve_device
from hasten.measure.draw import BAR, BAR_FIRST, Bar, draw_bars
from hasten.measure.options import check_finite, check_least, say
from hasten.measure.process import Rung, run_interleaved
from hasten.measure.table import format_value, machine_line
from hasten.planning.largest import largest
from hasten.training.recipe import Recipe

# What a process mostly says that was refused memory (in lower case), wherever in torch, Python or the C library it
# noticed. Whatever else it says is put down to the limit only if the same batch passes without one.
REFUSALS = ("memory", "bad_alloc", "resource temporarily", "sigkill", "sigabrt", "sigsegv", "ended by itself")
STEPS = 2  # the second one has the optimizer's state too


@dataclass(frozen=True, kw_only=True)
class LargestBatch(StepOptions):
    """Training: the largest batch that fits a given memory, before and after all techniques."""

    rungs: tuple[str, ...] = ()
    """Rungs of bench train, separated by commas; the first and the fastest by default."""
    memory: float = 2.0
    """GiB that a process may take, above what it has with torch imported."""
    most: int = 1024
    """Try no larger batch."""
    timeout: float = 600.0
    """Seconds that one try may take."""

    def run(self) -> dict[str, Any]:
        """Search and return the report. Raises ConfigError."""
        check_finite("--memory", self.memory, " GiB")
        check_finite("--timeout", self.timeout)
        check_least("--most", self.most)
        device = str(resolve_device(self.device))
        recipe, config = self.recipe_and_config(1)
        wanted = self.rungs or first_and_last(device)
        rows = []
        for name, (own, words) in recipes(recipe, device, vocab_size=config.vocab_size, wanted=wanted).items():
            with tempfile.TemporaryDirectory(prefix="hasten-compile-") as cache:
                process: dict[str, Any] = {"threads": self.threads, "seed": self.seed, "compile_cache": cache}
                arguments = {"recipe": own, "config": config, "steps": STEPS, "device": device}
                setup = "hasten.bench.largest_batch:LimitedRung"
                tries = self.search(Rung(name, words, setup, arguments, device=device, **process))
            best = max((size for size, fits in tries.items() if fits), default=0)
            tried = {str(size): fits for size, fits in sorted(tries.items())}
            rows.append({"name": name, "techniques": list(words), "largest_batch": best, "tries": tried})
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
        settings, batches = report["settings"], [row["largest_batch"] for row in report["rows"]]
        bars: list[Bar] = []
        for row, batch in zip(report["rows"], batches, strict=True):
            ratio = f"  ({format_value(batch / batches[0], 'times')})" if bars and batches[0] else ""
            bars.append(Bar(row["name"], batch, f"{batch:,}{ratio}", color=BAR if bars else BAR_FIRST))
        draw_bars(
            bars,
            path,
            title=f"The largest batch in {settings['memory_bytes'] / 2**30:g} GiB",
            subtitle=f"{settings['model']}; {machine_line(report['machine'], settings['device'])}",
            x_label="rows in a batch",
        )

    def show(self, report: Mapping[str, Any]) -> bool:
        """Print a line for each rung; whether any batch fits."""
        for row in report["rows"]:
            say(f"{row['name']}: a batch of {row['largest_batch']} fits {self.memory:g} GiB")
        return any(row["largest_batch"] for row in report["rows"])

    def search(self, rung: Rung) -> dict[int, bool]:
        """Whether each batch size that was tried fits."""
        tries: dict[int, bool] = {}
        recipe: Recipe = rung.arguments["recipe"]

        def fits(size: int) -> bool:
            changed = replace(recipe, data=replace(recipe.data, batch_size=size))
            tries[size] = self._fits(replace(rung, arguments=rung.arguments | {"recipe": changed}), size)
            say(f"{rung.name}: a batch of {size} {'fits' if tries[size] else 'does not fit'}")
            return tries[size]

        largest(fits, self.most)
        return tries

    def _fits(self, rung: Rung, size: int) -> bool:
        failure = self._failure(rung, self.memory_bytes)
        if failure is None or any(word in failure.lower() for word in REFUSALS):
            return failure is None
        failure = self._failure(rung, None)
        if failure is not None:
            raise ConfigError(f"{rung.name} with a batch of {size} failed, without a limit too: {failure}")
        return False

    def _failure(self, rung: Rung, memory: int | None) -> str | None:
        """The error of a process that could not train in `memory` bytes, or None."""
        limited = replace(rung, arguments=rung.arguments | {"memory": memory})
        return run_interleaved([limited], rounds=1, timeout=self.timeout)[0].error


class LimitedRung(TrainRung):
    """A rung of training in a process that may take `memory` bytes more than it has (None: what it wants)."""

    def __init__(self, *, memory: int | None, **rest: Any) -> None:
        import torch._inductor.config  # noqa: F401 - the compiler's modules are no part of the model

        if memory is not None:
            limit(memory, rest["device"])
        super().__init__(**rest)


def limit(memory: int, device: str) -> None:
    """Limit this process to `memory` more bytes on a device. Raises ConfigError where the system cannot."""
    import psutil
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
    taken = psutil.Process().memory_info().data
    resource.setrlimit(resource.RLIMIT_DATA, (taken + memory, taken + memory))

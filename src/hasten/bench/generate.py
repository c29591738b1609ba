"""The ladder of generation: greedy decoding of random tokens, after the same prompt on every rung.

Cumulative rungs; their names never change:
- no-cache: the whole sequence is computed again for each token.
- static-cache: keys and values are kept; eager.
- static-cache-compiled: the same with torch.compile for the decode step; -int8 and -int4: on quantized weights.
- native-bf16, native-int8, native-int4: the fused native steps instead, on bfloat16, int8 and int4 (groups of 128)
  weights, the head quantized like the rest; on a CPU.

A checkpoint that is quantized already is measured as it is: by default static-cache and the native rung of its format.

A rung with a cache may also be measured with several sequences at once (`-x8`) and after prompts of other lengths
(`-c2048`): further rows, measured in the same process in the same rounds.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from hasten.bench.measure import Rung, run_ladder
from hasten.bench.shapes import ELEMENT_BYTES, Subject, check_fits, choose_rungs
from hasten.errors import ConfigError

if TYPE_CHECKING:
    from hasten.model.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a rung generates. weights: "bfloat16", "int8" or "int4" whatever the ladder's dtype is; None: that dtype."""

    techniques: tuple[str, ...]
    cache: bool = True
    compiled: bool = False
    fused: bool = False
    weights: str | None = None


COMPILED = ("static cache", "torch.compile")
NATIVE_STEPS = ("static cache", "native fused steps")
RUNGS: Mapping[str, Way] = {
    "no-cache": Way(techniques=("eager",), cache=False),
    "static-cache": Way(techniques=("eager", "static cache")),
    "static-cache-compiled": Way(techniques=COMPILED, compiled=True),
    "static-cache-compiled-int8": Way(techniques=(*COMPILED, "int8"), compiled=True, weights="int8"),
    "static-cache-compiled-int4": Way(techniques=(*COMPILED, "int4"), compiled=True, weights="int4"),
    "native-bf16": Way(techniques=NATIVE_STEPS, fused=True, weights="bfloat16"),
    "native-int8": Way(techniques=(*NATIVE_STEPS, "int8"), fused=True, weights="int8"),
    "native-int4": Way(techniques=(*NATIVE_STEPS, "int4"), fused=True, weights="int4"),
}
NATIVE = tuple(name for name, way in RUNGS.items() if way.fused)
# Where the native steps are, the compiler's rungs on quantized weights are measured only when they are asked for.
COMPILED_QUANTIZED = tuple(name for name, way in RUNGS.items() if way.compiled and way.weights)
TEXT_BYTES = 200_000  # of a text that is scored
PROCESS_BYTES = 400 << 20  # what a process keeps besides the model: libraries, the compiler's graphs, the logits
LARGEST_PREFILL = 4096  # tokens that a prompt is taken in by


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateLadder:
    """What to measure. rungs: some of RUNGS, () for all that belong to the device.

    dtype: of the weights; "auto" is bfloat16. Where the processor only emulates its products, readable rungs multiply
    in float32, as a loaded model does, and every row says in which dtype (`matrix_dtype`, and why in `precision`).

    new_tokens: decoded by each sequence in each round (no-cache: at most 2). batches: numbers of sequences decoded at
    once. contexts: other lengths of the prompt after which decoding is measured too. text: a source (file, folder,
    glob, "stdlib") whose perplexity each rung reports, on its first TEXT_BYTES.
    """

    subject: Subject
    dtype: str = "auto"
    prompt_tokens: int = 512
    new_tokens: int = 64
    batches: tuple[int, ...] = (1,)
    contexts: tuple[int, ...] = ()
    text: str | None = None
    rounds: int = 5
    warmup: int = 1
    rungs: tuple[str, ...] = ()
    device: str = "auto"
    threads: int | None = None
    seed: int = 0
    limit_seconds: float = 0.3

    def run(self, *, show_progress: bool = True) -> dict[str, Any]:
        """Measure and return the report. Raises ConfigError or ResourceError before anything is allocated."""
        from hasten.machine import resolve_device

        names = choose_rungs(RUNGS, self.rungs)
        if self.text is not None and self.subject.folder is None:
            raise ConfigError("random weights predict no text; give --text with --model")
        stored = self.subject.quantized()
        if stored is not None:
            names = _rungs_of_quantized(self, names, stored)
        elif not self.rungs:
            others = COMPILED_QUANTIZED if resolve_device(self.device).type == "cpu" else NATIVE
            names = [name for name in names if name not in others]
        return measure(
            self,
            {name: (self.subject, name, RUNGS[name].techniques) for name in names},
            show_progress=show_progress,
        )


def _rungs_of_quantized(ladder: GenerateLadder, names: list[str], stored: str) -> list[str]:
    """Of a checkpoint that is quantized: what runs it as it is; by default eager, and the native or compiled steps."""
    from hasten.machine import resolve_device

    possible = [name for name, way in RUNGS.items() if way.weights in (None, stored)]
    refused = [name for name in names if name not in possible]
    if ladder.rungs and refused:
        raise ConfigError(
            f"the weights of {ladder.subject.name} are {stored} already, which cannot become the rung {refused[0]!r}; "
            f"possible: {', '.join(possible)}. The original checkpoint has them all"
        )
    fast = "native" if resolve_device(ladder.device).type == "cpu" else "static-cache-compiled"
    return names if ladder.rungs else ["static-cache", f"{fast}-{stored}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """So many sequences at once after prompts of so many tokens."""

    batch: int
    prompt_tokens: int
    ratio_to: str = ""  # the ending of the row that this one is held against


def further_rows(ladder: GenerateLadder) -> dict[str, Point]:
    """The rows of a rung besides its own, by the ending of their names: each further batch, and each context, alone."""
    first, *more = ladder.batches
    found = {f"x{batch}": Point(batch=batch, prompt_tokens=ladder.prompt_tokens) for batch in more}
    for context in ladder.contexts:
        found[f"c{context}"] = Point(batch=first, prompt_tokens=context, ratio_to=f"c{ladder.contexts[0]}")
    return found


def measure(
    ladder: GenerateLadder, rungs: Mapping[str, tuple[Subject, str, tuple[str, ...]]], *, show_progress: bool
) -> dict[str, Any]:
    """Run rungs given by name as (model, which of RUNGS it is measured as, its techniques)."""
    from hasten.machine import emulated, resolve_device

    if ladder.dtype == "auto":
        ladder = replace(ladder, dtype="bfloat16")
    _check(ladder)
    device = str(resolve_device(ladder.device))
    wide = emulated(ladder.dtype, device) is not None
    made = []
    with tempfile.TemporaryDirectory(prefix="hasten-compile-") as cache:
        for name, (subject, way, techniques) in rungs.items():
            how = RUNGS[way]
            # Without a cache a token costs a whole prompt: eight of them, or a longer one, would show nothing new.
            rows = further_rows(ladder) if how.cache else {}
            arguments = {
                "subject": asdict(subject),
                "way": way,
                "dtype": ladder.dtype,
                "device": device,
                "batch": ladder.batches[0],
                "prompt_tokens": ladder.prompt_tokens,
                "new_tokens": ladder.new_tokens,
                "rows": {ending: asdict(point) for ending, point in rows.items()},
                "text": ladder.text,
                "seed": ladder.seed,
                "compile_cache": os.path.join(cache, name),
            }
            parts = _memory(subject.config(), ladder, list(rows.values()), wide=wide)
            if subject.quantized() is not None:
                parts["weights"] = subject.stored_bytes()
            memory = check_fits(f"{subject.name} in {ladder.dtype}", parts, device)
            shown = name if ladder.batches[0] == 1 else f"{name}-x{ladder.batches[0]}"
            setup = "hasten.bench.generate_rung:GenerateRung"
            made.append(Rung(shown, techniques, setup, arguments, memory, twice=how.compiled))
        quantized = ladder.subject.quantized() is not None
        quantized = quantized or any(RUNGS[way].weights in ("int8", "int4") for _, way, _ in rungs.values())
        return run_ladder(
            made,
            kind="generate",
            settings={
                "model": f"{ladder.subject.name}, {ladder.dtype}, {ladder.prompt_tokens} prompt tokens",
                "weights": "checkpoint" if ladder.subject.folder else "random",
                "dtype": ladder.dtype,
                "batch": ladder.batches[0],
                "batches": list(ladder.batches),
                "prompt_tokens": ladder.prompt_tokens,
                "contexts": list(ladder.contexts),
                "new_tokens": ladder.new_tokens,
                "text_bytes": None if ladder.text is None else TEXT_BYTES,
            },
            device=device,
            threads=ladder.threads,
            seed=ladder.seed,
            rounds=ladder.rounds,
            warmup=ladder.warmup,
            dtypes=("float32" if wide else ladder.dtype, *(("int8",) if quantized else ())),
            limit_seconds=ladder.limit_seconds,
            show_progress=show_progress,
        )


def _check(ladder: GenerateLadder) -> None:
    """Raise ConfigError for what cannot be measured, before anything is allocated."""
    config = ladder.subject.config()
    if ladder.dtype not in ELEMENT_BYTES:
        raise ConfigError(f"dtype {ladder.dtype!r} is not known; use one of {', '.join(ELEMENT_BYTES)}")
    for option, numbers in (("--batches", ladder.batches), ("--contexts", ladder.contexts)):
        if any(number < 1 for number in numbers) or len(set(numbers)) != len(numbers):
            raise ConfigError(f"{option} takes different whole numbers from 1 up; found {', '.join(map(str, numbers))}")
    if not ladder.batches:
        raise ConfigError("--batches needs at least one number of sequences")
    if ladder.prompt_tokens < 1 or ladder.new_tokens < 2:
        raise ConfigError(
            f"at least 1 prompt token and 2 new tokens are needed; found {ladder.prompt_tokens} and {ladder.new_tokens}"
        )
    longest = max((ladder.prompt_tokens, *ladder.contexts))
    if longest + ladder.new_tokens > config.max_positions:
        raise ConfigError(
            f"{longest} prompt and {ladder.new_tokens} new tokens do not fit the {config.max_positions} positions of "
            f"{ladder.subject.name}; lower --prompt-tokens, --contexts or --new-tokens"
        )


def _memory(config: ModelConfig, ladder: GenerateLadder, rows: Sequence[Point], *, wide: bool) -> dict[str, int]:
    """Bytes of one rung, by what needs them. wide: readable blocks compute in float32, and keep their cache in it."""
    from hasten.planning.cost import kv_bytes_per_token, parameters

    size = ELEMENT_BYTES[ladder.dtype]
    width = 6 * config.hidden_size + 3 * config.intermediate_size + 4 * config.heads * config.head_dim
    prompts = [(ladder.batches[0], ladder.prompt_tokens), *((row.batch, row.prompt_tokens) for row in rows)]
    tokens = sum(batch * (length + ladder.new_tokens) for batch, length in prompts)
    return {
        "weights": parameters(config).total * size,
        "cache": tokens * kv_bytes_per_token(config, 4 if wide else size),
        "activations": min(max(batch * length for batch, length in prompts), LARGEST_PREFILL) * width * 4,
        "the process": PROCESS_BYTES,
    }

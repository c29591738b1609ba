"""The ladder of generation: one sequence, greedy, the same context for every rung.

Cumulative rungs; their names never change:
- no-cache: the whole sequence is computed again for each token.
- static-cache: keys and values are kept; eager.
- static-cache-compiled: the same with torch.compile for the decode step.
- native-bf16, native-int8, native-int4: the fused native steps instead, on bfloat16, int8 and int4 (groups of 128)
  weights, the head quantized like the rest; on a CPU.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hasten.bench.measure import Rung, run_ladder
from hasten.bench.shapes import ELEMENT_BYTES, Subject, check_fits, choose_rungs, require_compiler
from hasten.errors import ConfigError

if TYPE_CHECKING:
    from hasten.generation.decoder import Decoder
    from hasten.model.config import ModelConfig

RUNGS: Mapping[str, tuple[str, ...]] = {
    "no-cache": ("eager",),
    "static-cache": ("eager", "static cache"),
    "static-cache-compiled": ("static cache", "torch.compile"),
    "native-bf16": ("static cache", "native fused steps"),
    "native-int8": ("static cache", "native fused steps", "int8"),
    "native-int4": ("static cache", "native fused steps", "int4"),
}
NATIVE = tuple(name for name in RUNGS if name.startswith("native-"))
# A token without a cache costs as much as the whole prompt: few are enough for the same precision.
NO_CACHE_TOKENS = 2
TEXT_BYTES = 200_000  # of a text that is scored
PROCESS_BYTES = 400 << 20  # what a process keeps besides the model: libraries, the compiler's graphs, the logits


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateLadder:
    """What to measure. rungs: some of RUNGS, () for all. new_tokens: decoded in each round (no-cache: at most 2).

    text: a source (file, folder, glob, "stdlib") whose perplexity each rung reports, on its first TEXT_BYTES.
    """

    subject: Subject
    dtype: str = "bfloat16"
    prompt_tokens: int = 512
    new_tokens: int = 64
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
        if not self.rungs and resolve_device(self.device).type != "cpu":
            names = [name for name in names if name not in NATIVE]
        return measure(
            self,
            {name: (self.subject, name, RUNGS[name]) for name in names},
            show_progress=show_progress,
        )


def measure(
    ladder: GenerateLadder, rungs: Mapping[str, tuple[Subject, str, tuple[str, ...]]], *, show_progress: bool
) -> dict[str, Any]:
    """Run rungs given by name as (model, which of RUNGS it is measured as, its techniques)."""
    from hasten.machine import resolve_device

    if ladder.dtype not in ELEMENT_BYTES:
        raise ConfigError(f"dtype {ladder.dtype!r} is not known; use one of {', '.join(ELEMENT_BYTES)}")
    device = str(resolve_device(ladder.device))
    made = []
    with tempfile.TemporaryDirectory(prefix="hasten-compile-") as cache:
        for name, (subject, way, techniques) in rungs.items():
            arguments = {
                "subject": asdict(subject),
                "way": way,
                "dtype": ladder.dtype,
                "device": device,
                "prompt_tokens": ladder.prompt_tokens,
                "new_tokens": ladder.new_tokens,
                "text": ladder.text,
                "seed": ladder.seed,
                "compile_cache": os.path.join(cache, name),
            }
            memory = check_fits(f"{subject.name} in {ladder.dtype}", _memory(subject.config(), ladder), device)
            made.append(Rung(name, techniques, "hasten.bench.generate:GenerateRung", arguments, memory))
        return run_ladder(
            made,
            kind="generate",
            settings={
                "model": f"{ladder.subject.name}, {ladder.dtype}, {ladder.prompt_tokens} prompt tokens",
                "weights": "checkpoint" if ladder.subject.folder else "random",
                "dtype": ladder.dtype,
                "batch": 1,
                "prompt_tokens": ladder.prompt_tokens,
                "new_tokens": ladder.new_tokens,
                "text_bytes": None if ladder.text is None else TEXT_BYTES,
            },
            device=device,
            threads=ladder.threads,
            seed=ladder.seed,
            rounds=ladder.rounds,
            warmup=ladder.warmup,
            dtypes=(ladder.dtype,),
            limit_seconds=ladder.limit_seconds,
            show_progress=show_progress,
        )


def _memory(config: ModelConfig, ladder: GenerateLadder) -> dict[str, int]:
    """Bytes of one rung, by what needs them. Raises ConfigError for a context that the model does not have."""
    from hasten.planning.cost import kv_bytes_per_token, parameters

    tokens = ladder.prompt_tokens + ladder.new_tokens
    if ladder.prompt_tokens < 1 or ladder.new_tokens < 2:
        raise ConfigError(
            f"at least 1 prompt token and 2 new tokens are needed; found {ladder.prompt_tokens} and {ladder.new_tokens}"
        )
    if tokens > config.max_positions:
        raise ConfigError(
            f"{ladder.prompt_tokens} prompt and {ladder.new_tokens} new tokens do not fit the "
            f"{config.max_positions} positions of {ladder.subject.name}; lower --prompt-tokens or --new-tokens"
        )
    size = ELEMENT_BYTES[ladder.dtype]
    wide = 6 * config.hidden_size + 3 * config.intermediate_size + 4 * config.heads * config.head_dim
    return {
        "weights": parameters(config).total * size,
        "cache": tokens * kv_bytes_per_token(config, size),
        "activations": ladder.prompt_tokens * wide * 4,
        "the process": PROCESS_BYTES,
    }


class GenerateRung:
    """Set up in a child process: the model, its cache, compiled where the rung says so, and warm."""

    def __init__(
        self,
        *,
        subject: Mapping[str, Any],
        way: str,
        dtype: str,
        device: str,
        prompt_tokens: int,
        new_tokens: int,
        seed: int,
        compile_cache: str,
        text: str | None = None,
    ) -> None:
        import torch

        from hasten.generation.compiled import compile_blocks
        from hasten.generation.graphs import fastest_decoder
        from hasten.machine import resolve_dtype

        compiled = way == "static-cache-compiled"
        if compiled:
            require_compiler(device)
            # A folder of the ladder's own: compiled for the first time, as on a machine that has never run it.
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = compile_cache
        dtype = "bfloat16" if way in NATIVE else dtype
        self.model = Subject(**subject).build(dtype=resolve_dtype(dtype), device=device, seed=seed)
        self.config = self.model.config
        self.dtype = dtype
        self.weight_bytes: float = ELEMENT_BYTES[dtype]
        if way in NATIVE:
            self.go_native(way)
        # A token without a cache costs a whole prompt, so the rung without one decodes fewer.
        self.new_tokens = min(new_tokens, NO_CACHE_TOKENS) if way == "no-cache" else new_tokens
        self.context = prompt_tokens + new_tokens // 2  # the mean context, and the same for all rungs
        generator = torch.Generator().manual_seed(seed)
        self.prompt = torch.randint(self.config.vocab_size, (prompt_tokens,), generator=generator).tolist()
        self.decoder: Decoder | None = None
        if way != "no-cache":
            self.decoder = fastest_decoder(self.model, batch=1, capacity=prompt_tokens + new_tokens, compiled=compiled)
        self.compile_seconds: float | None = None
        self.perplexity = None if text is None else self.score(text)
        if compiled:
            compile_blocks(self.model)
            token = self.first_token()
            start = time.perf_counter()
            self.next_token(token)
            self.compile_seconds = time.perf_counter() - start

    def go_native(self, way: str) -> None:
        """Quantize as the rung says, fuse, and count the bytes that a weight now takes, scales included."""
        from hasten.machine import reset_peak_memory
        from hasten.model.fused import fuse
        from hasten.ops.linear.modules import PackedLinear
        from hasten.quantization import Int4, Int8, quantize

        if way == "native-int8":
            quantize(self.model, Int8(lm_head="same"))
        elif way == "native-int4":
            # Which scales are chosen changes the error, not the speed.
            quantize(self.model, Int4(lm_head="same", search="minmax"))
        fuse(self.model)
        layers = [module for module in self.model.modules() if isinstance(module, PackedLinear)]
        total = sum(buffer.nbytes for layer in layers for buffer in layer.buffers())
        self.weight_bytes = total / sum(layer.in_features * layer.out_features for layer in layers)
        reset_peak_memory()  # what follows is the model's; making it from random bfloat16 weights is the ladder's

    def score(self, text: str) -> float:
        """Perplexity of the beginning of a text, computed by what the rung runs."""
        from hasten.data import read_documents
        from hasten.generation.perplexity import perplexity

        return perplexity(self.model, list(read_documents(text, limit_bytes=TEXT_BYTES))).perplexity

    def describe(self) -> dict[str, Any]:
        """What one token costs, and what the cache takes."""
        from hasten.planning.cost import decode_bytes_per_token, forward_flops_per_token, kv_bytes_per_token

        size = ELEMENT_BYTES[self.dtype]
        facts: dict[str, Any] = {
            "bytes_per_token": decode_bytes_per_token(
                self.config, weight_bytes=self.weight_bytes, kv_bytes=size, context=self.context
            ),
            "prefill_flops_per_token": forward_flops_per_token(self.config, len(self.prompt)),
            "matrix_dtype": self.dtype,
            "kv_heads": self.config.kv_heads,
            "context": self.context,
            "decoded_tokens": self.new_tokens,
        }
        if self.decoder is not None:
            facts["cache_bytes_per_token"] = kv_bytes_per_token(self.config, size)
            facts["cache_bytes"] = self.decoder.cache.bytes
        if self.perplexity is not None:
            facts["perplexity"] = self.perplexity
        if self.compile_seconds is not None:
            facts["compile_seconds"] = self.compile_seconds
        return facts

    def measure(self) -> dict[str, float]:
        """The prompt once, then the new tokens one by one, each waited for, as a stream would show them."""
        start = time.perf_counter()
        token = self.first_token()
        first = time.perf_counter()
        for _ in range(self.new_tokens):
            token = self.next_token(token)
        decode = time.perf_counter() - first
        return {
            "decode_tokens_per_second": self.new_tokens / decode,
            "prefill_tokens_per_second": len(self.prompt) / (first - start),
            "time_to_first_token_seconds": first - start,
        }

    def first_token(self) -> int:
        """Take the prompt in, whatever came before; the most likely token after it."""
        if self.decoder is None:
            self.sequence = list(self.prompt)
            return self._recompute()
        self.decoder.truncate(0)
        return int(self.decoder.prefill([self.prompt]).argmax())

    def next_token(self, token: int) -> int:
        """Append `token`; the most likely one after it."""
        import torch

        if self.decoder is None:
            self.sequence.append(token)
            return self._recompute()
        return int(self.decoder.decode(torch.tensor([token], device=self.model.device)).argmax())

    def _recompute(self) -> int:
        """The next token from the whole sequence, nothing kept."""
        import torch

        from hasten.model.context import TrainingContext

        tokens = torch.tensor([self.sequence], device=self.model.device)  # (1, T)
        positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        last = torch.tensor([tokens.shape[1] - 1], device=tokens.device)
        context = TrainingContext([layer.window for layer in self.config.layers])
        with torch.inference_mode():
            return int(self.model(tokens, positions, context, rows=last).argmax())

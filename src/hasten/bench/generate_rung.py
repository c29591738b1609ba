"""One rung of the generation ladder, in its own process: the model as the rung has it, and what is decoded with it."""

import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from hasten.bench.drafted_stream import DraftedStream, load_draft, real_prompts
from hasten.bench.generate import TEXT_BYTES, DecodeMode, GenerateLadder
from hasten.bench.models import BenchmarkModel, require_compiler
from hasten.bench.step_seconds import rewind, step_seconds
from hasten.checkpoints.export import export_model
from hasten.checkpoints.load import load
from hasten.data import read_documents
from hasten.distributed.ranks import ALONE, Ranks
from hasten.distributed.tensor_parallel import tensor_parallel
from hasten.engine.cache import row_format
from hasten.engine.compiled import compile_blocks
from hasten.engine.given_texts import GivenTexts
from hasten.evaluation.divergence import divergence
from hasten.evaluation.perplexity import perplexity
from hasten.machine import reset_peak_memory, resolve_dtype
from hasten.model.binding import bytes_per_weight
from hasten.model.context import TrainingContext
from hasten.model.fused import fuse, fuse_where_it_fits
from hasten.model.transformer import Transformer
from hasten.model.wide import precision_of, product_dtype
from hasten.ops.draw import likeliest
from hasten.planning.cost import decode_bytes_per_token, forward_flops_per_token, kv_bytes_per_token
from hasten.quantization import Int4, Int8, Scheme, quantize

# A token without a cache costs as much as the whole prompt: few are enough for the same precision.
NO_CACHE_TOKENS = 2


class GenerateRung:
    """The rung's own stream, prompt and answer, and one for each further row, of which only the answer is measured."""

    def __init__(
        self, *, ladder: GenerateLadder, mode: DecodeMode, source: BenchmarkModel | None = None, ranks: Ranks = ALONE
    ) -> None:
        device, seed = ladder.device, ladder.seed
        if mode.compiled:
            require_compiler(device)
        dtype = ladder.dtype if mode.weights is None else "bfloat16"
        self.kept = ExitStack()  # as long as the rung
        self.group = self.kept.enter_context(tensor_parallel(ranks))
        source = source or ladder.source
        if mode.file:
            self.model = from_file(source.build(dtype=resolve_dtype(mode.file), device="cpu", seed=seed), device)
        else:
            self.model = source.build(dtype=resolve_dtype(dtype), device=device, seed=seed, group=self.group)
        self.config = source.config()  # the whole model's, whatever a rank holds of it
        self.weight_bytes: float = resolve_dtype(dtype).itemsize
        if mode.weights is not None or self.model.quantization is not None:
            self.pack(mode, scored=ladder.text is not None)
        self.matrix_dtype = product_dtype(self.model)
        self.kv_cache_dtype = ladder.kv_cache_dtype if mode.cache else "auto"
        documents = [] if ladder.text is None else list(read_documents(ladder.text, limit_bytes=TEXT_BYTES))
        self.scores = {} if ladder.text is None else self.score(ladder, documents)
        if mode.compiled:
            compile_blocks(self.model)
        self.new_tokens = ladder.new_tokens  # the same for all rungs, where the bytes of a mean token are counted
        self.rows, self.streams = ladder.rows(mode), dict[str, Stream | DraftedStream]()
        if mode.drafted:
            draft = load_draft(ladder.draft or "none", ladder.source, self.model)
            prompts = real_prompts(self.model, documents, ladder.prompt_tokens)
            self.streams[""] = DraftedStream(self.model, mode, ladder, draft, prompts)
            return
        for ending, row in self.rows.items():
            self.streams[ending] = Stream(self.model, mode, ladder, row, keep_prompt=bool(ending))

    def pack(self, mode: DecodeMode, *, scored: bool) -> None:
        """Quantize, where the checkpoint is not, and fuse as the rung says; count the bytes that a weight now takes.

        Scales are among them. scored: as `--quantize` does it, since the perplexity is measured; else the head like the
        other layers, by the scales that are found fastest.
        """
        int4 = Int4() if scored else Int4(lm_head="same", search="minmax")
        int8 = Int8(activations=mode.activations) if scored else Int8(lm_head="same", activations=mode.activations)
        schemes: dict[str | None, Scheme] = {"int8": int8, "int4": int4}
        if mode.weights in schemes and self.model.quantization is None:  # else in this rung's format already
            quantize(self.model, schemes[mode.weights])
        if mode.fused:
            fuse(self.model)
        self.weight_bytes = bytes_per_weight(self.model)
        reset_peak_memory()  # what follows is the model's; making it from random bfloat16 weights is the ladder's

    def score(self, ladder: GenerateLadder, documents: Sequence[str]) -> dict[str, float]:
        """Perplexity of the beginning of a text, computed by what the rung runs, and how far that is from the model in
        bfloat16 (where it is at hand), on a CPU with the native steps.
        """
        if ladder.source.only_format() is not None:
            return {"perplexity": perplexity(self.model, documents, kv_cache_dtype=self.kv_cache_dtype).perplexity}
        same: dict[str, Any] = {"device": ladder.device, "seed": ladder.seed, "group": self.group}
        plain = ladder.source.build(dtype=resolve_dtype("bfloat16"), **same)
        found = divergence(self.model, fuse_where_it_fits(plain), documents, kv_cache_dtype=self.kv_cache_dtype)
        del plain
        reset_peak_memory()  # the other model is not the rung's
        return {"perplexity": found.perplexity, "kl_mean": found.kl_mean, "kl_99": found.kl_99, "top1": found.top1}

    def describe(self) -> dict[str, Any]:
        """What one token costs and what the cache takes, and the same of each further row."""
        facts = self._facts("")
        facts["precision"] = precision_of(self.model).to_json()
        facts["rows"] = {ending: self._facts(ending) for ending in self.rows if ending}
        facts |= self.scores
        if self.streams[""].compile_seconds is not None:
            facts["compile_seconds"] = self.streams[""].compile_seconds
        return facts

    def _facts(self, ending: str) -> dict[str, Any]:
        row, stream, head_dim = self.rows[ending], self.streams[ending], self.config.head_dim
        size = row_format(self.kv_cache_dtype).bytes(head_dim, self.model.compute_dtype) / head_dim
        context = row["prompt_tokens"] + self.new_tokens // 2  # the mean of the tokens decoded
        facts: dict[str, Any] = {
            **row,
            "bytes_per_token": decode_bytes_per_token(
                self.config, weight_bytes=self.weight_bytes, kv_bytes=size, context=context, batch=row["batch"]
            ),
            "prefill_flops_per_token": forward_flops_per_token(self.config, row["prompt_tokens"], scored=1),
            "matrix_dtype": self.matrix_dtype,
            "kv_heads": self.config.kv_heads,
            "context": context,
            "decoded_tokens": stream.new_tokens,
        }
        if stream.texts is not None:
            facts["cache_bytes_per_token"] = kv_bytes_per_token(self.config, size)
            facts["cache_bytes"] = stream.texts.cache.bytes
        return facts

    def measure(self) -> dict[str, float]:
        """The rung's own stream, then those of the further rows, whose metrics are marked with their ending."""
        found = {
            f"{ending}|{metric}" if ending else metric: value
            for ending, stream in self.streams.items()
            for metric, value in stream.measure().items()
        }
        if "tokens_per_pass" in found:  # of the model alone, not of one that drafts
            found["bytes_per_token"] = self._facts("")["bytes_per_token"] / found["tokens_per_pass"]
        return found


def from_file(model: Transformer, device: str) -> Transformer:
    """The model as a user has it, who loads it from a folder of plain weights in its dtype."""
    with tempfile.TemporaryDirectory(prefix="hasten-file-", ignore_cleanup_errors=True) as place:
        export_model(model, Path(place) / "model", dequantize=True)
        return load(Path(place) / "model", device=device)


class Stream:
    """A row's sequences, greedy. Without a cache, the whole sequences are computed again for each token.

    keep_prompt: the prompts are taken in once, and every measurement starts after them; else they are taken in, and
    measured, each time. Set up, everything is warm; `compile_seconds` is what the first decode step took then, where
    the model's blocks are compiled.
    """

    def __init__(
        self, model: Transformer, mode: DecodeMode, ladder: GenerateLadder, row: Mapping[str, Any], *, keep_prompt: bool
    ) -> None:
        self.model, self.batch = model, row["batch"]
        self.new_tokens = ladder.new_tokens if mode.cache else min(ladder.new_tokens, NO_CACHE_TOKENS)
        generator = torch.Generator().manual_seed(ladder.seed)
        shape = (self.batch, row["prompt_tokens"])
        self.prompts = torch.randint(model.config.vocab_size, shape, generator=generator).tolist()
        self.texts: GivenTexts | None = None
        if mode.cache:
            size = {"batch": self.batch, "capacity": row["prompt_tokens"] + self.new_tokens}
            self.texts = GivenTexts(model, **size, compiled=mode.compiled, kv_cache_dtype=ladder.kv_cache_dtype)
        self.compile_seconds: float | None = None
        self.kept: list[int] | None = None  # the tokens after prompts that are kept
        if mode.compiled or keep_prompt:
            tokens = self.first_tokens()
            start = time.perf_counter()
            self.next_tokens(tokens)
            self.compile_seconds = time.perf_counter() - start if mode.compiled else None
            self.kept = tokens if keep_prompt else None

    def measure(self) -> dict[str, float]:
        """The prompts, unless they are kept, then the new tokens, each waited for, as a stream shows them."""
        found: dict[str, float] = {}
        start = time.perf_counter()
        if self.kept is None:
            tokens = self.first_tokens()
            seconds = time.perf_counter() - start
            found["prefill_tokens_per_second"] = self.batch * len(self.prompts[0]) / seconds
            found["time_to_first_token_seconds"] = seconds
        else:
            assert self.texts is not None, "without a cache there are no prompts to keep"
            rewind(self.texts, len(self.prompts[0]))
            tokens = self.kept
        start = time.perf_counter()
        for _ in range(self.new_tokens):
            tokens = self.next_tokens(tokens)
        each = self.new_tokens / (time.perf_counter() - start)
        found["decode_tokens_per_second"] = self.batch * each
        if self.texts is not None and self.batch == 1:
            context = len(self.prompts[0]) + self.new_tokens - 1
            found["predicted_tokens_per_second"] = 1 / step_seconds(self.texts, [1], context)[1]
        if self.batch > 1:
            found["decode_tokens_per_second_per_sequence"] = each
        return found

    def first_tokens(self) -> list[int]:
        """Take the prompts in, whatever came before; the most likely token after each."""
        if self.texts is None:
            self.sequences = [list(prompt) for prompt in self.prompts]
            return self._recompute()
        self.texts.truncate(0)
        return _most_likely(self.texts.prefill(self.prompts))

    def next_tokens(self, tokens: list[int]) -> list[int]:
        """Append a token to each sequence; the most likely ones after them."""
        if self.texts is None:
            for sequence, token in zip(self.sequences, tokens, strict=True):
                sequence.append(token)
            return self._recompute()
        return _most_likely(self.texts.decode(torch.tensor(tokens, device=self.model.device)))

    def _recompute(self) -> list[int]:
        """The next tokens from the whole sequences, nothing kept."""
        tokens = torch.tensor(self.sequences, device=self.model.device)  # (B, T)
        batch, length = tokens.shape
        positions = torch.arange(length, device=tokens.device).expand(batch, -1)
        last = torch.arange(1, batch + 1, device=tokens.device) * length - 1
        context = TrainingContext([layer.window for layer in self.model.config.layers])
        with torch.inference_mode():
            return _most_likely(self.model(tokens, positions, context, rows=last))


def _most_likely(logits: torch.Tensor) -> list[int]:
    """The most likely token of each row of (B, V), on the host."""
    chosen: list[int] = likeliest(logits).tolist()
    return chosen

"""What a rung with a draft decodes: the ends of real documents, one after the other, greedy."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from hasten.bench.generate import DecodeMode, GenerateLadder
from hasten.bench.models import BenchmarkModel
from hasten.bench.step_seconds import step_seconds
from hasten.engine.generate import Generation, Timing
from hasten.engine.given_texts import GivenTexts
from hasten.engine.speculation import make_speculator, small_model
from hasten.engine.speculation.build import automatic
from hasten.errors import ConfigError
from hasten.model.fused import fuse_where_it_fits
from hasten.model.transformer import Transformer
from hasten.quantization import Int4, quantize

PROMPTS = 4  # documents: how often a draft is right differs between texts


@dataclass(frozen=True, slots=True)
class DraftedStream:
    """Decodes after each prompt with a new speculator, so that nothing is remembered from one round to the next."""

    compile_seconds: ClassVar[float | None] = None
    texts: ClassVar[None] = None
    model: Transformer
    mode: DecodeMode
    ladder: GenerateLadder
    draft: str | Transformer
    prompts: Sequence[Sequence[int]]

    @property
    def new_tokens(self) -> int:
        return self.ladder.new_tokens

    def measure(self) -> dict[str, float]:
        """Tokens a second, and what the steps seen would give, each as long as one of its rows that is timed alone."""
        timings, found = [], []
        for prompt in self.prompts:
            speculator, timing = make_speculator(self.model, self.draft, speculate=self.ladder.speculate), Timing()
            assert speculator is not None, "the ladder refuses a draft of none"
            run = Generation(
                self.model,
                [list(prompt)],
                max_new_tokens=self.new_tokens,
                temperature=0.0,
                ignore_eos=True,
                timing=timing,
                speculator=speculator,
                compiled=self.mode.compiled,
                kv_cache_dtype=self.ladder.kv_cache_dtype,
                gathered=True,
            )
            for _ in run:
                pass
            timings.append(timing)
            found.append(speculator.stats)
        rows = sum((Counter(stats.rows) for stats in found), Counter())
        for prompt in self.prompts:  # the step that read it
            rows -= Counter([len(prompt)])
        context, kept = len(self.prompts[0]) + self.new_tokens // 2, self.ladder.kv_cache_dtype
        texts = GivenTexts(self.model, batch=1, capacity=context + max(rows), kv_cache_dtype=kept)
        seconds = step_seconds(texts, rows, context, seconds=1.0)
        predicted = sum(stats.seconds for stats in found) + sum(n * seconds[count] for count, n in rows.items())
        proposed = sum(stats.draft_tokens for stats in found)
        # Without the steps that read the prompts, and their tokens.
        tokens, steps = (sum(getattr(stats, name) - 1 for stats in found) for name in ("tokens", "steps"))
        return {
            "decode_tokens_per_second": sum(t.decode_tokens for t in timings) / sum(t.decode_seconds for t in timings),
            "predicted_tokens_per_second": tokens / predicted,
            "tokens_per_pass": tokens / max(1, steps),
            "acceptance": sum(stats.accepted_tokens for stats in found) / max(1, proposed),
        }


def load_draft(draft: str, source: BenchmarkModel, model: Transformer) -> str | Transformer:
    """What drafts for a rung's model, as `make_speculator` takes it; a model that drafts is loaded once."""
    if draft == "auto" and (draft := automatic(model)) == "none":
        raise ConfigError("--draft auto proposes nothing where drafts may change the text, as here; name one")
    if draft == "self:int4":
        return fuse_where_it_fits(quantize(source.build(dtype=model.dtype, device=str(model.device), seed=0), Int4()))
    return draft if draft in ("suffix", "mtp") or draft.startswith("self:") else small_model(draft, model)


def real_prompts(model: Transformer, documents: Sequence[str], length: int) -> list[list[int]]:
    """The first `length` tokens of documents that are longer. Raises ConfigError where there are too few."""
    assert model.tokenizer is not None, "the ladder refuses a model without one"
    encoded = (model.tokenizer.encode(document) for document in documents)
    found = [ids[:length] for ids in islice((ids for ids in encoded if len(ids) > length), PROMPTS)]
    if not found:
        raise ConfigError(f"--text has no document of more than {length} tokens; lower --prompt-tokens")
    return found

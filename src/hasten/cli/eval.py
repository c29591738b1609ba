"""`hasten eval`: perplexity of a text, divergence from another model, and lm-eval's tasks."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

import tyro

from hasten.cli.options import AdapterOptions, CacheOptions, JsonOption, RankOptions
from hasten.effects import Needs
from hasten.errors import ConfigError
from hasten.machine.progress import share

if TYPE_CHECKING:
    from hasten.model.transformer import Transformer

OF_TEXT, OF_TASKS = Needs("text"), Needs("tasks")
TASK_OPTIONS = ("num_fewshot", "limit", "include_path", "apply_chat_template")


@dataclass(frozen=True, kw_only=True)
class Eval(JsonOption, CacheOptions, RankOptions, AdapterOptions):
    """Perplexity and bits per byte of a text; every token after the first of a document is predicted once.

    With --against also how far the model is from another one, for example from itself before quantization. With --tasks
    instead of a text: benchmarks of lm-evaluation-harness (pip install 'hasten[eval]').
    """

    text: str | None = None
    """A file, a folder or a glob of .txt, .py, .md, .jsonl or .parquet; each file or line of .jsonl is a document."""
    against: Annotated[str | None, OF_TEXT] = None
    """Compare with this model, token by token: mean and 99th percentile of the KL divergence, same top token."""
    context: int | None = None
    """Tokens in a window; by default the model's positions, at most 2048."""
    stride: Annotated[int | None, OF_TEXT, Needs("overlap")] = None
    """How far a window moves; half the context by default. Smaller is slower and gives each token more context."""
    overlap: Annotated[bool, OF_TEXT] = True
    """--no-overlap moves each window by its whole length: half the work, and less context for the first tokens."""
    limit_bytes: Annotated[int | None, OF_TEXT] = None
    """Stop after about N bytes of text."""
    tasks: tuple[str, ...] = ()
    """lm-eval's tasks, by name or pattern (arc_easy, mmlu_*); `python -m hasten.cli.lm_eval ls tasks` lists them."""
    num_fewshot: Annotated[int | None, OF_TASKS] = None
    """Examples before each question of --tasks; by default the task's own number."""
    limit: Annotated[float | None, OF_TASKS] = None
    """At most N questions of each of --tasks, or that share of them if below 1 (to try them)."""
    include_path: Annotated[str | None, OF_TASKS] = None
    """A folder with further tasks (YAML) for --tasks."""
    apply_chat_template: Annotated[bool, tyro.conf.FlagCreatePairsOff, OF_TASKS] = False
    """Ask the questions of --tasks in the model's chat template."""
    seed: int | None = None
    """The seed of random draws in --tasks."""

    EFFECTS: ClassVar = {"kv_cache_dtype": OF_TEXT}

    def run(self) -> None:
        if (self.text is None) == (not self.tasks):
            raise ConfigError("give --text FILE, or --tasks NAME,... of lm-eval")
        if self.text is None:
            self.run_tasks()
        else:
            self.score(self.text)

    def run_tasks(self) -> None:
        """Run lm-eval's tasks."""
        from hasten.evaluation.lm_eval import HastenLM, make_table, run_tasks

        lm = HastenLM(self.prepared(), max_length=self.context)
        names = [name for word in self.tasks for name in word.split(",") if name]
        results = run_tasks(lm, names, **{option: getattr(self, option) for option in TASK_OPTIONS})
        if self.write(results | {"model": self.model}):
            print("\n".join(make_table(results, part) for part in ("results", "groups") if results.get(part)))

    def score(self, text: str) -> None:
        """Measure perplexity, and the divergence from another model."""
        from hasten.data import read_documents

        documents = list(read_documents(text, limit_bytes=self.limit_bytes))
        model = self.prepared()
        from hasten.evaluation.divergence import divergence
        from hasten.evaluation.perplexity import DEFAULT_CONTEXT, perplexity
        from hasten.model.fused import path_of

        other = None
        if self.against is not None:  # as stored: --quantize and the cache dtype are for the evaluated model
            other = replace(self, model=self.against, quantize="none", adapter=None).prepared()
        limit = min(one.config.max_positions for one in (model, other) if one is not None)
        context = min(limit, DEFAULT_CONTEXT) if self.context is None else self.context
        stride = self.stride if self.overlap else context
        start = time.perf_counter()
        with share("scored tokens") as progress:
            if other is None:
                found = perplexity(
                    model,
                    documents,
                    context=context,
                    stride=stride,
                    kv_cache_dtype=self.kv_cache_dtype,
                    progress=progress,
                )
                facts = asdict(found)
                bits = "" if found.bits_per_byte is None else f"bits per byte {found.bits_per_byte:.4f}   "
                line = f"perplexity {found.perplexity:.4f}   {bits}tokens {found.tokens:,}"
            else:
                both = divergence(
                    model,
                    other,
                    documents,
                    context=context,
                    stride=stride,
                    kv_cache_dtype=self.kv_cache_dtype,
                    progress=progress,
                )
                facts = asdict(both) | {"model": self.model, "against": self.against}
                line = (
                    f"perplexity {both.perplexity:.4f}, of {self.against} {both.against_perplexity:.4f} "
                    f"({both.perplexity / both.against_perplexity - 1:+.2%})\n"
                    f"KL divergence mean {both.kl_mean:.5f}, 99% {both.kl_99:.4f} nats; same most likely token "
                    f"{both.top1:.2%}; tokens {both.tokens:,}"
                )
        seconds, path = time.perf_counter() - start, path_of(model)
        if self.write(facts | {"dtype": str(model.dtype).removeprefix("torch."), "path": path, "seconds": seconds}):
            print(f"{line} in {seconds:.1f} s ({path})")

    def prepared(self) -> Transformer:
        """Load the model to score texts."""
        import torch

        from hasten.training.build import apply_fused_activations

        model = self.load()
        if self.fuse and model.dtype == torch.float32:  # other dtypes have fused blocks
            apply_fused_activations(model, torch.float32)
        return model

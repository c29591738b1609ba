"""The ladder of training: the same model, seed and batch for every rung, so that the losses can be compared.

The rungs, cumulative: `hasten.bench.train_rungs`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hasten.bench.models import check_fits, require_compiler
from hasten.bench.train_rungs import rank_recipes, recipes
from hasten.errors import ConfigError
from hasten.machine import resolve_device, resolve_dtype, training_precision
from hasten.measure.ladder import Ladder
from hasten.measure.options import BenchmarkOptions, check_least
from hasten.measure.process import Rung
from hasten.model.config import ModelConfig
from hasten.planning.cost import training_flops_per_token
from hasten.planning.shapes import shape_config
from hasten.planning.sharing import sent_bytes
from hasten.training.recipe import Data, Recipe
from hasten.training.recipes import RECIPES

if TYPE_CHECKING:
    from hasten.distributed.ranks import Ranks

TINY_SHAKESPEARE = 65  # characters that occur in it: the vocabulary of nanoGPT's character model


@dataclass(frozen=True, kw_only=True)
class StepOptions(BenchmarkOptions):
    """The model whose steps are measured, and the length of its rows."""

    shape: str | None = None
    """A named shape: gpt2-124m, llama-120m, …; on 4 x 256 tokens unless said otherwise."""
    recipe: str | None = None
    """A recipe's model and batch: demo, gpt2-124m, llama-120m, shakespeare-char (its text's characters or 65)."""
    sequence_length: int | None = None
    """Tokens in a row (T)."""

    def recipe_and_config(self, batch_size: int | None) -> tuple[Recipe, ModelConfig]:
        """The recipe and the config of what is measured, the vocabulary unpadded."""
        from hasten.training import build

        if (self.shape is None) == (self.recipe is None):
            raise ConfigError("give one of --shape NAME and --recipe NAME")
        if self.shape is not None:
            config = shape_config(self.shape)
            recipe = Recipe(name=self.shape, data=Data(batch_size=4, context=256))
        else:
            recipe = known_recipe(str(self.recipe), "to measure")
            if recipe.data.tokenizer_kind == "character":
                recipe = replace(recipe, data=replace(recipe.data, vocab_size=characters(recipe.data.source)))
            positions = self.sequence_length or recipe.data.context
            config = build.shape_config(recipe.model, vocab_size=recipe.data.vocab_size, positions=positions)
        return with_batch(recipe, batch_size, self.sequence_length, seed=self.seed), config


@dataclass(frozen=True, kw_only=True)
class TrainLadder(StepOptions, Ladder):
    """Training: from explicit attention in float32, one technique after the other; at the end what saves memory."""

    title: ClassVar[str] = "Training ladder"
    batch_size: int | None = None
    """Rows in a batch (B)."""
    steps: int = 2
    """Optimizer steps measured in each round."""
    processes: int = 1
    """Processes of this machine that train together: the rungs are then ways to share the work, after one process."""

    def run(self) -> dict[str, Any]:
        """Measure and return the report. Raises ConfigError or ResourceError before anything is allocated."""
        import torch

        from hasten.distributed.ranks import Ranks
        from hasten.training.memory import step_memory

        device = str(resolve_device(self.device))
        recipe, config = self.recipe_and_config(self.batch_size)
        check_least("--steps", self.steps)
        check_least("--processes", self.processes)
        Ranks(size=self.processes).rows(recipe.data.batch_size)
        tokens = recipe.data.context
        if tokens > config.max_positions:
            raise ConfigError(f"{recipe.name} has {config.max_positions} positions; lower --sequence-length ({tokens})")
        rungs = []
        known = recipes if self.processes == 1 else rank_recipes
        for name, (own, words) in known(recipe, device, vocab_size=config.vocab_size, wanted=self.rungs).items():
            count = 1 if name == "one-process" else self.processes
            degree = own.parallel.tensor
            if name not in self.rungs and (count % degree or config.kv_heads % degree):
                continue  # splits nothing here; asked for by name it is refused
            ranks = Ranks(size=count).split(degree)
            need = step_memory(config, own, torch.device(device), ranks=ranks)
            memory = check_fits(f"training {recipe.name} ({name})", need, device, processes=count)
            arguments = {"recipe": own, "config": config, "steps": self.steps, "device": device}
            rungs.append(Rung(name, words, "hasten.bench.train:TrainRung", arguments, memory, processes=count))
        report = self.measure(
            rungs,
            kind="train",
            settings={
                "model": f"{recipe.name} (random weights), batches of {recipe.data.batch_size} × {tokens} tokens",
                "weights": "random",
                "precision": training_precision(device).to_json(),
                "vocabulary": config.vocab_size,
                "batch_size": recipe.data.batch_size,
                "sequence_length": tokens,
                "steps": self.steps,
                "processes": self.processes,
            },
        )
        for row in report["rows"]:
            if row.get("rounds"):
                row["first_loss"], row["last_loss"] = row["rounds"][0]["loss"], row["rounds"][-1]["loss"]
        return report


def with_batch(recipe: Recipe, batch_size: int | None, sequence_length: int | None, *, seed: int) -> Recipe:
    """A recipe whose steps are one batch of these sizes (None: its own). Raises ConfigError for smaller ones."""
    check_least("--batch-size", batch_size)
    check_least("--sequence-length", sequence_length, 2)
    batch, context = batch_size or recipe.data.batch_size, sequence_length or recipe.data.context
    data = replace(recipe.data, batch_size=batch, context=context, accumulation=1)
    return replace(recipe, data=data, run=replace(recipe.run, seed=seed))


def known_recipe(name: str, purpose: str) -> Recipe:
    """A recipe that starts from random weights. Raises ConfigError where there is none of that name."""
    known = [name for name, recipe in RECIPES.items() if recipe.init is None]
    if name not in known:
        raise ConfigError(f"there is no recipe {name!r} {purpose}; known: {', '.join(known)}")
    return RECIPES[name]


def kept_work(config: ModelConfig, recipe: Recipe, scales: Sequence[Sequence[float]]) -> dict[str, float]:
    """The share of the blocks that steps ran, and a token's FLOPs in them; {} without layer dropping."""
    from hasten.training.layer_drop import kept_share

    if not scales:
        return {}
    kept = kept_share(scales)
    return {"kept_blocks": kept, "flops_per_token": training_flops_per_token(config, recipe.data.context, kept=kept)}


def sent(config: ModelConfig, recipe: Recipe, ranks: Ranks) -> float:
    """Bytes that a rank sends in a step, by the formula that tests hold against counts."""
    padded, parallel = config.padded_to(recipe.techniques.pad_vocabulary_to), recipe.parallel
    itemsize = 2 if parallel.policy == "float32-masters" else 4
    return sent_bytes(padded, stage=parallel.zero, ranks=ranks.size, itemsize=itemsize)


def characters(source: str) -> int:
    """Tokens of a vocabulary of characters: of the text where it is a file that is here, else tiny shakespeare's."""
    from hasten.data import train_characters

    path = Path(source).expanduser()
    if not path.is_file():
        return TINY_SHAKESPEARE
    return train_characters([path.read_text(encoding="utf-8", errors="replace")]).vocab_size


class TrainRung:
    """Set up in a child process: the model with the rung's techniques, its optimizer, and one batch."""

    def __init__(
        self, *, recipe: Recipe, config: ModelConfig, steps: int, device: str, ranks: Ranks | None = None
    ) -> None:
        import torch

        from hasten.data import Batch
        from hasten.distributed.ranks import ALONE
        from hasten.model.initialize import initialize
        from hasten.training import build, rank_checks
        from hasten.training.layer_drop import draw_block_scales, keep_probabilities

        self.recipe, self.config, self.steps = recipe, config, steps
        self.ranks = (ranks or ALONE).split(recipe.parallel.tensor)
        if self.ranks.joined and device != "cpu":
            device = "cuda"  # each its own
        chosen, data, seed = recipe.techniques, recipe.data, recipe.run.seed
        if chosen.compile:
            require_compiler(device)
        # Random weights before the padding, so that they are the same on every rung.
        frozen = recipe.lora.rank is not None
        dtype = resolve_dtype(recipe.lora.base, auto=torch.bfloat16) if frozen else torch.float32
        rank_checks.check_ranks(recipe, self.ranks)
        rank_checks.check_shares(config.padded_to(chosen.pad_vocabulary_to), recipe.parallel)
        model = initialize(config, seed=seed, dtype=dtype, device=torch.device(device))
        self.step = build.training_step(model, recipe, ranks=self.ranks)
        self.taken = 0
        self.block_scales = None
        if chosen.layer_drop is not None:  # as at the end of a run, when θ has come down
            kept = keep_probabilities(len(model.blocks), theta=chosen.layer_drop)
            self.block_scales = lambda step: [draw_block_scales(kept, seed=seed, step=step, micro_step=0)]
        generator = torch.Generator().manual_seed(seed)
        shaped = (data.batch_size, data.context + 1)
        tokens = torch.randint(config.vocab_size, shaped, generator=generator)
        rows = self.ranks.rows(data.batch_size)
        tokens = tokens[self.ranks.reader * rows :][:rows].to(device)
        # One batch again and again: its loss falls, and by as much on every rung that computes the same.
        self.batch = Batch(inputs=tokens[:, :-1].contiguous(), targets=tokens[:, 1:].contiguous(), documents=None)

    def describe(self) -> dict[str, Any]:
        """What one token costs: the model's FLOPs with the vocabulary unpadded, the same for every rung."""
        gpus = self.ranks.size if self.step.device.type != "cpu" else 1  # each has the measured rate
        facts = {
            "flops_per_token": training_flops_per_token(self.config, self.recipe.data.context) / gpus,
            "matrix_dtype": self.step.precision.name,
            "vocabulary_rows": self.step.model.embedding.weight.shape[0],
        }
        if self.ranks.joined and self.ranks.tensor == 1:
            facts["sent_bytes"] = sent(self.config, self.recipe, self.ranks)
        return facts

    def measure(self) -> dict[str, float]:
        """Whole optimizer steps, the last one's loss waited for."""
        accumulation, scales = self.recipe.data.accumulation, []
        start = time.perf_counter()
        for _ in range(self.steps):
            block_scales = None if self.block_scales is None else self.block_scales(self.taken)
            scales += block_scales or []
            result = self.step.run([self.batch] * accumulation, block_scales=block_scales)
            self.taken += 1
        assert result is not None
        loss = float(result.loss)
        seconds = time.perf_counter() - start
        return {
            "tokens_per_second": self.steps * self.batch.inputs.numel() * self.ranks.readers / seconds,
            "milliseconds_per_batch": 1000 * seconds / self.steps,
            "loss": loss,
        } | kept_work(self.config, self.recipe, scales)

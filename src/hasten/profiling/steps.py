"""The steps that are profiled: a training step, and prefill and decoding, alone or in the server's engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn

from hasten.data import Batch
from hasten.engine.compiled import CompiledForOneToken
from hasten.engine.engine import Engine
from hasten.engine.for_texts import engine_for
from hasten.engine.params import SamplingParams
from hasten.engine.request import EngineFailed, Request
from hasten.engine.run import DecodeRun
from hasten.engine.sampler import Sampler
from hasten.engine.settings import EngineSettings
from hasten.errors import ConfigError
from hasten.model.attention import Attention
from hasten.model.config import ModelConfig
from hasten.model.experts import Experts
from hasten.model.fused import FusedSteps
from hasten.model.fused_mixer import MixerParts
from hasten.model.mixer import StateMixer
from hasten.model.mlp import Linear
from hasten.model.transformer import Transformer
from hasten.ops.linear.embedding import PackedEmbedding
from hasten.planning.cost import attended_by_pattern
from hasten.profiling.walk import parts_of
from hasten.training.setup import Setup

NEW_TOKENS = 64  # tokens of an answer, before the prompts are processed again
Spans = Sequence[tuple[int, int]]  # of each sequence of a step: tokens that are cached, and new ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A step that can be repeated. prepare: called before each step, not measured. scored: rows of the head's input.

    item: bytes of an activation's element. split: ranks that divide every block and every row. calls: methods that are
    parts besides the model (`Meter`); bytes: the least that they have to move.
    """

    name: str
    model: Transformer
    prepare: Callable[[], object]
    step: Callable[[], object]
    spans: Spans
    scored: int
    item: int
    calls: tuple[tuple[Any, str, str], ...]
    bytes: dict[str, float] = field(default_factory=dict)
    trains: bool = False
    split: int = 1


def training(setup: Setup, batches: Sequence[Batch]) -> Work:
    """An optimizer step at learning rate 0, which changes no weight."""
    step = setup.step
    # Clipping reads the gradients once or twice; AdamW reads weights, gradients and two means, and writes three.
    update = 4.0 * sum(p.numel() for p in step.parameters) * (7 + (2 if step.clip else 1))
    return Work(
        name="step",
        model=setup.model,
        prepare=lambda: None,
        step=lambda: step.run(batches, learning_rate=0.0),
        spans=[(0, batch.inputs.shape[1]) for batch in batches for _ in batch.inputs],
        scored=sum(batch.inputs.numel() for batch in batches),
        item=step.precision.dtype.itemsize,
        calls=((step, "loss", "batch"), (step, "update", "update")),
        bytes={"update": update},
        trains=True,
        split=setup.step.ranks.tensor,
    )


class Answers:
    """Processes random prompts, then decodes a token a step; starts over when the answers are complete.

    In the engine of `hasten.generate`.
    """

    def __init__(self, model: Transformer, *, batch: int, prompt_tokens: int) -> None:
        positions = model.config.max_positions
        self.model, self.new, self.taken = model, min(NEW_TOKENS, positions // 2), 0
        if self.new < 2:
            raise ConfigError(f"the model has {positions} positions: no room for a prompt and an answer")
        shape = batch, min(prompt_tokens, positions - self.new)
        generator = torch.Generator().manual_seed(0)
        self.prompts = torch.randint(model.config.vocab_size, shape, generator=generator).tolist()
        self.params = SamplingParams(temperature=0, max_new_tokens=self.new, ignore_eos=True)
        self.engine = engine = self.make_engine()
        steps = -(-batch * len(self.prompts[0]) // engine.settings.budget)
        if steps + 2 > self.new:  # the first answer would end before the last one begins
            raise ConfigError(
                f"{batch} prompts of {len(self.prompts[0])} tokens take {steps} steps to read, and an answer has "
                f"{self.new} tokens; ask for fewer or shorter ones"
            )
        self.asked, self._numbers = [""], count()
        self.calls: tuple[tuple[Any, str, str], ...] = (
            (engine.scheduler, "plan", "plan"),
            (engine.runner, "logits", "compute"),
            (Sampler, "take", "draw"),
            (engine.continuations, "grow", "answer"),
            # and where the same sequences go on:
            (DecodeRun, "enter", "plan"),
            (engine.runner, "next_logits", "compute"),
            (Sampler, "next_tokens", "draw"),
            (DecodeRun, "take", "answer"),
        )

    def make_engine(self) -> Engine:
        """The engine, with room for all answers at once."""
        compiled = any(isinstance(block, CompiledForOneToken) for block in self.model.blocks)
        lengths = [len(prompt) + self.new for prompt in self.prompts]
        return engine_for(self.model, lengths, compiled=compiled, capture=False)

    def begin(self) -> None:
        """Queue the prompts."""
        for request_id in self.asked:
            self.engine.abort(request_id)
        self.engine.step()
        self.asked, self.taken = [f"profile-{next(self._numbers)}" for _ in self.prompts], 0
        for request_id, prompt in zip(self.asked, self.prompts, strict=True):
            self.engine.add(Request(id=request_id, prompt=tuple(prompt), params=self.params))

    def step(self) -> None:
        """Process the prompts, or append a token to each."""
        waiting, ended = set(self.asked), False
        while waiting:  # prompts may take several steps, in which those read first go on, and so end first
            outputs = self.engine.step()
            waiting -= {output.request_id for output in outputs if output.tokens}
            ended = ended or any(output.finish_reason for output in outputs)
            if self.engine.error is not None:
                raise EngineFailed(f"the engine failed: {self.engine.error}")
        self.taken = self.new if ended else self.taken + 1

    def go_on(self) -> None:
        """Advance to where the next step decodes a token."""
        if not 0 < self.taken < self.new:
            self.begin()
            self.step()

    def works(self) -> list[Work]:
        """The prefill step and the decode step; the decode step's cost is that in the middle of the answers."""
        batch, length, item = len(self.prompts), len(self.prompts[0]), self.model.compute_dtype.itemsize
        work = partial(Work, model=self.model, step=self.step, scored=batch, item=item, calls=self.calls)
        return [
            work(name="prefill", prepare=self.begin, spans=[(0, length)] * batch),
            work(name="decode", prepare=self.go_on, spans=[(length + self.new // 2, 1)] * batch),
        ]


class ServedAnswers(Answers):
    """The same work in the server's engine, as `batch` concurrent requests."""

    def make_engine(self) -> Engine:
        batch, length = len(self.prompts), len(self.prompts[0]) + self.new
        # Without a prefix cache, so that every prompt is read.
        # Nothing is captured: a graph's replay shows none of the model's parts.
        limits = {"max_sequences": batch, "token_budget": max(512, batch), "prefix_cache": False, "capture": False}
        settings = EngineSettings(max_length=length, **limits)  # type: ignore[arg-type]
        return Engine(self.model, self.model.tokenizer, settings)


def least_of(work: Work) -> dict[str, tuple[float, float]]:
    """FLOPs and least bytes of each part's own code, from shapes; three times as much with a backward pass.

    2 FLOPs for each weight and row, 4·H·D for each key that a query sees. Bytes: weights, inputs and outputs of
    products, keys and values, each once.
    """
    config, passes, item = work.model.config, 3 if work.trains else 1, work.item
    found = {part: (0.0, moved) for part, moved in work.bytes.items()}
    routers = (one for one in work.model.modules() if isinstance(one, Experts))
    routed = {expert for router in routers for expert in router.experts.modules()}
    looked_up = {one.table for one in work.model.modules() if isinstance(one, PackedEmbedding) and one.own}
    for part in parts_of(work.model):
        flops, moved = found.get(part.name, (0.0, 0.0))
        head, tokens = part.name == "model.head", float(sum(new for _, new in work.spans))
        rows = (work.scored if head else tokens) / work.split
        for module in part.modules:
            if module in looked_up:
                continue  # its rows are looked up, which is not counted
            weights = list(module.parameters(recurse=False))
            if isinstance(module, Linear):
                taken = rows * config.experts_per_token / config.experts if module in routed else rows
                frozen = work.trains and not any(weight.requires_grad for weight in weights)  # it gets no gradient
                held = sum(tensor.nbytes for tensor in (*weights, *module.buffers())) / work.split * min(1.0, taken)
                # The loss of a training step needs all logits nowhere at once.
                made = 0 if work.trains and head else module.out_features
                flops += (passes - frozen) * 2 * taken * module.in_features * module.out_features
                moved += (passes - frozen) * (held + item * taken * (module.in_features + made))
            elif isinstance(module, FusedSteps) and module.mixer is not None:
                continue  # it is counted where its parts are
            elif isinstance(module, Attention | FusedSteps):
                spec = module.spec
                seen, read = keys_of(work.spans, spec.window)
                if config.attention_pattern is not None:
                    each = [tokens_seen(config, held + new) - tokens_seen(config, held) for held, new in work.spans]
                    seen = sum(each)
                    read = sum(min(held + new, own) for (held, new), own in zip(work.spans, each, strict=True))
                if (sizes := config.latent) is not None:
                    expanded = isinstance(module, Attention) and not any(held for held, _ in work.spans)
                    each_head = sizes.query_dim + sizes.value_dim if expanded else sizes.kept + sizes.rank
                    flops += passes * 2 * spec.heads * each_head * seen
                    moved += passes * item * (read * sizes.kept + tokens * spec.heads * each_head)
                    continue
                flops += passes * 4 * spec.heads * spec.head_dim * seen
                moved += passes * 2 * item * spec.head_dim * (read * spec.kv_heads + tokens * spec.heads)
            elif isinstance(module, StateMixer | MixerParts):
                # Products with the matrix of each head, which is read and written, and the convolution.
                sizes = module.sizes
                flops += passes * rows * 2 * (sizes.passes * sizes.numbers + sizes.kernel * sizes.channels)
                moved += passes * (8 * sizes.numbers * len(work.spans) + item * rows * (sizes.channels + sizes.values))
            elif isinstance(module, nn.Conv1d):
                continue  # a part of a mixer, which reads its weights itself
            else:  # a norm; of an embedding's table, rows
                moved += passes * 2 * item * rows * sum(weight.shape[-1] for weight in weights)
        found[part.name] = flops, moved
    return found


def tokens_seen(config: ModelConfig, length: int) -> float:
    """Number of keys that all tokens of a sequence see in a layer with a sparse pattern, summed."""
    return length * attended_by_pattern(config, length) if length else 0.0


def keys_of(spans: Spans, window: int | None) -> tuple[float, float]:
    """Number of keys that the queries of a layer see, summed, and of keys that have to be read for them."""
    most = window or 1 << 60
    seen = sum(min(position + 1, most) for held, new in spans for position in range(held, held + new))
    return seen, sum(min(held + new, most + new - 1) for held, new in spans)

"""The next tokens of a `DecodeBatch`, drawn on the device from its logits: a run of steps needs nothing of the host.

The rules are `hasten.engine.sampling`'s, over tensors of fixed addresses. Which of them a batch needs is its
`DrawKind`; each kind is captured by itself. Rows that want more than that (constraints, log-probabilities, beams) are
drawn for by the host.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hasten.engine.batch import DecodeBatch, StepShape
from hasten.engine.params import SamplingParams
from hasten.engine.sampling import History, RowParams, next_tokens
from hasten.engine.sequence import ScheduledTokens, TextSequence
from hasten.ops import triton_support

_TOP_KS = (64, 512)  # a batch's largest top-k is rounded up to one of these, or is the vocabulary


class DrawKind(NamedTuple):
    """What some row of a batch needs. top_k: the largest one's bound, 0 for none; every: each row has one."""

    greedy: bool
    drawn: bool
    temperature: bool
    top_p: bool
    min_p: bool
    repetition: bool
    presence: bool
    frequency: bool
    bias: bool
    banned: bool
    top_k: int
    every: bool

    @property
    def penalized(self) -> bool:
        return self.repetition or self.presence or self.frequency


class DeviceSampler:
    """Draws for a batch, and moves it on to its next step: the tokens drawn are its tokens, one further."""

    def __init__(self, batch: DecodeBatch, *, vocab_size: int) -> None:
        self.batch, self.vocab_size, self.device = batch, vocab_size, batch.device
        self._history: History | None = None
        self._ends: Tensor | None = None  # (B, V) bool
        self._bias: Tensor | None = None  # (B, V) float32
        self.restart()

    def restart(self) -> None:
        """Forget all sequences, whose numbers may come again."""
        self._owners = {what: [-1] * self.batch.sequences for what in ("ends", "bias")}  # the sequence of each row
        self._held: list[tuple[int, int] | None] = [None] * self.batch.sequences  # whose history, of how many tokens

    # -- the host's part ----------------------------------------------------------------------------------------------

    def prepare(self, plan: Sequence[ScheduledTokens]) -> DrawKind:
        """Write what the batch's buffer has no place for, of these sequences; returns the kind of their draw."""
        sequences = [entry.sequence for entry in plan]
        kind = kind_of([one.params for one in sequences], _steps(plan), self.vocab_size)
        if kind.penalized or kind.bias or kind.banned:
            places = self.batch.place([one.number for one in sequences])
            if kind.penalized:
                self._write_history(sequences, places)
            if kind.banned:
                self._write_ends(sequences, places)
            if kind.bias:
                self._write_bias(sequences, places)
        return kind

    def values(self, plan: Sequence[ScheduledTokens]) -> np.ndarray:
        """The values of `DecodeBatch.fill` for this plan, int64 (10, P)."""
        found = np.empty((10, len(plan)), dtype=np.int64)
        found[0] = _steps(plan)
        packed = b"".join([self.pack(entry.sequence) for entry in plan])
        found[1:] = np.frombuffer(packed, dtype=np.int64).reshape(len(plan), 9).T
        return found

    def pack(self, sequence: TextSequence) -> bytes:
        """Its values in `StepTensors`, 8 bytes each: seed, least, top_k (the vocabulary: off), and the floats."""
        if sequence.packed is None:
            params, vocab_size = sequence.params, self.vocab_size
            assert params.seed is not None, "a row of a batch has a seed"
            sequence.packed = struct.pack(
                "=3q6d",
                *(params.seed, params.min_new_tokens, min(params.top_k or vocab_size, vocab_size)),
                *(
                    0.0 if params.greedy else params.temperature,
                    params.top_p,
                    math.log(params.min_p) if params.min_p else -math.inf,
                ),
                *(params.repetition_penalty, params.presence_penalty, params.frequency_penalty),
            )
        return sequence.packed

    def took(self, numbers: Sequence[int]) -> None:
        """One more token of each was counted on the device."""
        for number in numbers:
            row = self.batch.rows[number]
            held = self._held[row]
            if held is not None and held[0] == number:
                self._held[row] = (number, held[1] + 1)

    def _write_history(self, sequences: Sequence[TextSequence], places: Sequence[int]) -> None:
        size = self.batch.sequences, self.vocab_size
        if self._history is None:
            self._history = History(
                counts=torch.zeros(size, dtype=torch.int32, device=self.device),
                seen=torch.zeros(size, dtype=torch.bool, device=self.device),
            )
        new: list[tuple[TextSequence, int]] = []
        more: tuple[list[int], list[int]] = ([], [])
        for one, place in zip(sequences, places, strict=True):
            number, text, held = one.number, one.tokens, self._held[place]
            if not one.params.needs_history:
                self._held[place] = None
            elif held is not None and held[0] == number and held[1] <= len(text):
                more[0].extend([place] * (len(text) - held[1]))
                more[1].extend(text[held[1] :])
                self._held[place] = (number, len(text))
            else:
                new.append((one, place))
                self._held[place] = (number, len(text))
        if new:
            fresh = History.of_prompts(
                [one.tokens[: one.prompt_length] for one, _ in new],
                outputs=[one.generated for one, _ in new],
                vocab_size=self.vocab_size,
                device=self.device,
            )
            at = torch.tensor([place for _, place in new], device=self.device)
            self._history.counts.index_copy_(0, at, fresh.counts)
            self._history.seen.index_copy_(0, at, fresh.seen)
        if more[0]:
            self._history.observe(torch.tensor(more[1], device=self.device), rows=more[0])

    def _write_ends(self, sequences: Sequence[TextSequence], places: Sequence[int]) -> None:
        """What may not come before min_new_tokens."""
        if self._ends is None:
            self._ends = torch.zeros(self.batch.sequences, self.vocab_size, dtype=torch.bool, device=self.device)
        new = self._new("ends", sequences, places)
        if new:
            ends = torch.zeros(len(new), self.vocab_size, dtype=torch.bool)
            for own, i in zip(ends, new, strict=True):
                own[[token for token in sequences[i].end_ids if token < self.vocab_size]] = True
            self._ends.index_copy_(0, torch.tensor([places[i] for i in new], device=self.device), ends.to(self.device))

    def _write_bias(self, sequences: Sequence[TextSequence], places: Sequence[int]) -> None:
        if self._bias is None:
            self._bias = torch.zeros(self.batch.sequences, self.vocab_size, device=self.device)
        new = self._new("bias", sequences, places)
        if new:
            bias = torch.zeros(len(new), self.vocab_size)
            for own, i in zip(bias, new, strict=True):
                for token, value in sequences[i].params.logit_bias.items():
                    own[token] = value
            self._bias.index_copy_(0, torch.tensor([places[i] for i in new], device=self.device), bias.to(self.device))

    def _new(self, what: str, sequences: Sequence[TextSequence], places: Sequence[int]) -> list[int]:
        """Which of these sequences have something else written in their rows; theirs is to be written now."""
        owners = self._owners[what]
        pairs = enumerate(zip(sequences, places, strict=True))
        found = [i for i, (one, place) in pairs if owners[place] != one.number]
        for i in found:
            owners[places[i]] = sequences[i].number
        return found

    # -- the device's part --------------------------------------------------------------------------------------------

    def step(self, shape: StepShape, kind: DrawKind, logits: Tensor) -> None:
        """Draw from logits (S, 1, V) and move the batch on: nothing here depends on a value that the host knows."""
        step, size = self.batch.views(shape), shape.sequences
        history = None
        if kind.penalized:
            assert self._history is not None
            history = History(counts=self._history.counts[:size], seen=self._history.seen[:size])
        banned = None
        if kind.banned:
            assert self._ends is not None
            banned = self._ends[:size] & (step.steps < step.least)[:, None]
        settings = self._settings(shape, kind)
        tokens = next_tokens(logits[:, 0], settings, steps=step.steps, history=history, banned=banned)
        going = step.lengths > 0
        if history is not None:
            one, at = going.to(torch.int32)[:, None], tokens[:, None]
            history.counts.scatter_add_(1, at, one)
            history.seen.scatter_(1, at, history.seen.gather(1, at) | going[:, None])
        if tokens.is_cuda and triton_support.refusal(tokens.device) is None:
            from hasten.ops.draw import triton_draw

            triton_draw.move_on(tokens, step.tokens, step.lengths, step.steps)
        else:
            step.tokens.copy_((tokens * going)[:, None])
            step.lengths.add_(going)
            step.steps.add_(going)

    def _settings(self, shape: StepShape, kind: DrawKind) -> RowParams:
        """The settings of all rows as tensors that stay where they are."""
        step, vocab = self.batch.views(shape), self.vocab_size
        floats = step.floats.float().unsqueeze(-1).unbind()  # (S, 1) each
        on = (kind.temperature, kind.top_p, kind.min_p, kind.repetition, kind.presence, kind.frequency)
        temperature, top_p, min_p, *penalties = (own if one else None for own, one in zip(floats, on, strict=True))
        repetition, presence, frequency = penalties
        greedy = step.floats[0] == 0 if kind.greedy and kind.drawn else None
        if temperature is not None:
            temperature = torch.where(temperature == 0, 1.0, temperature)
        return RowParams(
            vocab_size=vocab,
            seeds=step.seeds,
            all_greedy=not kind.drawn,
            greedy=greedy,
            temperature=temperature,
            top_k=step.top_k[:, None] if kind.top_k else None,
            max_top_k=min(kind.top_k or vocab, vocab),
            every_row_top_k=kind.every,
            top_p=top_p,
            log_min_p=min_p,
            repetition=repetition,
            presence=presence,
            frequency=frequency,
            bias=None if self._bias is None or not kind.bias else self._bias[: shape.sequences],
        )


def _steps(plan: Sequence[ScheduledTokens]) -> list[int]:
    """How many tokens each sequence has generated, one that only the device knows included."""
    return [entry.end - entry.sequence.prompt_length for entry in plan]


def kind_of(params: Sequence[SamplingParams], steps: Sequence[int], vocab_size: int) -> DrawKind:
    """What a batch of these rows needs, given the tokens each has so far."""
    ks = [p.top_k for p in params if 0 < p.top_k < vocab_size]
    return DrawKind(
        greedy=any(p.greedy for p in params),
        drawn=not all(p.greedy for p in params),
        temperature=any(not p.greedy and p.temperature != 1.0 for p in params),
        top_p=any(p.top_p != 1.0 for p in params),
        min_p=any(p.min_p for p in params),
        repetition=any(p.repetition_penalty != 1.0 for p in params),
        presence=any(p.presence_penalty for p in params),
        frequency=any(p.frequency_penalty for p in params),
        bias=any(p.logit_bias for p in params),
        banned=any(step < p.min_new_tokens for p, step in zip(params, steps, strict=True)),
        top_k=0 if not ks else next((k for k in _TOP_KS if k >= max(ks)), vocab_size),
        every=0 < len(ks) == len(params),
    )

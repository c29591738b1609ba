"""What the model computes in a step: logits for the tokens of all sequences, and the next tokens drawn from them.

The tokens of a step's sequences go through the model end to end (`step_logits`). What is drawn (`Sampler`) is one batch
for all output sequences that got to their last token. A row's token depends on its own logits, settings, seed and step
alone (see `hasten.generation.sampling`): it does not matter who else is drawn for. What is laid out for a set of rows
is kept until the set changes. Before a step, tokens may be guessed (speculation); who guesses well is not decided here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hasten.errors import ConfigError
from hasten.generation.batch_sampler import BatchSampler
from hasten.generation.paged import PagedCache, Rows
from hasten.generation.prompts import check_ids
from hasten.model.context import training_context
from hasten.model.transformer import Transformer
from hasten.serving.blocks import BlockManager
from hasten.serving.logprobs import TokenTexts, token_logprobs
from hasten.serving.request import Constraint, RequestRefused, TokenLogprob
from hasten.serving.request_state import OutputSequence
from hasten.serving.scheduler import ScheduledSequence, ScheduledTokens


def step_logits(
    model: Transformer,
    cache: PagedCache,
    plan: Sequence[ScheduledTokens],
    blocks: BlockManager,
) -> tuple[Tensor, list[int]]:
    """Logits (R, V) float32 of the rows that are wanted, and the first of each of the plan's entries.

    An entry's scored rows come before those of its last token. Where none is wanted, the step only reads, and R is 1.
    """
    tokens: list[int] = []
    wanted: list[int] = []
    first: list[int] = []
    rows: list[Rows] = []
    for entry in plan:
        sequence, start, count = entry.sequence, entry.start, entry.count
        drafts, at = sequence.drafts, len(tokens)
        if count == 1 and not drafts:
            tokens.append(sequence.tokens[start])
        else:
            tokens += (sequence.tokens + drafts if drafts else sequence.tokens)[start : start + count]
        first.append(len(wanted))
        if sequence.scored:
            wanted += range(at, at + entry.scored)
        if entry.complete:
            wanted += range(len(tokens) - 1 - len(drafts), len(tokens))
        rows.append(Rows(blocks.block_table(sequence.number), start, count))
    step = cache.step(rows)
    ids = torch.tensor([tokens], device=model.device)  # (1, N)
    return model(ids, step.positions, step, rows=torch.tensor(wanted or [len(tokens) - 1], device=model.device)), first


@torch.no_grad()
def embed(model: Transformer, prompt: Sequence[int], *, pooling: str, max_length: int) -> Tensor:
    """States (C,) float32: the mean over the prompt's tokens ("mean"), or the last one's ("last"). Not normalised.

    Raises RequestRefused.
    """
    if pooling not in ("mean", "last"):
        raise RequestRefused(f"pooling is {pooling!r:.40}; it must be 'mean' or 'last'")
    try:
        check_ids(model, prompt)
    except ConfigError as error:
        raise RequestRefused(str(error)) from error
    if not 0 < len(prompt) <= max_length:
        raise RequestRefused(f"the text has {len(prompt)} tokens; it must have from 1 to {max_length}")
    tokens = torch.tensor([list(prompt)], device=model.device)  # (1, T)
    positions = torch.arange(len(prompt), device=tokens.device)[None]
    x = model.norm(model.states(tokens, positions, training_context(model, len(prompt)))).float()[0]  # (T, C)
    return x[-1] if pooling == "last" else x.mean(dim=0)


# A guess at the next tokens of a sequence that is about to draw one.
Proposer = Callable[[ScheduledSequence], Sequence[int]]


def guess(propose: Proposer, outputs: Iterable[OutputSequence]) -> None:
    """Have the next tokens of output sequences that are one behind guessed, no more than they may still take."""
    for output in outputs:
        sequence = output.sequence
        if len(sequence.tokens) - sequence.computed != 1:
            continue
        if output.constraint is not None or output.params.needs_history:
            continue  # each of their draws depends on the one before
        room = output.params.max_new_tokens - output.count - 1
        sequence.drafts = list(propose(sequence))[: max(0, room)]


@dataclass(slots=True)  # not frozen, which takes longer to make: there is one for each row of each step
class SampledTokens:
    """What an output sequence takes in a step. failure: why its constraint allows nothing, if so."""

    tokens: list[int]
    logprobs: Sequence[TokenLogprob]
    failure: str | None


class Sampler:
    """Draws for a changing set of rows."""

    def __init__(self, *, vocab_size: int, eos_ids: Collection[int], texts: TokenTexts, device: torch.device) -> None:
        self.vocab_size, self.eos_ids, self.texts, self.device = vocab_size, frozenset(eos_ids), texts, device
        self._key: tuple[int, ...] = ()
        self._drawn: list[int] = []  # indices of the rows that are more than an argmax
        self._rows: Tensor | None = None  # the same, where they are not all
        self._batch: BatchSampler | None = None
        self._failures: dict[int, str] = {}  # of the last draw: rows whose constraint raised or left no token

    def sample(self, logits: Tensor, outputs: Sequence[OutputSequence], first: Sequence[int]) -> list[SampledTokens]:
        """What each output sequence takes. logits (R, V) float32; its first row, and one more for each guess behind it.

        A guess is right if it is what is drawn at its place, from the same logits and noise as without guessing: so the
        text is the same, and the more of them are right, the sooner.
        """
        rows: list[int] = []
        owners: list[OutputSequence] = []
        steps: list[int] = []
        wanted: dict[int, int] = {}  # rows whose log-probabilities are, and how many alternatives
        for output, row in zip(outputs, first, strict=True):
            count = output.count
            if output.state.wants_logprobs:
                own = range(len(rows), len(rows) + 1 + len(output.sequence.drafts))
                wanted |= dict.fromkeys(own, output.state.request.logprobs or 0)
            for i in range(1 + len(output.sequence.drafts)):
                rows.append(row + i)
                owners.append(output)
                steps.append(count + i)
        if rows != list(range(len(logits))):  # several outputs of one row, or rows of a prompt's log-probabilities
            logits = logits[torch.tensor(rows, device=logits.device)]
        raw = logits[torch.tensor(list(wanted), device=logits.device)] if wanted else None  # constraints mask in place
        tokens = self._draw(logits, owners, steps)
        logprobs: dict[int, TokenLogprob] = {}
        if raw is not None:
            chosen = [tokens[i] for i in wanted]
            found = token_logprobs(raw, chosen, tops=list(wanted.values()), texts=self.texts)
            logprobs = dict(zip(wanted, found, strict=True))
        sampled: list[SampledTokens] = []
        at = 0
        for output in outputs:
            drafts, end = output.sequence.drafts, at + 1
            while end - at <= len(drafts) and drafts[end - at - 1] == tokens[end - 1]:
                end += 1
            taken = [logprobs[i] for i in range(at, end)] if output.state.wants_logprobs else ()
            sampled.append(SampledTokens(tokens[at:end], taken, self._failures.get(at)))
            at += 1 + len(drafts)
        return sampled

    def _draw(self, logits: Tensor, outputs: Sequence[OutputSequence], steps: Sequence[int]) -> list[int]:
        """logits (R, V) float32 (masked by constraints in place) -> a token of each row, for its output sequence.

        steps: tokens before it. Rows with penalties or constraints have no guesses.
        """
        key = tuple(output.sequence.number for output in outputs)
        self._failures.clear()
        if key != self._key:
            self._arrange(outputs)
            self._key = key
        if self._batch is None:
            return logits.argmax(dim=-1).tolist()
        own, at = [outputs[i] for i in self._drawn], [steps[i] for i in self._drawn]
        part = logits if self._rows is None else logits[self._rows]
        for row, output, place in zip(part, own, self._drawn, strict=True):
            if output.constraint is not None:
                self._constrain(row, output.constraint, place)
        tokens = self._batch.next_tokens(part, steps=at)
        if self._rows is None:
            return tokens.tolist()
        found = logits.argmax(dim=-1)
        found[self._rows] = tokens
        return found.tolist()

    def _constrain(self, row: Tensor, constraint: Constraint, place: int) -> None:
        try:
            constraint.mask(row)
            if row.amax().item() == -math.inf:
                self._failures[place] = "the constraint on the answer allows no token here"
        except Exception as error:  # of a grammar that came with a request: its own failure, not the engine's
            self._failures[place] = f"the constraint on the answer failed: {error}"

    def _arrange(self, outputs: Sequence[OutputSequence]) -> None:
        self._drawn = [i for i, one in enumerate(outputs) if not one.plain or one.count < one.params.min_new_tokens]
        own = [outputs[i] for i in self._drawn]
        self._rows = self._batch = None
        if not own:
            return
        if len(own) < len(outputs):
            self._rows = torch.tensor(self._drawn, device=self.device)
        self._batch = BatchSampler(
            [output.params for output in own],
            [output.state.request.prompt if output.params.needs_history else () for output in own],
            [output.generated if output.params.needs_history else () for output in own],
            eos_ids=self.eos_ids,
            vocab_size=self.vocab_size,
            device=self.device,
        )

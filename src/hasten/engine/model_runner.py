"""What the model computes in a step: logits for the tokens of all sequences, and the next tokens drawn from them.

The tokens of a step's sequences go through the model end to end (`step_logits`). What is drawn (`Sampler`) is one batch
for all output sequences that got to their last token. A row's token depends on its own logits, settings, seed and step
alone (see `hasten.engine.sampling`): it does not matter who else is drawn for. What is laid out for a set of rows
is kept until the set changes. A sequence may come with a draft, tokens that were proposed for it (speculation).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hasten.engine.batch_sampler import BatchSampler, agreed
from hasten.engine.layout import to_device
from hasten.engine.logprobs import TokenTexts, token_logprobs
from hasten.engine.prompts import check_ids
from hasten.engine.request import RequestRefused, TokenLogprob
from hasten.engine.runner import ModelRunner
from hasten.engine.sequence import ScheduledTokens, TextSequence
from hasten.engine.speculation import Speculator
from hasten.errors import ConfigError
from hasten.model.sharded import broadcast_from_rank0
from hasten.model.transformer import Transformer

if TYPE_CHECKING:
    from hasten.engine.batch_runner import BatchRunner


def step_logits(
    runner: ModelRunner, plan: Sequence[ScheduledTokens], *, captured: bool = True
) -> tuple[Tensor, list[int]]:
    """Logits (R, V) float32 of the rows that are wanted, and the first of each of the plan's entries.

    An entry's scored rows come before those of its last token. Where none is wanted, the step only reads, and R is 1.
    captured: whether a captured step may be looked for.
    """
    decoder = runner.decoder if captured else None
    if decoder is not None and (found := _captured_logits(decoder, plan)) is not None:
        return found
    tokens: list[int] = []
    wanted: list[int] = []
    first: list[int] = []
    for entry in plan:
        drafts, at = len(entry.sequence.drafts), len(tokens)
        tokens += entry.tokens
        first.append(len(wanted))
        if entry.sequence.scored:
            wanted += range(at, at + entry.scored)
        if entry.complete:
            wanted += range(len(tokens) - 1 - drafts, len(tokens))
    model = runner.model
    if model.adapters is not None and runner.chooses_adapters:
        chosen = [entry.sequence.adapter for entry in plan for _ in range(entry.count)]
        model.adapters.choose(chosen, model.device)
    return runner.logits(tokens, plan, wanted or [len(tokens) - 1]), first


def common_adapter(plan: Sequence[ScheduledTokens]) -> int | None:
    """The adapter that all of a plan's sequences take (-1: none does); None where they differ."""
    found = {entry.sequence.adapter for entry in plan}
    return found.pop() if len(found) == 1 else None


def _captured_logits(decoder: BatchRunner, plan: Sequence[ScheduledTokens]) -> tuple[Tensor, list[int]] | None:
    """The same of a step of decodes and their drafts, where it is captured."""
    for entry in plan:
        if not entry.complete or entry.count != 1 + len(entry.sequence.drafts):
            return None
    adapter = common_adapter(plan)
    return None if adapter is None else decoder.logits(plan, adapter=adapter)


@torch.no_grad()
def embed(runner: ModelRunner, prompt: Sequence[int], adapter: int = -1, *, pooling: str, max_length: int) -> Tensor:
    """States (C,) float32: the mean over the prompt's tokens ("mean"), or the last one's ("last"). Not normalised.

    Raises RequestRefused.
    """
    if pooling not in ("mean", "last"):
        raise RequestRefused(f"pooling is {pooling!r:.40}; it must be 'mean' or 'last'")
    try:
        check_ids(runner.model, prompt)
    except ConfigError as error:
        raise RequestRefused(str(error)) from error
    if not 0 < len(prompt) <= max_length:
        raise RequestRefused(f"the text has {len(prompt)} tokens; it must have from 1 to {max_length}")
    model = runner.model
    if model.adapters is not None:
        model.adapters.choose([adapter] * len(prompt), model.device)
    x = runner.states(prompt)
    return x[-1] if pooling == "last" else x.mean(dim=0)


class _Walk:
    """The constraints of drawn rows, each walked along its draft; what is not taken is forgotten with a fork."""

    def __init__(self, outputs: Sequence[TextSequence], end_ids: Sequence[Collection[int]]) -> None:
        self.failures: dict[int, str] = {}
        self._end_ids = end_ids
        self._drafted = [bool(output.drafts) for output in outputs]
        self._constraints = [
            one.constraint.fork() if drafted and one.constraint is not None else one.constraint
            for one, drafted in zip(outputs, self._drafted, strict=True)
        ]

    def mask(self, row: int, logits: Tensor) -> None:
        constraint = self._constraints[row]
        if constraint is None:
            return
        try:
            constraint.mask(logits)
            if logits.amax().item() == -math.inf:
                self.failures[row] = "the constraint on the answer allows no token here"
        except Exception as error:  # of a grammar that came with a request: its own failure, not the engine's
            self.failures[row] = f"the constraint on the answer failed: {error}"

    def took(self, row: int, token: int) -> bool:
        constraint = self._constraints[row]
        if constraint is None or row in self.failures or not self._drafted[row] or token in self._end_ids[row]:
            return constraint is None
        try:
            constraint.advance(token)
            return not constraint.done
        except Exception:  # it fails again where the token is appended, which says so
            return False


class Sampler:
    """Draws for a changing set of rows."""

    def __init__(
        self, model: Transformer, *, eos_ids: Collection[int], texts: TokenTexts, in_step: bool = False
    ) -> None:
        """in_step: as in `ModelRunner`."""
        self.model, self.eos_ids, self.texts, self.in_step = model, frozenset(eos_ids), texts, in_step
        self._outputs: Sequence[TextSequence] = ()  # that all of this was laid out for
        self._key: tuple[int, ...] = ()
        self._drawn: list[int] = []  # indices of the outputs whose tokens are more than an argmax
        self._batch: BatchSampler | None = None  # of those

    def forget(self) -> None:
        """Lay everything out again at the next draw: tokens were drawn elsewhere meanwhile."""
        self._outputs, self._key, self._drawn, self._batch = (), (), [], None

    def sample(
        self,
        logits: Tensor,
        outputs: Sequence[TextSequence],
        first: Sequence[int],
        *,
        speculator: Speculator | None = None,
    ) -> list[tuple[list[int], Sequence[TokenLogprob]]]:
        """The tokens that each output sequence takes, and their log-probabilities where these are wanted.

        Its draft as far as it is right, and one token more. Where its constraint allows nothing, its `failure` is set.
        logits (R, V) float32; of each output the row `first`, and one more for each token of its draft behind it.
        speculator: knows what the drafts were drawn from.
        """
        self._arrange(outputs)
        scored = {
            i: logits[first[i] : first[i] + 1 + len(output.drafts)]
            for i, output in enumerate(outputs)
            if output.state.wants_logprobs
        }
        taken, failures = self._take(logits, outputs, first, speculator)
        if speculator is not None and self.in_step:  # only the first rank knows what drafts were drawn from
            taken = broadcast_from_rank0(self.model, taken)
        logprobs = self._logprobs(scored, taken, outputs)
        for i, failure in failures.items():
            outputs[i].failure = failure
        return [(own, logprobs.get(i, ())) for i, own in enumerate(taken)]

    def _take(
        self,
        logits: Tensor,
        outputs: Sequence[TextSequence],
        first: Sequence[int],
        speculator: Speculator | None,
    ) -> tuple[list[list[int]], dict[int, str]]:
        """The tokens of each output, and why those failed whose constraint allows none."""
        taken: list[list[int]] = [[] for _ in outputs]
        drawn = set(self._drawn)
        if len(drawn) < len(outputs):
            best = logits.argmax(dim=-1).tolist()
            for i, output in enumerate(outputs):
                if i not in drawn:
                    drafts = output.drafts
                    taken[i] = agreed(best[first[i] : first[i] + 1 + len(drafts)], drafts)
        if self._batch is None:
            return taken, {}
        own = [outputs[i] for i in self._drawn]
        rows = [first[i] + at for i in self._drawn for at in range(1 + len(outputs[i].drafts))]
        if rows != list(range(len(logits))):  # several outputs of one row, or rows of a prompt's log-probabilities
            logits = logits[torch.tensor(rows, device=logits.device)]
        walk = None
        if any(output.constraint is not None for output in own):
            walk = _Walk(own, self._batch.end_ids)
        proposed = [output.drafts for output in own]
        drawn_from = None
        if speculator is not None:
            drawn_from = [
                speculator.probabilities(output.number)[: len(draft)]
                for output, draft in zip(own, proposed, strict=True)
            ]
        steps = [output.count for output in own]
        found = self._batch.take(logits, proposed, steps=steps, guide=walk, probabilities=drawn_from)
        failures: dict[int, str] = {}
        for at, (i, tokens) in enumerate(zip(self._drawn, found, strict=True)):
            taken[i] = tokens
            if walk is not None and at in walk.failures:
                if len(tokens) > 1:  # what was right before it counts; the next step fails at once
                    taken[i] = tokens[:-1]
                else:
                    failures[i] = walk.failures[at]
        return taken, failures

    def _logprobs(
        self, scored: dict[int, Tensor], taken: Sequence[Sequence[int]], outputs: Sequence[TextSequence]
    ) -> dict[int, list[TokenLogprob]]:
        """Those of the taken tokens, for the outputs that want them."""
        if not scored:
            return {}
        rows = torch.cat([logits[: len(taken[i])] for i, logits in scored.items()])
        tops = [outputs[i].state.request.logprobs or 0 for i in scored for _ in taken[i]]
        tokens = [token for i in scored for token in taken[i]]
        found = iter(token_logprobs(rows, tokens, tops=tops, texts=self.texts))
        return {i: [next(found) for _ in taken[i]] for i in scored}

    def draw(self, logits: Tensor, outputs: list[TextSequence], first: Sequence[int]) -> Tensor:
        """The next token of each output sequence, int64 on the device; the host does not wait for it.

        logits (R, V) and `first` as in `sample`; of outputs without drafts, constraints and log-probabilities.
        """
        if outputs is not self._outputs:
            self._arrange(outputs)
        if len(first) != len(logits) or first != range(len(logits)):
            logits = logits[to_device(list(first), logits.device)]
        if self._batch is None:
            return logits.argmax(dim=-1)
        own = self._drawn
        whole = len(own) == len(outputs)
        rows = None if whole else to_device(own, logits.device)
        drawn = self._batch.next_tokens(
            logits if rows is None else logits[rows],
            steps=[len(outputs[i].tokens) - outputs[i].prompt_length for i in own],
        )
        if rows is None:
            return drawn
        best = logits.argmax(dim=-1)
        best.index_copy_(0, rows, drawn)
        return best

    def _arrange(self, outputs: Sequence[TextSequence]) -> None:
        """Lay out how these are drawn for, unless it was done for the same ones."""
        key = tuple(output.number for output in outputs)
        self._outputs = outputs
        if key == self._key:
            return
        self._key = key
        self._drawn = [i for i, one in enumerate(outputs) if not one.plain or one.count < one.params.min_new_tokens]
        own = [outputs[i] for i in self._drawn]
        self._batch = None
        if own:
            self._batch = BatchSampler(
                [output.params for output in own],
                [output.state.request.prompt if output.params.needs_history else () for output in own],
                [output.generated if output.params.needs_history else () for output in own],
                eos_ids=self.eos_ids,
                vocab_size=self.model.config.vocab_size,
                device=self.model.device,
            )

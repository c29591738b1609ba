"""The next tokens of the rows of a batch, step after step: `hasten.engine.sampling` with what it must remember.

A row's token depends on its own logits, settings, seed and step alone: it does not matter who else is drawn for. A row
may come with a draft: tokens that were guessed to follow its text, and the logits after each of them. A guessed
token is taken if it is what is drawn at its place, from the logits, noise, history and constraint of that place. So the
text is the same with any draft or none; a good one only makes it come sooner.
"""

from collections.abc import Collection, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from hasten.engine.guide import Guide
from hasten.engine.layout import to_device
from hasten.engine.params import SamplingParams
from hasten.engine.sampling import History, RowParams, banned_ends, next_tokens, process
from hasten.engine.stopping import stop_ids
from hasten.ops.draw import exponential_noise, likeliest

_KEPT = 64  # selections of rows
_STEPS = 256  # of which the numbers are on the device at a time
_STREAM = 0x5851F42D4C957F2D  # between the seeds of streams of noise that have nothing to do with each other


class Sampler:
    """Draws for B rows, each with its own params, after its prompt (and the output that it has already).

    Prompts and outputs are looked at only where a row has a penalty. eos_ids: the model's end-of-text tokens.
    """

    def __init__(
        self,
        params: Sequence[SamplingParams],
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]] = (),
        *,
        eos_ids: Collection[int],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._params, self._device = params, device
        self._rows = RowParams.stack(params, vocab_size=vocab_size, device=device)
        self.end_ids = [stop_ids(row, eos_ids=eos_ids) for row in params]  # of each row, what ends its text
        self._least = max((row.min_new_tokens for row in params), default=0)
        self._selected: dict[tuple[int, ...], RowParams] = {}
        self._steps: tuple[int, Tensor] | None = None  # the first of them, and (_STEPS, B)
        self._largest = self._rows.largest_only
        self._history = None
        if self._rows.needs_history:
            self._history = History.of_prompts(prompts, outputs=outputs, vocab_size=vocab_size, device=device)

    def next_tokens(self, logits: Tensor, *, steps: Sequence[int], rows: Sequence[int] | None = None) -> Tensor:
        """Logits of the last position (B, V or more) -> tokens (B,) int64. steps: tokens generated so far by each.

        rows: which rows they are, where not all are there.
        """
        tokens = self._draw(logits, rows, steps)
        if self._history is not None:
            self._history.observe(tokens, rows=rows)
        return tokens

    def take(
        self,
        logits: Tensor,
        drafts: Sequence[Sequence[int]],
        *,
        steps: Sequence[int],
        guide: Guide | None = None,
        probabilities: Sequence[Sequence[Tensor]] | None = None,
    ) -> list[list[int]]:
        """What each row takes: its draft as far as it is what is drawn, and one token more.

        logits (R, V or more): of each row those after its text, then those after each token of its draft. steps: tokens
        generated so far by each row. Where a draw depends on those before it (penalties, a guide), the drafts' places
        are drawn for one after the other; else all at once. probabilities: those (V,) that each token of a draft was
        drawn from, with noise of its own; where a row has them and no penalty or guide, a token is taken with
        min(1, p/q) instead, and one that is not is replaced by a draw from what p has more than q (arXiv 2211.17192).
        """
        if guide is None and not any(drafts):
            return [[token] for token in self.next_tokens(logits, steps=steps).tolist()]
        first = [0, *accumulate(1 + len(draft) for draft in drafts)]
        rows: list[int] | None
        if guide is None and self._history is None:
            rows = [row for row, draft in enumerate(drafts) for _ in range(1 + len(draft))]
            places = [steps[row] + at - first[row] for at, row in enumerate(rows)]
            if probabilities is not None and any(probabilities):
                return self._by_distribution(logits, drafts, probabilities, rows, places)
            drawn = self._draw(logits, rows, places).tolist()
            return [agreed(drawn[first[row] : first[row + 1]], draft) for row, draft in enumerate(drafts)]
        taken: list[list[int]] = [[] for _ in drafts]
        going = list(range(len(drafts)))
        for place in range(1 + max(map(len, drafts))):
            part = logits[torch.tensor([first[row] + place for row in going], device=logits.device)]
            rows = going if len(going) < len(drafts) else None
            if guide is not None:
                for row, own in zip(going, part, strict=True):
                    guide.mask(row, own)
            tokens = self._draw(part, rows, [steps[row] + place for row in going])
            if self._history is not None:
                self._history.observe(tokens, rows=going)
            more: list[int] = []
            for row, token in zip(going, tokens.tolist(), strict=True):
                taken[row].append(token)
                goes_on = guide is None or guide.took(row, token)
                if goes_on and place < len(drafts[row]) and drafts[row][place] == token:
                    more.append(row)
            going = more
            if not going:
                break
        return taken

    def probabilities(self, logits: Tensor, *, steps: Sequence[int], rows: Sequence[int] | None = None) -> Tensor:
        """What the tokens of the rows are drawn from (B, V), where none has a penalty."""
        settings, banned = self._settings(rows, steps)
        return process(logits, settings, banned=banned).softmax(-1)

    def _by_distribution(
        self,
        logits: Tensor,
        drafts: Sequence[Sequence[int]],
        drawn_from: Sequence[Sequence[Tensor]],
        rows: Sequence[int],
        places: Sequence[int],
    ) -> list[list[int]]:
        """What each row takes by the rule of min(1, p/q); by the other one where a draft has no probabilities."""
        drawn = self._draw(logits, rows, places).tolist()
        target = self.probabilities(logits, steps=places, rows=rows)  # (R, V)
        seeds, at = self._rows.seeds[list(rows)], torch.tensor(places, device=self._device)
        # A third stream of noise beside the target's and the draft's: e^-E is uniform.
        uniform = (-exponential_noise(seeds + 2 * _STREAM, at, vocab_size=1)[:, 0]).exp().tolist()
        taken, start = [], 0
        for draft, own in zip(drafts, drawn_from, strict=True):
            found, start = start, start + 1 + len(draft)
            if len(own) < len(draft):
                taken.append(agreed(drawn[found:start], draft))
                continue
            count = 0
            while count < len(draft):
                q, p = own[count][draft[count]], target[found + count, draft[count]]
                if uniform[found + count] * q >= p:
                    break
                count += 1
            last = drawn[found + count]  # by the noise of its place
            if count < len(draft):
                noise = exponential_noise(seeds[[found + count]], at[[found + count]], vocab_size=target.shape[1])[0]
                last = int(((target[found + count] - own[count]).clamp(min=0).log() - noise.log()).argmax())
            taken.append([*draft[:count], last])
        return taken

    def _draw(self, logits: Tensor, rows: Sequence[int] | None, steps: Sequence[int]) -> Tensor:
        """A token (R,) for each of the logits (R, V), which belong to these rows (None: to all, in order)."""
        if self._largest and (not self._least or min(steps) >= self._least):
            return likeliest(logits[:, : self._rows.vocab_size])
        settings, banned = self._rows, None
        if rows is not None or min(steps) < self._least:
            settings, banned = self._settings(rows, steps)
        history = self._history if rows is None or self._history is None else self._history.select(rows)
        same = rows is None and min(steps) == max(steps)  # as in a batch of texts that began together
        at = self._numbers_of(steps[0]) if same else to_device(list(steps), self._device)
        return next_tokens(logits, settings, steps=at, history=history, banned=banned)

    def _numbers_of(self, step: int) -> Tensor:
        """The same step (B,) for all rows, without a launch or a copy for each."""
        first = step - step % _STEPS
        if self._steps is None or self._steps[0] != first:
            numbers = torch.arange(first, first + _STEPS, device=self._device)
            self._steps = first, numbers[:, None].repeat(1, len(self._params))
        return self._steps[1][step - first]

    def _settings(self, rows: Sequence[int] | None, steps: Sequence[int]) -> tuple[RowParams, Tensor | None]:
        """The settings of these rows (None: of all), and the tokens that must not come at these steps."""
        params, ends, settings = self._params, self.end_ids, self._rows
        if rows is not None and list(rows) != list(range(len(params))):
            params, ends, settings = (
                [params[row] for row in rows],
                [ends[row] for row in rows],
                self._select(tuple(rows)),
            )
        if min(steps) >= self._least:
            return settings, None
        banned = banned_ends(params, steps=steps, end_ids=ends, vocab_size=settings.vocab_size, device=self._device)
        return settings, banned

    def _select(self, rows: tuple[int, ...]) -> RowParams:
        """The settings of these rows; drafts ask for the same ones again and again."""
        if self._rows.bias is not None:  # as wide as the vocabulary: not to be kept
            return self._rows.select(rows)
        if rows not in self._selected:
            if len(self._selected) >= _KEPT:
                self._selected.clear()
            self._selected[rows] = self._rows.select(rows)
        return self._selected[rows]


def other_seed(seed: int | None) -> int | None:
    """The seed of a draft that draws with noise of its own."""
    return None if seed is None else (seed + _STREAM) % (1 << 63)


def agreed(drawn: Sequence[int], draft: Sequence[int]) -> list[int]:
    """The tokens taken, given those drawn at a draft's places and at the one behind it."""
    count = next((i for i, token in enumerate(draft) if drawn[i] != token), len(draft))
    return list(drawn[: count + 1])

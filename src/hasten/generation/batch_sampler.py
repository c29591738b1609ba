"""The next token of every row of a batch, step after step: `hasten.generation.sampling` with what it must remember."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from hasten.generation.params import SamplingParams
from hasten.generation.sampling import History, RowParams, banned_ends, next_tokens
from hasten.generation.stopping import stop_ids


class BatchSampler:
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
        self._end_ids = [stop_ids(row, eos_ids=eos_ids) for row in params]
        self._history = None
        if self._rows.needs_history:
            self._history = History.of_prompts(prompts, outputs=outputs, vocab_size=vocab_size, device=device)

    def next_tokens(self, logits: Tensor, *, steps: Sequence[int]) -> Tensor:
        """Logits of the last position (B, V or more) -> tokens (B,) int64. steps: tokens generated so far by each."""
        banned = banned_ends(
            self._params, steps=steps, end_ids=self._end_ids, vocab_size=self._rows.vocab_size, device=self._device
        )
        if min(steps) == max(steps):  # as in `generate`: no copy to a GPU, which would wait there for the logits
            at = torch.full((len(steps),), steps[0], device=self._device)
        else:
            at = torch.tensor(steps, device=self._device)
        tokens = next_tokens(logits, self._rows, steps=at, history=self._history, banned=banned)
        if self._history is not None:
            self._history.observe(tokens)
        return tokens

"""Running ahead of a GPU: the next step is queued before the tokens of this one are read, so that the GPU never waits.

Tokens stay on the device. That a text has ended is seen one step late, when the step behind it is queued already: it
is undone, and nobody sees its tokens.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hasten.generation.batch_sampler import BatchSampler
from hasten.generation.decoder import Decoder
from hasten.generation.graphs import GraphDecoder
from hasten.model.sharded import ShardedTransformer


def runs_ahead(decoder: Decoder) -> bool:
    """Whether a decoder's steps can be queued without their tokens, and whether that gains anything."""
    sharded = isinstance(decoder.model, ShardedTransformer)
    return decoder.model.device.type == "cuda" and not sharded and not decoder.needs_tokens


class Reading:
    """Tokens on their way to the host."""

    def __init__(self, tokens: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tokens.device.type == "cuda":
            self._tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._tokens.copy_(tokens, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._tokens = tokens.clone()

    def wait(self) -> list[int]:
        """The tokens; waits for what made them, and for nothing that was queued later."""
        if self._event is not None:
            self._event.synchronize()
        return self._tokens.tolist()


class Draws:
    """A sampler's draws for all rows, captured where nothing but the number of the step changes between them."""

    def __init__(
        self,
        sampler: BatchSampler,
        capture: Callable[[Callable[[], None], Callable[[], None]], Callable[[], None]] | None,
    ) -> None:
        """capture: `cuda_graph`, or None."""
        self._sampler = sampler
        self._capture = capture if sampler.capturable else None
        self._captured: tuple[int, Tensor, Callable[[], None]] | None = None  # address of the logits, steps, replay
        self._step = -1  # that the captured draw is at

    def __call__(self, logits: Tensor, steps: Sequence[int]) -> Tensor:
        """The next tokens (B,) int64, valid until the next call. steps: tokens generated so far, the same in all."""
        step = max(steps)
        if self._capture is None or step == 0:  # a prompt's logits are not where those of steps are
            return self._sampler.next_tokens(logits, steps=[step] * len(steps))
        if self._captured is None or self._captured[0] != logits.data_ptr():
            self._record(logits, len(steps))
        assert self._captured is not None
        _, at, replay = self._captured
        if step != self._step:
            at.fill_(step)
        replay()
        self._step = step + 1
        return self._tokens

    def _record(self, logits: Tensor, rows: int) -> None:
        assert self._capture is not None
        at = torch.zeros(rows, dtype=torch.int64, device=logits.device)
        self._tokens = torch.zeros_like(at)

        def draw() -> None:
            self._tokens.copy_(self._sampler.next_tokens_at(logits, at))
            at.add_(1)

        self._captured = logits.data_ptr(), at, self._capture(draw, lambda: None)
        self._step = -1


def draws_of(sampler: BatchSampler, decoder: Decoder) -> Draws:
    """The draws from a decoder's logits."""
    return Draws(sampler, decoder.capture if isinstance(decoder, GraphDecoder) else None)

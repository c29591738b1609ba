"""Running ahead of a GPU: the next step is queued before the tokens of this one are read, so that the GPU never waits.

Tokens stay on the device. That a text has ended is seen one step late, when the step behind it is queued already: it
is undone, and nobody sees its tokens.
"""

import torch
from torch import Tensor

from hasten.generation.decoder import Decoder
from hasten.model.sharded import ShardedTransformer


def runs_ahead(decoder: Decoder) -> bool:
    """Whether a decoder's steps can be queued without their tokens, and whether that gains anything."""
    sharded = isinstance(decoder.model, ShardedTransformer)
    return decoder.model.device.type == "cuda" and not sharded and not decoder.needs_tokens


class TokensOnTheWay:
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

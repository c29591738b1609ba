"""Running ahead of a GPU: the next step is queued before the tokens of this one are read, so that the GPU never waits.

Tokens stay on the device. That a text has ended is seen one step late, when the step behind it is queued already: it
is undone, and nobody sees its tokens.
"""

from hasten.generation.decoder import Decoder
from hasten.model.sharded import ShardedTransformer


def runs_ahead(decoder: Decoder) -> bool:
    """Whether a decoder's steps can be queued without their tokens, and whether that gains anything."""
    sharded = isinstance(decoder.model, ShardedTransformer)
    return decoder.model.device.type == "cuda" and not sharded and not decoder.needs_tokens

"""Token ids that come from outside."""

from collections.abc import Sequence

from hasten.errors import ConfigError
from hasten.model.transformer import Transformer


def check_ids(model: Transformer, ids: object) -> None:
    """Raise ConfigError unless ids are integers inside the model's vocabulary."""
    if not isinstance(ids, Sequence):
        raise ConfigError(f"token ids must be a list of integers; found {ids!r:.40}")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise ConfigError(f"token ids must be integers; found {token!r:.40}")
        if not 0 <= token < model.config.vocab_size:
            raise ConfigError(f"token id {token} is outside the vocabulary of {model.config.vocab_size}")

"""What a function of a model says to something that is none."""

from hasten.errors import ConfigError
from hasten.model.transformer import Transformer


def require_model(model: object, caller: str) -> None:
    """Raise ConfigError, naming the caller, for anything but a hasten model."""
    if not isinstance(model, Transformer):
        found = f"{model!r:.60}" if isinstance(model, str) else type(model).__name__
        raise ConfigError(f"{caller} takes a model, as hasten.load(...) returns one; found {found}")

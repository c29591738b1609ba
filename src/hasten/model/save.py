"""A model as a Hugging Face folder."""

from pathlib import Path

from hasten.errors import ConfigError
from hasten.model.binding import kernels
from hasten.model.export import export_model
from hasten.model.sharded import ShardedTransformer
from hasten.model.transformer import Transformer, require_model


def save(model: Transformer, folder: str | Path) -> None:
    """Write a Hugging Face folder that transformers loads; see `hasten.model.export.export_model`.

    A fused model is taken apart for the while, because files hold readable layers. Raises ConfigError for what is no
    model or no path.
    """
    require_model(model, "hasten.save")
    if not isinstance(folder, str | Path):
        raise ConfigError(f"a model is saved into a folder; found {type(folder).__name__}")
    if model.adapters is not None:
        raise ConfigError("this model has adapters beside its weights; hasten.merge writes their sum")
    if isinstance(model, ShardedTransformer):
        raise ConfigError("this rank holds a share of the model; save it from a process that has all of it")
    with kernels(model, block="readable"):
        export_model(model, Path(folder))

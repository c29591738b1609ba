"""The model that a ladder measures: a named shape with random weights, or a checkpoint. Nothing is allocated here.

Speed depends on the sizes and not on the values of the weights, so a shape is measured without a checkpoint; every
report says that its weights are random.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten.errors import ConfigError, ResourceError
from hasten.machine import available_memory, find_compiler
from hasten.model.config import ModelConfig
from hasten.planning.memory import PROCESS_BYTES, Memory
from hasten.planning.shapes import check_shape, shape_config

if TYPE_CHECKING:
    import torch

    from hasten.checkpoints.source import ModelSource
    from hasten.model.transformer import Transformer
    from hasten.ops.collective import RankGroup
    from hasten.ops.linear import WeightFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkModel:
    """A shape's config, or a checkpoint: its folder, GGUF file, hub id or short name (`model`). Pickles into children.

    kv_heads: replaces the number of key/value heads (a shape only).
    """

    shape: str | None = None
    model: str | None = None
    kv_heads: int | None = None

    def __post_init__(self) -> None:
        if (self.shape is None) == (self.model is None):
            raise ConfigError("give one of --shape NAME and --model MODEL, a folder, file, hub id or short name")
        if self.shape is not None:
            check_shape(self.shape)
        if self.model is not None and self.kv_heads is not None:
            raise ConfigError("the number of key/value heads of a checkpoint cannot be changed; use --shape")

    @property
    def name(self) -> str:
        """What a report calls it; never a whole path."""
        if self.shape is not None:
            return f"{self.shape} (random weights)"
        return folder_name(str(self.model))

    def config(self) -> ModelConfig:
        """The model's config: the shape's, or what the folder's config.json says."""
        if self.shape is None:
            return self._checkpoint().config
        config = shape_config(self.shape)
        return config if self.kv_heads is None else replace(config, kv_heads=self.kv_heads)

    def quantized(self) -> str | None:
        """ "int8", "int4" or another element where the checkpoint is stored so: it is measured as nothing else.

        A head may be in another format than the blocks, whose lower number of bits it is that counts.
        """
        found = min(self.weight_formats(), key=lambda weight: weight.bits, default=None)
        return None if found is None else found.element

    def is_gguf(self) -> bool:
        """Whether it is a GGUF file, from which a ladder makes plain weights for the other rungs."""
        from hasten.checkpoints.hub import resolve_model

        return self.model is not None and resolve_model(self.model).suffix == ".gguf"

    def only_format(self) -> str | None:
        """The format of a quantized folder, which is measured as nothing else; None for what has all rungs."""
        return None if self.is_gguf() else self.quantized()

    def dequantized(self, folder: Path) -> BenchmarkModel:
        """The model with plain bfloat16 weights, written into `folder` unless it is there already."""
        import torch

        from hasten.checkpoints.export import export_model
        from hasten.checkpoints.load import load

        if not (folder / "config.json").exists():
            export_model(load(str(self.model), dtype="bfloat16"), folder, dtype=torch.bfloat16, dequantize=True)
        return BenchmarkModel(model=str(folder))

    def weight_formats(self) -> Sequence[WeightFormat]:
        """How the checkpoint's quantized layers are stored; none of a shape, or of plain weights."""
        found = None if self.model is None else self._checkpoint().quantized
        return [] if found is None else [module.layer.weight for module in found.modules.values() if module.layer]

    def weights(self) -> str:
        """The format of the weights: a checkpoint's own; bfloat16 for a shape."""
        from hasten.checkpoints.load import own_dtype

        if self.model is None:
            return "bfloat16"
        return self.quantized() or str(own_dtype(self._checkpoint().stored.values())).removeprefix("torch.")

    def held_bytes(self) -> int:
        """The size of the checkpoint's weights as they are loaded: each layer as `load` holds its format."""
        from hasten.planning.held import held_bytes

        return held_bytes(self._checkpoint())

    def build(self, *, dtype: torch.dtype, device: str, seed: int, group: RankGroup | None = None) -> Transformer:
        """The model, ready for inference: random weights made on the device, or the checkpoint's, or a rank's share."""
        from hasten.checkpoints.load import load
        from hasten.model.initialize import initialize

        if self.model is not None:
            return load(self.model, dtype=dtype, device=device, group=group)
        return initialize(self.config(), seed=seed, dtype=dtype, device=device).eval()

    def _checkpoint(self) -> ModelSource:
        from hasten.checkpoints.load import open_checkpoint

        return open_checkpoint(str(self.model))


def folder_name(path: str) -> str:
    """What a report calls a folder or hub id: its last part, and the run's of a run's `model`."""
    above, last = ["", *path.rstrip("/").split("/")][-2:]
    return f"{above}/{last}" if last == "model" and above else last


def check_fits(name: str, memory: Memory, device: str, *, processes: int = 1) -> int:
    """The peak of `processes` processes. Raises ResourceError with the figures if it is not free."""
    whole = memory.beside(process=PROCESS_BYTES)
    remedy = "choose a smaller shape, dtype, batch or context, or a larger machine"
    shared = processes if device == "cpu" else 1
    whole.require(name, available_memory(device) // shared, device, remedy=remedy)
    return shared * whole.peak


def choose_rungs(known: Mapping[str, Any], wanted: tuple[str, ...]) -> list[str]:
    """The rungs to run, in the ladder's own order; all of them where none is named. ConfigError for unknown ones."""
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ConfigError(f"there is no rung {unknown[0]!r} on this ladder; known: {', '.join(known)}")
    return [name for name in known if not wanted or name in wanted]


def require_compiler(device: str) -> None:
    """Raise ResourceError where torch.compile has no C++ compiler to call (CPU)."""
    if device == "cpu" and find_compiler() is None:
        raise ResourceError(
            "torch.compile needs a C++ compiler on a CPU and none is here; install g++ or clang++ (hasten doctor)"
        )

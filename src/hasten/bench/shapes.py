"""What a ladder measures: a named shape with random weights, or a checkpoint folder. Nothing is allocated here.

Speed depends on the sizes and not on the values of the weights, so a shape is measured without a checkpoint; every
report says that its weights are random.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hasten.errors import ConfigError, ResourceError

if TYPE_CHECKING:
    import torch

    from hasten.model.config import ModelConfig
    from hasten.model.transformer import Transformer

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **changes: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 32_000,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    } | changes


# name -> config.json; llama-7b and llama-70b are Llama 2's (arXiv 2307.09288), qwen3-0.6b is arXiv 2505.09388's.
SHAPES: Mapping[str, dict[str, Any]] = {
    "tiny": _llama(64, 128, 2, 4, 2, vocab_size=250, max_position_embeddings=512),
    "llama-120m": _llama(768, 2048, 12, 12, 4),
    "llama-1.1b": _llama(2048, 5632, 22, 32, 4),
    "llama-7b": _llama(4096, 11_008, 32, 32, 32),
    "llama-70b": _llama(8192, 28_672, 80, 64, 8),
    "gpt2-124m": {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "vocab_size": 50_257,
        "activation_function": "gelu_new",
    },
    "qwen3-0.6b": _llama(1024, 3072, 28, 16, 8)
    | {
        "model_type": "qwen3",
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The model under measurement: a shape's config, or the folder of a checkpoint. Pickles into child processes.

    kv_heads: replaces the number of key/value heads (a shape only).
    """

    shape: str | None = None
    folder: str | None = None
    kv_heads: int | None = None

    def __post_init__(self) -> None:
        if (self.shape is None) == (self.folder is None):
            raise ConfigError("give one of --shape NAME and --model FOLDER")
        if self.shape is not None and self.shape not in SHAPES:
            raise ConfigError(f"there is no shape {self.shape!r}; known: {', '.join(SHAPES)}")
        if self.folder is not None and self.kv_heads is not None:
            raise ConfigError("the number of key/value heads of a checkpoint cannot be changed; use --shape")

    @property
    def name(self) -> str:
        """What a report calls it; never a whole path."""
        if self.shape is not None:
            return f"{self.shape} (random weights)"
        assert self.folder is not None
        return self.folder.rstrip("/").rsplit("/", 1)[-1]

    def config(self) -> ModelConfig:
        """The model's config, from the table above or from the folder's config.json."""
        from dataclasses import replace
        from pathlib import Path

        from hasten.model.checkpoint import read_json
        from hasten.model.families import read_config
        from hasten.model.load import resolve_folder

        if self.shape is None:
            path = Path(resolve_folder(str(self.folder))) / "config.json"
            return read_config(read_json(path), str(path))
        config = read_config(SHAPES[self.shape], f"shape {self.shape}")
        return config if self.kv_heads is None else replace(config, kv_heads=self.kv_heads)

    def quantized(self) -> str | None:
        """ "int8" or "int4" where the checkpoint's blocks are stored so: it is measured as it is, and as nothing else.

        A head may be in another format than the blocks, whose lower number of bits it is that counts.
        """
        from pathlib import Path

        from hasten.model.checkpoint import read_json
        from hasten.model.formats.registry import read_quantization
        from hasten.model.load import resolve_folder
        from hasten.ops.linear import INT8

        if self.folder is None:
            return None
        path = Path(resolve_folder(self.folder)) / "config.json"
        found = read_quantization(read_json(path), path)
        formats = [] if found is None else found.weight_formats
        # int8 by group or with zero points is held as plain weights: no kernel takes it.
        bits = [format.bits for format in formats if format.bits == 4 or format == INT8]
        return f"int{min(bits)}" if bits else None

    def stored_bytes(self) -> int:
        """The size of the checkpoint's weights in their files."""
        from hasten.model.load import resolve_folder

        assert self.folder is not None
        return sum(file.stat().st_size for file in resolve_folder(self.folder).glob("*.safetensors"))

    def build(self, *, dtype: torch.dtype, device: str, seed: int) -> Transformer:
        """The model, ready for inference: random weights made on the device, or the checkpoint's."""
        from hasten.model.initialize import initialize
        from hasten.model.load import load

        if self.folder is not None:
            return load(self.folder, dtype=dtype, device=device)
        return initialize(self.config(), seed=seed, dtype=dtype, device=device).eval()


def check_fits(name: str, parts: Mapping[str, int], device: str) -> int:
    """The sum of `parts` (what needs how many bytes). Raises ResourceError with the figures if it is not free."""
    from hasten.machine import available_memory

    needed, free = sum(parts.values()), available_memory(device)
    if needed > free:
        listed = ", ".join(f"{size / 1e9:.1f} GB {what}" for what, size in parts.items())
        raise ResourceError(
            f"{name} needs about {needed / 1e9:.1f} GB on {device} ({listed}) and {free / 1e9:.1f} GB are free; "
            "choose a smaller shape, dtype, batch or context, or a larger machine"
        )
    return needed


def choose_rungs(known: Mapping[str, Any], wanted: tuple[str, ...]) -> list[str]:
    """The rungs to run, in the ladder's own order; all of them where none is named. ConfigError for unknown ones."""
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ConfigError(f"there is no rung {unknown[0]!r} on this ladder; known: {', '.join(known)}")
    return [name for name in known if not wanted or name in wanted]


def require_compiler(device: str) -> None:
    """Raise ResourceError where torch.compile has no C++ compiler to call (CPU)."""
    from hasten.machine import find_compiler

    if device == "cpu" and find_compiler() is None:
        raise ResourceError(
            "torch.compile needs a C++ compiler on a CPU and none is here; install g++ or clang++ (hasten doctor)"
        )

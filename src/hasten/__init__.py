"""hasten makes PyTorch language models fast, and measures what each technique adds.

    model = hasten.load("folder-or-hub-id")
    for piece in hasten.stream(model, "Once upon"): print(piece, end="")

Names are imported when first used: `import hasten` itself is quick and does not import torch.
"""

from importlib import import_module
from typing import Any

_NAMES = {  # by their module
    "hasten.data": "prepare",
    "hasten.errors": "HastenError HastenWarning",
    "hasten.engine.chat": "Chat",
    "hasten.engine.generate": "generate stream",
    "hasten.engine.own_text": "own_text",
    "hasten.engine.params": "SamplingParams",
    "hasten.evaluation.perplexity": "perplexity",
    "hasten.checkpoints.adapters": "load_adapters",
    "hasten.model.binding": "explain kernels",
    "hasten.checkpoints.export": "save",
    "hasten.model.fused": "fuse unfuse",
    "hasten.model.initialize": "initialize",
    "hasten.checkpoints.load": "load",
    "hasten.model.vocabulary": "pad_vocabulary",
    "hasten.profiling.profile": "profile",
    "hasten.quantization": "quantize Int8 Int4 Int3 Int2 Mixed choose_bits GPTQ AWQ SignRounding calibration_tokens",
    "hasten.quantization.merge": "merge",
    "hasten.engine.llm": "LLM",
    "hasten.engine.settings": "EngineSettings",
    "hasten.training": "train",
    "hasten.training.in_transformers": "accelerated trainer_callback",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("hasten")
    if name not in _HOMES:
        raise AttributeError(f"module 'hasten' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

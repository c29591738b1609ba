"""hasten makes PyTorch language models fast, and measures what each technique adds.

    model = hasten.load("folder-or-hub-id")
    for piece in hasten.stream(model, "Once upon"): print(piece, end="")

Names are imported when first used: `import hasten` itself is quick and does not import torch.
"""

from importlib import import_module
from importlib.metadata import version as _version
from typing import Any

_HOMES = {
    "load": "hasten.model.load",
    "save": "hasten.model.export",
    "load_adapters": "hasten.model.adapters",
    "merge": "hasten.quantization.merge",
    "initialize": "hasten.model.initialize",
    "pad_vocabulary": "hasten.model.vocabulary",
    "kernels": "hasten.model.binding",
    "fuse": "hasten.model.fused",
    "unfuse": "hasten.model.fused",
    "quantize": "hasten.quantization",
    "Int8": "hasten.quantization",
    "Int4": "hasten.quantization",
    "Int3": "hasten.quantization",
    "Int2": "hasten.quantization",
    "Mixed": "hasten.quantization",
    "choose_bits": "hasten.quantization",
    "GPTQ": "hasten.quantization",
    "AWQ": "hasten.quantization",
    "SignRounding": "hasten.quantization",
    "calibration_tokens": "hasten.quantization",
    "generate": "hasten.generation.generate",
    "stream": "hasten.generation.generate",
    "Chat": "hasten.generation.chat",
    "SamplingParams": "hasten.generation.params",
    "LLM": "hasten.serving.llm",
    "EngineSettings": "hasten.serving.settings",
    "perplexity": "hasten.generation.perplexity",
    "accelerated": "hasten.training.in_transformers",
    "trainer_callback": "hasten.training.in_transformers",
    "prepare": "hasten.data",
    "train": "hasten.training",
    "profile": "hasten.profiling.profile",
    "explain": "hasten.model.binding",
    "HastenError": "hasten.errors",
    "HastenWarning": "hasten.errors",
}

__all__ = ["__version__", *_HOMES]

__version__ = _version("hasten")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hasten' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

"""hasten makes PyTorch language models fast, and measures what each technique adds.

    model = hasten.load("smollm2-135m")
    for piece in hasten.stream(model, "Once upon"):
        print(piece, end="")

Names are imported when first used: `import hasten` itself is quick and does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what type checkers and editors read; `__getattr__` imports the same names at run time
    from hasten.checkpoints.adapters import load_adapters
    from hasten.checkpoints.export import save
    from hasten.checkpoints.load import load
    from hasten.data import prepare
    from hasten.engine.chat import Chat
    from hasten.engine.generate import generate, stream
    from hasten.engine.llm import LLM
    from hasten.engine.own_text import own_text
    from hasten.engine.params import SamplingParams
    from hasten.engine.settings import EngineSettings
    from hasten.errors import HastenError, HastenWarning
    from hasten.evaluation.perplexity import perplexity
    from hasten.model.binding import explain, kernels
    from hasten.model.fused import fuse, unfuse
    from hasten.model.initialize import initialize
    from hasten.model.vocabulary import pad_vocabulary
    from hasten.profiling.profile import profile
    from hasten.quantization import (
        GPTQ,
        Int2,
        Int3,
        Int4,
        Int8,
        Mixed,
        calibration_tokens,
    )
    from hasten.quantization.merge import merge
    from hasten.quantization.quantize import quantize
    from hasten.training import train
    from hasten.training.in_transformers import accelerated, trainer_callback

    __version__: str

__all__ = [
    "GPTQ",
    "LLM",
    "Chat",
    "EngineSettings",
    "HastenError",
    "HastenWarning",
    "Int2",
    "Int3",
    "Int4",
    "Int8",
    "Mixed",
    "SamplingParams",
    "__version__",
    "accelerated",
    "calibration_tokens",
    "explain",
    "fuse",
    "generate",
    "initialize",
    "kernels",
    "load",
    "load_adapters",
    "merge",
    "own_text",
    "pad_vocabulary",
    "perplexity",
    "prepare",
    "profile",
    "quantize",
    "save",
    "stream",
    "train",
    "trainer_callback",
    "unfuse",
]

_MODULES = {  # the module of each public name, as imported above
    "GPTQ": "hasten.quantization",
    "LLM": "hasten.engine.llm",
    "Chat": "hasten.engine.chat",
    "EngineSettings": "hasten.engine.settings",
    "HastenError": "hasten.errors",
    "HastenWarning": "hasten.errors",
    "Int2": "hasten.quantization",
    "Int3": "hasten.quantization",
    "Int4": "hasten.quantization",
    "Int8": "hasten.quantization",
    "Mixed": "hasten.quantization",
    "SamplingParams": "hasten.engine.params",
    "accelerated": "hasten.training.in_transformers",
    "calibration_tokens": "hasten.quantization",
    "explain": "hasten.model.binding",
    "fuse": "hasten.model.fused",
    "generate": "hasten.engine.generate",
    "initialize": "hasten.model.initialize",
    "kernels": "hasten.model.binding",
    "load": "hasten.checkpoints.load",
    "load_adapters": "hasten.checkpoints.adapters",
    "merge": "hasten.quantization.merge",
    "own_text": "hasten.engine.own_text",
    "pad_vocabulary": "hasten.model.vocabulary",
    "perplexity": "hasten.evaluation.perplexity",
    "prepare": "hasten.data",
    "profile": "hasten.profiling.profile",
    "quantize": "hasten.quantization.quantize",
    "save": "hasten.checkpoints.export",
    "stream": "hasten.engine.generate",
    "train": "hasten.training",
    "trainer_callback": "hasten.training.in_transformers",
    "unfuse": "hasten.model.fused",
}


def __dir__() -> list[str]:
    return sorted(__all__)


if not TYPE_CHECKING:  # a type checker that sees `__getattr__` accepts any name, misspelt ones too

    def __getattr__(name: str) -> object:
        if name == "__version__":
            return import_module("importlib.metadata").version("hasten")
        if name not in _MODULES:
            raise AttributeError(f"module 'hasten' has no attribute {name!r}")
        return getattr(import_module(_MODULES[name]), name)

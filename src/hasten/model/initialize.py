"""Random weights for a model that is trained from scratch, or measured without a checkpoint."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hasten.model.activations import XIELU
from hasten.model.config import ModelConfig
from hasten.model.experts import kept_dtype
from hasten.model.mixer import StateMixer
from hasten.model.norms import LayerNorm, RMSNorm, place_ones
from hasten.model.transformer import Transformer

# Takes a parameter's name and its whole values, keeps what it needs of them, and returns that part.
Put = Callable[[str, Tensor], Tensor]
# Gives all parameters of a model to such a function, one at a time.
Weights = Callable[[Put], None]


def initialize(
    config: ModelConfig, *, seed: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Transformer:
    """Create a model with GPT-2's initialization: normal(0, 0.02), in residual projections times 1/√(halves of layers).

    Reproducible from the seed on one device. Rows that pad the vocabulary are zero.
    """
    with unfilled():
        model = Transformer(config)

    def put(name: str, values: Tensor) -> Tensor:
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(values))
        return values

    draw_weights(model, put, seed=seed, dtype=dtype, device=device)
    if config.tie_embeddings:
        model.embedding.weight = model.head.weight
    model.to(device)  # the rotary tables
    place_ones(model, device=None, dtype=dtype)
    model.bind()
    return model


@torch.no_grad()
def draw_weights(
    model: Transformer, put: Put, *, seed: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> None:
    """Draw the parameters that `initialize` gives a model, one at a time and whatever holds them.

    The model's own are only asked for their shapes, and may be on the meta device.
    """
    config, generator = model.config, torch.Generator(device=device).manual_seed(seed)
    for name, module in list(model.named_modules()):
        for leaf, empty in list(module.named_parameters(recurse=False)):
            values = torch.empty(empty.shape, dtype=kept_dtype(f".{leaf}", dtype), device=device)
            _fill(values, module, f"{name}.{leaf}", config, generator)
            if name in ("embedding", "head"):
                values[config.vocab_size :] = 0
            if name != "embedding" or not config.tie_embeddings:  # tied, it is drawn again as the head
                put(f"{name}.{leaf}", values)


def _fill(values: Tensor, module: nn.Module, name: str, config: ModelConfig, generator: torch.Generator) -> None:
    """Draw the parameter `name` of a module into `values`."""
    owner, _, leaf = name.rpartition(".")
    if leaf in ("bias", "choice_bias"):
        values.zero_()
    elif leaf in ("scale", "router_scale", "expert_scale"):
        values.fill_(1.0)
    elif leaf == "sinks":
        values.normal_(0.0, config.initializer_range, generator=generator)
    elif isinstance(module, nn.Linear | nn.Embedding):
        into_residual = owner.endswith((".output", ".down", ".out", ".expand", ".widen"))
        std = config.initializer_range / (sum(layer.halves for layer in config.layers) ** 0.5 if into_residual else 1)
        values.normal_(0.0, std, generator=generator)
    elif isinstance(module, RMSNorm | LayerNorm):
        values.fill_(1.0 - module.offset)
    elif isinstance(module, XIELU):
        values.fill_(math.log(math.expm1(module.INITIAL[leaf])))
    elif isinstance(module, nn.Conv1d):  # of a layer that keeps a state
        bound = module.kernel_size[0] ** -0.5
        values.uniform_(-bound, bound, generator=generator)
    else:
        assert isinstance(module, StateMixer), f"{name} has no initial values"
        module.fill(leaf, values, generator)


@contextmanager
def unfilled() -> Iterator[None]:
    """Create modules on the meta device, without initializing their parameters."""
    with torch.device("meta"), _Uninitialised():
        yield


class _Uninitialised(TorchFunctionMode):
    """Leaves new parameters as they are.

    The meta device has no data to fill, and the first random number drawn there imports torch's symbolic shapes: 155 MB
    and over a second at the start of a process (measured).
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))

"""LoRA (arXiv 2106.09685): y = W·x + s·B(A·x), W frozen in whatever format it is held, A (r, K) and B (N, r) narrow.

An adapter is the factors of some of a model's linear layers, by the names of our modules. Where a checkpoint holds
several layers as one (GPT-2's c_attn, Phi-3's qkv_proj), they share one A and each has its rows of B, as an adapter of
that checkpoint's module has.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hasten.errors import ConfigError
from hasten.model.config import ModelConfig
from hasten.model.families import FAMILIES
from hasten.model.families.slices import TensorSlice
from hasten.model.sharded import RowsOfRank
from hasten.model.transformer import Transformer
from hasten.ops.linear import PackedLinear

LARGEST_RANK = 4096
# Names of our modules that can be adapted.
LINEARS = ("q", "k", "v", "output", "gate", "up", "down", "narrow", "widen", "q_down", "q_up", "kv_down", "kv_up")
ALL_LINEAR = "all-linear"


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """An adapter's factors for one layer: a (r, K), b (N, r); the scale is alpha/r, with rslora alpha/√r."""

    a: Tensor
    b: Tensor
    alpha: float
    rslora: bool = False

    @property
    def scale(self) -> float:
        """The factor of B·A."""
        rank = self.a.shape[0]
        return self.alpha / (math.sqrt(rank) if self.rslora else rank)

    @property
    def delta(self) -> Tensor:
        """s·B·A (N, K) in float64."""
        return self.scale * (self.b.detach().double() @ self.a.detach().double())


Adapter = Mapping[str, Factors]


@dataclass(slots=True, eq=False)
class AdapterChoice:
    """The adapter of each row of the next step, as its index; -1 is none.

    rows: int64, one index for each token of the step; None: all rows use `every`. groups: the same as (adapter, its
    rows). places: the number of adapters, places that were left empty included.
    """

    every: int = 0
    rows: Tensor | None = None
    groups: list[tuple[int, Tensor]] = field(default_factory=list)
    places: int = 0

    def choose(self, numbers: list[int], device: torch.device) -> None:
        """Set the adapters of the next step's rows."""
        taken = sorted({number for number in numbers if number >= 0})
        rows = torch.tensor(numbers, device=device)
        self.every, self.rows = -1, rows if taken else None
        self.groups = [(number, (rows == number).nonzero().squeeze(1)) for number in taken]

    def of(self, rows: int) -> Tensor | None:
        """The adapters of a step's rows in the form of the native steps; None if no row uses one."""
        if self.rows is not None:
            assert len(self.rows) == rows, f"{rows} rows were computed, and adapters chosen for {len(self.rows)}"
            return self.rows
        return None if self.every < 0 else torch.full((rows,), self.every)


class LoRALinear(nn.Module):
    """A linear layer with adapters. In training it has one, whose factors are parameters."""

    def __init__(
        self,
        base: nn.Linear | PackedLinear | RowsOfRank,
        adapters: Sequence[Factors | None],
        choice: AdapterChoice,
        *,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.base, self.choice, self.dropout = base, choice, nn.Dropout(dropout)
        held = [one for one in adapters if one is not None]
        self.a, self.b = (nn.ParameterList(getattr(one, name) for one in held) for name in ("a", "b"))
        # Each adapter's index in the lists, not the tensors themselves: FSDP replaces the parameters.
        self.places = [None if one is None else (held.index(one), one.scale) for one in adapters]
        self.kinds = [(one.alpha, one.rslora) for one in held]

    @property
    def factors(self) -> list[Factors | None]:
        """The factors of each adapter; None for one that leaves this layer alone."""
        return [None if at is None else Factors(self.a[at[0]], self.b[at[0]], *self.kinds[at[0]]) for at in self.places]

    @property
    def bias(self) -> Tensor | None:
        """The frozen layer's bias."""
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        """x (…, K) -> (…, N) in the frozen layer's dtype."""
        y: Tensor = self.base(x)
        if self.choice.rows is None:
            place = None if self.choice.every < 0 else self.places[self.choice.every]
            return y if place is None else y + self._added(*place, x).to(y.dtype)
        flat, rows_of_x = y.flatten(0, -2), x.flatten(0, -2)
        for number, rows in self.choice.groups:
            if (place := self.places[number]) is not None:
                flat[rows] = flat[rows] + self._added(*place, rows_of_x[rows]).to(y.dtype)
        return flat.view(y.shape)

    def taken(self) -> list[tuple[Tensor | slice, Factors]]:
        """The adapters that the next step's rows take: (rows of the flattened tokens, factors) of each."""
        if self.choice.rows is None:
            own = None if self.choice.every < 0 else self.factors[self.choice.every]
            return [] if own is None else [(slice(None), own)]
        found = ((rows, self.factors[number]) for number, rows in self.choice.groups)
        return [(rows, own) for rows, own in found if own is not None]

    def _added(self, place: int, scale: float, x: Tensor) -> Tensor:
        a, b = self.a[place], self.b[place]
        narrow = F.linear(self.dropout(x).to(a.dtype), a)  # (…, r)
        return F.linear(narrow, b) * scale


def adaptable(config: ModelConfig) -> dict[str, list[tuple[str, TensorSlice]]]:
    """The layers that can have an adapter: {checkpoint name: our modules, each with its slice}."""
    found: dict[str, list[tuple[str, TensorSlice]]] = {}
    for ours, piece in FAMILIES[config.family].places(config):
        parts = ours.split(".")
        linears = LINEARS if "mixer" not in parts else (*config.state_mixer.inputs, "out")
        if parts[-1] == "weight" and parts[-2] in linears and "experts" not in parts:
            found.setdefault(piece.name.removesuffix(".weight"), []).append((ours.removesuffix(".weight"), piece))
    return found


def targeted(config: ModelConfig, targets: Sequence[str]) -> list[str]:
    """Checkpoint names of the layers that match targets: suffixes of names, or "all-linear" for all in the blocks.

    Raises ConfigError for a target that matches none.
    """
    known = list(adaptable(config))
    found: set[str] = set()
    for target in targets:
        fitting = [name for name in known if target == ALL_LINEAR or f".{name}".endswith(f".{target}")]
        if not fitting:
            leaves = dict.fromkeys(name.rpartition(".")[2] for name in known)
            raise ConfigError(
                f"LoRA's target {target!r:.80} is no linear layer of a {config.family}'s blocks that can have an "
                f"adapter; use {ALL_LINEAR} or some of {', '.join(leaves)}"
            )
        found.update(fitting)
    return [name for name in known if name in found]


def layer_size(config: ModelConfig, name: str) -> tuple[int, int]:
    """Input and output features (K, N) of a layer that can have an adapter."""
    hidden = config.hidden_size
    layer = config.layers[int(name.split(".")[1])]
    inner = config.shared_size if ".shared." in name else config.inner_of(layer)
    size = config.head_dim_of(layer)
    q, kv = config.heads * size, config.kv_heads_of(layer) * size
    into = {"q": q * (1 + config.attention_gate), "k": kv, "v": kv, "gate": inner, "up": inner}
    leaf = name.rpartition(".")[2]
    if leaf in ("narrow", "widen"):
        return (hidden, config.expert_latent) if leaf == "narrow" else (config.expert_latent, hidden)
    if ".mixer." in name:
        features = config.state_mixer.inputs
        return (hidden, features[leaf]) if leaf in features else (config.state_mixer.values, hidden)
    if (sizes := config.latent) is not None and ".attention." in name:
        q, rank, both = config.heads * sizes.query_dim, sizes.query_rank or hidden, sizes.key_dim + sizes.value_dim
        shapes = {"q": (hidden, q), "q_down": (hidden, rank), "q_up": (rank, q), "kv_down": (hidden, sizes.kept)}
        shapes |= {"kv_up": (sizes.rank, config.heads * both), "output": (config.heads * sizes.value_dim, hidden)}
        return shapes[leaf]
    return (hidden, into[leaf]) if leaf in into else (q if leaf == "output" else inner, hidden)


def new_adapter(
    config: ModelConfig,
    *,
    rank: int,
    alpha: float,
    targets: Sequence[str],
    rslora: bool = False,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> dict[str, Factors]:
    """New float32 factors to train: A uniform in ±1/√K, as in peft, and B zero, so that the adapter starts at zero.

    Raises ConfigError for a rank that could not be loaded again.
    """
    if rank > LARGEST_RANK:
        raise ConfigError(f"lora.rank is {rank}; it must be at most {LARGEST_RANK}")
    generator = torch.Generator().manual_seed(seed)
    places, adapter = adaptable(config), {}
    for name in targeted(config, targets):
        inputs = layer_size(config, places[name][0][0])[0]
        a = torch.empty(rank, inputs, device="meta" if str(device) == "meta" else "cpu")
        a.uniform_(-1 / math.sqrt(inputs), 1 / math.sqrt(inputs), generator=generator)
        shared = nn.Parameter(a.to(device))
        for ours, _ in places[name]:
            b = torch.zeros(layer_size(config, ours)[1], rank, device=device)
            adapter[ours] = Factors(shared, nn.Parameter(b), alpha, rslora)
    return adapter


def attach(model: Transformer, adapters: Sequence[Adapter], *, dropout: float = 0.0) -> AdapterChoice:
    """Freeze a model with readable blocks and replace its layers by ones with the adapters.

    Returns the AdapterChoice for the next step's rows (also `model.adapters`); at first all rows use the first adapter.
    """
    model.requires_grad_(False)
    model.adapters = choice = AdapterChoice(places=len(adapters))
    for name in dict.fromkeys(name for adapter in adapters for name in adapter):
        base = model.get_submodule(name)
        assert isinstance(base, nn.Linear | PackedLinear | RowsOfRank)
        own = [adapter.get(name) for adapter in adapters]
        model.set_submodule(name, LoRALinear(base, own, choice, dropout=dropout))
    return choice


def place(model: Transformer, choice: AdapterChoice, number: int, adapter: Adapter) -> None:
    """Replace the factors of one adapter beside readable blocks; an empty one leaves its place empty."""
    held = [name for name, layer in model.named_modules() if isinstance(layer, LoRALinear)]
    for name in dict.fromkeys([*held, *adapter]):
        base: nn.Module = model.get_submodule(name)
        own: list[Factors | None] = []
        if isinstance(base, LoRALinear):
            own, base = base.factors, base.base
        assert isinstance(base, nn.Linear | PackedLinear | RowsOfRank)
        own += [None] * (max(choice.places, number + 1) - len(own))
        own[number] = adapter.get(name)
        model.set_submodule(name, LoRALinear(base, own, choice))


def attached(model: nn.Module) -> dict[str, Factors]:
    """The factors of a model's only adapter, by the names of our modules."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoRALinear)}
    return {name: own for name, one in layers.items() if (own := one.factors[0]) is not None}

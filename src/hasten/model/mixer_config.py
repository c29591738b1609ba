"""The sizes of layers that keep a state of each sequence, whatever its length, instead of keys and values.

One class for each kind. What a plan counts, what a cache holds and how parameters are called follows from its answers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple


class StateTensor(NamedTuple):
    """The size of a tensor of a sequence's state. wide: it is float32; else it has the dtype of the model."""

    size: tuple[int, ...]
    wide: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerConfig:
    """What all kinds have: products of the layer's input, a convolution over `kernel` tokens, a product behind.

    name: of the kind, in messages. operator: what `explain` calls what it computes beside its products. passes: how
    often a token goes through its matrices, with a multiplication and an addition for each number.
    """

    kernel: int

    name: ClassVar[str]
    operator: ClassVar[str]
    passes: ClassVar[int] = 0

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        raise NotImplementedError

    @property
    def inputs(self) -> Mapping[str, int]:
        """Output features of each product of the layer's input."""
        raise NotImplementedError

    @property
    def values(self) -> int:
        """Features that the last product, `out`, reads."""
        raise NotImplementedError

    @property
    def bias(self) -> bool:
        """Whether all these products have one."""
        return False

    @property
    def vectors(self) -> Mapping[str, int]:
        """The other parameters, each with its number of weights."""
        raise NotImplementedError

    @property
    def matrix(self) -> tuple[int, ...]:
        """Size of the matrices of all heads, which are float32; empty where there are none."""
        return ()

    @property
    def numbers(self) -> int:
        """Numbers in these matrices."""
        found = 1 if self.matrix else 0
        for size in self.matrix:
            found *= size
        return found

    @property
    def state(self) -> dict[str, StateTensor]:
        """What the layer keeps of a sequence: see `hasten.ops.states.State`."""
        inputs = {"inputs": StateTensor((self.kernel - 1, self.channels))}
        return inputs | ({"matrix": StateTensor(self.matrix, wide=True)} if self.matrix else {})

    @property
    def parameters(self) -> list[str]:
        """Names of all parameters."""
        kinds = ("weight", "bias") if self.bias else ("weight",)
        return [*self.vectors, *(f"{name}.{kind}" for name in (*self.inputs, "out") for kind in kinds)]

    def working_numbers(self, *, kept: bool) -> int:
        """Numbers of a token, in float32, that the layer holds at once, or that are kept for the backward pass."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaConfig(MixerConfig):
    """The sizes of Gated DeltaNet (arXiv 2412.06464).

    Heads of queries and keys, of size key_dim, and of values, of size value_dim, each key head for equally many
    consecutive value heads.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    name: ClassVar[str] = "Gated DeltaNet"
    operator: ClassVar[str] = "gated delta rule"
    passes: ClassVar[int] = 3

    @property
    def keys(self) -> int:
        """Features of all keys of a token, and of all queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        return 2 * self.keys + self.values

    @property
    def inputs(self) -> Mapping[str, int]:
        keys, values, heads = self.keys, self.values, self.value_heads
        return {"query": keys, "key": keys, "value": values, "z": values, "beta": heads, "decay": heads}

    @property
    def vectors(self) -> Mapping[str, int]:
        heads = self.value_heads
        conv = self.channels * self.kernel
        return {"log_rate": heads, "rate_bias": heads, "conv.weight": conv, "value_norm.weight": self.value_dim}

    @property
    def matrix(self) -> tuple[int, ...]:
        return self.value_heads, self.key_dim, self.value_dim

    def working_numbers(self, *, kept: bool) -> int:
        from hasten.ops.delta import CHUNK

        if not kept:
            return 3 * self.channels + self.value_heads * (6 * self.key_dim + 4 * self.value_dim + 3 * CHUNK)
        states = 2 * self.numbers // CHUNK
        return 6 * self.channels + self.value_heads * (10 * self.key_dim + 8 * self.value_dim + 5 * CHUNK) + states


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionConfig(MixerConfig):
    """The size of LFM2's short convolution: y = C ⊙ conv(B ⊙ x), of `width` features.

    C is the product `query`, B is `key` and x is `value`. biased: products and convolution have a bias.
    """

    width: int
    biased: bool = False

    name: ClassVar[str] = "short convolution"
    operator: ClassVar[str] = "short convolution"

    @property
    def channels(self) -> int:
        return self.width

    @property
    def inputs(self) -> Mapping[str, int]:
        return dict.fromkeys(("key", "query", "value"), self.width)

    @property
    def values(self) -> int:
        return self.width

    @property
    def bias(self) -> bool:
        return self.biased

    @property
    def vectors(self) -> Mapping[str, int]:
        conv = {"conv.weight": self.width * self.kernel}
        return conv | ({"conv.bias": self.width} if self.biased else {})

    def working_numbers(self, *, kept: bool) -> int:
        return (8 if kept else 6) * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig(MixerConfig):
    """The sizes of Mamba-2 (arXiv 2405.21060).

    heads of values, of size head_dim, and groups of keys and queries, of size state_dim, each for equally many
    consecutive heads. biased: the products have a bias. conv_biased: the convolution has one.
    """

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    biased: bool = False
    conv_biased: bool = True

    name: ClassVar[str] = "Mamba-2"
    operator: ClassVar[str] = "Mamba-2's scan"
    passes: ClassVar[int] = 2

    @property
    def keys(self) -> int:
        """Features of all keys of a token, and of all queries."""
        return self.groups * self.state_dim

    @property
    def values(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        return self.values + 2 * self.keys

    @property
    def inputs(self) -> Mapping[str, int]:
        return {"z": self.values, "value": self.values, "key": self.keys, "query": self.keys, "step": self.heads}

    @property
    def bias(self) -> bool:
        return self.biased

    @property
    def vectors(self) -> Mapping[str, int]:
        own = dict.fromkeys(("log_rate", "step_bias", "skip"), self.heads) | {"value_norm.weight": self.values}
        own["conv.weight"] = self.channels * self.kernel
        return own | ({"conv.bias": self.channels} if self.conv_biased else {})

    @property
    def matrix(self) -> tuple[int, ...]:
        return self.heads, self.state_dim, self.head_dim

    def working_numbers(self, *, kept: bool) -> int:
        from hasten.ops.ssd import CHUNK

        if not kept:
            return 3 * self.channels + 6 * self.values + 3 * self.heads * CHUNK
        states = 2 * self.numbers // CHUNK
        return 6 * self.channels + 9 * self.values + 4 * self.heads * CHUNK + states

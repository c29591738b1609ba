"""The part of a model that each of several ranks holds: whole heads, whole groups of quantized weights, words.

Decided by the role of a module, not by family (Megatron-LM, arXiv 1909.08053): q, k, v, gate and up are split by output
features, output and down by input features, so that ranks need not communicate in between, and output and down give
partial sums. Embedding and head are split by vocabulary. Everything else is small and replicated. Shares may differ in
size.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from hasten.errors import ConfigError
from hasten.model.config import LayerConfig, ModelConfig
from hasten.model.mixer_config import DeltaConfig
from hasten.ops.linear.weights import QuantizedWeight, WeightFormat

TILE = 64  # rows of a panel of the native kernels: a share of many of them has whole ones


@dataclass(frozen=True, slots=True)
class Cut:
    """The slice of a parameter that a rank holds: `part` of dimension 0 or 1, or zeros (None).

    rows: held instead of columns, where the groups of a quantized weight have columns from everywhere (desc_act).
    apart: in the place of `part`, rows that do not follow each other.
    """

    dim: int
    part: range | None
    rows: range = range(0)
    apart: tuple[range, ...] = ()

    def of(self, tensor: Tensor) -> Tensor:
        """Slice a plain parameter. Copies, so that the mapped file pages can be released."""
        if self.apart:
            return torch.cat([tensor[rows.start : rows.stop] for rows in self.apart])
        if self.part is None:
            return torch.zeros_like(tensor)
        return tensor.narrow(self.dim, self.part.start, len(self.part)).clone(memory_format=torch.contiguous_format)

    def takes_rows(self, weight: QuantizedWeight) -> bool:
        """Whether `rows` of this weight are held, and all of their columns."""
        return self.dim == 1 and weight.columns is not None

    def of_weight(self, weight: QuantizedWeight) -> QuantizedWeight:
        """Slice a quantized weight by whole groups; its values may be packed, eight to a word."""
        part = self.part
        assert part is not None, "only a bias is another rank's"
        if self.dim == 0 or self.takes_rows(weight):
            rows = part if self.dim == 0 else self.rows
            return weight.rows(slice(rows.start, rows.stop))
        steps = [level.columns for level in weight.format.scales]

        def columns(tensor: Tensor, step: int) -> Tensor:
            """Slice a tensor that has one column for `step` columns of the weight (0: one for all columns)."""
            if not step:
                return tensor
            return tensor[:, part.start // step : -(-part.stop // step)].contiguous()

        return replace(
            weight,
            values=columns(weight.values, 8 if weight.values.dtype == torch.int32 else 1),
            scales=columns(weight.scales, steps[0]),
            zeros=None if weight.zeros is None else columns(weight.zeros, steps[0]),
            outer=None if weight.outer is None else columns(weight.outer, steps[-1]),
        )


@dataclass(frozen=True, slots=True)
class Share:
    """The share of rank `rank` in a model whose config is `whole`: ranges of query heads, key/value heads (of layers by
    their number and size), inner features of an MLP (by their number), of an expert and of the MLP beside the experts,
    the residual stream (where columns cannot be split), the vocabulary's rows, and Gated DeltaNet's heads of keys and
    values."""

    rank: int
    whole: ModelConfig
    heads: range
    kv_ranges: Mapping[tuple[int, int], range]
    inner_ranges: Mapping[int, range]
    expert: range
    shared: range
    stream: range
    words: range
    key_heads: range
    value_heads: range

    @property
    def kv_heads(self) -> range:
        """Key/value heads of layers that have the model's own number and size of them."""
        return self.kv_ranges[self.whole.kv_heads, self.whole.head_dim]

    @property
    def inner(self) -> range:
        """Inner features of an MLP that has the model's own number of them."""
        return self.inner_ranges[self.whole.intermediate_size]

    def config(self) -> ModelConfig:
        """Config of the rank's own model: `whole` with smaller sizes."""
        whole, pattern, mixer = self.whole, self.whole.attention_pattern, self.whole.mixer
        if isinstance(mixer, DeltaConfig):
            mixer = replace(mixer, key_heads=len(self.key_heads), value_heads=len(self.value_heads))
        return replace(
            whole,
            attention_pattern=None if pattern is None else replace(pattern, first_head=self.heads.start),
            layers=tuple(map(self._layer, whole.layers)),
            heads=len(self.heads),
            kv_heads=len(self.kv_heads),
            intermediate_size=len(self.inner),
            expert_size=len(self.expert),
            shared_size=len(self.shared),
            padded_vocab_size=len(self.words),
            mixer=mixer,
        )

    def cut(self, name: str) -> Cut | None:
        """The slice of a parameter, by its name in a Transformer; None: it is replicated."""
        *owners, module, kind = path = name.split(".")
        if "token_features" in owners:
            return None
        if "mixer" in path:
            return self._cut_of_delta(module, kind)
        if kind == "sinks":
            return Cut(0, self.heads)
        layer = self.whole.layers[int(path[1])] if path[0] == "blocks" else LayerConfig()
        size, heads = self.whole.head_dim_of(layer), self.heads
        kv_heads = _scaled(self._kv_heads(layer), size)
        inner = self.inner_ranges.get(self.whole.inner_of(layer), range(0))
        inner = self.expert if "experts" in owners else self.shared if "shared" in owners else inner
        queries = _scaled(heads, size * (1 + self.whole.attention_gate))  # a head is followed by its gate
        columns = {"q": queries, "k": kv_heads, "v": kv_heads, "gate": inner, "up": inner}
        columns |= {"embedding": self.words, "head": self.words}
        if self.whole.qk_norm == "projection":
            columns |= {"q_norm": queries, "k_norm": kv_heads}
        rows = {"output": _scaled(heads, size), "down": inner}
        if module in columns:
            return Cut(0, columns[module])
        if module not in rows:
            return None
        if kind == "weight":
            return Cut(1, rows[module], self.stream)
        return Cut(0, None) if self.rank else None  # a bias is added once

    def _cut_of_delta(self, module: str, kind: str) -> Cut | None:
        """The slice of a parameter of Gated DeltaNet; the norm of its values has the size of one head."""
        sizes = self.whole.state_mixer
        assert isinstance(sizes, DeltaConfig)
        heads, keys = self.value_heads, _scaled(self.key_heads, sizes.key_dim)
        values = _scaled(heads, sizes.value_dim)
        if module == "conv":  # channels of all queries, keys and values
            first = (0, keys), (sizes.keys, keys), (2 * sizes.keys, values)
            return Cut(0, None, apart=tuple(range(at + own.start, at + own.stop) for at, own in first))
        if kind in ("log_rate", "rate_bias"):
            return Cut(0, heads)
        if module == "out":
            return Cut(1, values, self.stream)
        rows = {"query": keys, "key": keys, "value": values, "z": values, "beta": heads, "decay": heads}
        return Cut(0, rows[module]) if module in rows else None

    def _kv_heads(self, layer: LayerConfig) -> range:
        return self.kv_ranges[_kind_of_heads(self.whole, layer)]

    def _layer(self, layer: LayerConfig) -> LayerConfig:
        """The config of a layer, with the rank's own sizes where they are not the model's."""
        kv_heads, inner = self._kv_heads(layer), self.inner_ranges.get(self.whole.inner_of(layer))
        return replace(
            layer,
            kv_heads=None if (layer.kv_heads, layer.head_dim) == (None, None) else len(kv_heads),
            inner=None if layer.inner is None or inner is None else len(inner),
        )


def _scaled(part: range, size: int) -> range:
    """The features of heads, of this size each."""
    return range(part.start * size, part.stop * size)


def _kind_of_heads(config: ModelConfig, layer: LayerConfig) -> tuple[int, int]:
    """Number and size of a layer's key/value heads."""
    return config.kv_heads_of(layer), config.head_dim_of(layer)


def whole_groups(formats: Iterable[WeightFormat]) -> int:
    """Smallest number of columns that can be split off weights of these formats without cutting a group or a word."""
    groups = (level.columns for one in formats for level in one.scales)
    return math.lcm(8, *(columns for columns in groups if columns))


def shares(config: ModelConfig, size: int, *, output: int = 1, down: int = 1) -> list[Share]:
    """Each rank's share for `size` ranks. output, down: smallest number of columns that can be split off these weights.

    Raises ConfigError if the model cannot be split that way; it names the sizes that can.
    """
    if config.latent is not None and size > 1:
        raise ConfigError(
            f"--tensor-parallel is {size}; a {config.family} has latent attention, whose latents belong to "
            "all heads and which no ranks share yet: leave it at 1"
        )
    dense = {config.inner_of(layer) for layer in config.layers if layer.mlp and not layer.experts}
    sizes = [*dense, *[config.expert_size] * any(layer.experts for layer in config.layers)]
    sizes += [config.shared_size] * (config.shared_size > 0)
    kinds = {(config.kv_heads, config.head_dim)}
    kinds |= {_kind_of_heads(config, layer) for layer in config.layers if layer.attends}
    every = {kind: _Heads(config.heads, *kind) for kind in kinds}
    delta = config.mixer
    if delta is not None and not isinstance(delta, DeltaConfig):
        if size > 1:
            raise ConfigError(f"--tensor-parallel does not divide {delta.name}, which this model has; leave it out")
        delta = None
    values = None if delta is None else _Heads(delta.value_heads, delta.key_heads, delta.value_dim)
    kept = [*every.values(), *([] if values is None else [values])]
    most = min(config.padded_vocab_size, *(max(one.most(output)) for one in kept), *(-(-one // down) for one in sizes))
    fits = 1 <= size <= most
    if not fits or not _same_queries(every.values(), size, output):
        able = [one for one in range(1, most + 1) if _same_queries(every.values(), one, output)]
        every_size = len(able) == most
        can, advice = (f"1 to {most}", f"at most {most}") if every_size else (_listed(able), _listed(able))
        if fits:
            raise ConfigError(
                f"--tensor-parallel is {size}; the layers of this {config.family} have different numbers of key/value "
                f"heads, which {size} ranks would divide differently: take {advice}"
            )
        groups = f", in whole groups of {max(output, down)} columns," if max(output, down) > 8 else ""
        raise ConfigError(
            f"--tensor-parallel is {size}; a model of {config.heads} heads ({config.kv_heads} of keys and values) and "
            f"{min(sizes):,} inner features{groups} can be shared by {can} ranks: take {advice}"
        )
    heads = {kind: one.of_ranks(size, output) for kind, one in every.items()}
    states = [(range(0), range(0))] * size if values is None else values.of_ranks(size, output)
    inner = {one: _shared(one, _in_tiles(one, down, size), size) for one in {*dense, config.intermediate_size}}
    widths = config.expert_size, config.shared_size
    expert, shared = (_shared(one, _in_tiles(one, down, size), size) for one in widths)
    stream = _shared(config.hidden_size, _in_tiles(config.hidden_size, 1, size), size)
    words = _shared(config.padded_vocab_size, _in_tiles(config.padded_vocab_size, 1, size), size)
    return [
        Share(
            rank,
            config,
            heads=heads[config.kv_heads, config.head_dim][rank][0],
            kv_ranges={kind: ranks[rank][1] for kind, ranks in heads.items()},
            inner_ranges={one: ranks[rank] for one, ranks in inner.items()},
            expert=expert[rank],
            shared=shared[rank],
            stream=stream[rank],
            words=words[rank],
            key_heads=states[rank][1],
            value_heads=states[rank][0],
        )
        for rank in range(size)
    ]


def _same_queries(kinds: Iterable["_Heads"], size: int, output: int) -> bool:
    """Whether ranks have the same query heads in all layers, whatever number of key/value heads these have."""
    return len({tuple(own for own, _ in one.of_ranks(size, output)) for one in kinds}) == 1


def _listed(sizes: list[int]) -> str:
    *others, last = map(str, sizes)
    return f"{', '.join(others)} or {last}" if others else last


def _shared(count: int, unit: int, size: int) -> list[range]:
    """Split into ranges of whole units, as even as possible; the last unit may be smaller."""
    units = -(-count // unit)
    ends = [min(count, units * rank // size * unit) for rank in range(size + 1)]
    return [range(*pair) for pair in pairwise(ends)]


def _in_tiles(count: int, unit: int, size: int) -> int:
    """The unit, or a multiple of it that fills whole tiles if each rank has many of them."""
    tiles = math.lcm(unit, TILE)
    return tiles if count >= 4 * size * tiles else unit


class _Heads(NamedTuple):
    """Heads of queries, and those of keys that they share; in Gated DeltaNet of values, and those of keys.

    size: of a head of what `output` reads; output: smallest number of its columns that can be split off.
    """

    heads: int
    key_heads: int
    size: int

    def most(self, output: int) -> tuple[int, int]:
        """Most ranks among which heads can be split: with the heads of a key head together, and divided."""
        ratio, unit = self.heads // self.key_heads, output // math.gcd(output, self.size)
        together = unit // math.gcd(unit, ratio)
        return -(-self.key_heads // together), self.key_heads * (ratio // unit) if ratio % unit == 0 else 0

    def of_ranks(self, size: int, output: int) -> list[tuple[range, range]]:
        """(heads, key heads) of each rank. With more ranks than key heads, several hold the same one."""
        ratio, unit = self.heads // self.key_heads, output // math.gcd(output, self.size)
        if size <= self.most(output)[0]:
            held = _shared(self.key_heads, unit // math.gcd(unit, ratio), size)
            return [(_scaled(own, ratio), own) for own in held]
        return [
            (range(head * ratio + part.start, head * ratio + part.stop), range(head, head + 1))
            for head, ranks in enumerate(_shared(size, 1, self.key_heads))
            for part in _shared(ratio, unit, len(ranks))
        ]

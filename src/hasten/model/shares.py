"""The part of a model that each of several ranks holds: whole heads, whole groups of quantized weights, words.

Decided by the role of a module, not by family (Megatron-LM, arXiv 1909.08053): q, k, v, gate and up are split by output
features, output and down by input features, so that ranks need not communicate in between, and output and down give
partial sums. Embedding and head are split by vocabulary. Everything else is small and replicated. Shares may differ in
size.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from hasten.errors import ConfigError
from hasten.model.config import ModelConfig
from hasten.ops.linear.weights import QuantizedWeight, WeightFormat

TILE = 64  # rows of a panel of the native kernels: a share of many of them has whole ones


@dataclass(frozen=True, slots=True)
class Cut:
    """The slice of a parameter that a rank holds: `part` of dimension 0 or 1, or zeros (None).

    rows: held instead of columns, where the groups of a quantized weight have columns from everywhere (desc_act).
    """

    dim: int
    part: range | None
    rows: range = range(0)

    def of(self, tensor: Tensor) -> Tensor:
        """Slice a plain parameter. Copies, so that the mapped file pages can be released."""
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
    """The share of rank `rank`: ranges of query heads, key/value heads, inner features of an MLP, of an expert and of
    the MLP beside the experts, the residual stream (where columns cannot be split), and the vocabulary's rows."""

    rank: int
    head_dim: int
    heads: range
    kv_heads: range
    inner: range
    expert: range
    shared: range
    stream: range
    words: range

    def config(self, whole: ModelConfig) -> ModelConfig:
        """Config of the rank's own model: `whole` with smaller sizes."""
        pattern = whole.attention_pattern
        return replace(
            whole,
            attention_pattern=None if pattern is None else replace(pattern, first_head=self.heads.start),
            heads=len(self.heads),
            kv_heads=len(self.kv_heads),
            intermediate_size=len(self.inner),
            expert_size=len(self.expert),
            shared_size=len(self.shared),
            padded_vocab_size=len(self.words),
        )

    def cut(self, name: str) -> Cut | None:
        """The slice of a parameter, by its name in a Transformer; None: it is replicated."""
        *owners, module, kind = name.split(".")
        if kind == "sinks":
            return Cut(0, self.heads)
        inner = self.expert if "experts" in owners else self.shared if "shared" in owners else self.inner
        size = self.head_dim
        heads, kv_heads = (range(held.start * size, held.stop * size) for held in (self.heads, self.kv_heads))
        columns = {"q": heads, "k": kv_heads, "v": kv_heads, "gate": inner, "up": inner}
        columns |= {"embedding": self.words, "head": self.words}
        rows = {"output": heads, "down": inner}
        if module in columns:
            return Cut(0, columns[module])
        if module not in rows:
            return None
        if kind == "weight":
            return Cut(1, rows[module], self.stream)
        return Cut(0, None) if self.rank else None  # a bias is added once


def whole_groups(formats: Iterable[WeightFormat]) -> int:
    """Smallest number of columns that can be split off weights of these formats without cutting a group or a word."""
    groups = (level.columns for one in formats for level in one.scales)
    return math.lcm(8, *(columns for columns in groups if columns))


def shares(config: ModelConfig, size: int, *, output: int = 1, down: int = 1) -> list[Share]:
    """Each rank's share for `size` ranks. output, down: smallest number of columns that can be split off these weights.

    Raises ConfigError if the model cannot be split that way; it names the largest size that can.
    """
    if (config.keeps_states or config.attention_gate) and size > 1:
        raise ConfigError(
            f"--tensor-parallel is {size}; a {config.family} has Gated DeltaNet or gates of attention, which are not "
            "split over processes: run it in one process"
        )
    unsplit = config.mixed_heads or config.shares_keys or config.token_features or config.expert_norms
    if unsplit and size > 1:
        raise ConfigError(
            f"--tensor-parallel is {size}; layers of a {config.family} have heads of several sizes, use the keys of "
            "others, per-layer embeddings or norms of their experts, which are not split over processes: run it in one "
            "process"
        )
    if config.qk_norm == "projection" and size > 1:
        raise ConfigError(
            f"--tensor-parallel is {size}; {config.family} normalises all heads of its queries together, of which "
            "each process would hold some: run it in one process"
        )
    sizes = [config.intermediate_size] * any(not layer.experts for layer in config.layers)
    sizes += [config.expert_size] * any(layer.experts for layer in config.layers)
    sizes += [config.shared_size] * (config.shared_size > 0)
    most = min(config.padded_vocab_size, max(_most_ranks(config, output)), *(-(-one // down) for one in sizes))
    if not 1 <= size <= most:
        groups = f", in whole groups of {max(output, down)} columns," if max(output, down) > 8 else ""
        raise ConfigError(
            f"--tensor-parallel is {size}; a model of {config.heads} heads ({config.kv_heads} of keys and values) and "
            f"{min(sizes):,} inner features{groups} can be shared by 1 to {most} ranks: take at most {most}"
        )
    heads = _heads(config, size, output)
    widths = config.intermediate_size, config.expert_size, config.shared_size
    inner, expert, shared = (_shared(one, _in_tiles(one, down, size), size) for one in widths)
    stream = _shared(config.hidden_size, _in_tiles(config.hidden_size, 1, size), size)
    words = _shared(config.padded_vocab_size, _in_tiles(config.padded_vocab_size, 1, size), size)
    return [
        Share(
            rank,
            config.head_dim,
            *own,
            inner=inner[rank],
            expert=expert[rank],
            shared=shared[rank],
            stream=stream[rank],
            words=words[rank],
        )
        for rank, own in enumerate(heads)
    ]


def _shared(count: int, unit: int, size: int) -> list[range]:
    """Split into ranges of whole units, as even as possible; the last unit may be smaller."""
    units = -(-count // unit)
    ends = [min(count, units * rank // size * unit) for rank in range(size + 1)]
    return [range(*pair) for pair in pairwise(ends)]


def _in_tiles(count: int, unit: int, size: int) -> int:
    """The unit, or a multiple of it that fills whole tiles if each rank has many of them."""
    tiles = math.lcm(unit, TILE)
    return tiles if count >= 4 * size * tiles else unit


def _most_ranks(config: ModelConfig, output: int) -> tuple[int, int]:
    """Most ranks among which heads can be split: with the query heads of a key head together, and divided."""
    ratio, unit = config.heads // config.kv_heads, output // math.gcd(output, config.head_dim)
    together = unit // math.gcd(unit, ratio)
    return -(-config.kv_heads // together), config.kv_heads * (ratio // unit) if ratio % unit == 0 else 0


def _heads(config: ModelConfig, size: int, output: int) -> list[tuple[range, range]]:
    """(query heads, key/value heads) of each rank. With more ranks than key heads, several hold the same one."""
    ratio, unit = config.heads // config.kv_heads, output // math.gcd(output, config.head_dim)
    if size <= _most_ranks(config, output)[0]:
        held = _shared(config.kv_heads, unit // math.gcd(unit, ratio), size)
        return [(range(own.start * ratio, own.stop * ratio), own) for own in held]
    return [
        (range(head * ratio + part.start, head * ratio + part.stop), range(head, head + 1))
        for head, ranks in enumerate(_shared(size, 1, config.kv_heads))
        for part in _shared(ratio, unit, len(ranks))
    ]

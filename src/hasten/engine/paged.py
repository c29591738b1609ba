"""The paged key/value cache: blocks of a fixed number of tokens in any order, a table a sequence (arXiv 2309.06180).

The tensors only; which block belongs to whom is `hasten.engine.blocks.BlockManager`'s business. A step takes any
number of tokens of any number of sequences, laid end to end in one row: chunks of prompts and decodes in the same call.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hasten.engine.cache import key_value_memory
from hasten.engine.layout import RaggedLayout, Rows
from hasten.engine.sparse import SparseMasks
from hasten.errors import ConfigError
from hasten.model.config import ModelConfig
from hasten.ops.attention import AttentionRequest, AttentionSpec, LayerAttention
from hasten.ops.attention.cache_rows import PLAIN, RowFormat
from hasten.ops.attention.paged import PAGED_KERNELS, PagedGroup
from hasten.ops.attention.view import AttentionMetadata, KVView, StackView
from hasten.ops.picker import pick


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """One layer's keys and values during one step; see `KVView`."""

    held: KVView
    kernel: Callable[..., Tensor]
    groups: Callable[[], list[PagedGroup]]

    def view(self, *, batch: int, tokens: int, kv_heads: int, head_dim: int) -> KVView:
        """For a kernel that writes and reads the cache itself."""
        return self.held

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, attention: LayerAttention, dropout: float) -> Tensor:
        """Write the step's k, v (1, N, Hkv, D); attention of q (1, N, H, D) over all that its sequences hold."""
        held = self.held
        slots, rows = held.metadata.slot_mapping, held.metadata.rows
        held.k[slots], held.v[slots] = rows.write(k)[0], rows.write(v)[0]
        return self.kernel(q[0], held, spec=attention.spec, groups=self.groups, dense=attention)[None]


@dataclass(frozen=True, slots=True)
class PagedStep:
    """The context of a forward pass of N tokens: positions int64 (1, N), and `last`, each sequence's last row (B,)."""

    all_layers: StackView
    positions: Tensor
    kernel: Callable[..., Tensor]
    groups: Sequence[Callable[[], list[PagedGroup]]]  # of each layer

    @property
    def last(self) -> Tensor:
        return self.all_layers.metadata.query_start_loc[1:] - 1

    @property
    def layers(self) -> list[PagedLayer]:
        """For the blocks one by one."""
        layers = zip(self.all_layers.layers, self.groups, strict=True)
        return [PagedLayer(view, self.kernel, groups) for view, groups in layers]


class PagedCache:
    """Keys and values in `blocks` blocks of `block_size` tokens, (blocks·block_size + 1, Hkv, …) a layer."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        blocks: int,
        block_size: int = 16,
        dtype: torch.dtype,
        device: torch.device | str,
        row_format: RowFormat = PLAIN,
    ) -> None:
        """dtype: of the model. row_format: how keys and values are kept. `bytes_per_block` says what a block takes.

        Raises ConfigError for sizes below 1.
        """
        if blocks < 1 or block_size < 1:
            raise ConfigError(f"a paged cache needs at least 1 block of 1 token; found {blocks} of {block_size}")
        self.config = config
        self.sparse: SparseMasks | None = None
        self.blocks, self.block_size = blocks, block_size
        self.device = torch.device(device)
        layers = len(config.layers)
        slots = blocks * block_size + 1
        self._memory = key_value_memory(config, slots=slots, rows=row_format, dtype=dtype, device=device)
        self.k, self.v = list(self._memory[:layers]), list(self._memory[layers:])
        spec = AttentionSpec(heads=config.heads, kv_heads=config.kv_heads, head_dim=config.head_dim, scale=1.0)
        self.row_format = row_format
        request = AttentionRequest(spec=spec, device=self.device, dtype=dtype, cache_bits=row_format.bits)
        self.kernel = pick(PAGED_KERNELS, replace(request, block_mask=config.attention_pattern is not None))
        self._last: tuple[RaggedLayout, PagedStep] | None = None  # the latest step

    @staticmethod
    def bytes_per_block(
        config: ModelConfig, *, block_size: int = 16, dtype: torch.dtype, row_format: RowFormat = PLAIN
    ) -> int:
        """Bytes that one block takes in all layers together."""
        row = row_format.bytes(config.head_dim, dtype)
        return 2 * len(config.layers) * block_size * config.kv_heads * row

    @property
    def bytes(self) -> int:
        """Size of the cache in bytes."""
        return self._memory.nbytes

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, target), as if one after the other."""
        if not pairs:
            return
        blocks = self._memory[:, :-1].unflatten(1, (self.blocks, self.block_size))
        for together in _independent(pairs):
            sources, targets = torch.tensor(together, device=self.device).T
            blocks[:, targets] = blocks[:, sources]

    def step(self, rows: Sequence[Rows]) -> PagedStep:
        """The context of a call model(tokens (1, N), step.positions, step): the rows' tokens end to end.

        The tables must have room for their tokens; nobody else may be reading the blocks that are written.
        """
        layout = RaggedLayout(rows, self.block_size)
        self._last = layout, (step := self._laid_out(layout))
        return step

    def go_on(self, entered: Sequence[tuple[int, int]]) -> PagedStep | None:
        """The context of the next token of each sequence, after a step of one token each, which becomes unusable.

        entered: (sequence, block) for each that begins a block. None, and nothing is changed, where the step's block
        tables are too small: it has to be laid out again.
        """
        if not self.can_go_on(entered):
            return None
        assert self._last is not None
        layout, step = self._last
        layout.go_on(entered)
        if self.device.type != "cpu" or self.config.attention_pattern is not None:
            self._last = layout, (step := self._laid_out(layout))
        return step

    def can_go_on(self, entered: Sequence[tuple[int, int]]) -> bool:
        """Whether `go_on` will."""
        return self._last is not None and self._last[0].has_columns(entered)

    def _laid_out(self, layout: RaggedLayout) -> PagedStep:
        positions, slots, query_start_loc, seq_lens, table = layout.on(self.device)

        def groups() -> list[PagedGroup]:  # for all layers, and only where a kernel asks for it
            return layout.groups(lambda t: t.to(self.device))

        metadata = AttentionMetadata(
            slots,
            query_start_loc,
            seq_lens,
            first_slots=None,
            block_table=table,
            block_size=self.block_size,
            rows=self.row_format,
            max_query=layout.most,
            longest=table.shape[1] * self.block_size,
        )
        sparse = self._sparse(layout.longest)
        seen = sparse.native if sparse is not None and self.kernel.name == "native" else []
        shown = [groups] * len(self.k) if sparse is None or seen else self._masked(groups(), sparse)
        return PagedStep(StackView(self.k, self.v, metadata, seen), positions[None], self.kernel.run, shown)

    def _sparse(self, longest: int) -> SparseMasks | None:
        """What the model's pattern, if it has one, shows of texts of so many tokens."""
        if self.config.attention_pattern is not None and (self.sparse is None or self.sparse.positions < longest):
            self.sparse = SparseMasks(self.config, positions=1 << longest.bit_length(), device=self.device)
        return self.sparse

    def _masked(self, groups: list[PagedGroup], sparse: SparseMasks) -> Sequence[Callable[[], list[PagedGroup]]]:
        """The groups as each layer sees them, with its masks."""
        masked: list[list[PagedGroup]] = [[] for _ in self.k]
        for group in groups:
            places = torch.arange(group.slots.shape[1], device=self.device)
            for own, mask in zip(masked, sparse.masks(group.positions, places), strict=True):
                own.append(group._replace(mask=mask))
        return [functools.partial(list, own) for own in masked]


def _independent(pairs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """The pairs in order, in runs in which nothing is read or written after it was written."""
    runs: list[list[tuple[int, int]]] = []
    targets: set[int] = set()
    for source, target in pairs:
        if not runs or source in targets or target in targets:
            runs.append([])
            targets = set()
        runs[-1].append((source, target))
        targets.add(target)
    return runs

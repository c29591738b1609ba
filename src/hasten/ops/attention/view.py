"""The views of a cache for kernels that write a step's keys and values themselves and read all others."""

from typing import NamedTuple

from torch import Tensor

from hasten.ops.attention.cache_rows import PLAIN, RowFormat


class AttentionMetadata(NamedTuple):
    """Where the tokens of one step are in the cache, the same for all layers.

    slot_mapping int64 (R,): the cache's row for each of the step's R tokens, -1 for padding. Tokens
    query_start_loc[b] … query_start_loc[b+1] - 1 belong to sequence b and are the last of its seq_lens[b] positions;
    int64 (B + 1,) and (B,). Contiguous: first_slots int64 (B,), the row of each sequence's position 0. Paged:
    block_table int64 (B, blocks); of one block, positions past its end begin again. rows: how the cache keeps keys and
    values.

    Known on the host, to size a launch on a GPU (None: unknown): max_query, the most new tokens of a sequence;
    longest, the most tokens a sequence can have. Neither changes a result.
    """

    slot_mapping: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    first_slots: Tensor | None
    block_table: Tensor | None = None
    block_size: int = 0
    rows: RowFormat = PLAIN
    max_query: int | None = None
    longest: int | None = None

    @property
    def to_read(self) -> tuple[Tensor | int | None, ...]:
        """The fields for reading the cache: all but slot_mapping, in the native operators' order."""
        return *self[1:6], self.rows.rotated


class KVView(NamedTuple):
    """One layer's keys and values during one step.

    k, v (slots + 1, Hkv, …): rows of `metadata.rows` (cache_rows.py), the last one taking the padding; one tensor, if
    the keys are the values (latent attention). seen: which of
    them a sparse pattern shows, as the native kernels take it (their plan_pattern). plan: k, v and seen as the native
    blocks take them (`CachePlan`).
    """

    k: Tensor
    v: Tensor
    metadata: AttentionMetadata
    seen: Tensor | None = None
    plan: Tensor | None = None

"""Steps that read prompts as CUDA graphs: any tokens of any sequences end to end, padded to a few sizes.

Launched from Python, the operations of such a step take the host longer than they take a GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hasten.engine.block_table import Rows
from hasten.engine.cache import KVCache
from hasten.engine.captures import Captures, LogitsBuffer
from hasten.engine.layout import RaggedLayout
from hasten.engine.step import Groups, KVStep
from hasten.model.transformer import Transformer
from hasten.ops.attention.view import AttentionMetadata

TOKENS = (256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
SEQUENCES = (16, 64, 256, 512)  # and rows that are scored
_REACHES, _SHORTEST = 4, 512  # of the longest sequence, as `DecodeBatch.shape` has them
_ALIGNED = 16  # values: parts of the buffer begin at multiples
_ROUNDED = 256  # tokens of the largest step: a multiple
_SEEN = 2  # steps of a shape, after which it is captured


class PromptShape(NamedTuple):
    """The padded size of a step: tokens, sequences (and scored rows), and the most tokens of one sequence in all."""

    tokens: int
    sequences: int
    longest: int


class PromptSteps:
    """The captured steps, and the tensors that they read."""

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        captures: Captures,
        logits: LogitsBuffer,
        *,
        sequences: int,
        longest: int,
        tokens: int,
    ) -> None:
        """sequences, tokens: the most of a step. longest: the most tokens of one sequence."""
        self._model = weakref.ref(model)
        self.cache, self.captures, self.longest = cache, captures, longest
        self.logits_buffer = logits
        device = cache.device
        self.tokens = [size for size in TOKENS if size < tokens] + [-(-tokens // _ROUNDED) * _ROUNDED]
        self.sequences = [size for size in SEQUENCES if size < sequences] + [sequences]
        self.buffer = torch.zeros(_places(self.tokens[-1], sequences)[-1], dtype=torch.int64, device=device)
        self.block_table = torch.zeros(sequences, -(-longest // cache.block_size), dtype=torch.int64, device=device)

    def logits(self, tokens: Sequence[int], rows: Sequence[Rows], wanted: Sequence[int]) -> Tensor | None:
        """Run `ModelRunner.logits` captured; valid until the next step. None: it is to be run plainly."""
        choice = self._transformer.adapters
        if self.cache.kernel.name != "triton" or (
            choice is not None and (choice.rows is not None or choice.every >= 0)
        ):
            return None
        shape = self._shape(len(tokens), max(len(rows), len(wanted)), max(row.start + row.count for row in rows))
        if shape is None or (shape not in self.captures.pieces and not self.captures.due(shape, after=_SEEN)):
            return None
        self._fill(shape, tokens, rows, wanted)
        piece = self.captures.pieces.get(shape)
        if piece is None:
            out = self.logits_buffer.rows(shape.sequences)
            piece = self.captures.capture(shape, lambda: self._compute(shape, out))
        if piece is None:
            return None
        piece.run()
        found: Tensor = piece.result
        return found[: len(wanted)]

    @property
    def _transformer(self) -> Transformer:
        model = self._model()
        assert model is not None, "an engine has its model as long as it takes steps"
        return model

    def _shape(self, tokens: int, sequences: int, longest: int) -> PromptShape | None:
        if tokens > self.tokens[-1] or sequences > self.sequences[-1] or longest > self.longest:
            return None
        reach = _SHORTEST
        while reach < longest:
            reach *= _REACHES
        sizes = (next(n for n in self.tokens if n >= tokens), next(n for n in self.sequences if n >= sequences))
        return PromptShape(*sizes, min(reach, self.longest))

    def _fill(self, shape: PromptShape, tokens: Sequence[int], rows: Sequence[Rows], wanted: Sequence[int]) -> None:
        layout = RaggedLayout(rows, self.cache.block_size)
        staged = np.zeros(_places(*shape[:2])[-1], dtype=np.int64)
        ids, positions, slots, query_start_loc, seq_lens, scored = _parts(staged, shape)
        slots[:], query_start_loc[:] = -1, len(tokens)  # padding belongs to nobody and is written nowhere
        ids[: len(tokens)] = tokens
        own = (layout.positions, layout.slots, layout.query_start_loc, layout.seq_lens, np.array(wanted))
        for part, values in zip((positions, slots, query_start_loc, seq_lens, scored), own, strict=True):
            part[: len(values)] = values
        columns = min(layout.table.shape[1], self.block_table.shape[1])
        table = torch.from_numpy(np.ascontiguousarray(layout.table[:, :columns]))
        whole = torch.from_numpy(staged)
        if self.buffer.is_cuda:
            table, whole = table.pin_memory().to(self.buffer.device, non_blocking=True), whole.pin_memory()
        self.buffer[: len(staged)].copy_(whole, non_blocking=True)
        self.block_table[: len(rows), :columns] = table

    def _compute(self, shape: PromptShape, out: Tensor) -> Tensor:
        cache = self.cache
        ids, positions, slots, query_start_loc, seq_lens, scored = _parts(self.buffer, shape)
        metadata = AttentionMetadata(
            slots,
            query_start_loc,
            seq_lens,
            first_slots=None,
            block_table=self.block_table[: shape.sequences],
            block_size=cache.block_size,
            rows=cache.row_format,
            max_query=shape.tokens,
            longest=shape.longest,
        )
        model = self._transformer
        if model.adapters is not None:
            model.adapters.every, model.adapters.rows, model.adapters.groups = -1, None, []
        groups: list[Groups] = [list] * len(cache.k)
        step = KVStep(cache.k, cache.v, metadata, positions[None], kernel=cache.kernel.run, groups=groups)
        return model.scores(model.states(ids[None], step.positions, step)[0, scored], out=out)


def _places(tokens: int, sequences: int) -> list[int]:
    """Where the parts begin in the buffer, and where it ends."""
    found = [0]
    for size in (tokens, tokens, tokens, sequences + 1, sequences, sequences):
        found.append(found[-1] + -(-size // _ALIGNED) * _ALIGNED)
    return found


def _parts(buffer: Tensor | np.ndarray, shape: PromptShape) -> list:
    """Tokens, positions and slots (N,), query_start_loc (S + 1,), seq_lens and scored rows (S,)."""
    tokens, sequences, _ = shape
    sizes = (tokens, tokens, tokens, sequences + 1, sequences, sequences)
    return [buffer[at : at + size] for at, size in zip(_places(tokens, sequences), sizes, strict=False)]

"""Steps over texts side by side, each in one block of the cache, as many tokens of every text.

For layers whose attention is PyTorch's, which reads a text's keys as one tensor, and for compiled blocks: those are
compiled for one shape of a decode step, which all steps of an engine share (the technique of gpt-fast).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hasten.engine.block_table import Rows
from hasten.engine.cache import READ_STEP, KVCache
from hasten.engine.layout import to_device
from hasten.engine.runner import ModelRunner, capture_refusal
from hasten.engine.step import KVStep
from hasten.model.fused import is_fused
from hasten.model.transformer import Transformer

# Longer prompts are read in pieces, which bounds the memory of the activations.
_PREFILL_TOKENS = 4096


class SideBySideRunner(ModelRunner):
    """A model over a cache made by `KVCache.of_texts`, in which text b is block b."""

    side_by_side = True

    def __init__(self, model: Transformer, cache: KVCache, *, fixed: bool = False) -> None:
        """fixed: a decode step reads whole blocks, so that its shapes never change; on a GPU it is then captured."""
        super().__init__(model, cache)
        self.fixed, self.reach = fixed, None
        self._texts: list[int] = []  # of the last step, in its order
        self._ends: list[int] = []  # tokens that each of them has in the cache
        self._slots = list(range(cache.blocks))  # where the states of each text of the cache are
        self._stretched: Tensor | None = None  # bool (B, 1): see `KVStep`
        capturable = fixed and capture_refusal(model) is None
        self._captured = CapturedDecode(self) if capturable else None

    def logits(self, tokens: Sequence[int], rows: Sequence[Rows], wanted: Sequence[int]) -> Tensor:
        """Compute the step's tokens side by side; arguments and result are those of `ModelRunner.logits`."""
        self._texts = [row.block_table[:1][0] for row in rows]
        self._ends = [row.start + row.count for row in rows]
        for text, row in zip(self._texts, rows, strict=True):
            self._slots[text] = row.slot
        if self.model.config.stretches_at is not None:
            stretched = {text for text, row in zip(self._texts, rows, strict=True) if row.stretched}
            values = [[text in stretched] for text in range(self.cache.blocks)]
            self._stretched = torch.tensor(values, device=self.model.device)
        if len(tokens) == len(rows) == len(wanted):
            return self._decode(tokens)
        longest = max(row.count for row in rows)
        piece = max(1, _PREFILL_TOKENS // self.cache.blocks)
        starts = [row.start for row in rows]
        flat = [0]  # where each row's tokens begin
        for row in rows:
            flat.append(flat[-1] + row.count)
        fresh, places = not any(starts), set(wanted)
        found: dict[int, Tensor] = {}
        for begin in range(0, longest, piece):
            parts = [
                list(tokens[flat[i] + begin : min(flat[i] + begin + piece, flat[i + 1])]) for i in range(len(rows))
            ]
            width = max(map(len, parts))
            own = {  # wanted token -> its row among those of the step's texts
                flat[i] + begin + at: self._texts[i] * width + at
                for i, part in enumerate(parts)
                for at in range(len(part))
                if flat[i] + begin + at in places
            }
            logits = self._piece(parts, [start + begin for start in starts], list(own.values()) or [0], fresh=fresh)
            if list(own) == list(wanted):
                return logits
            found.update(zip(own, logits, strict=False))
            fresh = False
        return torch.stack([found[place] for place in wanted])

    def next_logits(self, tokens: Sequence[int], entered: Sequence[tuple[int, int]]) -> Tensor | None:
        """Compute the next token of each text of the last step; see `ModelRunner.next_logits`."""
        self._ends = [end + 1 for end in self._ends]
        return self._decode(tokens)

    def _piece(self, parts: list[list[int]], starts: list[int], rows: list[int], *, fresh: bool) -> Tensor:
        """Logits (R, V) of some rows, after each text of the step got these tokens behind its first `starts`."""
        batch, width, device = self.cache.blocks, max(map(len, parts)), self.model.device
        ids, begins, counts = [[0] * width for _ in range(batch)], [0] * batch, [0] * batch
        for text, part, start in zip(self._texts, parts, starts, strict=True):
            ids[text][: len(part)] = part
            begins[text], counts[text] = (start if part else 0), len(part)
        offsets, lengths = torch.arange(width, device=device), torch.tensor(counts, device=device)[:, None]
        positions, valid = torch.tensor(begins, device=device)[:, None] + offsets, None
        if min(counts) < width:
            valid = offsets < lengths  # (B, W)
            # Padding repeats a text's last position: its keys are kept nowhere, and the text must not look longer.
            positions = torch.minimum(positions, positions[:, :1] + (lengths - 1).clamp(min=0))
        read = max(begin + count for begin, count in zip(begins, counts, strict=True))
        context = self._context(positions, valid=valid, fresh=fresh, read=read)
        logits: Tensor = self.model(torch.tensor(ids, device=device), positions, context, rows=to_device(rows, device))
        return logits

    def _context(self, positions: Tensor, *, valid: Tensor | None, read: int | None, fresh: bool = False) -> KVStep:
        return self.cache.step_of_texts(
            positions,
            valid=valid,
            fresh=fresh,
            read=read,
            masks=not is_fused(self.model),
            stretched=self._stretched,
            state_slots=self._slots,
        )

    def _decode(self, tokens: Sequence[int]) -> Tensor:
        """Logits (N, V) after one token of each text of the step; texts that are not in it are padding."""
        batch, device = self.cache.blocks, self.model.device
        ids, places, whole = tokens, [end - 1 for end in self._ends], self._texts == list(range(batch))
        if not whole:
            ids, places = [0] * batch, [0] * batch
            for text, token, end in zip(self._texts, tokens, self._ends, strict=True):
                ids[text], places[text] = token, end - 1
        going = None if whole else [text in self._texts for text in range(batch)]
        if self._captured is not None:
            logits = self._captured.run(ids, places, going)
        else:
            positions = torch.tensor(places, device=device)[:, None]  # (B, 1)
            valid = None if going is None else torch.tensor(going, device=device)[:, None]
            read = None if self.fixed else -(-max(self._ends) // READ_STEP) * READ_STEP
            context = self._context(positions, valid=valid, read=read)
            logits = self.model(torch.tensor(ids, device=device)[:, None], positions, context)[:, 0]
        return logits if whole else logits[to_device(self._texts, device)]


class CapturedDecode:
    """A decode step of compiled blocks as a CUDA graph: all that it reads is in tensors that stay where they are."""

    def __init__(self, runner: SideBySideRunner) -> None:
        from hasten.engine.captures import Captures  # only where it is needed

        self.runner, device = runner, runner.cache.device
        self.captures = Captures(device)
        self.tokens = torch.zeros(runner.cache.blocks, 1, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.tokens)
        self.going = torch.ones_like(self.tokens, dtype=torch.bool)

    def run(self, tokens: Sequence[int], places: Sequence[int], going: Sequence[bool] | None) -> Tensor:
        """Logits (B, V), valid until the next step."""
        whole = [True] * len(places) if going is None else going
        for held, values in ((self.tokens, tokens), (self.positions, places), (self.going, whole)):
            held.copy_(torch.tensor(values)[:, None])
        if self.captures.due("decode", after=1):
            self.captures.capture("decode", self._compute)
        piece = self.captures.pieces.get("decode")
        if piece is None:
            return self._compute()
        piece.run()
        logits: Tensor = piece.result
        return logits

    def _compute(self) -> Tensor:
        runner = self.runner
        context = runner.cache.step_of_texts(self.positions, valid=self.going, masks=not is_fused(runner.model))
        logits: Tensor = runner.model(self.tokens, self.positions, context)
        return logits[:, 0]

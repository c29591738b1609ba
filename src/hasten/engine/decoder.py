"""The two steps of generation over a static cache: prefill (many tokens, once) and decode (one token, many times)."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hasten.engine.cache import READ_STEP, KVCache, row_format
from hasten.errors import ConfigError
from hasten.model.fused import is_fused
from hasten.model.sharded import ShardedTransformer
from hasten.model.transformer import Transformer

# The capacity of a cache for compiled steps is a multiple of this.
_STATIC_STEP = 128
# Longer prompts are taken in pieces, which bounds the memory of the activations.
_PREFILL_TOKENS = 4096


def static_capacity(model: Transformer, capacity: int) -> int:
    """The capacity of a static decoder for this number of tokens: one of few sizes, because each is compiled for."""
    rounded = -(-capacity // _STATIC_STEP) * _STATIC_STEP
    return max(capacity, min(rounded, model.config.max_positions))


class Decoder:
    """B sequences that grow together; row b has `lengths[b]` tokens in the cache."""

    def __init__(
        self,
        model: Transformer,
        *,
        batch: int,
        capacity: int,
        static: bool = False,
        kv_cache_dtype: str = "auto",
        cache: KVCache | None = None,
    ) -> None:
        """capacity: tokens a sequence can hold. static: every decode step has the same shapes (for compiled blocks).

        cache: of another decoder of the model that is no longer used, with the same rows and room enough.
        """
        self.model = model
        self.static, self.kv_cache_dtype = static, kv_cache_dtype
        if static:
            capacity = static_capacity(model, capacity)
        # longrope has one set of frequencies for sequences within the pretraining context and one for longer ones: a
        # sequence that grows past it is computed again, for which its tokens must be known; in one step.
        self._rescale_at = next((r.original_positions for r in model.config.ropes if r.scaling == "longrope"), None)
        self.cache = cache or KVCache.of_texts(
            model.config,
            batch=batch,
            capacity=capacity,
            dtype=model.compute_dtype,
            device=model.device,
            row_format=row_format(kv_cache_dtype),
            bounded=self._rescale_at is None,
        )
        self.lengths = [0] * batch
        self._written = [0] * batch  # of each row, as far as any of its keys were ever written, since it was empty
        self._history: list[list[int]] = [[] for _ in range(batch)]

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Append each row's tokens and return the logits (B, V) after its last one. Rows may differ in length."""
        if not all(prompts):
            raise ConfigError("a prompt has no tokens; give at least one (for example the beginning-of-text token)")
        return self._extend(prompts)

    def _extend(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """`prefill` in which a row may also get nothing; its logits then mean nothing."""
        longest = max(len(prompt) for prompt in prompts)
        grown = self._grown(map(len, prompts))
        piece = max(1, _PREFILL_TOKENS // len(prompts))
        if self._rescale_at is not None:
            self._history = [[*h[:n], *p] for h, n, p in zip(self._history, self.lengths, prompts, strict=True)]
            if any(0 < n <= self._rescale_at < after for n, after in zip(self.lengths, grown, strict=True)):
                self.lengths, prompts = [0] * len(prompts), self._history
            longest = piece = max(len(prompt) for prompt in prompts)  # in one piece: its length decides
        elif (any(self.lengths) or is_fused(self.model, any)) and self.cache.longest_step is not None:
            piece = min(piece, self.cache.longest_step)  # fused steps see their own tokens through the cache, too
        logits: Tensor | None = None
        start = 0
        while start < longest:
            part = [list(prompt[start : start + piece]) for prompt in prompts]
            found = self._append(part)
            start += piece
            piece = min(piece, self.cache.longest_step or piece)  # nothing is empty any more
            if logits is None:
                logits = found
            else:  # a row that ended in an earlier piece keeps the logits it got there
                took = torch.tensor([bool(p) for p in part], device=found.device)
                logits = torch.where(took[:, None], found, logits)
        assert logits is not None
        return logits

    def _append(self, part: list[list[int]], *, every: bool = False) -> Tensor:
        """Logits after the last token of each row, or after `every` token."""
        longest = max(len(tokens) for tokens in part)
        device = self.model.device
        tokens = torch.tensor([p + [0] * (longest - len(p)) for p in part], device=device)  # (B, T)
        starts, offsets = torch.tensor(self.lengths, device=device), torch.arange(longest, device=device)
        counts = torch.tensor([len(p) for p in part], device=device)
        positions, valid, rows = starts[:, None] + offsets, None, None
        if any(len(p) < longest for p in part):
            valid = offsets < counts[:, None]  # (B, T)
            # Padding repeats a row's last position: its keys are kept nowhere, and the row must not look longer.
            positions = (starts[:, None] + torch.minimum(offsets, counts[:, None] - 1)).clamp(min=0)
        if not every:
            rows = torch.arange(len(part), device=device) * longest + (counts - 1).clamp(min=0)
        elif valid is not None:
            rows = valid.flatten().nonzero()[:, 0]
        fresh = not any(self.lengths)
        self.lengths = [n + len(p) for n, p in zip(self.lengths, part, strict=True)]
        read, masks = max(self.lengths), not is_fused(self.model)
        context = self.cache.step_of_texts(positions, valid=valid, fresh=fresh, read=read, masks=masks)
        logits = self.model(tokens, positions, context, rows=rows)
        return logits.flatten(0, 1) if rows is None else logits

    @torch.inference_mode()
    def decode(self, tokens: Tensor, *, active: Sequence[bool] | None = None) -> Tensor:
        """Append one token to every row, tokens (B,) int64 on the device; return the logits (B, V) after it.

        active: False for rows that have ended: they stay as long as they are, and their logits mean nothing.
        """
        going = [True] * len(self.lengths) if active is None else list(active)
        if self._rescale_at is not None:
            new = [[token] if on else [] for token, on in zip(tokens.tolist(), going, strict=True)]
            if any(n == self._rescale_at and on for n, on in zip(self.lengths, going, strict=True)):
                return self._extend(new)
            self._history = [[*h[:n], *t] for h, n, t in zip(self._history, self.lengths, new, strict=True)]
        grown = self._grown(going)
        positions = torch.tensor([[n - 1] for n in grown], device=tokens.device)  # (B, 1)
        valid = None if all(going) else torch.tensor(going, device=tokens.device)[:, None]
        self.lengths = grown
        read = None if self.static else -(-max(grown) // READ_STEP) * READ_STEP
        context = self.cache.step_of_texts(positions, valid=valid, read=read, masks=not is_fused(self.model))
        return self.model(tokens[:, None], positions, context)[:, 0]

    @torch.inference_mode()
    def verify(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Append each row's tokens; return the logits (R, V) after every one of them, row by row. `truncate` forgets
        those that turn out wrong.
        """
        self._grown(map(len, tokens))
        if self._rescale_at is not None:
            self._history = [[*h[:n], *t] for h, n, t in zip(self._history, self.lengths, tokens, strict=True)]
        return self._append([list(row) for row in tokens], every=True)

    @property
    def runs_ahead(self) -> bool:
        """Whether a step is launched before the tokens of the last one are read, so that a GPU never waits.

        The tokens stay on the device. The end of a text is seen one step late, and the step behind it is undone.
        """
        sharded = isinstance(self.model, ShardedTransformer)
        return self.model.device.type == "cuda" and not sharded and not self.needs_tokens

    @property
    def needs_tokens(self) -> bool:
        """Whether the host has to know the tokens of a step before the next one."""
        return self._rescale_at is not None

    def undo(self, rows: Sequence[bool]) -> None:
        """Take back the latest token of some of the rows, which `decode` appended."""
        self.truncate([length - on for length, on in zip(self.lengths, rows, strict=True)])

    def room(self, row: int) -> int:
        """How many tokens a draft of a row may have that `verify` takes beside its next token."""
        if self._rescale_at is not None and self._rescale_at in self.lengths:
            return 0  # the next step computes that row again, as `decode` does
        length = self.lengths[row]
        room = self.cache.capacity - length - 1
        if self.cache.longest_step is not None:
            room = min(room, self.cache.longest_step - 1)
        if self._rescale_at is not None and length <= self._rescale_at:
            room = min(room, self._rescale_at - length - 1)
        return max(0, room)

    def truncate(self, lengths: int | Sequence[int]) -> None:
        """Forget everything after the first `lengths` tokens of every row, or of each; what lies behind is overwritten
        later.

        Raises ConfigError where a bounded cache no longer holds what came before.
        """
        wanted = [lengths] * len(self.lengths) if isinstance(lengths, int) else lengths
        for row, length in enumerate(wanted):
            if self.forgets(row, length):
                raise ConfigError(
                    f"this model sees {self.cache.reach} tokens, and its cache keeps the last "
                    f"{self.cache.block_size}; it cannot go back to {length} of {self.lengths[row]}: make a new Decoder"
                )
        written = [max(pair) for pair in zip(self.lengths, self._written, strict=True)]
        self._written = [n if length else 0 for n, length in zip(written, wanted, strict=True)]
        self.lengths = [min(n, length) for n, length in zip(self.lengths, wanted, strict=True)]

    def forgets(self, row: int, length: int) -> bool:
        """Whether a row that goes back to `length` tokens would miss keys that were overwritten since."""
        most, written = self.cache.longest_step, max(self._written[row], self.lengths[row])
        return most is not None and written > self.cache.block_size and 0 < length < written - most

    def _grown(self, counts: Iterable[int]) -> list[int]:
        """The rows' lengths with `counts` tokens more; raises ConfigError where there is no room for them."""
        grown = [n + count for n, count in zip(self.lengths, counts, strict=True)]
        if max(grown) > self.cache.capacity:
            raise ConfigError(f"the cache holds {self.cache.capacity} tokens a sequence; {max(grown)} are needed")
        return grown

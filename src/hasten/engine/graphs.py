"""The decode step as one CUDA graph: captured once, then replayed with a single launch for each token.

A step of a 7 B model is some 500 kernels, which the host launches more slowly than a GPU runs them. A graph replays the
same kernels on the same addresses, so everything a step reads or changes is in tensors that never move: the tokens,
the positions (which the step itself advances), the cache, the logits. Nothing that Python computes may differ from one
step to the next, since Python runs only while the graph is captured. Blocks that torch.compile compiled are captured
like any others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hasten.engine.cache import KVCache
from hasten.engine.decoder import Decoder, static_capacity
from hasten.errors import ConfigError
from hasten.machine.cuda_graphs import capture_graph
from hasten.model.fused import CudaStack, is_fused
from hasten.model.transformer import Transformer

WARM_UP_STEPS = 1  # compiles what is compiled on first use, and lets libraries allocate their workspaces
MOST_KEPT_BYTES = 2 << 30  # of a cache that is kept for the next text


def refusal(model: Transformer) -> str | None:
    """Why this model's decode step cannot be captured, or None if it can."""
    if any(layer.experts for layer in model.config.layers):
        return "its experts choose their tokens on the host"
    if any(rope.scaling == "longrope" for rope in model.config.ropes):
        return "longrope computes a sequence again where it outgrows the pretraining context"
    return None if model.device.type == "cuda" else f"CUDA graphs need a CUDA device; the model is on {model.device}"


def cuda_graph(step: Callable[[], None], reset: Callable[[], None], *, pool: Any = None) -> Callable[[], None]:
    """Warm `step` up on a stream of its own, as capturing wants it, then capture it; returns what runs it again.

    Its device has to be the current one.
    reset is called before each step that warms up. pool: of the memory of graphs of which one runs at a time.
    """
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(WARM_UP_STEPS):
            reset()
            step()
    torch.cuda.current_stream().wait_stream(aside)
    replay, _ = capture_graph(step, pool)
    return replay


def fastest_decoder(
    model: Transformer, *, batch: int, capacity: int, compiled: bool = False, kv_cache_dtype: str = "auto"
) -> Decoder:
    """A `GraphDecoder` where the model's step can be captured, else a `Decoder`, static for compiled blocks.

    It reuses the cache and the captured steps of a finished decoder that was given to `keep`.
    """
    if refusal(model) is not None:
        return Decoder(model, batch=batch, capacity=capacity, static=compiled, kv_cache_dtype=kv_cache_dtype)
    kept = _KEPT.pop(model, None)
    if kept is not None and kept.serves(model, batch, static_capacity(model, capacity), kv_cache_dtype):
        return GraphDecoder(model, batch=batch, capacity=capacity, kv_cache_dtype=kv_cache_dtype, kept=kept)
    return GraphDecoder(model, batch=batch, capacity=capacity, kv_cache_dtype=kv_cache_dtype)


@dataclass(frozen=True, slots=True)
class Kept:
    """The cache and the captured steps of a decoder that is no longer used. Nothing here refers to the model."""

    cache: KVCache
    captured: dict[int, tuple["FixedStep", Callable[[], None]]]
    captured_at: tuple[int, int]
    kv_cache_dtype: str
    addresses: tuple[int, ...]  # of what the steps read of the model

    def serves(self, model: Transformer, batch: int, capacity: int, kv_cache_dtype: str) -> bool:
        """Whether it may be used for a decoder of this kind: no smaller, and at most twice as large."""
        cache, stack = self.cache, model.stack
        same = cache.blocks == batch and self.kv_cache_dtype == kv_cache_dtype
        fits = capacity <= cache.capacity <= 2 * capacity
        return same and fits and isinstance(stack, CudaStack) and stack.addresses(model) == self.addresses


_KEPT: WeakKeyDictionary[Transformer, Kept] = WeakKeyDictionary()


def keep(decoder: Decoder) -> None:
    """Let the next `fastest_decoder` of the model have this one's cache and captured steps; it is not used any more.

    Of a model that is fused on a GPU, whose steps read the weights at addresses that can be compared.
    """
    model = decoder.model
    if not isinstance(decoder, GraphDecoder) or not isinstance(model.stack, CudaStack):
        return
    if decoder._captured and decoder.cache.bytes <= MOST_KEPT_BYTES:
        state = decoder.cache, decoder._captured, decoder._captured_at, decoder.kv_cache_dtype
        _KEPT[model] = Kept(*state, model.stack.addresses(model))


def release(model: Transformer) -> None:
    """Free what `keep` holds of this model, before others plan with the device's memory."""
    _KEPT.pop(model, None)


class FixedStep:
    """One step of B sequences by up to W tokens each over tensors that stay where they are.

    tokens and positions int64 (B, W), going bool (B, W), False behind a row's last token; logits float32 (B, W, V), of
    the latest call. The step moves the positions of what is `going` on by one. Padding repeats the row's last position,
    as it must not look longer than it is; its key goes nowhere.
    """

    logits: Tensor

    def __init__(self, cache: KVCache, width: int) -> None:
        self.cache = cache
        self.tokens = torch.zeros(cache.blocks, width, dtype=torch.int64, device=cache.first_slots.device)
        self.positions, self.moves = torch.zeros_like(self.tokens), torch.ones_like(self.tokens)
        self.going = torch.ones_like(self.tokens, dtype=torch.bool)
        self.stands_at: tuple[list[int], list[int]] | None = None  # starts and counts, one each, after it has run

    def set(self, starts: Sequence[int], counts: Sequence[int]) -> None:
        """Set each row's number of tokens in the cache, and of those that follow."""
        offsets, own = torch.arange(self.tokens.shape[1]), torch.tensor(counts).long()[:, None]
        positions = torch.tensor(starts)[:, None] + torch.minimum(offsets, own - 1)
        self.positions.copy_(positions.clamp(min=0))
        self.going.copy_(offsets < own)
        self.moves.copy_(offsets < own)

    def __call__(self, model: Transformer) -> None:
        context = self.cache.step_of_texts(self.positions, valid=self.going, masks=not is_fused(model))
        self.logits = model(self.tokens, self.positions, context)
        self.positions.add_(self.moves)


class GraphDecoder(Decoder):
    """A static `Decoder` whose decode step is captured at its first call, and again only after the cache has grown.

    Checking drafts is captured too, for 2, 4, 8, … tokens a row. The logits that `decode` returns are overwritten by
    the next call. Raises ConfigError for a model that cannot be captured (`refusal` says so before).
    """

    def __init__(
        self,
        model: Transformer,
        *,
        batch: int,
        capacity: int,
        kv_cache_dtype: str = "auto",
        kept: Kept | None = None,
    ) -> None:
        if (reason := refusal(model)) is not None:
            raise ConfigError(f"the decode step of this model cannot be captured: {reason}")
        cache = None if kept is None else kept.cache
        options = {"batch": batch, "capacity": capacity, "kv_cache_dtype": kv_cache_dtype}
        super().__init__(model, **options, static=True, cache=cache)  # type: ignore[arg-type]
        self.capture = cuda_graph
        self._captured: dict[int, tuple[FixedStep, Callable[[], None]]] = {}  # by the width
        self._captured_at = (0, 0)  # capacity and address of the cache that was captured
        if kept is not None:
            self._captured, self._captured_at = kept.captured, kept.captured_at
            for step, _ in self._captured.values():
                step.stands_at = None

    @torch.inference_mode()
    def decode(self, tokens: Tensor, *, active: Sequence[bool] | None = None) -> Tensor:
        """As `Decoder.decode`: tokens (B,) int64 on the device -> logits (B, V), valid until the next call.

        active: False for rows that have ended; their logits mean nothing.
        """
        counts = [1] * len(self.lengths) if active is None else [int(on) for on in active]
        return self._run(tokens[:, None], counts).logits[:, 0]

    @torch.inference_mode()
    def verify(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """As `Decoder.verify`."""
        counts = [len(row) for row in tokens]
        width = 1 << (max(counts) - 1).bit_length()
        step = self._run(torch.tensor([[*row, *[0] * (width - len(row))] for row in tokens]), counts)
        rows = [width * row + i for row, count in enumerate(counts) for i in range(count)]
        return step.logits.flatten(0, 1)[torch.tensor(rows, device=step.logits.device)]

    def _run(self, tokens: Tensor, counts: list[int]) -> FixedStep:
        """The step of tokens (B, W), of which each row has `counts`, after it has run; captured where it is new."""
        grown, width = self._grown(counts), tokens.shape[1]
        place = (self.cache.capacity, self.cache.k[0].data_ptr())
        if self._captured_at != place:
            self._captured, self._captured_at = {}, place
        if width not in self._captured:
            step = FixedStep(self.cache, width)
            # Warming up writes the same keys to the same places again and again, never beyond the cache.
            with torch.cuda.device_of(step.tokens):
                replay = self.capture(lambda: step(self.model), lambda: step.set(self.lengths, counts))
            self._captured[width] = step, replay
        step, replay = self._captured[width]
        step.tokens.copy_(tokens)
        if width > 1 or step.stands_at != (self.lengths, counts):  # else it has moved the positions on by itself
            step.set(self.lengths, counts)
        replay()
        self.lengths, step.stands_at = grown, (grown, counts)
        return step

"""Runs decode steps of a model as captured CUDA graphs of a few padded sizes."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hasten.engine.batch import DecodeBatch, StepShape
from hasten.engine.block_table import SequenceBlocks
from hasten.engine.cache import KVCache
from hasten.engine.captures import Captures, LogitsBuffer
from hasten.engine.device_sampler import DeviceSampler, DrawKind
from hasten.engine.forward import forward
from hasten.engine.prompt_steps import PromptSteps
from hasten.engine.sequence import ScheduledTokens
from hasten.machine.host_copy import HostCopy
from hasten.model.transformer import Transformer

_SEEN = 2  # steps of a shape, after which it is captured
_SERVED = 32  # misses before a capture while a larger captured size serves
_LOGITS = 1 << 28  # bytes of a captured step's logits, at most
_GATHERED = 1 << 28  # bytes of the keys that a captured step of a kernel which brings them together may copy


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens on their way to the host."""

    rows: list[int]  # of the sequences that were asked for
    tokens: HostCopy  # (S,)

    def wait(self) -> list[int]:
        """A token of each."""
        found = self.tokens.tensor().tolist()
        return [found[row] for row in self.rows]


class ForwardKey(NamedTuple):
    """Which forward pass was captured: of which shape, and with which adapter for all rows (-1: none)."""

    shape: StepShape
    adapter: int


class DrawKey(NamedTuple):
    """Which draw was captured: behind that forward pass, by these rules."""

    shape: StepShape
    adapter: int
    kind: DrawKind


class BatchRunner:
    """Runs a `DecodeBatch` as captured pieces: a forward pass for each shape, a draw for each shape and kind.

    A shape is captured when it has come twice; until then a larger captured one serves, or none does, and the caller
    runs the step plainly. `explain` says what is captured.
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        *,
        sequences: int,
        longest: int,
        tokens: int,
        sizes: Sequence[int] = (),
    ) -> None:
        """sequences, longest: the most at once, and tokens of one. tokens: the most of a step with prompts.

        sizes: of decode steps, captured by `warm_up`.
        """
        self._model, self.cache = weakref.ref(model), cache  # `hasten.engine.kept` holds it longer than the model
        self.batch = DecodeBatch(cache, sequences=sequences, longest=longest)
        self.sampler = DeviceSampler(self.batch, vocab_size=model.config.vocab_size)
        self.captures = Captures(model.device)
        most = {"sequences": sequences, "longest": longest, "tokens": tokens}
        self.logits_buffer = LogitsBuffer(model.config.vocab_size, model.device)
        self.prompts = PromptSteps(model, cache, self.captures, self.logits_buffer, **most)
        # The largest first, which needs the most memory.
        self._waiting = deque(sorted({min(size, self.batch.sequences) for size in sizes}, reverse=True))
        self._shape: StepShape | None = None  # of the step that `begin` or `go_on` has run
        self._asked = StepShape(1, 1, 1)  # what it was padded from
        self._adapter = -1
        self._kind: DrawKind | None = None

    @property
    def model(self) -> Transformer:
        model = self._model()
        assert model is not None, "an engine has its model as long as it takes steps"
        return model

    def restart(self) -> None:
        """Forget all sequences, whose numbers may come again; what was captured stays."""
        self.batch.restart()
        self.sampler.restart()

    # -- steps whose tokens the host draws ----------------------------------------------------------------------------

    def logits(self, plan: Sequence[ScheduledTokens], *, adapter: int = -1) -> tuple[Tensor, list[int]] | None:
        """Logits (R, V) after each token of the plan, and the row of each entry's first; None: run it plainly.

        Valid until the next step.
        """
        width, longest = max(entry.count for entry in plan), max(entry.end for entry in plan)
        found = self._forward(len(plan), width, longest, adapter, lambda shape: self.batch.fill(shape, plan))
        if found is None:
            return None
        logits, shape, rows = found
        return logits.flatten(0, 1), [row * shape.width for row in rows]

    # -- steps whose tokens stay on the device ------------------------------------------------------------------------

    def begin(
        self,
        plan: Sequence[ScheduledTokens],
        *,
        adapter: int = -1,
        behind: tuple[list[int], list[int], Tensor] | None = None,
    ) -> Drawn | None:
        """Compute and draw one token of each sequence; None: run it plainly.

        behind: sequences whose tokens the host does not know yet, and the places of these in a tensor on the device.
        """
        numbers, longest = [entry.sequence.number for entry in plan], max(entry.end for entry in plan)
        values = self.sampler.values(plan)

        def fill(shape: StepShape) -> list[int]:
            found = self.batch.fill(shape, plan, values)
            if behind is not None:
                self.batch.take_tokens(shape, *behind)
            return found

        found = self._forward(len(plan), 1, longest, adapter, fill)
        if found is None:
            return None
        logits, self._shape, _ = found
        self._adapter = adapter
        self._kind = self.sampler.prepare(plan)
        return self._draw(numbers, logits)

    def go_on(
        self, numbers: Sequence[int], grown: Sequence[tuple[int, SequenceBlocks]], *, longest: int
    ) -> Drawn | None:
        """The next step of these sequences of the last one, after the tokens that it draws; the others leave.

        grown: the block tables that have changed, by the sequences' numbers. longest: tokens of the longest one then.
        None: not in the same shape; `begin` it when the tokens are known.
        """
        shape = self._shape
        assert shape is not None
        wanted = self.batch.shape(sequences=len(numbers), width=1, longest=longest)
        if wanted is None or not shape.covers(wanted) or wanted.sequences < self._asked.sequences:
            return None
        if self._asked != shape and self.captures.due(ForwardKey(self._asked, self._adapter), after=_SERVED - 1):
            return None  # `begin` captures it
        if len(numbers) < len(self.batch.rows):
            staying = set(numbers)
            self.batch.leave(shape, [number for number in self.batch.rows if number not in staying])
        self.batch.copy_tables([table for _, table in grown], [self.batch.rows[number] for number, _ in grown])
        piece = self.captures.pieces[ForwardKey(shape, self._adapter)]
        piece.run()
        return self._draw(numbers, piece.result)

    def _draw(self, numbers: Sequence[int], logits: Tensor) -> Drawn:
        shape, kind, batch = self._shape, self._kind, self.batch
        assert shape is not None
        assert kind is not None
        lengths = batch.views(shape).lengths
        kept: list[Tensor] = []

        def compute() -> None:
            self.sampler.step(shape, kind, logits)

        def still() -> None:  # so that warming up draws for nobody
            if not kept:
                kept.append(lengths.clone())
            lengths.zero_()

        key = DrawKey(shape, self._adapter, kind)
        piece = self.captures.pieces.get(key)
        if piece is None and self.captures.due(key):
            piece = self.captures.capture(key, compute, reset=still)
            if kept:
                lengths.copy_(kept[0])
        (compute if piece is None else piece.run)()
        if kind.penalized:
            self.sampler.took(numbers)
        return self._read(numbers, shape)

    def _read(self, numbers: Sequence[int], shape: StepShape) -> Drawn:
        """Start the copy of the drawn tokens to the host."""
        rows = [self.batch.rows[number] for number in numbers]
        return Drawn(rows, HostCopy(self.batch.views(shape).tokens[:, 0]))

    # -- captured forward passes --------------------------------------------------------------------------------------

    def _forward(
        self, sequences: int, width: int, longest: int, adapter: int, fill: Callable[[StepShape], list[int]]
    ) -> tuple[Tensor, StepShape, list[int]] | None:
        """Logits (S, W, V) of a step, its padded shape, and the rows of its sequences."""
        wanted = self.batch.shape(sequences=sequences, width=width, longest=longest)
        if wanted is None or self._too_large(wanted) is not None:
            return None
        key, shape = ForwardKey(wanted, adapter), wanted
        if key not in self.captures.pieces:
            larger = min(self._captured(adapter, wanted), key=_size, default=None)
            if self.captures.due(key, after=_SEEN if larger is None else _SERVED):
                fill(wanted)  # warming up writes what the step writes
                self._capture(wanted, adapter)
            if key not in self.captures.pieces:
                if larger is None:
                    return None
                shape = larger
        rows = fill(shape)
        piece = self.captures.pieces[ForwardKey(shape, adapter)]
        piece.run()
        self._asked = wanted
        return piece.result, shape, rows

    def _captured(self, adapter: int, wanted: StepShape) -> list[StepShape]:
        """The captured shapes to which a step of this one can be padded."""
        return [key.shape for key in self.forwards() if key.adapter == adapter and key.shape.covers(wanted)]

    def forwards(self) -> list[ForwardKey]:
        """The captured forward passes."""
        return [key for key in self.captures.pieces if isinstance(key, ForwardKey)]

    def _capture(self, shape: StepShape, adapter: int) -> None:
        choice, out = self.model.adapters, self.logits_buffer.rows(shape.sequences, shape.width)

        def compute() -> Tensor:
            if choice is not None:  # one for all rows, or none: the same for each step of this key
                choice.every, choice.rows, choice.groups = adapter, None, []
            return forward(self.model, self.batch, shape, out=out)

        self.captures.capture(ForwardKey(shape, adapter), compute)

    def _too_large(self, shape: StepShape) -> str | None:
        """Why steps of this shape are not captured."""
        rows = shape.sequences * shape.width
        if rows * self.model.config.vocab_size * 4 > _LOGITS:
            return f"the logits of {rows} rows are too large"
        row = self.cache.k[0][0].nbytes
        if self.cache.kernel.name == "gathered" and shape.sequences * shape.longest * row > _GATHERED:
            return "its attention kernel copies all keys"
        return None

    # -- what is known ahead ------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def warm_up(self) -> bool:
        """Capture one of the sizes that were asked for; False: there is none left. Between steps only."""
        if not self._waiting:
            return False
        size = self._waiting.popleft()
        shape = self.batch.shape(sequences=size, width=1, longest=self.batch.longest)
        if shape is None or self._too_large(shape) is not None:
            return True
        if self.captures.due(ForwardKey(shape, -1), after=1):
            self.batch.buffer.zero_()  # padding only: shapes share it, and what another one left is no token
            self._capture(shape, -1)
        return True

    def explain(self) -> str:
        """A line on what is captured."""
        shapes = [key.shape for key in self.forwards()]
        sizes = sorted({f"{shape.sequences}" + f"x{shape.width}" * (shape.width > 1) for shape in shapes}, key=_natural)
        refused = next(iter(self.captures.refused.values()), self.captures.full)
        more = "" if refused is None else f"; not captured: {refused}"
        return f"decode steps of {', '.join(sizes) or 'no'} sequences are captured, {self.captures.seconds:.1f} s{more}"


def _size(shape: StepShape) -> tuple[int, int]:
    return shape.sequences * shape.width, shape.longest


def _natural(text: str) -> list[int]:
    return [int(part) for part in text.split("x")]

"""Times the parts of a step by reading a clock whenever one part hands over to the next.

The time between two readings belongs to one part, so every part's time is measured and none is a remainder. Forward, a
part begins and ends with a call. Backward, hooks on autograd's nodes are used: a node belongs to the part that was
running when it was created. The native call of a fused model reports the times of its parts itself.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor

from hasten.model.fused import FusedBlock, FusedStack
from hasten.model.transformer import Transformer
from hasten.profiling.walk import parts_of

FORWARD, BACKWARD = "forward", "backward"


class Meter:
    """While it is entered, appends (part, phase, nanoseconds) to `marks` whenever a part begins or continues.

    calls: further methods that are parts, of an object or a class: (owner, name, part); "batch" and "update" end a
    backward pass.
    """

    def __init__(self, model: Transformer, calls: Iterable[tuple[Any, str, str]] = ()) -> None:
        self.model, self.cuda = model, model.device.type == "cuda"
        own = [(part.owner, part.call, part.name) for part in parts_of(model) if part.call is not None]
        self.calls = [*own, *calls]
        self.times: Tensor | None = None  # of a fused model's parts
        if isinstance(model.stack, FusedStack):
            blocks = [block for block in model.blocks if isinstance(block, FusedBlock)]
            self.names = [f"model.blocks.{i}.{part}" for i, block in enumerate(blocks) for part in block.parts()]
            self.times = torch.zeros(1 + len(self.names), dtype=torch.int64)
        if model.stack is not None:
            self.calls += [(model.stack, "run", "model.blocks"), (model.stack, "scores", "model.head")]
        self.restart()

    def restart(self) -> None:
        """Begin a step."""
        self.marks: list[tuple[str, str, int]] = []
        self._outer: list[tuple[str, str]] = []
        self._nodes: set[Any] = set()  # of the backward pass, that belong to somebody
        self.enter("", FORWARD)

    def enter(self, part: str, phase: str) -> None:
        """Mark that this part runs from now on ("" is the step itself); on a GPU, after all work before it."""
        if self.cuda:
            torch.cuda.synchronize(self.model.device)
        self.now = part, phase
        self.marks.append((part, phase, time.perf_counter_ns()))

    def __enter__(self) -> Self:
        self._undo = ExitStack()
        for owner, name, part in self.calls:
            self._watch(owner, name, part)
        if isinstance(self.model.stack, FusedStack):
            self.model.stack.times = self.times
            self._undo.callback(setattr, self.model.stack, "times", None)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _watch(self, owner: Any, name: str, part: str) -> None:
        call, own = getattr(owner, name), name in vars(owner)

        def watched(*given: Any, **options: Any) -> Any:
            self._begin(part, given)
            made = call(*given, **options)
            self._end(part, made)
            return made

        setattr(owner, name, watched)
        self._undo.callback(*((setattr, owner, name, call) if own else (delattr, owner, name)))

    def _begin(self, part: str, given: Sequence[Any]) -> None:
        if part in ("batch", "update"):
            self.now = "", FORWARD
        self._claim(given, self.now[0])
        self._outer.append(self.now)
        self.enter(part, self.now[1])  # what a checkpoint computes again is a part of the backward pass

    def _end(self, part: str, made: Any) -> None:
        self._claim(made if isinstance(made, tuple) else (made,), part)
        if part == "model.blocks" and self.times is not None:
            ended = self.times.tolist()
            # Not where blocks were called one by one, nor where Python has another clock.
            if self.marks[-1][2] <= ended[0] <= ended[-1] <= time.perf_counter_ns():
                own = zip([*self.names, part], ended, strict=True)
                self.marks += [(name, FORWARD, at) for name, at in own]
        self.enter(*self._outer.pop())

    def _claim(self, tensors: Sequence[Any], part: str) -> None:
        """Assign the autograd nodes behind these tensors to a part, unless they are assigned already."""
        if not torch.is_grad_enabled():
            return
        waiting = [tensor.grad_fn for tensor in tensors if isinstance(tensor, Tensor)]
        while waiting:
            node = waiting.pop()
            # A weight's node (which has a variable) runs right behind what made its gradient, and counts there.
            if node is not None and node not in self._nodes and not hasattr(node, "variable"):
                self._nodes.add(node)
                node.register_prehook(lambda gradients: self.enter(part, BACKWARD))
                waiting += [before for before, _ in node.next_functions]

    def spent(self) -> dict[tuple[str, str], float]:
        """Seconds by part and phase since the last `restart`."""
        self.enter("", FORWARD)
        found: defaultdict[tuple[str, str], float] = defaultdict(float)
        for (part, phase, at), (_, _, until) in zip(self.marks, self.marks[1:], strict=False):
            found[part, phase] += (until - at) / 1e9
        return dict(found)

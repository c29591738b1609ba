"""`CachePlan`: a cache as one argument of the native calls, laid out once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hasten.ops.native import native_ops
from hasten.ops.states import State


class CachePlan:
    """The tensors of a cache as the native calls take them: of all its layers, or of some.

    k, v: of the layers with attention; seen: what each of them sees of a pattern, empty for all; states: of the layers
    that keep any. They must stay where they are, and are held. Each plan is made when it is first asked for.
    """

    def __init__(
        self,
        k: Sequence[Tensor],
        v: Sequence[Tensor],
        seen: Sequence[Tensor] = (),
        states: Sequence[State | None] = (),
    ) -> None:
        self._keys = {"k": k, "v": v, "seen": seen}
        self._states = [one for one in states if one is not None]
        self._made: dict[Any, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        """State without plans, which hold addresses; a copy makes its own."""
        return self.__dict__ | {"_made": {}}

    def whole(self) -> Tensor:
        """The plan of all layers."""
        return self._plan("whole", slice(None), self._states)

    def of(self, layers: slice) -> Tensor:
        """The plan of some of the layers with attention."""
        return self._plan((layers.start, layers.stop), layers, [])

    def of_state(self, layer: int) -> Tensor:
        """The plan of one of the layers that keep states."""
        return self._plan(layer, slice(0), self._states[layer : layer + 1])

    def _plan(self, key: Any, layers: slice, states: Sequence[State]) -> Tensor:
        if key not in self._made:
            self._made[key] = native_ops().plan_cache.default(
                **{name: list(part[layers]) for name, part in self._keys.items()},
                inputs=[one["inputs"] for one in states],
                matrices=[one["matrix"] for one in states if "matrix" in one],
            )
        return self._made[key]

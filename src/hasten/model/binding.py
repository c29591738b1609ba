"""Which kernel each layer runs: said by `explain`, forced for a while by `kernels`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hasten.errors import ConfigError
from hasten.model.transformer import Attention, Transformer
from hasten.ops import picker
from hasten.ops.attention import KERNELS

OPERATORS = ("attention",)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A kernel that a layer does not run, and why not."""

    kernel: str
    reason: str


@dataclass(frozen=True, slots=True)
class Binding:
    """What one layer runs for one operator. `dataclasses.asdict` makes plain JSON values of it."""

    layer: int
    operator: str
    kernel: str
    others: list[Refusal]


def explain(model: Transformer) -> list[Binding]:
    """For each layer and operator the kernel that runs now, and for every other one the reason why it does not."""
    bindings = []
    for layer, attention in enumerate(_attentions(model)):
        request = attention.request()
        forced = attention.kernel.name if picker.pick(KERNELS, request) is not attention.kernel else None
        choice = picker.explain(KERNELS, request, forced=forced)
        others = [Refusal(kernel, reason) for kernel, reason in choice.others]
        bindings.append(Binding(layer, "attention", choice.kernel, others))
    return bindings


@contextmanager
def kernels(model: Transformer, **names: str) -> Iterator[Transformer]:
    """Within the block every layer runs the kernels named, for example `attention="reference"`.

    The kernels bound before come back at the end, also after an exception. A compiled model compiles again on both
    changes. Raises ConfigError, changing nothing, for an operator or a kernel that does not exist (listing those that
    do) and for a kernel that cannot serve one of the layers.
    """
    unknown = sorted(set(names) - set(OPERATORS))
    if unknown:
        raise ConfigError(f"there is no operator {unknown[0]!r}; known: {', '.join(OPERATORS)}")
    attentions = _attentions(model)
    before = [attention.kernel for attention in attentions]
    chosen = before
    if "attention" in names:
        chosen = []
        for layer, attention in enumerate(attentions):
            try:
                chosen.append(picker.pick(KERNELS, attention.request(), forced=names["attention"]))
            except ConfigError as error:
                raise ConfigError(f"attention of layer {layer}: {error}") from None
    try:
        for attention, kernel in zip(attentions, chosen, strict=True):
            attention.kernel = kernel
        yield model
    finally:
        for attention, kernel in zip(attentions, before, strict=True):
            attention.kernel = kernel


def _attentions(model: Transformer) -> list[Attention]:
    found = [block.attention for block in model.blocks]
    assert all(isinstance(attention, Attention) for attention in found)
    return found  # type: ignore[return-value]

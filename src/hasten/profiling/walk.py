"""The parts of a model: which calls a profile looks into, and where it has to stop."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from hasten.engine.compiled import CompiledForOneToken
from hasten.model.experts import Experts
from hasten.model.fused import FusedBlock, FusedSteps
from hasten.model.mixer import StateMixer
from hasten.model.transformer import Transformer
from hasten.ops.linear.embedding import PackedEmbedding
from hasten.training.training_modules import FusedMLP, JoinedAttention

COMPILED = "compiled: one graph, whose parts cannot be timed"
NATIVE = "native steps: attention and its products are one row"


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A part of a model. name: "model.blocks.0.mlp".

    owner, call: the module that is called, or another method of it; None: a native call reports its time. modules:
    modules whose weights it reads itself, outside of its children. note: why a profile does not look into it further.
    """

    name: str
    owner: nn.Module
    call: str | None = "forward"
    modules: tuple[nn.Module, ...] = ()
    note: str | None = None


def parts_of(model: Transformer) -> list[ModelPart]:
    """The parts of a model, parents before children."""
    return [*_parts("model", model, stacked=model.stack is not None), ModelPart("model.head", model, "loss")]


def _parts(name: str, module: nn.Module, *, stacked: bool) -> Iterator[ModelPart]:
    compiled = module._compiled_call_impl is not None
    if compiled or isinstance(module, CompiledForOneToken):
        call = "_compiled_call_impl" if compiled else "forward"
        yield ModelPart(name, module, call, tuple(module.modules()), COMPILED)
    elif isinstance(module, FusedBlock) and stacked:
        yield ModelPart(name, module, None)
        for part, own in module.parts().items():
            yield ModelPart(f"{name}.{part}", module, None, own or (module,))
        norms = (one for child, one in module.named_modules() if child.endswith("norm") and "experts." not in child)
        yield ModelPart(f"{name}.norms", module, None, tuple(norms), "a part of the steps around them")
    else:
        hidden, note = _hidden(module)
        own = tuple(one for child in hidden for one in module.get_submodule(child).modules())
        joined = isinstance(module, JoinedAttention) and bool(hidden)
        yield ModelPart(name, module, "forward", (module,) if joined else (module, *own), None if joined else note)
        if joined:
            yield ModelPart(f"{name}.project", module, "project", own, note)
        for leaf, child in module.named_children():
            if leaf not in hidden:
                yield from _parts(f"{name}.{leaf}", child, stacked=stacked)


def _hidden(module: nn.Module) -> tuple[tuple[str, ...], str | None]:
    """Children that a module does not call (hooks on them would change how it computes), and a note."""
    if isinstance(module, JoinedAttention) and all(type(one) is nn.Linear for one in (module.q, module.k, module.v)):
        return ("q", "k", "v"), "q, k and v are one product"
    if isinstance(module, StateMixer):
        return ("conv",), "its convolution is its own"
    if isinstance(module, PackedEmbedding) and module.own:
        return ("tables",), None
    if isinstance(module, FusedMLP) and module.gate is None and type(module.up) is nn.Linear:
        return ("up",), "the product of up is the module's own"
    if isinstance(module, Experts) and not module.training and module.why_one_by_one() is None:
        return ("experts",), "all experts in a few launches"
    if isinstance(module, FusedSteps):
        apart = () if module.joins_experts else ("experts",)
        return tuple(name for name, _ in module.named_children() if name not in apart), NATIVE
    return (), None

"""Which kernel each layer runs: `explain` reports it, `kernels` forces one temporarily; what its weights take."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hasten.errors import ConfigError
from hasten.model.attention import Attention
from hasten.model.experts import experts_of
from hasten.model.fused import CudaStack, FusedBlock, FusedSteps, fuse, listed, refusal, take_apart, waits
from hasten.model.transformer import Transformer, require_model
from hasten.ops import attention as attention_operator
from hasten.ops import picker
from hasten.ops.attention.layer import LayerAttention, layer_requests
from hasten.ops.attention.paged import PAGED_KERNELS
from hasten.ops.experts import KERNELS as EXPERTS_KERNELS
from hasten.ops.linear import LinearRequest, PackedLinear, request_of
from hasten.ops.linear import operator as linear_operator
from hasten.ops.linear.weights import WeightFormat
from hasten.ops.linear.wide import WideLinear

# The forms of a layer's calls of attention (ops/attention/layer.py), as explain names them.
FORMS = {
    "tokens": "attention",
    "dropout": "attention with dropout",
    "masked": "attention over a cache",
    "decode": "attention over a cache, one query",
}
OVER_CACHE = ("masked", "decode")
ONE_ROW = "decode step of one sequence"  # on a GPU: as one launch, or several for each block
OPERATORS: dict[str, tuple[str, ...]] = {
    "block": ("fused", "readable"),
    "attention": tuple(kernel.name for kernel in attention_operator.KERNELS),
    "linear": tuple(kernel.name for kernel in linear_operator.KERNELS),
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """A kernel that a layer does not use, and the reason."""

    kernel: str
    reason: str


UNFUSED = Refusal("fused", "it belongs to the fused steps, which this model does not run")


@dataclass(frozen=True, slots=True)
class Binding:
    """The kernel of one layer for one operator. `dataclasses.asdict` converts it to plain JSON values.

    layer: the number of the block, -1 for the head behind the last one. operator: "block" (the fused steps or the
    readable block), "decode step of one sequence" (on a GPU), "attention", what a layer that keeps a state has in its
    place ("gated delta rule", "short convolution"), "paged attention" (over a cache in blocks, by readable ones:
    serving and hasten.LLM), "experts" (all of a layer, but for those in a native call), or "linear" (products of a
    block that run alike are one entry).
    """

    layer: int
    operator: str
    kernel: str
    others: list[Refusal]


def explain(model: Transformer) -> list[Binding]:
    """List the kernel that each layer runs for each operator, and for every other kernel the reason why it does not."""
    require_model(model, "hasten.explain")
    if not model.bound:
        model.bind_once()
    against_fused = refusal(model)
    launches = [_launches(model, model.stack)] if isinstance(model.stack, CudaStack) else []
    bindings = []
    for layer, block in enumerate(model.blocks):
        if isinstance(block, FusedSteps):
            readable = Refusal("readable", "the fused steps come first")
            bindings.append(Binding(layer, "block", "fused", [readable]))
            bindings.append(_fused_mixer(layer, block))
            bindings += [replace(one, layer=layer) for one in launches]
        else:
            reason = against_fused or waits(model) or "the model is fused when it first generates (or by hasten.fuse)"
            bindings.append(Binding(layer, "block", "readable", [Refusal("fused", reason)]))
            bindings += _mixer_bindings(model, layer, block)
        bindings += _expert_bindings(model, layer, block)
        bindings += _linear_bindings(layer, block, _types_of(model, f"blocks.{layer}."))
    return bindings + _linear_bindings(-1, model.head, _types_of(model, "head"))


def grouped(bindings: Iterable[Binding]) -> list[tuple[str, Binding]]:
    """Group bindings that differ in the layer alone: their layers in words ("layers 0-5 and the head"), and one."""
    alike: dict[tuple, tuple[Binding, list[int]]] = {}
    for binding in bindings:
        key = (binding.operator, binding.kernel, *binding.others)
        alike.setdefault(key, (binding, []))[1].append(binding.layer)
    return [(_layers(layers), binding) for binding, layers in alike.values()]


def _layers(layers: list[int]) -> str:
    if layers[-1] == -1:  # after the last block
        return f"{_layers(layers[:-1])} and the head" if layers[:-1] else "the head"
    if len(layers) == 1:
        return f"layer {layers[0]}"
    if layers == list(range(layers[0], layers[-1] + 1)):
        return f"layers {layers[0]}-{layers[-1]}"
    return f"layers {', '.join(map(str, layers))}"


def bytes_per_weight(model: Transformer) -> float:
    """Mean bytes of a weight that a decode step reads, scales included.

    The embedding is not counted unless the head is the same matrix: a step reads single rows of it.
    """
    read = [*model.blocks.modules(), model.head]
    linears = [module for module in read if isinstance(module, PackedLinear | nn.Linear)]
    total = sum(tensor.nbytes for linear in linears for tensor in (*linear.buffers(), *linear.parameters()))
    return total / sum(linear.in_features * linear.out_features for linear in linears)


def _binding(
    layer: int, operator: str, kernels: Sequence[picker.Kernel], request: Any, current: str | None = None
) -> Binding:
    """The binding of `request`: the kernel that is picked, or `current` if another one was forced."""
    forced = current if current != picker.pick(kernels, request).name else None
    choice = picker.explain(kernels, request, forced=forced)
    return Binding(layer, operator, choice.kernel, [Refusal(*other) for other in choice.others])


def _launches(model: Transformer, stack: CudaStack, layer: int = 0) -> Binding:
    """The binding of a decode step of one sequence on a GPU: one launch or several. It holds for all layers."""
    each, together = "a few launches for each block", "one launch for all blocks"
    reason = stack.why_not_one_launch(model)
    if reason is None:
        return Binding(layer, ONE_ROW, together, [Refusal(each, "all blocks at once are faster")])
    return Binding(layer, ONE_ROW, each, [Refusal(together, reason)])


def _fused_mixer(layer: int, block: FusedSteps) -> Binding:
    """What lets the tokens of a fused block see each other."""
    if block.mixer is not None:
        return Binding(
            layer, block.mixer.sizes.operator, "fused", [Refusal("pytorch", "the fused steps bring their own")]
        )
    others = [Refusal(k.name, "the fused steps bring their own attention") for k in attention_operator.KERNELS]
    return Binding(layer, "attention", "fused", others)


def _expert_bindings(model: Transformer, layer: int, block: nn.Module) -> list[Binding]:
    """The kernel of a block's experts, unless they are a part of its native call."""
    experts = experts_of(block)
    if experts is None or isinstance(block, FusedBlock):
        return []
    return [_binding(layer, "experts", EXPERTS_KERNELS, experts.request(model.device))]


def _mixer_bindings(model: Transformer, layer: int, block: nn.Module) -> list[Binding]:
    """What lets the tokens of a readable block see each other: attention, or a layer that keeps a state."""
    if getattr(block, "mixer", None) is not None:
        return [Binding(layer, model.config.state_mixer.operator, "pytorch", [UNFUSED])]
    if block.attention is None:
        return []
    assert isinstance(block.attention, Attention)
    sparse = model.config.attention_pattern is not None
    request = replace(block.attention.request(), dtype=model.compute_dtype, block_mask=sparse)
    # A cache has one kernel for all layers.
    widest = max(model.config.head_dim_of(one) for one in model.config.layers if one.attends)
    request = replace(request, spec=replace(block.attention.over_cache.spec, head_dim=widest))
    paged = _binding(layer, "paged attention", PAGED_KERNELS, request)
    return [*_attention_bindings(layer, block.attention), paged]


def _attention_bindings(layer: int, attention: Attention) -> list[Binding]:
    """One binding for each form of the layer's calls; with dropout only if the layer has any."""
    found = []
    for form, request in layer_requests(attention.request()).items():
        if form != "dropout" or attention.dropout:
            kernels = attention.over_cache if form in OVER_CACHE else attention.kernels
            request, bound = replace(request, spec=kernels.spec), getattr(kernels, form).name
            binding = _binding(layer, FORMS[form], attention_operator.KERNELS, request, bound)
            found.append(replace(binding, others=[UNFUSED, *binding.others]))
    return found


def _types_of(model: Transformer, prefix: str) -> dict[WeightFormat | None, str]:
    """GGUF type names in a part of the model, by the format that layers hold; None: plain weights."""
    found: dict[WeightFormat | None, set[str]] = {}
    for name, stored in model.stored_types.items():
        if name.startswith(prefix):
            layer = (model.quantization or {}).get(name)
            found.setdefault(None if layer is None else layer.weight, set()).add(stored)
    return {format: listed(sorted(names)) for format, names in found.items()}


def _linear_bindings(layer: int, part: nn.Module, types: Mapping[WeightFormat | None, str]) -> list[Binding]:
    """One binding for each kind of product in a part of the model. types: the file's name of each format."""
    found: dict[tuple, Binding] = {}
    for module in part.modules():
        if not isinstance(module, nn.Linear | PackedLinear):
            continue
        unpacked = "float32" if isinstance(module, WideLinear) else "pytorch"
        request, current = request_of(module), module.kernel if isinstance(module, PackedLinear) else unpacked
        held, stored = request.format.name, types.get(request.format if request.format.scales else None)
        weights = held if stored in (None, held) else f"{stored} as {held}"
        binding = _binding(layer, f"linear ({weights})", linear_operator.KERNELS, request, current)
        if isinstance(module, nn.Linear):
            binding = replace(binding, others=[Refusal(o.kernel, _unpacked(o, request)) for o in binding.others])
        found.setdefault((binding.kernel, request.format, *binding.others), binding)
    return list(found.values())


def _unpacked(other: Refusal, request: LinearRequest) -> str:
    """Why an unpacked layer runs PyTorch's product."""
    if other.kernel in ("float32", "pytorch"):
        return other.reason
    if request.format.element not in ("bfloat16", "float16", "int8", "int4"):
        return f"it multiplies 16-bit, int8 or int4 weights; these are {request.format.element}"
    return other.reason if "asked for" not in other.reason else "the layer was not packed (hasten.fuse packs)"


@contextmanager
def kernels(model: Transformer, **names: str) -> Iterator[Transformer]:
    """Force kernels by name during a `with` block, for example `attention="reference"` or `block="readable"`.

    Forcing an attention or linear kernel temporarily unfuses a fused model; forcing a linear one holds both plain and
    packed weights. The previous kernels are restored at the end, also after an exception. A compiled model is
    recompiled at both changes. Raises ConfigError, changing nothing, for an operator or a kernel that does not exist
    (listing those that do), for a kernel that cannot serve one of the layers, and for the fused block together with
    another kernel.
    """
    require_model(model, "hasten.kernels")
    unknown = sorted(set(names) - set(OPERATORS))
    if unknown:
        raise ConfigError(f"there is no operator {unknown[0]!r}; known: {', '.join(OPERATORS)}")
    for operator, name in names.items():
        if name not in OPERATORS[operator]:
            raise ConfigError(f"there is no {operator} kernel {name!r}; known: {', '.join(OPERATORS[operator])}")
    if names.get("block") == "fused" and len(names) > 1:
        others = ", ".join(f"{operator}={name!r}" for operator, name in names.items() if operator != "block")
        raise ConfigError(
            f"block='fused' brings its own attention and products, and leaves no place for {others}; leave one out"
        )
    with ExitStack() as afterwards:  # what puts back what was there
        if names:  # and nothing is fused by itself meanwhile
            afterwards.callback(setattr, model, "auto_fuse", model.auto_fuse)
            model.auto_fuse = False
        if names == {"block": "fused"}:
            if model.readable:
                fuse(model)
                afterwards.callback(take_apart, model)
        elif names and not model.readable:
            take_apart(model)
            afterwards.callback(fuse, model)
        if not model.bound:
            model.bind_once()
        if "attention" in names:
            _force_attention(model, names["attention"], afterwards)
        if "linear" in names:
            _force_linear(model, names["linear"], afterwards)
        yield model


def _force_attention(model: Transformer, name: str, afterwards: ExitStack) -> None:
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    for layer, attention in enumerate(attentions):
        bound = {name: value for name, value in vars(attention).items() if isinstance(value, LayerAttention)}
        afterwards.callback(vars(attention).update, bound)
        try:
            attention.bind(name)
        except ConfigError as error:
            raise ConfigError(f"attention of layer {layer}: {error}") from None


def _force_linear(model: Transformer, name: str, afterwards: ExitStack) -> None:
    """Bind packed layers to the kernel, and replace plain bfloat16 layers by packed ones temporarily."""
    places = [(owner, leaf, child) for owner in model.modules() for leaf, child in owner.named_children()]
    for owner, leaf, child in places:
        if isinstance(child, PackedLinear):
            afterwards.callback(child.bind, child.kernel)
            child.bind(name)
        elif isinstance(child, nn.Linear) and name != "pytorch":
            if child.weight.dtype != torch.bfloat16:
                raise ConfigError(
                    f"linear layer {leaf!r}: kernel {name!r} multiplies bfloat16, int8 or int4 weights; "
                    f"these are {request_of(child).format.element}"
                )
            afterwards.callback(setattr, owner, leaf, child)
            setattr(owner, leaf, PackedLinear.from_linear(child, kernel=name))

"""The kernel of all experts of a layer: chosen from its MLPs, and again when one of their weights was replaced."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from hasten.model.mlp import MLP
from hasten.ops import triton_support
from hasten.ops.experts import KERNELS, ExpertsRequest, ExpertWeights, Grouped
from hasten.ops.linear import LinearRequest, PackedLinear, request_of
from hasten.ops.linear.layouts import Operands
from hasten.ops.picker import pick

PRODUCTS = ("gate", "up", "down")
ALIGNED = 16  # bytes of an address


class BoundExperts:
    """The kernel of a layer's experts, and the tensors it was chosen for.

    run: computes all experts of its rows; None: they are called one by one.
    """

    def __init__(self, experts: nn.ModuleList) -> None:
        each = list(experts)
        self.request = experts_request(each)
        kernel = pick(KERNELS, self.request)
        self.run: Grouped | None = None if kernel.name == "readable" else kernel.run(weights_of(each))
        self._owners, self._names, self._held = zip(*_places(experts), strict=True)
        self._hooks = list(_hooks(each))
        self._hooked = any(self._hooks)
        # Only a kernel reads them by their addresses, which `parameter.data = …` changes.
        self._tensors = [] if self.run is None else [held for held in self._held if isinstance(held, Tensor)]
        self._addresses = list(map(Tensor.data_ptr, self._tensors))

    @property
    def current(self) -> bool:
        """Whether the experts are the same modules with the same tensors, and have hooks only if they had some.

        Asked before each call that is not captured, of some hundred experts: without a loop in Python.
        """
        return (
            all(map(is_, map(dict.get, self._owners, self._names), self._held))
            and list(map(Tensor.data_ptr, self._tensors)) == self._addresses
            and any(self._hooks) == self._hooked
        )

    @property
    def addresses(self) -> Tensor | None:
        """The kernel's table of addresses, which captured steps read; None without one."""
        return getattr(self.run, "addresses", None)


def experts_request(experts: Sequence[nn.Module], device: torch.device | None = None) -> ExpertsRequest:
    """The request of a layer's experts to a kernel. device: of the weights, if they are still on the meta device."""
    first: Any = experts[0]
    inner, down = (_request(getattr(first, name)) for name in ("up", "down"))
    if device is not None:
        inner, down = replace(inner, device=device), replace(down, device=device)
    return ExpertsRequest(inner=inner, down=down, activation=first.activation_name, unusual=_unusual(experts))


def _request(module: nn.Module) -> LinearRequest:
    """That of a layer, or of the layer that an adapter or a rank's part wraps."""
    return request_of(next(one for one in module.modules() if isinstance(one, nn.Linear | PackedLinear)))


def could_run(device: torch.device) -> bool:
    """Whether a kernel of all experts may run on a device: a quick look before all else."""
    return device.type == "cuda" or (device.type == "cpu" and triton_support.interpreted())


def _unusual(experts: Sequence[nn.Module]) -> str | None:
    """What no kernel computes, as a reason."""
    first: Any = experts[0]
    if not all(type(one) is MLP for one in experts):
        return f"its experts are modules of another kind ({type(first).__name__})"
    if first.gate is None:
        return "its experts have no gate"
    if first.limit is not None or first.up_offset:
        return "its experts limit what they multiply"
    for names in (("gate", "up"), ("down",)):  # products of a launch
        kinds = {_kind(getattr(one, name)): None for one in experts for name in names}
        if (reason := next((kind for kind in kinds if isinstance(kind, str)), None)) is not None:
            return reason
        if len(kinds) > 1:
            return "its experts' weights differ in their formats"
    if any(_hooks(experts)) or any("forward" in one.__dict__ for one in _modules(experts)):
        return "its experts have a hook, or a forward of their own"
    return None


def _kind(linear: nn.Module) -> str | tuple[Any, ...]:
    """What has to be alike in the layers of one product; or why no kernel reads this one."""
    if getattr(linear, "bias", None) is not None:
        return "its experts have biases"
    if isinstance(linear, PackedLinear):
        if linear.order is not None:
            return "its experts take features in the order of their columns (desc_act)"
        if linear.kernel != "triton" and could_run(linear.data.device):
            return f"its experts are packed for the kernel {linear.kernel}"
        return PackedLinear, linear.request, linear.out_features
    if type(linear) is not nn.Linear:
        return f"its experts hold layers of another kind ({type(linear).__name__})"
    weight = linear.weight
    if type(weight) not in (nn.Parameter, Tensor):
        return "its experts' weights are divided among ranks"
    if not weight.is_meta and (not weight.is_contiguous() or weight.data_ptr() % ALIGNED):
        return f"its experts' weights do not lie row by row at multiples of {ALIGNED} bytes"
    return nn.Linear, weight.dtype, weight.device, weight.shape


def weights_of(experts: Sequence[Any]) -> ExpertWeights:
    """The weights of MLPs with gates, as kernels take them."""
    each = {name: [_operands(getattr(one, name)) for one in experts] for name in PRODUCTS}
    return ExpertWeights(**each, activation=experts[0].activation_name)


def _operands(linear: nn.Linear | PackedLinear) -> Operands:
    if isinstance(linear, PackedLinear):
        return linear.operands
    weight = linear.weight.detach()
    return Operands(weight, None, None, None, None, len(weight), request_of(linear).format)


def _places(experts: nn.ModuleList) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Where experts, their layers, weights and own forwards are held, by which names, and which they are."""
    for number, one in experts._modules.items():
        yield experts._modules, number, one
        for name in PRODUCTS:
            linear = getattr(one, name)
            yield one._modules, name, linear
            for own in () if linear is None else (linear._parameters, linear._buffers):
                for kept in ("weight", "data", "scales", "zeros"):
                    if kept in own:
                        yield own, kept, own[kept]
    for module in _modules(experts):
        yield module.__dict__, "forward", module.__dict__.get("forward")


def _hooks(experts: Iterable[nn.Module]) -> Iterator[dict[Any, Any]]:
    for module in _modules(experts):
        yield module._forward_hooks
        yield module._forward_pre_hooks


def _modules(experts: Iterable[nn.Module]) -> Iterator[nn.Module]:
    return chain.from_iterable(one.modules() for one in experts)

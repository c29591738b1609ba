"""Chooses a kernel: each declares what it supports, the first that fits is used, and every refusal has a reason.

The choice is made when a model is bound (loaded, compiled) and stored in the layer; nothing is looked up in the hot
path. The idea of printing every candidate with the reasons against it is xformers' dispatcher's.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hasten.errors import ConfigError

Request = TypeVar("Request")


def _always(request: Any) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Kernel(Generic[Request]):
    """One implementation of an operator.

    `unsupported_reason(request)` returns None if the kernel supports the request, else a readable reason.
    `opt_in_reason(request)` returns why a kernel that supports it is only used when it is named, or None.
    Kernels are listed in the order of preference: the fastest first, the reference last.
    """

    name: str
    run: Callable
    unsupported_reason: Callable[[Request], str | None]
    opt_in_reason: Callable[[Request], str | None] = _always


@dataclass(frozen=True, slots=True)
class Choice:
    """The result of `explain`: the kernel that is used, and for every other one the reason why not."""

    kernel: str
    others: tuple[tuple[str, str], ...]


_listeners: list[list[Choice]] = []


@contextlib.contextmanager
def explained() -> Iterator[list[Choice]]:
    """Record, while the context is open, which kernel each call picked and why not the others.

    For operators that pick at each call, such as `hasten.ops.attention.attention`, in anybody's module.
    """
    found: list[Choice] = []
    _listeners.append(found)
    try:
        yield found
    finally:
        _listeners[:] = [one for one in _listeners if one is not found]  # another one may be equal


def pick_at_call(kernels: Sequence[Kernel[Request]], request: Request, *, forced: str | None = None) -> Kernel[Request]:
    """Call `pick`, and record the choice for every open `explained`."""
    for found in _listeners:
        found.append(explain(kernels, request, forced=forced))
    return pick(kernels, request, forced=forced)


def explain(kernels: Sequence[Kernel[Request]], request: Request, *, forced: str | None = None) -> Choice:
    """Report which kernel `pick` returns, and why it does not return each other one."""
    taken = pick(kernels, request, forced=forced)
    others = []
    for kernel in kernels:
        if kernel is taken:
            continue
        reason = kernel.unsupported_reason(request)
        if reason is None and forced:
            reason = f"{forced} was asked for by name"
        others.append((kernel.name, reason or kernel.opt_in_reason(request) or f"{taken.name} comes first"))
    return Choice(taken.name, tuple(others))


def pick(kernels: Sequence[Kernel[Request]], request: Request, *, forced: str | None = None) -> Kernel[Request]:
    """Return the first kernel that supports the request without `opt_in_reason`, or the one named by `forced`.

    Raises ConfigError if the forced kernel is unknown or does not support the request (with its reason).
    """
    if forced is not None:
        for kernel in kernels:
            if kernel.name == forced:
                reason = kernel.unsupported_reason(request)
                if reason:
                    raise ConfigError(f"kernel {forced!r} cannot be used here: {reason}")
                return kernel
        raise ConfigError(f"there is no kernel {forced!r}; known: {', '.join(k.name for k in kernels)}")
    for kernel in kernels:
        if kernel.unsupported_reason(request) is None and kernel.opt_in_reason(request) is None:
            return kernel
    raise AssertionError("the reference kernel serves every request")

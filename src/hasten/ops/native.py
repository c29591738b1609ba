"""The native operators: which instruction set, its library, and what torch.compile must know about each operator.

Each instruction set's libraries register their operators in a torch namespace of its own (`hasten_avx2::linear` …):
one for inference, one for what only training calls, each compiled and loaded when it is first asked for.
`meta_kernels.py` gives torch the output shapes of each operator, `with_gradients` the gradients of those that have one:
once for each instruction set, when one is first wanted.
"""

import functools
import inspect
import os
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hasten.errors import ConfigError, HastenWarning, ResourceError
from hasten.machine import amx_permitted, find_compiler
from hasten.machine.measured import compare, slower
from hasten.ops import calls
from hasten.ops.build import INSTRUCTION_SETS, Part, build, can_build, is_built, namespace, prebuilt

MISSING = "the native library is not there (no compiler, or HASTEN_ISA=none)"
NONE = "none"  # HASTEN_ISA=none: PyTorch's kernels only

_loading = threading.Lock()  # torch takes a fake implementation once; two threads may ask for the library at once


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """A loaded library: its instruction set, its file, and `ops`, the torch.ops namespace its operators are in."""

    isa: str
    path: Path
    ops: Any


def available_isas() -> tuple[str, ...]:
    """The instruction sets that this processor can execute, the fastest first; "portable" is always the last."""
    return tuple(isa for isa in INSTRUCTION_SETS if _why_not(isa) is None)


def _why_not(isa: str) -> str | None:
    """Why an instruction set cannot be used here, or None."""
    found = INSTRUCTION_SETS[isa].here()
    if missing := found.missing():
        return f"this processor has no {', '.join(missing)}"
    # Asked of the system only for kernels that want it: the permission makes all signal frames larger.
    if "amx_tile" in found.needs and not amx_permitted():
        return "the system does not let this process use AMX"
    return None


def choose_isa(isa: str | None = None) -> str:
    """The instruction set to use: `isa`, else $HASTEN_ISA, else the fastest; "none" for no native.

    The fastest of those that this processor has and that came with the wheel; without a wheel, that the compiler knows
    (g++ has had AMX since version 11).
    Raises ConfigError for an unknown name and for one that this processor cannot execute.
    """
    asked, origin = isa or os.environ.get("HASTEN_ISA"), "isa" if isa else "HASTEN_ISA"
    if not asked:
        return _fastest(available_isas(), os.environ.get("CXX"), os.environ.get("PATH"))
    if asked == NONE:
        return asked
    if asked not in INSTRUCTION_SETS:
        raise ConfigError(f"{origin} is {asked!r}; known: {', '.join((*INSTRUCTION_SETS, NONE))}")
    if reason := _why_not(asked):
        raise ConfigError(f"{origin} is {asked!r}, but {reason}; use {', '.join(available_isas())}")
    return asked


@functools.cache
def _fastest(isas: tuple[str, ...], *_where_compilers_are: str | None) -> str:
    if ready := next((isa for isa in isas if prebuilt(isa)), None):
        return ready  # no compiler is started: a tenth of a second of a command
    compiler = find_compiler()
    if compiler is None:  # then a library from before has to do
        return next((isa for isa in isas if is_built(isa)), isas[0])
    sets = [INSTRUCTION_SETS[isa].here() for isa in isas]
    return next((one.name for one in sets if compiler.takes(one.flags, one.probe)), isas[-1])


def library(isa: str | None = None, part: Part = "inference") -> NativeLibrary | None:
    """The native operators for `isa` (default: $HASTEN_ISA, else the fastest), compiled on first use, once a process.

    None if they are not available: after one HastenWarning with the reason, or silently with HASTEN_ISA=none.
    """
    # Asked in every call of an operator; the choice reads files of the system.
    return _library(isa, part, *(os.environ.get(name) for name in ("HASTEN_ISA", "CXX", "PATH")))


def native_ops() -> Any:
    """The operators of the native inference library, which must be available."""
    native = library()
    assert native is not None, "a native kernel is only taken where its library is"
    return native.ops


def missing_library(part: Part = "inference") -> str | None:
    """Why native kernels are not available, or None."""
    return MISSING if library(part=part) is None else None


def slower_than_pytorch(
    what: str, contenders: Callable[[], Mapping[str, Callable[[], object]]], part: Part = "inference"
) -> str | None:
    """Why PyTorch's of two contenders is faster on this processor, by their measured times, or None."""
    native = library(part=part)
    assert native is not None, "what the library cannot serve is refused before"
    return slower("native", "PyTorch's", compare(what, contenders, library=native.path.stem))


def obtainable(part: Part) -> bool:
    """Whether `library` would succeed, without compiling: for choosing a kernel that may never run."""
    chosen = choose_isa()
    if chosen == NONE:
        return False
    if not is_built(chosen, part) and can_build(chosen):
        return True
    return library(part=part) is not None  # which says why not


@functools.cache
def _library(isa: str | None, part: Part, *_environment: str | None) -> NativeLibrary | None:
    chosen = choose_isa(isa)
    if chosen == NONE:
        return None
    with _loading:
        return _load(chosen, part)


@functools.cache
def _load(isa: str, part: Part) -> NativeLibrary | None:
    import torch

    ops = getattr(torch.ops, namespace(isa))
    try:
        path = build(isa, part)
        missing = [name for name in meta_kernels() if not hasattr(ops, name)]
        torch.ops.load_library(str(path))
    except (ResourceError, OSError, RuntimeError) as error:
        _warn_once(
            f"no native kernels ({isa}), PyTorch's slower ones are used: {error} (HASTEN_ISA=none silences this)"
        )
        return None
    for name in missing:
        if hasattr(ops, name):  # then it is this library's
            _register_meta_kernel(getattr(ops, name).default, meta_kernels()[name])
    if part == "inference":
        calls.check(ops)
    return NativeLibrary(isa=isa, path=path, ops=ops)


@functools.cache
def _warn_once(text: str) -> None:
    """Warn of what both parts of the library lack."""
    warnings.warn(text, HastenWarning, stacklevel=6)


def _register_meta_kernel(operator: Any, kernel: Callable[..., Any]) -> None:
    """Register an operator's output shapes. Raises TypeError if `kernel` names an argument that it does not have."""
    import torch

    names = [argument.name for argument in operator._schema.arguments]
    inspect.signature(kernel).bind(**dict.fromkeys(names))

    def by_name(*given: Any, **named: Any) -> Any:
        return kernel(**dict(zip(names, given, strict=False)), **named)  # torch leaves defaults out

    torch.library.register_fake(operator.name(), by_name)


@functools.cache
def meta_kernels() -> dict[str, Callable]:
    """The function of every native operator that gives its output shapes, by the operator's name."""
    from hasten.ops import meta_kernels as module  # here: it imports torch

    own = inspect.getmembers(module, lambda one: inspect.isfunction(one) and one.__module__ == module.__name__)
    return {name: function for name, function in own if not name.startswith("_")}


def with_gradients(register: Callable[[NativeLibrary, str], None]) -> Callable[[str | None], str]:
    """Turn `register(native, namespace)`, which registers gradients with torch, into `ready(isa)`, which calls it once.

    ready returns the namespace of an instruction set's operators (None: HASTEN_ISA's, or the best one here) with their
    gradients registered. A compiled graph holds its result. Raises ResourceError if there is no native library.
    """
    registering, registered = threading.Lock(), set()  # torch takes a gradient once

    @functools.cache
    def asked_for(asked: str | None) -> str:
        native = library(asked, "training")
        if native is None:
            raise ResourceError("no native kernels are here; a C++ compiler is needed, and HASTEN_ISA must allow one")
        if native.isa not in registered:
            register(native, namespace(native.isa))
            registered.add(native.isa)
        return namespace(native.isa)

    def ready(isa: str | None) -> str:
        with registering:
            return asked_for(isa or os.environ.get("HASTEN_ISA"))

    # This is torch.compiler.assume_constant_result without importing the compiler for it.
    ready._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return ready

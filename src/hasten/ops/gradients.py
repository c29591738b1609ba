"""Native operators with a gradient: torch is told of it once for each instruction set, when one is first wanted."""

import functools
import os
import threading
from collections.abc import Callable

from hasten.errors import ResourceError
from hasten.ops.build import namespace
from hasten.ops.native import NativeLibrary, choose_isa, library


def with_gradients(register: Callable[[NativeLibrary, str], None]) -> Callable[[str | None], str]:
    """Of `register(native, namespace)`, which tells torch of gradients, make `ready(isa)`, which calls it in time.

    ready: the namespace of an instruction set's operators (None: of HASTEN_ISA, or the best here), whose gradients
    torch knows then. A compiled graph holds its result. It raises ResourceError where there is no native library.
    """
    registering = threading.Lock()  # torch takes a gradient once

    @functools.cache
    def registered(isa: str) -> str:
        native = library(isa, "training")
        if native is None:
            raise ResourceError(
                "there are no native kernels here; a C++ compiler is needed, and HASTEN_ISA must allow one"
            )
        register(native, namespace(isa))
        return namespace(isa)

    @functools.cache
    def asked_for(asked: str | None) -> str:
        return registered(choose_isa(asked))

    def ready(isa: str | None) -> str:
        with registering:
            return asked_for(isa or os.environ.get("HASTEN_ISA"))

    # This is torch.compiler.assume_constant_result without importing the compiler for it.
    ready._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return ready

"""The instruction sets that kernel tests run for, and whether there are native kernels at all."""

import pytest

from hasten.ops.native import available_isas, choose_isa, obtainable

NATIVE = obtainable("inference")
needs_native = pytest.mark.skipif(not NATIVE, reason="no native kernels here: no C++ compiler, or HASTEN_ISA=none")


def _tested() -> tuple[str, ...]:
    """The one that everything takes here and all after it: under benchmarks/as_avx2.sh none that AVX2 lacks.

    All that the processor has where HASTEN_ISA is not set and the compiler knows them.
    """
    isas, chosen = available_isas(), choose_isa()
    return isas[isas.index(chosen) :] if chosen in isas else isas  # "none": then these tests are skipped


ISAS = _tested()
# Sets that only `make test-slow` compiles and tests: they run the first one's code with fewer instructions.
RARE = frozenset(ISAS[1:]) - {"avx2", "portable"}

#!/usr/bin/env bash
# Runs a command as on a processor with AVX2 and no AVX-512: our kernels, PyTorch's, oneDNN's, MKL's and what Inductor
# compiles. Memory, caches and clock stay this machine's. `--check` says whether bfloat16 products are slow then.
#
#   benchmarks/as_avx2.sh make test
#   benchmarks/as_avx2.sh --check
set -euo pipefail
[ $# -gt 0 ] || { echo "usage: $0 --check | COMMAND …" >&2; exit 2; }
export HASTEN_ISA=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
export TORCHINDUCTOR_CPP_MARCH=x86-64-v3
# Code that Inductor compiled for AVX-512 must not be found.
export TORCHINDUCTOR_CACHE_DIR="${HASTEN_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/hasten}/inductor-avx2"
[ "$1" = --check ] || exec "$@"

python=$(dirname "$0")/../.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" - <<'CODE'
import sys
import time

import torch

torch.set_num_threads(1)


def rate(dtype: torch.dtype) -> float:
    """FLOP/s of the best of three products."""
    a, b = torch.randn(2, 384, 384).to(dtype)
    seconds = []
    for _ in range(4):  # the first one prepares
        start = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - start)
    return 2 * 384**3 / min(seconds[1:])


float32, bfloat16 = rate(torch.float32), rate(torch.bfloat16)
capability = torch.backends.cpu.get_cpu_capability()
rates = f"float32 {float32 / 1e9:.1f} GFLOP/s, bfloat16 {bfloat16 / 1e9:.1f}"
print(f"PyTorch takes {capability}; products on one thread: {rates}")
if capability != "AVX2" or bfloat16 > float32 / 4:
    sys.exit("this is not how a processor with AVX2 behaves: bfloat16 products should be emulated and slow")
CODE

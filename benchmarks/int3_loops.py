"""Whether 3 bits would pay if a kernel multiplied them: inner loops of int3 and int4 without scales, weights in cache.

    python benchmarks/int3_loops.py --output benchmarks/results/int3-loops.json

int4: a vector of 16 (8) rows holds 8 values of each, taken apart by one shift and two masks. int3: two vectors of
2-bit parts and one of third bits hold 32 values of each row. Both sum four products an instruction (VNNI), or pairs of
them in 16 bits (AVX2). One thread; the loops take turns; medians. `pays` is what a kernel would gain where the memory
gives a thread so many GB/s and loading hides behind arithmetic, or the other way round.
"""

import ctypes
import subprocess
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import tyro
from timing import interleaved

SOURCE = r"""
#include <immintrin.h>
#include <cstdint>
#if defined(__AVX512VNNI__)
using V = __m512i;
#define OP(name) _mm512_##name
static inline V both(V a, V b) { return _mm512_or_si512(a, b); }
static inline V only(V a, int m) { return _mm512_and_si512(a, _mm512_set1_epi32(m)); }
#define LOAD(p) _mm512_loadu_si512(p)
#else
using V = __m256i;
#define OP(name) _mm256_##name
static inline V both(V a, V b) { return _mm256_or_si256(a, b); }
static inline V only(V a, int m) { return _mm256_and_si256(a, _mm256_set1_epi32(m)); }
#define LOAD(p) _mm256_loadu_si256((const __m256i*)(p))
#endif

// The sums of one row of x over 8 operands of four values a lane.
struct Sums {
  V wide[4], pairs;
  void clear() { for (V& v : wide) v = V{}; }
  void begin() { pairs = V{}; }
  void add(int j, V w, const int32_t* x) {
#if defined(__AVX512VNNI__)
    wide[j % 4] = _mm512_dpbusd_epi32(wide[j % 4], w, _mm512_set1_epi32(*x));
#else
    pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(w, _mm256_set1_epi32(*x)));
#endif
  }
  void end() {
#if !defined(__AVX512VNNI__)
    wide[0] = _mm256_add_epi32(wide[0], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
  }
  int32_t sum() const {
    const V v = OP(add_epi32)(OP(add_epi32)(wide[0], wide[1]), OP(add_epi32)(wide[2], wide[3]));
    int32_t lanes[sizeof(V) / 4], all = 0;
    __builtin_memcpy(lanes, &v, sizeof(V));
    for (int32_t lane : lanes) all += lane;
    return all;
  }
};

template <int ROWS, int BITS>
static int32_t run(const char* w, int64_t steps, const int32_t* x, int64_t repeats) {
  Sums sums[ROWS];
  for (Sums& s : sums) s.clear();
  for (int64_t r = 0; r < repeats; r++)
    for (int64_t i = 0; i < steps; i++) {
      const char* at = w + i * BITS * sizeof(V);
      const int32_t* quads = x + i * 8;
      for (Sums& s : sums) s.begin();
      auto take = [&](int j, V values) {
        for (int n = 0; n < ROWS; n++) sums[n].add(j, values, quads + n * steps * 8 + j);
      };
      if constexpr (BITS == 4) {
        for (int l = 0; l < 4; l++) {
          const V line = LOAD(at + l * sizeof(V));
          take(2 * l, only(line, 0x0f0f0f0f));
          take(2 * l + 1, only(OP(srli_epi32)(line, 4), 0x0f0f0f0f));
        }
      } else {
        const V third = LOAD(at + 2 * sizeof(V));
#define ONE(j, line) \
  take(j, both(only(OP(srli_epi32)(line, 2 * (j % 4)), 0x03030303), \
               only(j < 2 ? OP(slli_epi32)(third, 2 - (j < 2 ? j : 0)) : OP(srli_epi32)(third, j < 2 ? 0 : j - 2), \
                    0x04040404)))
        const V low = LOAD(at), high = LOAD(at + sizeof(V));
        ONE(0, low); ONE(1, low); ONE(2, low); ONE(3, low);
        ONE(4, high); ONE(5, high); ONE(6, high); ONE(7, high);
      }
      for (Sums& s : sums) s.end();
    }
  int32_t all = 0;
  for (const Sums& s : sums) all += s.sum();
  return all;
}

extern "C" int32_t loop(int bits, int rows, const char* w, int64_t steps, const int32_t* x, int64_t repeats) {
  if (bits == 3) return rows == 1 ? run<1, 3>(w, steps, x, repeats) : run<4, 3>(w, steps, x, repeats);
  return rows == 1 ? run<1, 4>(w, steps, x, repeats) : run<4, 4>(w, steps, x, repeats);
}
"""
FLAGS = {
    "AVX-512 VNNI": (("avx512f", "avx512_vnni"), ("-mavx512f", "-mavx512bw", "-mavx512vnni"), 64),
    "AVX2": (("avx2",), ("-mavx2",), 32),
}
STEPS = 48  # of 32 values in each row of a vector: 8 to 12 KB of weights
RATES = (15, 25, 40)  # GB/s that the memory gives a thread


@dataclass(frozen=True, slots=True, kw_only=True)
class Int3Loops:
    """Measure, print, and write."""

    rounds: int = 15
    """Interleaved rounds."""

    output: Path | None = None
    """Where to write the JSON."""

    def run(self) -> None:
        from hasten.machine import describe
        from hasten.machine.files import write_json

        machine, found = describe(), []
        for isa, (needs, flags, size) in FLAGS.items():
            if set(needs) <= set(machine.instruction_sets):
                found += self.measured(isa, flags, size)
        report = {"schema": 1, "machine": machine.to_json(), "rounds": self.rounds, "loops": found}
        write_json(self.output, report)

    def measured(self, isa: str, flags: tuple[str, ...], size: int) -> list[dict[str, Any]]:
        """Of one instruction set, whose vectors have `size` bytes: GB/s of weights, and what int3 would gain."""
        import numpy

        library, draw = compiled(flags), numpy.random.default_rng(0)
        x = draw.integers(-127, 128, 4 * STEPS * 32, dtype=numpy.int8)
        codes = draw.integers(0, 16, (STEPS, 8, size), dtype=numpy.uint8)
        held = {3: as_int3(codes & 7), 4: as_int4(codes)}
        repeats = (1 << 26) // (STEPS * 32 * size // 4)

        def call(bits: int, rows: int, times: int) -> int:
            data = (ctypes.c_void_p(held[bits].ctypes.data), ctypes.c_int64(STEPS), ctypes.c_void_p(x.ctypes.data))
            return library.loop(bits, rows, *data, ctypes.c_int64(times))

        for bits, own in ((3, codes & 7), (4, codes)):
            for rows in (1, 4):
                quads = x.astype(int).reshape(4, STEPS, 8, 1, 4)[:rows]
                exact = int((quads * own.astype(int).reshape(1, STEPS, 8, size // 4, 4)).sum())
                assert call(bits, rows, 1) == exact, "the loop multiplies what it was given"
        calls = {(bits, rows): partial(call, bits, rows, repeats) for bits in (3, 4) for rows in (1, 4)}
        times = interleaved(calls, self.rounds)
        rate = {key: held[key[0]].nbytes * repeats / median(own) / 1e9 for key, own in times.items()}
        rows_found = []
        for rows in (1, 4):
            three, four = (rate[bits, rows] for bits in (3, 4))
            pays = {str(gb): min(three, gb) / 3 / (min(four, gb) / 4) for gb in RATES}
            row = {"isa": isa, "rows": rows, "int4_gb_per_second": four, "int3_gb_per_second": three, "pays": pays}
            rows_found.append(row | {"arithmetic_alone": three / 3 / (four / 4)})
            print(isa, f"{rows} rows: int4 {four:.1f} GB/s, int3 {three:.1f} GB/s;", end=" ")
            print(", ".join(f"{value:.2f} times as fast at {gb} GB/s" for gb, value in pays.items()))
        return rows_found


def compiled(flags: tuple[str, ...]) -> Any:
    """The loops for some flags."""
    from hasten.machine import find_compiler

    compiler = find_compiler()
    if compiler is None:
        raise SystemExit("this needs a C++ compiler")
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "loops.cpp").write_text(SOURCE)
        command = [compiler.command, "-O3", "-std=c++20", "-shared", "-fPIC", *flags, "loops.cpp", "-o", "loops.so"]
        subprocess.run(command, cwd=place, check=True)
        return ctypes.CDLL(f"{place}/loops.so")


def as_int4(codes: Any) -> Any:
    """Codes (steps, 8, bytes of a vector): of each two operands the first in the low halves, the other in the high."""
    import numpy

    return numpy.ascontiguousarray(codes[:, 0::2] | codes[:, 1::2] << 4)


def as_int3(codes: Any) -> Any:
    """Low two bits of four operands in each of two vectors, then the third bits of all eight."""
    import numpy

    low, third = codes & 3, codes >> 2
    parts = [sum(low[:, 4 * half + j] << 2 * j for j in range(4)) for half in range(2)]
    return numpy.ascontiguousarray(numpy.stack([*parts, sum(third[:, j] << j for j in range(8))], axis=1))


if __name__ == "__main__":
    tyro.cli(Int3Loops).run()

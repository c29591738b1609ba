// Products y = x·Wᵀ for 1 to thousands of rows x, from one packed layout of W in floats of 16 or 8 bits or integers of 2 to 8.
//
// The layout. Output rows are grouped in panels of 64. Inside a panel, 64-byte lines follow each other along K; a line
// belongs to 16 rows and holds, row by row, 4 bytes of each: 2 bf16, 4 int8 or 8 int4 values. So every lane of an
// accumulator is its own output row: no horizontal sums, and scales are loaded as vectors. A decode step streams the
// panel once; a product with many rows multiplies the same lines with 4 to 6 rows of x held in registers' reach,
// or with 16 or 32 in tiles (amx.h).
//
//   bf16   [N/64][K/2][64][2]
//   f16    [N/64][K][64]        as they are converted
//   int8   [N/64][K/4][64][4]   value + 128 (the dot product wants one unsigned operand)
//   fp8    [N/64][K/4][64][4]   float8_e4m3fn, in the order k, k+2, k+1, k+3
//   int4   [N/64][K/8][64][4]   byte j of a row: low nibble k+j, high nibble k+4+j, values 0 … 15
//   iq4, fp4                    as int4: places in tables of numbers (unpack.h)
//   int6   [N/64][K/16][3][64][4]  the low nibbles in two lines of int4, then byte j: the upper bits of k+j, k+4+j,
//                               k+8+j and k+12+j, the lowest first
//   int5   [N/64][K/32][5][64][4]  the low nibbles in four lines of int4, then byte j: the upper bits of k+j, k+4+j, …, k+28+j
//   int3   [N/64][K/32][3][64][4]  the lower two bits in two lines of int2, then the upper bits as in int5
//   int2   [N/64][K/16][64][4]  byte j: the values k+j, k+4+j, k+8+j and k+12+j, the lowest first
//   scales [N/64][K/group][64]  float32, float16 or bfloat16; of fp4 uint8, e8m0; of int8 with one a row [N/64][64] float32
//   zeros  [N/64][K/group][64]  of int8 int8, of fewer bits uint8; or float16: minima, which are taken away
//
// GGUF's super-blocks of 256 values, B of them, have scales of scales, `outer`, and some minima beside the scales:
//
//   Q6_K, Q3_K, IQ4_XS  scales [N/64][K/group][64] int8; outer [N/64][B][64] float16
//   Q4_K, Q5_K          scales [N/64][B][3][64] uint32, of 8 groups: the low nibbles of the scales, those of the minima, and
//                       the upper two bits of the scales, then of the minima; outer [N/64][B][2][64]: also that of the minima
//   Q2_K                scales [N/64][K/16][64] uint8: the scale in the low nibble, the minimum in the high one; outer as Q4_K
//
// Every output is summed in one chain along K, whatever the number of rows: results do not depend on the batch.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "../memory.h"
#include "../simd.h"
#if HASTEN_MMLA
#include "neon.h"
#endif

namespace hasten {

constexpr int PANEL = 64;          // output rows of a panel
constexpr int VECTORS = PANEL / LANES;

// How many rows of x are multiplied at a time (`most` in one pass over the weights, `tile` of many), and with how many
// vectors of the panel. Accumulators, the weights and a value of x have to fit into the registers: 32 of 64 bytes with
// AVX-512, 16 of 32 bytes with AVX2, where a vector is two of them.
struct TileShape {
  int most, tile, two, four;  // two, four: most rows that go with two vectors at a time, with all four
  int waiting;                // most rows beside which there is little to do but to wait for memory: see ask_line
  int alone = 0;              // most rows of lines in memory that ask for nothing: beside so little work the processor's own prefetcher is faster
  constexpr int span(int rows) const { return rows <= four ? VECTORS : rows <= two ? 2 : 1; }
};
#if HASTEN_512
constexpr TileShape BF16_TILE{12, 6, 12, 6, 4, 2}, INT8_TILE = BF16_TILE;
constexpr TileShape INT4_TILE{6, 6, 6, 6, 3, 2};  // of half the bytes, so that more tiles have as long to wait for memory
constexpr bool SPARE = true;       // registers for twice the accumulators of two rows
#elif defined(__AVX2__)
constexpr TileShape BF16_TILE{6, 6, 3, 1, 1}, INT8_TILE{4, 4, 2, 1, 1}, INT4_TILE = INT8_TILE;
constexpr bool SPARE = false;
#elif defined(__aarch64__)         // 32 registers of 16 bytes; rows of x in pairs (neon.h)
constexpr TileShape BF16_TILE{4, 4, 1, 0, 1}, INT8_TILE = BF16_TILE, INT4_TILE = BF16_TILE;
constexpr bool SPARE = false;
#else
constexpr TileShape BF16_TILE{3, 3, 1, 0, 1}, INT8_TILE = BF16_TILE, INT4_TILE = BF16_TILE;
constexpr bool SPARE = false;
#endif
#if defined(__AMX_TILE__)
constexpr int64_t ROW_BLOCK = 256; // most rows of x in a chunk of work: weights come from memory once for all of them
#else
constexpr int64_t ROW_BLOCK = 96;  // most rows of x in a chunk of work: their sums stay in the first-level cache
#endif
constexpr int64_t AHEAD = 8192;    // bytes that the first tile's stream is prefetched ahead: see ask_line

constexpr int64_t SUPER_BLOCK = 256;      // values of a k-quant that share a scale of scales
constexpr int64_t BEGINNING = 256 << 10;  // bytes of a weight that may be asked for before its product begins

enum class Format { bf16, f16, fp8, int8, int6, int5, int4, int3, int2, iq4, fp4 };
// The last three have scales of scales: integers, words of 6 bits with minima, nibbles with minima.
enum class ScaleType { f32, bf16, f16, e8m0, int8, words, nibbles };

struct Weight {
  Format format;
  const void* data;
  const void* scales;      // null for bf16 and f16
  const int8_t* zeros;     // zero points; null: the middle of unsigned integers, 0 of others
  const uint16_t* minima;  // float16, instead of zero points
  const uint16_t* outer;   // scales of scales; null: there are none
  ScaleType scale_type;
  int64_t n, k;            // k: padded to the layout
  int64_t group;           // values that share a scale; 0: all of a row
  int planes = 1;          // of the rows of x that integers are multiplied with
  int64_t groups() const { return group ? k / group : 1; }
  int64_t panels() const { return (n + PANEL - 1) / PANEL; }
  bool integers() const { return format >= Format::int8; }  // which are multiplied with integers
  int64_t bits() const {
    switch (format) {
      case Format::bf16: case Format::f16: return 16;
      case Format::fp8: case Format::int8: return 8;
      case Format::int6: return 6;
      case Format::int5: return 5;
      case Format::int3: return 3;
      case Format::int2: return 2;
      default: return 4;
    }
  }
  int64_t panel_bytes() const { return k * PANEL * bits() / 8; }
};

// Two planes of an activation: x = scale·(255·high + low), both from -127 to 127. (255 is odd, so that
// rounding a quotient by it never meets a tie.)
constexpr int32_t PLANE_BASE = 255;

// Rows of x as the kernel wants them, `stride` values apart. Weights of floats: rows of k values. Others: `planes` rows of k
// values for each row of x, `rows` in all, each with a scale and a sum for each of the weight's groups.
struct Rows {
  Operand* plain = nullptr;      // of bf16 and fp8 weights
  float* wide = nullptr;         // of f16
  ByteOperand* bytes = nullptr;  // of integers but int4
  int8_t* q = nullptr;           // of int4
  float* scales = nullptr;   // [groups][rows]
  int32_t* sums = nullptr;   // [groups][rows]: sum of the q of a group, for the weights' offset
  int planes = 1;
  int64_t rows = 0;
  int64_t groups = 1;
  int64_t stride = 0;
};

// Rows an odd number of cache lines apart: at a power of two, all rows of a tile fall into one set of the cache.
template <class T>
constexpr int64_t spread_rows(int64_t k) {
  const int64_t lines = (k * int64_t(sizeof(T)) + 63) / 64;
  return (lines | 1) * 64 / int64_t(sizeof(T));
}

INLINE F32 load_scale(const void* base, ScaleType type, int64_t index) {
  switch (type) {
    case ScaleType::f32: return load(static_cast<const float*>(base) + index);
    case ScaleType::bf16: return load_bf16(static_cast<const uint16_t*>(base) + index);
    default: return load_f16(static_cast<const uint16_t*>(base) + index);
  }
}

// Asks for a line of a stream. Beside few rows it goes to the first-level cache. More rows are multiplied meanwhile: to the
// second level and from further ahead, so that it takes none of the first level's few outstanding misses (8 rows of bf16
// run 1.3 times as fast on AVX2; but 2 to 4 rows of bf16 and int8 took 1.3 times as long with AVX-512).
template <bool WAITING>
INLINE void ask_line(const char* next_lines, int64_t line) {
  if constexpr (WAITING) __builtin_prefetch(next_lines + line * 64);
  else __builtin_prefetch(next_lines + AHEAD + line * 64, 0, 2);
}

// sums[m][v] += w·x over `steps` pairs. w: line of the first of V vectors of the panel. STREAM: w comes from memory, and
// at each step the next V lines from `next_lines` on are asked for.
template <int M, int V, bool STREAM = false>
void tile_bf16(const uint16_t* w, const Operand* x, int64_t stride, int64_t steps, float* sums, bool fresh,
               const char* next_lines = nullptr) {
#if HASTEN_MMLA
  return tile_pairs<M, V>(w, x, stride, steps, sums, fresh, [=](int64_t step) __attribute__((always_inline)) {
    if constexpr (STREAM)
      for (int v = 0; v < V; v++) ask_line<M <= BF16_TILE.waiting>(next_lines, step * V + v);
  });
#else
  F32 acc[M][V];
  EACH(m, M, EACH(v, V, acc[m][v] = fresh ? F32{} : load(sums + m * PANEL + v * LANES)));
  for (int64_t s = 0; s < steps; s++) {
    const uint16_t* line = w + s * PANEL * 2;
    if constexpr (STREAM)
      for (int v = 0; v < V; v++) ask_line<M <= BF16_TILE.waiting>(next_lines, s * V + v);
    if constexpr (sizeof(Operand) == 2) {
      EACH(m, M,
           uint32_t pair;
           std::memcpy(&pair, x + m * stride + 2 * s, 4);
           EACH(v, V, acc[m][v] = dot_bf16(acc[m][v], load_line(line + v * 32), pair)));
    } else {
      EACH(v, V,
           const F32 even = as<F32>(load_line(line + v * 32) << 16);
           EACH(m, M, accumulate(acc[m][v], even, splat(float(x[m * stride + 2 * s]))));
           const F32 odd = as<F32>(load_line(line + v * 32) & 0xffff0000u);
           EACH(m, M, accumulate(acc[m][v], odd, splat(float(x[m * stride + 2 * s + 1])))));
    }
  }
  EACH(m, M, EACH(v, V, store(sums + m * PANEL + v * LANES, acc[m][v])));
#endif
}

// The same of f16 weights, over `values` of K: of each 16 rows' halves, vector v's are LANES further on.
template <int M, int V, bool STREAM = false>
void tile_f16(const uint16_t* w, const float* x, int64_t stride, int64_t values, float* sums, bool fresh,
              const char* next_lines = nullptr) {
  F32 acc[M][V];
  EACH(m, M, EACH(v, V, acc[m][v] = fresh ? F32{} : load(sums + m * PANEL + v * LANES)));
  for (int64_t k = 0; k < values; k++) {
    const uint16_t* line = w + k * PANEL;
    if constexpr (STREAM)
      if (V > 1 || k % 2 == 0)
        for (int v = 0; v < (V + 1) / 2; v++) ask_line<M <= BF16_TILE.waiting>(next_lines, k * V / 2 + v);
    EACH(v, V,
         const F32 own = load_f16(line + v * LANES);
         EACH(m, M, accumulate(acc[m][v], own, splat(x[m * stride + k]))));
  }
  EACH(m, M, EACH(v, V, store(sums + m * PANEL + v * LANES, acc[m][v])));
}

template <int M>
using Count = std::integral_constant<int, M>;

// f(Count<m>) for a number of rows m between 1 and M.
template <int M, class F>
INLINE void with_count(int64_t m, const F& f) {
  if constexpr (M > 1)
    if (m < M) return with_count<M - 1>(m, f);
  f(Count<M>{});
}

// Rows of x in a chunk of work with w. AMX multiplies faster than anything but the second-level cache brings x.
inline int64_t row_block(const Weight& w) {
#if defined(__AMX_TILE__)
  const int64_t bytes = w.integers() ? w.k : w.format == Format::f16 ? w.k * 4 : w.k * 2;
  return std::clamp<int64_t>((3 << 19) / bytes / 32 * 32, 96, ROW_BLOCK);
#else
  return ROW_BLOCK;
#endif
}

// The products of rows m0 … m1 with one panel: out [m1 - m0][64], scaled.
void panel_product(const Weight& w, const Rows& x, int64_t panel, int64_t m0, int64_t m1, float* out);

}  // namespace hasten

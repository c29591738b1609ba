// Products y = x·Wᵀ for 1 to thousands of rows x, from one packed layout of W in bf16, int8 or int4.
//
// The layout. Output rows stand in panels of 64. Inside a panel, 64-byte lines follow each other along K; a line
// belongs to 16 rows and holds, row by row, 4 bytes of each: 2 bf16, 4 int8 or 8 int4 values. So every lane of an
// accumulator is its own output row: no horizontal sums, and scales are loaded as vectors. A decode step streams the
// panel once; a product with many rows multiplies the same lines with 6 rows of x held in registers' reach.
//
//   bf16   [N/64][K/2][64][2]
//   int8   [N/64][K/4][64][4]   value + 128 (the dot product wants one unsigned operand)
//   int4   [N/64][K/8][64][4]   byte j of a row: low nibble k+j, high nibble k+4+j, values 0 … 15
//   scales int8 [N/64][64] float32; int4 [N/64][K/group][64] float16 or bfloat16; zeros int4 [N/64][K/group][64] uint8
//
// Every output is summed in one chain along K, whatever the number of rows: results do not depend on the batch.
#pragma once

#include <algorithm>

#include "../parallel.h"
#include "../simd.h"

namespace hasten {

constexpr int PANEL = 64;          // output rows of a panel
constexpr int VECTORS = PANEL / LANES;
#if defined(__AVX512F__)
constexpr int TILE = 6;            // rows of x at a time: 6 × 4 accumulators of 32 registers
constexpr int SPAN = VECTORS;      // vectors of the panel at a time
#else
constexpr int TILE = 2;            // 2 × 2 vectors of 64 bytes are 8 of AVX2's 16 registers
constexpr int SPAN = 2;
#endif
constexpr int64_t ROW_BLOCK = 96;  // rows of x in a chunk of work: their sums stay in the first-level cache
constexpr int64_t AHEAD = 4096;    // bytes that a single row's stream is prefetched ahead

enum class Format { bf16, int8, int4 };
enum class ScaleType { f32, bf16, f16 };

struct Weight {
  Format format;
  const void* data;
  const void* scales;      // null for bf16
  const uint8_t* zeros;    // int4 with zero points; null: the zero is 8
  ScaleType scale_type;
  int64_t n, k;            // k: padded to the layout
  int64_t group;           // int4: values that share a scale
  int64_t panels() const { return (n + PANEL - 1) / PANEL; }
};

// Rows of x as the kernel wants them. bf16: rows of k values. int8: `digits` rows of k values for each row of x, with
// x = scale·(256·high + low) for two digits; one scale a row (int8 weights) or one a group (int4 weights).
struct Rows {
  const uint16_t* bf16 = nullptr;
  const int8_t* q = nullptr;
  const float* scales = nullptr;   // [rows][groups]
  const int32_t* sums = nullptr;   // [rows·digits][groups]: sum of the q of a group, for the weights' offset
  int digits = 1;
  int64_t groups = 1;
};

INLINE F32 load_scale(const void* base, ScaleType type, int64_t index) {
  switch (type) {
    case ScaleType::f32: return load(static_cast<const float*>(base) + index);
    case ScaleType::bf16: return load_bf16(static_cast<const uint16_t*>(base) + index);
    default: return load_f16(static_cast<const uint16_t*>(base) + index);
  }
}

template <int M>
INLINE void prefetch(const char* line) {
  if constexpr (M <= 2)
    for (int v = 0; v < SPAN; v++) __builtin_prefetch(line + v * 64 + AHEAD);
}

// sums[m][v] += w·x over `steps` pairs. w: line of vector `first` of the panel.
template <int M>
void tile_bf16(const uint16_t* w, const uint16_t* x, int64_t stride, int64_t steps, float* sums, bool fresh) {
  F32 acc[M][SPAN];
  for (int m = 0; m < M; m++)
    for (int v = 0; v < SPAN; v++) acc[m][v] = fresh ? F32{} : load(sums + m * PANEL + v * LANES);
  for (int64_t s = 0; s < steps; s++) {
    const uint16_t* line = w + s * PANEL * 2;
    prefetch<M>(reinterpret_cast<const char*>(line));
    for (int m = 0; m < M; m++) {
      uint32_t pair;
      std::memcpy(&pair, x + m * stride + 2 * s, 4);
      for (int v = 0; v < SPAN; v++) acc[m][v] = dot_bf16(acc[m][v], line + v * 32, pair);
    }
  }
  for (int m = 0; m < M; m++)
    for (int v = 0; v < SPAN; v++) store(sums + m * PANEL + v * LANES, acc[m][v]);
}

template <int M>
void tile_int8(const uint8_t* w, const int8_t* x, int64_t stride, int64_t steps, int32_t* sums, bool fresh) {
  I32 acc[M][SPAN];
  for (int m = 0; m < M; m++)
    for (int v = 0; v < SPAN; v++) acc[m][v] = fresh ? I32{} : load(sums + m * PANEL + v * LANES);
  for (int64_t s = 0; s < steps; s++) {
    const uint8_t* line = w + s * PANEL * 4;
    prefetch<M>(reinterpret_cast<const char*>(line));
    U32 wv[SPAN];
    for (int v = 0; v < SPAN; v++) wv[v] = load_line(line + v * 64);
    for (int m = 0; m < M; m++) {
      int32_t quad;
      std::memcpy(&quad, x + m * stride + 4 * s, 4);
      for (int v = 0; v < SPAN; v++) acc[m][v] = dot_u8s8(acc[m][v], wv[v], quad);
    }
  }
  for (int m = 0; m < M; m++)
    for (int v = 0; v < SPAN; v++) store(sums + m * PANEL + v * LANES, acc[m][v]);
}

// One group of int4 weights: sums[m][v] += scale · (w·q - zero · Σq), for M rows of digits.
template <int M>
void tile_int4(const Weight& w, int64_t panel, int64_t first, int64_t g, const Rows& x, int64_t row, float* sums,
               bool fresh) {
  const int64_t groups = w.k / w.group, steps = w.group / 8;
  const uint8_t* lines = static_cast<const uint8_t*>(w.data) + (panel * (w.k / 8) + g * steps) * PANEL * 4 + first * 64;
  I32 acc[M][SPAN];
  for (int m = 0; m < M; m++)
    for (int v = 0; v < SPAN; v++) acc[m][v] = I32{};
  for (int64_t s = 0; s < steps; s++) {
    const uint8_t* line = lines + s * PANEL * 4;
    prefetch<M>(reinterpret_cast<const char*>(line));
    U32 low[SPAN], high[SPAN];
    for (int v = 0; v < SPAN; v++) {
      U32 both = load_line(line + v * 64);
      low[v] = both & 0x0f0f0f0fu;
      high[v] = (both >> 4) & 0x0f0f0f0fu;
    }
    for (int m = 0; m < M; m++) {
      int32_t quads[2];
      std::memcpy(quads, x.q + (row + m) * w.k + g * w.group + 8 * s, 8);
      for (int v = 0; v < SPAN; v++) {
        acc[m][v] = dot_u8s8(acc[m][v], low[v], quads[0]);
        acc[m][v] = dot_u8s8(acc[m][v], high[v], quads[1]);
      }
    }
  }
  for (int v = 0; v < SPAN; v++) {
    const int64_t at = (panel * groups + g) * PANEL + (first + v) * LANES;
    F32 scale = load_scale(w.scales, w.scale_type, at);
    I32 zero = I32{} + 8;
    if (w.zeros) {
      typedef uint8_t U8 __attribute__((vector_size(16)));
      U8 z; std::memcpy(&z, w.zeros + at, 16);
      zero = __builtin_convertvector(z, I32);
    }
    for (int m = 0; m < M; m++) {
      const int64_t digit_row = row + m;
      float own = x.scales[digit_row / x.digits * x.groups + g];
      if (x.digits == 2 && digit_row % 2 == 0) own *= 256.0f;
      F32 part = to_float(acc[m][v] - zero * x.sums[digit_row * x.groups + g]) * (scale * own);
      float* out = sums + m * PANEL + v * LANES;
      store(out, fresh ? part : load(out) + part);
    }
  }
}

#define HASTEN_TILES(count, CALL) \
  switch (count) {                \
    case 1: CALL(1); break;       \
    case 2: CALL(2); break;       \
    case 3: CALL(3); break;       \
    case 4: CALL(4); break;       \
    case 5: CALL(5); break;       \
    default: CALL(6); break;      \
  }

// The products of rows m0 … m1 with one panel: out [m1 - m0][64], scaled.
inline void panel_product(const Weight& w, const Rows& x, int64_t panel, int64_t m0, int64_t m1, float* out) {
  const int64_t rows = m1 - m0;
  if (w.format == Format::bf16) {
    constexpr int64_t block = 1024;
    const uint16_t* base = static_cast<const uint16_t*>(w.data) + panel * w.k * PANEL;
    for (int64_t k = 0; k < w.k; k += block) {
      const int64_t steps = std::min(block, w.k - k) / 2;
      for (int64_t m = 0; m < rows; m += TILE)
        for (int64_t first = 0; first < VECTORS; first += SPAN) {
          const uint16_t* lines = base + k * PANEL + first * 32;
          const uint16_t* from = x.bf16 + (m0 + m) * w.k + k;
          float* sums = out + m * PANEL + first * LANES;
#define HASTEN_CALL(M) if constexpr (M <= TILE) tile_bf16<M>(lines, from, w.k, steps, sums, k == 0)
          HASTEN_TILES(std::min<int64_t>(TILE, rows - m), HASTEN_CALL)
#undef HASTEN_CALL
        }
    }
    return;
  }
  const int64_t digit_rows = rows * x.digits, from_row = m0 * x.digits;
  if (w.format == Format::int8) {
    constexpr int64_t block = 2048;
    int32_t* sums = scratch<int32_t, 0>(ROW_BLOCK * 2 * PANEL);
    const uint8_t* base = static_cast<const uint8_t*>(w.data) + panel * w.k * PANEL;
    for (int64_t k = 0; k < w.k; k += block) {
      const int64_t steps = std::min(block, w.k - k) / 4;
      for (int64_t m = 0; m < digit_rows; m += TILE)
        for (int64_t first = 0; first < VECTORS; first += SPAN) {
          const uint8_t* lines = base + k * PANEL + first * 64;
          const int8_t* from = x.q + (from_row + m) * w.k + k;
          int32_t* own = sums + m * PANEL + first * LANES;
#define HASTEN_CALL(M) if constexpr (M <= TILE) tile_int8<M>(lines, from, w.k, steps, own, k == 0)
          HASTEN_TILES(std::min<int64_t>(TILE, digit_rows - m), HASTEN_CALL)
#undef HASTEN_CALL
        }
    }
    for (int64_t m = 0; m < rows; m++)
      for (int v = 0; v < VECTORS; v++) {
        F32 total = {};
        for (int d = 0; d < x.digits; d++) {
          const int64_t row = m * x.digits + d;
          F32 part = to_float(load(sums + row * PANEL + v * LANES) - 128 * x.sums[from_row + row]);
          total = d + 1 < x.digits ? part * 256.0f : total + part;
        }
        F32 scale = load(static_cast<const float*>(w.scales) + panel * PANEL + v * LANES);
        store(out + m * PANEL + v * LANES, total * (scale * x.scales[m0 + m]));
      }
    return;
  }
  float* sums = x.digits == 1 ? out : scratch<float, 1>(ROW_BLOCK * 2 * PANEL);
  const int64_t groups = w.k / w.group;
  const int64_t block = std::max<int64_t>(1, 2048 / w.group);  // groups whose lines stay in the first-level cache
  for (int64_t g0 = 0; g0 < groups; g0 += block)
    for (int64_t m = 0; m < digit_rows; m += TILE)
      for (int64_t g = g0; g < std::min(groups, g0 + block); g++)
        for (int64_t first = 0; first < VECTORS; first += SPAN) {
          float* own = sums + m * PANEL + first * LANES;
#define HASTEN_CALL(M) if constexpr (M <= TILE) tile_int4<M>(w, panel, first, g, x, from_row + m, own, g == 0)
          HASTEN_TILES(std::min<int64_t>(TILE, digit_rows - m), HASTEN_CALL)
#undef HASTEN_CALL
        }
  if (x.digits == 2)
    for (int64_t m = 0; m < rows; m++)
      for (int v = 0; v < VECTORS; v++) {
        const float* pair = sums + 2 * m * PANEL + v * LANES;
        store(out + m * PANEL + v * LANES, load(pair) + load(pair + PANEL));
      }
}

// Calls finish(panel, m0, m1, values [m1 - m0][64]) for every panel and block of rows, in parallel.
template <class Finish>
void product(const Weight& w, const Rows& x, int64_t rows, const Finish& finish) {
  const int64_t blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
  for_chunks(w.panels() * blocks, [&](int64_t chunk) {
    const int64_t panel = chunk / blocks, m0 = chunk % blocks * ROW_BLOCK, m1 = std::min(rows, m0 + ROW_BLOCK);
    float* values = scratch<float, 2>(ROW_BLOCK * PANEL);
    panel_product(w, x, panel, m0, m1, values);
    finish(panel, m0, m1, values);
  });
}

}  // namespace hasten

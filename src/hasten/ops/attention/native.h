// Causal attention over a key/value cache in bf16 or int8: one kernel for decode, prefill and everything between.
//
// Keys are taken in tiles of 64 at fixed positions. A tile of K and one of V are brought into the layout of the linear
// kernels (keys, then value elements, side by side in lanes), so both products run at their speed; the score matrix
// exists for 6 query lines and 64 keys at a time. The softmax is kept as a running maximum and sum (FlashAttention,
// arXiv 2205.14135) within a span of 512 keys; spans are merged in order. Tiles and spans depend on positions only,
// so a query gets the same bits alone, in a batch, in a prefill of any length, and on any number of threads.
//
// All query heads that share a key/value head are lines of one piece of work: K and V are read once for them.
#pragma once

#include <limits>

#include "tiles.h"

namespace hasten {

constexpr int64_t SPAN_KEYS = 512;
constexpr int64_t AHEAD_LINES = 32;  // of what is read next, asked for with each line of scores
constexpr int64_t LINES = 252;  // query lines that share a packed tile: a multiple of 6

struct Scores {
  float scale, softcap;  // softcap 0: none
  int64_t window;        // 0: none
};

// sums[line][64] (+)= panel · x for up to TILE lines of x.
inline void multiply(const uint16_t* panel, const uint16_t* x, int64_t stride, int64_t steps, float* sums, int64_t lines,
                     bool fresh) {
  for (int64_t m = 0; m < lines; m += TILE)
    for (int64_t first = 0; first < VECTORS; first += SPAN) {
      const uint16_t* from = x + m * stride;
      float* own = sums + m * PANEL + first * LANES;
#define HASTEN_CALL(M) \
  if constexpr (M <= TILE) tile_bf16<M>(panel + first * 32, from, stride, steps, own, fresh)
      HASTEN_TILES(std::min<int64_t>(TILE, lines - m), HASTEN_CALL)
#undef HASTEN_CALL
    }
}

INLINE F32 tanh(F32 x) { return 1.0f - 2.0f / (exp(x + x) + 1.0f); }

// The state of a line's softmax over a span: maximum, sum, and the weighted values of `padded` elements.
struct Lines {
  float *top, *sum, *values;  // values: [padded/64][stride][64]
  int64_t count, padded, stride;
  float* value(int64_t panel, int64_t line) const { return values + (panel * stride + line) * PANEL; }
  Lines from(int64_t line) const {
    return {top + line, sum + line, values + line * PANEL, count - line, padded, stride};
  }
};

// One tile of keys for all lines. q: [lines][padded] bf16. position[line]: of its query. next: see pack_tile.
template <bool INT8>
void attend_tile(const Lines& lines, const uint16_t* q, const int64_t* position, int64_t begin, const Tile& tile,
                 const Scores& how, const TileRows& next, Ahead& ahead) {
  const float lowest = -std::numeric_limits<float>::infinity();
  alignas(64) float scores[6 * PANEL];
  alignas(64) uint16_t weights[6 * PANEL];
  for (int64_t line = 0; line < lines.count; line += 6) {
    const int64_t rows = std::min<int64_t>(6, lines.count - line);
    multiply(tile.k, q + line * lines.padded, lines.padded, lines.padded / 2, scores, rows, true);
    for (int64_t i = 0; i < rows; i++) {
      if (line + i < TILE_KEYS / 8) next.prefetch(next.v + (line + i) * 8, 8);
      ahead.ask(AHEAD_LINES);
      const int64_t at = position[line + i] - begin;  // the last key that this query sees, counted in the tile
      F32 s[VECTORS], largest = splat(lowest);
      for (int v = 0; v < VECTORS; v++) {
        s[v] = load(scores + i * PANEL + v * LANES) * how.scale;
        if constexpr (INT8) s[v] *= load(tile.k_scales + v * LANES);
        if (how.softcap != 0) s[v] = tanh(s[v] / how.softcap) * how.softcap;
        if (at < TILE_KEYS - 1 || (how.window && at >= how.window)) {
          I32 key = I32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + v * LANES;
          I32 hidden = key > int32_t(std::min<int64_t>(at, TILE_KEYS));
          if (how.window) hidden |= key <= int32_t(std::max<int64_t>(at - how.window, -1));
          s[v] = hidden ? splat(lowest) : s[v];
        }
        largest = max(largest, s[v]);
      }
      const float before = lines.top[line + i], top = std::max(before, max_lanes(largest));
      F32 total = {};
      for (int v = 0; v < VECTORS; v++) {
        F32 p = top == lowest ? F32{} : exp(s[v] - top);
        total += p;
        if constexpr (INT8) p *= load(tile.v_scales + v * LANES);
        store_bf16(weights + i * PANEL + v * LANES, p);
      }
      if (top != before) {  // rescale what was summed under the smaller maximum
        const float shrink = before == lowest ? 0.0f : exp(splat(before - top))[0];
        lines.sum[line + i] *= shrink;
        for (int64_t p = 0; p < lines.padded / PANEL; p++)
          for (int v = 0; v < VECTORS; v++) {
            float* value = lines.value(p, line + i) + v * LANES;
            store(value, load(value) * shrink);
          }
        lines.top[line + i] = top;
      }
      lines.sum[line + i] += sum_lanes(total);
    }
    for (int64_t p = 0; p < lines.padded / PANEL; p++)
      multiply(tile.v + p * TILE_KEYS * PANEL, weights, PANEL, TILE_KEYS / 2,
               lines.value(p, line), rows, false);
  }
}

inline void clear(const Lines& lines) {
  for (int64_t i = 0; i < lines.count; i++)
    lines.top[i] = -std::numeric_limits<float>::infinity(), lines.sum[i] = 0;
  std::memset(lines.values, 0, lines.count * lines.padded * sizeof(float));
}

// whole <- whole merged with the next span.
inline void merge(const Lines& whole, const Lines& next) {
  const float lowest = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < whole.count; i++) {
    const float top = std::max(whole.top[i], next.top[i]);
    if (top == lowest) continue;
    const float a = whole.top[i] == lowest ? 0.0f : exp(splat(whole.top[i] - top))[0];
    const float b = next.top[i] == lowest ? 0.0f : exp(splat(next.top[i] - top))[0];
    whole.top[i] = top;
    whole.sum[i] = whole.sum[i] * a + next.sum[i] * b;
    for (int64_t p = 0; p < whole.padded / PANEL; p++)
      for (int v = 0; v < VECTORS; v++) {
        float* to = whole.value(p, i) + v * LANES;
        store(to, load(to) * a + load(next.value(p, i) + v * LANES) * b);
      }
  }
}

}  // namespace hasten

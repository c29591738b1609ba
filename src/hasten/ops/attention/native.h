// Causal attention over a key/value cache in bf16: one kernel for decode, prefill and everything between.
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

#include "../tensors.h"

namespace hasten {

constexpr int64_t TILE_KEYS = 64;
constexpr int64_t SPAN_KEYS = 512;
constexpr int64_t LINES = 252;  // query lines that share a packed tile: a multiple of 6

struct KeyValues {
  const uint16_t* k;      // (slots, Hkv, D) bf16
  const uint16_t* v;
  const int64_t* first;   // contiguous: the slot of position 0 of each sequence
  const int64_t* table;   // paged: (B, blocks) block numbers, null if contiguous
  int64_t blocks, block_size, kv_heads, head_dim, slots;
  // Positions that a sequence has slots for: padding at the end of a batch may ask for more, and gets zeros.
  int64_t room(int64_t sequence) const { return table ? blocks * block_size : slots - first[sequence]; }
  int64_t slot(int64_t sequence, int64_t position) const {
    return table ? table[sequence * blocks + position / block_size] * block_size + position % block_size
                 : first[sequence] + position;
  }
};

struct Scores {
  float scale, softcap;  // softcap 0: none
  int64_t window;        // 0: none
};

// out[word][key] = the word-th pair of elements of each key: 16 × 16 blocks of 32-bit words are transposed.
inline void transpose16(const uint32_t* const* rows, uint32_t* out, int64_t out_stride) {
  U32 r[16], t[16];
  for (int i = 0; i < 16; i++) std::memcpy(&r[i], rows[i], 64);
#define LOW(a, b) __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
#define HIGH(a, b) __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)
#define LOW2(a, b) __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define HIGH2(a, b) __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define EVEN4(a, b) __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
#define ODD4(a, b) __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)
  for (int i = 0; i < 16; i += 2) t[i] = LOW(r[i], r[i + 1]), t[i + 1] = HIGH(r[i], r[i + 1]);
  for (int i = 0; i < 16; i += 4) {
    r[i] = LOW2(t[i], t[i + 2]), r[i + 1] = HIGH2(t[i], t[i + 2]);
    r[i + 2] = LOW2(t[i + 1], t[i + 3]), r[i + 3] = HIGH2(t[i + 1], t[i + 3]);
  }
  // r[4q + j]: for the four 128-bit quarters c, elements 4c + j of rows 4q … 4q + 3.
  for (int j = 0; j < 4; j++) {
    U32 a = EVEN4(r[j], r[4 + j]), b = EVEN4(r[8 + j], r[12 + j]);
    U32 c = ODD4(r[j], r[4 + j]), d = ODD4(r[8 + j], r[12 + j]);
    t[j] = EVEN4(a, b), t[8 + j] = ODD4(a, b);
    t[4 + j] = EVEN4(c, d), t[12 + j] = ODD4(c, d);
  }
#undef LOW
#undef HIGH
#undef LOW2
#undef HIGH2
  // a holds quarters 0 and 2 of rows 0 … 7; its EVEN4 with b takes quarter 0 of rows 0 … 15 in order.
  for (int i = 0; i < 16; i++) std::memcpy(out + i * out_stride, &t[i], 64);
}

// Where the keys and values [begin, begin + 64) of one head lie; those from `end` on are zeros.
struct TileRows {
  const uint16_t *k[TILE_KEYS], *v[TILE_KEYS];
  int64_t head_dim;
  void find(const KeyValues& kv, int64_t sequence, int64_t head, int64_t begin, int64_t end) {
    alignas(64) static const uint16_t zeros[256] = {};
    // Slots run on until a block ends: a division for each key would cost a twentieth of the attention.
    const int64_t row = kv.kv_heads * kv.head_dim, own = head * kv.head_dim;
    int64_t block = kv.table ? begin / kv.block_size : 0;
    int64_t left = kv.table ? (block + 1) * kv.block_size - begin : TILE_KEYS;
    int64_t at = begin < end ? kv.slot(sequence, begin) * row + own : 0;
    for (int64_t j = 0; j < TILE_KEYS; j++, at += row) {
      const bool there = begin + j < end;
      if (there && left-- == 0) {
        at = kv.table[sequence * kv.blocks + ++block] * kv.block_size * row + own;
        left = kv.block_size - 1;
      }
      k[j] = there ? kv.k + at : zeros;
      v[j] = there ? kv.v + at : zeros;
    }
    head_dim = kv.head_dim;
  }
  // Asks for `count` rows of K or V.
  void prefetch(const uint16_t* const* rows, int64_t count) const {
    for (int64_t j = 0; j < count; j++)
      for (int64_t d = 0; d < head_dim; d += 32) __builtin_prefetch(rows[j] + d, 0, 3);
  }
};

// A tile: K as [padded/2][64][2] and V as panels [padded/64][32][64][2]. Rows of one head lie far apart, where the
// processor does not look ahead by itself: those of the next tile are asked for on the way, K here and V while this tile
// is attended, a few at a time, because a burst waits for its own first lines.
inline void pack_tile(const TileRows& tile, const TileRows& next, int64_t padded, uint16_t* k_panel,
                      uint16_t* v_panels) {
  const auto& k = tile.k;
  const auto& v = tile.v;
  const int64_t head_dim = tile.head_dim;
  auto* words = reinterpret_cast<uint32_t*>(k_panel);
  for (int64_t d = 0; d < padded; d += 32)
    for (int64_t j = 0; j < TILE_KEYS; j += 16) {
      const uint32_t* rows[16];
      alignas(64) uint16_t tail[16][32];
      for (int i = 0; i < 16; i++) {
        if (d + 32 <= head_dim) {
          rows[i] = reinterpret_cast<const uint32_t*>(k[j + i] + d);
        } else {
          std::memset(tail[i], 0, 64);
          if (d < head_dim) std::memcpy(tail[i], k[j + i] + d, (head_dim - d) * 2);
          rows[i] = reinterpret_cast<const uint32_t*>(tail[i]);
        }
      }
      transpose16(rows, words + d / 2 * TILE_KEYS + j, TILE_KEYS);
      if (d == 0) next.prefetch(next.k + j, 16);
    }
  typedef uint16_t Row __attribute__((vector_size(64)));
  for (int64_t d = 0; d < padded; d += 2 * LANES)
    for (int64_t j = 0; j < TILE_KEYS; j += 2) {
      Row a = {}, b = {};
      const int64_t count = std::clamp<int64_t>(head_dim - d, 0, 2 * LANES);
      if (count == 2 * LANES) {
        std::memcpy(&a, v[j] + d, 64);
        std::memcpy(&b, v[j + 1] + d, 64);
      } else {
        std::memcpy(&a, v[j] + d, count * 2);
        std::memcpy(&b, v[j + 1] + d, count * 2);
      }
      const Row first = __builtin_shufflevector(a, b, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41,
                                                10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47);
      const Row second = __builtin_shufflevector(a, b, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24,
                                                 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63);
      uint16_t* to = v_panels + (d / PANEL * (TILE_KEYS / 2) * PANEL + j / 2 * PANEL + d % PANEL) * 2;
      std::memcpy(to, &first, 64);
      std::memcpy(to + 2 * LANES, &second, 64);
    }
}

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
inline void attend_tile(const Lines& lines, const uint16_t* q, const int64_t* position, int64_t begin,
                        const uint16_t* k_panel, const uint16_t* v_panels, const Scores& how, const TileRows& next) {
  const float lowest = -std::numeric_limits<float>::infinity();
  alignas(64) float scores[6 * PANEL];
  alignas(64) uint16_t weights[6 * PANEL];
  for (int64_t line = 0; line < lines.count; line += 6) {
    const int64_t rows = std::min<int64_t>(6, lines.count - line);
    multiply(k_panel, q + line * lines.padded, lines.padded, lines.padded / 2, scores, rows, true);
    for (int64_t i = 0; i < rows; i++) {
      if (line + i < TILE_KEYS / 8) next.prefetch(next.v + (line + i) * 8, 8);
      const int64_t at = position[line + i] - begin;  // the last key that this query sees, counted in the tile
      F32 s[VECTORS], largest = splat(lowest);
      for (int v = 0; v < VECTORS; v++) {
        s[v] = load(scores + i * PANEL + v * LANES) * how.scale;
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
      multiply(v_panels + p * TILE_KEYS * PANEL, weights, PANEL, TILE_KEYS / 2,
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

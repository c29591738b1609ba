// Cached keys and values brought into tiles of 64 keys, in the layout of the linear kernels: out of rows of bf16, int8 or
// int4 (cache_rows.h).
#pragma once

#include "cache_rows.h"

namespace hasten {

constexpr int64_t TILE_KEYS = 64;

struct KeyValues {
  const uint8_t* k;       // (slots, Hkv) rows of row_bytes
  const uint8_t* v;
  const int64_t* first;   // contiguous: the slot of position 0 of each sequence
  const int64_t* block_table;   // paged: (B, blocks) block numbers, from the first again after the last; null if contiguous
  int64_t blocks, block_size, kv_heads, head_dim, row_bytes, slots;
  int64_t slot_bytes, head_bytes;  // from a slot to the next, from a head's row to the next head's
  // Positions that a sequence has slots for: padding at the end of a batch may ask for more, and gets zeros.
  int64_t room(int64_t sequence) const { return block_table ? INT64_MAX : slots - first[sequence]; }
  int64_t slot(int64_t sequence, int64_t position) const {
    if (!block_table) return first[sequence] + position;
    int64_t block = position / block_size;
    if (block >= blocks) block %= blocks;
    return block_table[sequence * blocks + block] * block_size + position % block_size;
  }
};

// out[j][i] = rows[i][j] of 16 rows of 16 words, in blocks as wide as a register.
#if HASTEN_512
// Words `at` … `at + 3` of rows 0, 4, 8 and 12, each in a quarter of a register.
INLINE U32 quarters(const uint32_t* const* rows, int64_t at) {
  const auto four = [&](int row) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[row] + at)); };
  __m512i all = _mm512_castsi128_si512(four(0));
  all = _mm512_mask_broadcast_i32x4(all, 0x00f0, four(4));
  all = _mm512_mask_broadcast_i32x4(all, 0x0f00, four(8));
  return (U32)_mm512_mask_broadcast_i32x4(all, 0xf000, four(12));
}
// The quarters are put where they belong while they are loaded, so that only words within them remain to be moved.
INLINE void transpose16(const uint32_t* const* rows, uint32_t* out, int64_t out_stride) {
#define LOW(a, b) shuffle<0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29>(a, b)
#define HIGH(a, b) shuffle<2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31>(a, b)
#define LOW2(a, b) shuffle<0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29>(a, b)
#define HIGH2(a, b) shuffle<2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31>(a, b)
  for (int64_t at = 0; at < 16; at += 4) {
    const U32 a = quarters(rows, at), b = quarters(rows + 1, at), c = quarters(rows + 2, at), d = quarters(rows + 3, at);
    const U32 first = LOW(a, b), second = LOW(c, d), third = HIGH(a, b), fourth = HIGH(c, d);
    const U32 found[] = {LOW2(first, second), HIGH2(first, second), LOW2(third, fourth), HIGH2(third, fourth)};
    for (int j = 0; j < 4; j++) std::memcpy(out + (at + j) * out_stride, &found[j], 64);
  }
#undef LOW
#undef HIGH
#undef LOW2
#undef HIGH2
}
#else
// One block: out[j][i] = rows[i][at + j].
INLINE void transpose_block(const uint32_t* const* rows, int64_t at, uint32_t* out, int64_t out_stride) {
  typedef Native<uint32_t>::type Words;
  Words r[NATIVE], t[NATIVE];
#if defined(__AVX2__)
#define LOW(a, b) shuffle<0, 8, 1, 9, 4, 12, 5, 13>(a, b)
#define HIGH(a, b) shuffle<2, 10, 3, 11, 6, 14, 7, 15>(a, b)
#define LOW2(a, b) shuffle<0, 1, 8, 9, 4, 5, 12, 13>(a, b)
#define HIGH2(a, b) shuffle<2, 3, 10, 11, 6, 7, 14, 15>(a, b)
#else
#define LOW(a, b) shuffle<0, 4, 1, 5>(a, b)
#define HIGH(a, b) shuffle<2, 6, 3, 7>(a, b)
#define LOW2(a, b) shuffle<0, 1, 4, 5>(a, b)
#define HIGH2(a, b) shuffle<2, 3, 6, 7>(a, b)
#endif
  EACH(i, NATIVE, std::memcpy(&r[i], rows[i] + at, REGISTER));
  EACH(i, NATIVE / 2, t[2 * i] = LOW(r[2 * i], r[2 * i + 1]), t[2 * i + 1] = HIGH(r[2 * i], r[2 * i + 1]));
  // r[4q + j]: elements j, and with 8 lanes 4 + j, of rows 4q … 4q + 3.
  EACH(q, NATIVE / 4,
       r[4 * q] = LOW2(t[4 * q], t[4 * q + 2]), r[4 * q + 1] = HIGH2(t[4 * q], t[4 * q + 2]),
       r[4 * q + 2] = LOW2(t[4 * q + 1], t[4 * q + 3]), r[4 * q + 3] = HIGH2(t[4 * q + 1], t[4 * q + 3]));
#undef LOW
#undef HIGH
#undef LOW2
#undef HIGH2
#if defined(__AVX2__)
  EACH(j, 4, t[j] = shuffle<0, 1, 2, 3, 8, 9, 10, 11>(r[j], r[4 + j]),
       t[4 + j] = shuffle<4, 5, 6, 7, 12, 13, 14, 15>(r[j], r[4 + j]));
  EACH(j, NATIVE, std::memcpy(out + j * out_stride, &t[j], REGISTER));
#else
  EACH(j, NATIVE, std::memcpy(out + j * out_stride, &r[j], REGISTER));
#endif
}
inline void transpose16(const uint32_t* const* rows, uint32_t* out, int64_t out_stride) {
  for (int i = 0; i < 16; i += NATIVE)
    for (int j = 0; j < 16; j += NATIVE) transpose_block(rows + i, j, out + j * out_stride + i, out_stride);
}
#endif

#if HASTEN_512
// 32 values of a and of b, one after the other: 32 words of a pair each.
inline void interleave32(const uint16_t* a, const uint16_t* b, uint16_t* to) {
  typedef uint16_t Row __attribute__((vector_size(64)));
  Row x, y;
  std::memcpy(&x, a, 64);
  std::memcpy(&y, b, 64);
  const Row first = shuffle<0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44,
                            13, 45, 14, 46, 15, 47>(x, y);
  const Row second = shuffle<16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27,
                             59, 28, 60, 29, 61, 30, 62, 31, 63>(x, y);
  std::memcpy(to, &first, 64);
  std::memcpy(to + 2 * LANES, &second, 64);
}
// The same of 64 values in bf16, and of 64 in int8.
inline void interleave(const uint8_t* a, const uint8_t* b, uint16_t* to) {
  for (int64_t d = 0; d < PANEL; d += 2 * LANES)
    interleave32(reinterpret_cast<const uint16_t*>(a) + d, reinterpret_cast<const uint16_t*>(b) + d, to + 2 * d);
}
inline void interleave_int8(const uint8_t* a, const uint8_t* b, uint16_t* to) {
  for (int64_t d = 0; d < PANEL; d += LANES) store_line(to + 2 * d, pairs_of(load_int8(a + d), load_int8(b + d)));
}
#endif

// 64 int8 values of each of 16 keys as pairs in bf16: pair i of all keys goes to words + i · TILE_KEYS. They are transposed
// four values at a time and made wider afterwards.
inline void transpose_int8(const uint32_t* const* rows, uint32_t* words) {
  alignas(64) uint32_t quads[16][16];  // [four values][key]
  transpose16(rows, quads[0], 16);
  for (int i = 0; i < 16; i++) {
    const I32 quad = as<I32>(load_line(quads[i]));
    uint32_t* to = words + 2 * i * TILE_KEYS;
    store_line(to, pairs_of(quad << 24 >> 24, quad << 16 >> 24));
    store_line(to + TILE_KEYS, pairs_of(quad << 8 >> 24, quad >> 24));
  }
}

// Where the keys and values [begin, begin + 64) of one head lie; those from `end` on are zeros.
struct TileRows {
  const uint8_t *k[TILE_KEYS], *v[TILE_KEYS];
  int64_t head_dim, row_bytes;
  void find(const KeyValues& kv, int64_t sequence, int64_t head, int64_t begin, int64_t end) {
    alignas(64) static const uint8_t zeros[2 * LARGEST_ROW] = {};
    head_dim = kv.head_dim;
    row_bytes = kv.row_bytes;
    const int64_t row = kv.slot_bytes, own = head * kv.head_bytes;
    if (begin + TILE_KEYS <= end) {  // without a condition for each key: a quarter of the time
      for (int64_t j = 0, run; j < TILE_KEYS; j += run) {
        run = kv.block_table ? std::min(kv.block_size - (begin + j) % kv.block_size, TILE_KEYS - j) : TILE_KEYS;
        const int64_t at = kv.slot(sequence, begin + j) * row + own;
        for (int64_t i = 0; i < run; i++) k[j + i] = kv.k + at + i * row;
        for (int64_t i = 0; i < run; i++) v[j + i] = kv.v + at + i * row;
      }
      return;
    }
    // Slots run on until a block ends: a division for each key would cost a twentieth of the attention.
    int64_t left = kv.block_table ? kv.block_size - begin % kv.block_size : TILE_KEYS;
    int64_t at = begin < end ? kv.slot(sequence, begin) * row + own : 0;
    for (int64_t j = 0; j < TILE_KEYS; j++, at += row) {
      const bool there = begin + j < end;
      if (there && left-- == 0) {
        at = kv.slot(sequence, begin + j) * row + own;
        left = kv.block_size - 1;
      }
      k[j] = there ? kv.k + at : zeros;
      v[j] = there ? kv.v + at : zeros;
    }
  }
};

// K as [padded/2][64][2] and V as panels [padded/64][32][64][2], bf16. Of int8 rows the values as they are, which bf16
// holds exactly; their scales belong to the scores and to the weights of the keys. Of int4 rows the products. Without AVX-512 nothing multiplies
// pairs of values, and V is taken row by row as it lies: `v` are then [64][padded], where rows had to be copied.
struct Tile {
  uint16_t *k, *v;
  float *k_scales, *v_scales;  // [64] of int8 rows
  int64_t begin;               // its first key
  const uint64_t* seen;        // of each line which keys it sees, bit by bit; nullptr: all up to its own
  const uint8_t* const* v_rows = nullptr;
  const uint8_t* const* k_rows = nullptr;  // where nothing is packed: both as they lie
};

// The rows of the next tile, asked for a few at a time while this one is multiplied: a core has a few buffers for lines
// that are on their way, and packing would wait for them. Into the second-level cache, since the first has no room for two.
class TilePrefetcher {
 public:
  TilePrefetcher() = default;
  // In `calls` calls of ask().
  TilePrefetcher(const TileRows& rows, int64_t calls) : rows(&rows), share((TILE_KEYS + calls - 1) / calls), key(0) {}
  INLINE void ask() {
    for (const int64_t end = std::min(key + share, TILE_KEYS); key < end; key++) {
      ask_row(rows->k[key]);
      ask_row(rows->v[key]);
    }
  }

 private:
  INLINE void ask_row(const uint8_t* row) const {
    for (int64_t at = 0; at < rows->row_bytes; at += 64) __builtin_prefetch(row + at, 0, 2);
  }
  const TileRows* rows = nullptr;
  int64_t share = 0, key = TILE_KEYS;
};

// Rows of bf16 as a tile, of which few query lines are multiplied, or many.
inline void pack_tile(TileRows& tile, int64_t padded, bool few, Tile& out) {
  const auto& k = tile.k;
  auto& v = tile.v;
  const int64_t head_dim = tile.head_dim;
  auto* words = reinterpret_cast<uint32_t*>(out.k);
  for (int64_t d = 0; d < padded; d += 32)
    for (int64_t j = 0; j < TILE_KEYS; j += 16) {
      const uint32_t* rows[16];
      alignas(64) uint16_t tail[16][32];
      for (int i = 0; i < 16; i++) {
        if (d + 32 <= head_dim) {
          rows[i] = reinterpret_cast<const uint32_t*>(k[j + i] + 2 * d);
        } else {
          std::memset(tail[i], 0, 64);
          if (d < head_dim) std::memcpy(tail[i], k[j + i] + 2 * d, (head_dim - d) * 2);
          rows[i] = reinterpret_cast<const uint32_t*>(tail[i]);
        }
      }
      transpose16(rows, words + d / 2 * TILE_KEYS + j, TILE_KEYS);
    }
#if HASTEN_512
  for (int64_t d = 0; d < padded; d += 2 * LANES)
    for (int64_t j = 0; j < TILE_KEYS; j += 2) {
      const uint8_t *a = v[j] + 2 * d, *b = v[j + 1] + 2 * d;
      alignas(64) uint8_t tail[2][64];
      if (d + 2 * LANES > head_dim) {
        std::memset(tail, 0, sizeof tail);
        for (int i = 0; i < 2 && d < head_dim; i++) std::memcpy(tail[i], v[j + i] + 2 * d, (head_dim - d) * 2);
        a = tail[0], b = tail[1];
      }
      interleave32(reinterpret_cast<const uint16_t*>(a), reinterpret_cast<const uint16_t*>(b),
                   out.v + (d / PANEL * (TILE_KEYS / 2) * PANEL + j / 2 * PANEL + d % PANEL) * 2);
    }
#else
  // Many lines would bring rows that lie apart into the first-level cache again and again.
  if (!few || head_dim < padded)
    for (int64_t j = 0; j < TILE_KEYS; j++) {
      uint16_t* row = out.v + j * padded;
      std::memcpy(row, v[j], 2 * head_dim);
      std::memset(row + head_dim, 0, 2 * (padded - head_dim));
      v[j] = reinterpret_cast<const uint8_t*>(row);
    }
  out.v_rows = v;
#endif
}

// The scales of int8 rows.
inline void take_row_scales(const TileRows& rows, Tile& out) {
  for (int64_t j = 0; j < TILE_KEYS; j++) {
    out.k_scales[j] = scale_of(rows.k[j], rows.head_dim);
    out.v_scales[j] = scale_of(rows.v[j], rows.head_dim);
  }
}

// Rows of int8 as a tile.
inline void pack_int8_tile(TileRows& tile, int64_t padded, bool few, Tile& out) {
  const auto& k = tile.k;
  auto& v = tile.v;
  const int64_t head_dim = tile.head_dim;
  auto* words = reinterpret_cast<uint32_t*>(out.k);
  for (int64_t d = 0; d < padded; d += 64)
    for (int64_t j = 0; j < TILE_KEYS; j += 16) {
      const uint32_t* rows[16];
      alignas(64) uint8_t tail[16][64];
      for (int i = 0; i < 16; i++) {
        if (d + 64 <= head_dim) {
          rows[i] = reinterpret_cast<const uint32_t*>(k[j + i] + d);
        } else {
          std::memset(tail[i], 0, 64);
          if (d < head_dim) std::memcpy(tail[i], k[j + i] + d, head_dim - d);
          rows[i] = reinterpret_cast<const uint32_t*>(tail[i]);
        }
      }
      transpose_int8(rows, words + d / 2 * TILE_KEYS + j);
    }
  take_row_scales(tile, out);
#if HASTEN_512
  for (int64_t d = 0; d < padded; d += PANEL)
    for (int64_t j = 0; j < TILE_KEYS; j += 2) {
      const uint8_t *a = v[j] + d, *b = v[j + 1] + d;
      alignas(64) uint8_t tail[2][PANEL];
      if (d + PANEL > head_dim) {
        std::memset(tail, 0, sizeof tail);
        for (int i = 0; i < 2 && d < head_dim; i++) std::memcpy(tail[i], v[j + i] + d, head_dim - d);
        a = tail[0], b = tail[1];
      }
      interleave_int8(a, b, out.v + (d * (TILE_KEYS / 2) + j / 2 * PANEL) * 2);
    }
#else
  for (int64_t j = 0; j < TILE_KEYS; j++) {
    uint16_t* row = out.v + j * padded;
    int64_t d = 0;
    for (; d + LANES <= head_dim; d += LANES) store_bf16(row + d, to_float(load_int8(v[j] + d)));
    for (; d < padded; d++) row[d] = d < head_dim ? to_bf16(float(int8_t(v[j][d]))) : 0;
    v[j] = reinterpret_cast<const uint8_t*>(row);
  }
  out.v_rows = v;
#endif
}

}  // namespace hasten

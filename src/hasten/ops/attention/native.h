// Causal attention over a key/value cache in bf16, int8 or int4: one kernel for decode, prefill and everything between.
//
// Keys are taken in tiles of 64 at fixed positions. A tile of K and one of V are brought into the layout of the linear
// kernels (keys, then value elements, side by side in lanes), so both products run at their speed; the score matrix
// exists for 6 query lines or fewer (32 with AMX) and 64 keys at a time. (A decode step takes bf16 and int8 rows as they
// lie where it can: see PIECE.) The softmax is kept as a running maximum and sum
// (FlashAttention, arXiv 2205.14135) within a span of 512 keys; spans are merged in order. Tiles and spans depend on positions only,
// so a query gets the same bits alone, in a batch, in a prefill of any length, and on any number of threads. (As long as
// the values of the keys after it, of its own prompt and tile, are finite: they are multiplied with weights of 0.)
//
// All query heads that share a key/value head are lines of one piece of work: K and V are read once for them.
#pragma once

#include <limits>

#include "../linear/amx.h"
#include "int4_tiles.h"
#include "pattern.h"

namespace hasten {

constexpr int64_t SPAN_KEYS = 512;
// Lines of the weights behind the attention, and of its next queries and its results, asked for with each line of scores.
constexpr int64_t AHEAD_LINES = 32, AHEAD_ROWS = 2;
#if defined(__AMX_TILE__)
constexpr int64_t TOGETHER = 2 * AMX_ROWS;  // query lines that are multiplied at a time
// Tiles that the same lines take one after the other, while their values stay in the first-level cache. A few lines take
// each tile by itself, while it stays there; so do all without AMX, where fewer are multiplied at a time.
constexpr int64_t TILES = SPAN_KEYS / TILE_KEYS;
#else
constexpr int64_t TOGETHER = BF16_TILE.tile;
constexpr int64_t TILES = 1;
#endif
constexpr int64_t LINES = 256 * (TILES > 1 ? 2 : 1) / TOGETHER * TOGETHER;  // query lines that share packed tiles
// Weights are 2^(score - top). A score may be this much above top before top follows it and sums are rescaled. Waiting
// changes nothing, since values and sum carry the same factor; it makes the branch rare, hence predicted.
constexpr float SLACK = 8;

// What will be read or written next, asked for while a tile is attended.
struct Coming {
  Prefetcher& weights;
  TilePrefetcher tile;
  RowsAhead<true> out;
  RowsAhead<false> q;
  bool any() const { return weights.at < weights.end || out.rows || q.rows; }
  void ask(int64_t times) {
    weights.ask(times * AHEAD_LINES);
    if (out.rows) out.ask(times * AHEAD_ROWS);
    else q.ask(times * AHEAD_ROWS);
  }
};

struct Scores {
  float scale, softcap;  // softcap 0: none
  int64_t window;        // 0: none
};

// What some tiles of keys are to all lines of a piece.
struct Attended {
  const Operand* q;         // [lines][padded]
  const uint32_t* pairs;    // the same as [padded/2][16] words of two values, where AMX takes keys as they lie
  const int64_t* position;  // of each line's query, ascending: the last of some lines sees most
  bool fresh;               // the lines' values are not yet written
  const Tile* tiles;
  int64_t count;
  const Scores& how;
};

// sums[line][64] (+)= panel · x for lines of x, `size` values long; of the panel's 64 rows only 32 with HALF. Between its
// parts it asks for the next tile.
#if defined(__AMX_TILE__)
inline int64_t parts_of(int64_t lines, int64_t padded) { return (lines + TOGETHER - 1) / TOGETHER * (1 + padded / PANEL); }
template <bool HALF>
inline void multiply(AmxTiles& tiles, const uint16_t* panel, const uint16_t* x, int64_t stride, int64_t size,
                     float* sums, int64_t lines, bool fresh, TilePrefetcher& prefetcher) {
  prefetcher.ask();
  amx_product<Dot::bf16, false>(tiles, panel, x, stride * 2, lines, size * 2 / AMX_BYTES, sums, fresh, HALF);
}
#else
// Calls of tile_bf16 for a tile of keys and its values, by a number of lines.
inline int64_t parts_of(int64_t lines, int64_t padded) {
  const int64_t turns = (lines + TOGETHER - 1) / TOGETHER, rows = (lines + turns - 1) / turns;
  return turns * VECTORS / std::min<int64_t>(VECTORS, BF16_TILE.span(int(rows))) * (1 + padded / PANEL);
}
template <bool HALF>
inline void multiply(AmxTiles&, const uint16_t* panel, const Operand* x, int64_t stride, int64_t size, float* sums,
                     int64_t lines, bool fresh, TilePrefetcher& prefetcher) {
  constexpr int vectors = HALF ? VECTORS / 2 : VECTORS;
  with_count<TOGETHER>(lines, [&](auto rows) {
    constexpr int span = std::min(vectors, BF16_TILE.span(rows));
    for (int64_t first = 0; first < vectors; first += span) {
      prefetcher.ask();
      tile_bf16<rows, span>(panel + first * 32, x, stride, size / 2, sums + first * LANES, fresh);
    }
  });
}
#endif

// Few lines take keys and values as they lie, a piece at a time of a size that stays in the first-level cache: a whole tile
// would be written to the second-level cache and read again. The sums are those of a packed tile, bit by bit.
// With AMX int8 keys are widened first, and rows at uneven distances copied. (Not with AVX2, where sums of a piece go to memory
// more often: tried, 6% slower.)
#if defined(__AMX_TILE__)
constexpr int64_t FEW_LINES = AMX_ROWS;
constexpr int64_t PIECE = TILE_KEYS;  // keys whose values are paired at a time
inline int64_t parts_of_rows(int64_t head_dim, bool) {
  return head_dim / 32 * VECTORS + head_dim / PANEL * VECTORS;
}
// Keys are what products take by rows, and queries what they take by pairs: the same products and sums, so that keys need
// not be transposed.
template <bool INT8, bool HALF>
inline void multiply_keys(AmxTiles& tiles, const Tile& tile, const Attended& what, int64_t head_dim, float* scores,
                          int64_t lines, TilePrefetcher& prefetcher) {
  constexpr int64_t width = INT8 ? 1 : 2, row = LARGEST_ROW * 2;
  alignas(64) uint8_t copied[LANES * row];
  alignas(64) float turned[LANES * LANES];  // [key][line]
  tiles.shape(lines);
  for (int64_t j = 0; j < (HALF ? TILE_KEYS / 2 : TILE_KEYS); j += LANES) {
    const uint8_t* const* keys = tile.k_rows + j;
    const uint8_t* from = keys[0];
    int64_t stride = keys[1] - keys[0];
    bool even = !INT8;
    for (int i = 2; even && i < LANES; i++) even = keys[i] == from + i * stride;
    if (!even) {
      for (int i = 0; i < LANES; i++) {
        if constexpr (INT8)
          for (int64_t d = 0; d < head_dim; d += 2 * LANES)
            store_operand(reinterpret_cast<Operand*>(copied + i * row) + d, to_float(load_int8(keys[i] + d)),
                          to_float(load_int8(keys[i] + d + LANES)));
        else std::memcpy(copied + i * row, keys[i], head_dim * width);
      }
      from = copied, stride = row;
    }
    before_tile_loads();
    _tile_zero(5);
    for (int64_t d = 0; d < head_dim; d += 32) {
      prefetcher.ask();
      _tile_loadd(6, from + 2 * d, stride);
      _tile_loadd(7, what.pairs + d / 2 * LANES, 64);
      _tile_dpbf16ps(5, 6, 7);
    }
    _tile_stored(5, turned, 64);
    const uint32_t* words[LANES];
    for (int i = 0; i < LANES; i++) words[i] = reinterpret_cast<const uint32_t*>(turned + i * LANES);
    transpose16(words, reinterpret_cast<uint32_t*>(scores + j), PANEL);
  }
}
inline void multiply_pairs(AmxTiles& tiles, const uint16_t* pairs, const Operand* weights, int64_t keys, float* sums,
                           int64_t lines, bool fresh) {
  amx_product<Dot::bf16, false>(tiles, pairs, weights, PANEL * 2, lines, keys * 2 / AMX_BYTES, sums, fresh);
}
#elif HASTEN_512
constexpr int64_t FEW_LINES = TOGETHER;
constexpr int64_t PIECE = 32;  // keys whose values are paired at a time. Of keys 64 bytes of each row are transposed at a time.
inline int64_t parts_of_rows(int64_t head_dim, bool int8) {
  return head_dim / (int8 ? 64 : 32) * VECTORS + head_dim / PANEL * (TILE_KEYS / PIECE) * VECTORS;
}
template <bool INT8, bool HALF>
inline void multiply_keys(AmxTiles&, const Tile& tile, const Attended& what, int64_t head_dim, float* scores,
                          int64_t lines, TilePrefetcher& prefetcher) {
  constexpr int vectors = HALF ? VECTORS / 2 : VECTORS;
  constexpr int64_t width = INT8 ? 1 : 2, values = 64 / width;
  alignas(64) uint32_t words[values / 2 * TILE_KEYS];
  const uint32_t* rows[LANES];
  for (int64_t d = 0; d < head_dim; d += values) {
    for (int64_t j = 0; j < vectors * LANES; j += LANES) {
      prefetcher.ask();
      for (int i = 0; i < LANES; i++) rows[i] = reinterpret_cast<const uint32_t*>(tile.k_rows[j + i] + width * d);
      INT8 ? transpose_int8(rows, words + j) : transpose16(rows, words + j, TILE_KEYS);
    }
    const auto* panel = reinterpret_cast<const uint16_t*>(words);
    with_count<TOGETHER>(lines, [&](auto count) {
      tile_bf16<count, vectors>(panel, what.q + d, head_dim, values / 2, scores, d == 0);
    });
  }
}
inline void multiply_pairs(AmxTiles&, const uint16_t* pairs, const Operand* weights, int64_t keys, float* sums,
                           int64_t lines, bool fresh) {
  with_count<TOGETHER>(lines, [&](auto count) { tile_bf16<count, VECTORS>(pairs, weights, PANEL, keys / 2, sums, fresh); });
}
#else
constexpr int64_t FEW_LINES = 0;
inline int64_t parts_of_rows(int64_t, bool) { return 1; }
#endif

#if HASTEN_512
// sums[line][64] (+)= weights · 64 values, from `at` on, of a tile's first KEYS.
template <bool INT8, int64_t KEYS>
inline void multiply_rows(AmxTiles& tiles, const Tile& tile, int64_t at, const Operand* weights, float* sums, int64_t lines,
                          bool fresh, TilePrefetcher& prefetcher) {
  constexpr int64_t width = INT8 ? 1 : 2, some = std::min(PIECE, KEYS);
  alignas(64) uint16_t pairs[PIECE * PANEL];
  for (int64_t j = 0; j < KEYS; j += some) {
    for (int64_t i = 0; i < some; i += 2) {
      if (i % (PIECE / VECTORS) == 0) prefetcher.ask();
      const uint8_t *a = tile.v_rows[j + i] + width * at, *b = tile.v_rows[j + i + 1] + width * at;
      INT8 ? interleave_int8(a, b, pairs + i * PANEL) : interleave(a, b, pairs + i * PANEL);
    }
    multiply_pairs(tiles, pairs, weights + j, some, sums, lines, fresh && j == 0);
  }
}
#endif

// scores[line][64] = q · k of a tile's keys, of the first 32 with HALF.
template <bool INT8, bool HALF>
inline void score(AmxTiles& tiles, const Tile& tile, const Attended& what, int64_t line, int64_t size, float* scores,
                  int64_t lines, TilePrefetcher& prefetcher) {
#if HASTEN_512
  if (tile.k_rows) return multiply_keys<INT8, HALF>(tiles, tile, what, size, scores, lines, prefetcher);
#endif
  multiply<HALF>(tiles, tile.k, what.q + line * size, size, size, scores, lines, true, prefetcher);
}
#if HASTEN_512
template <bool INT8, int64_t KEYS>
inline void multiply_values(AmxTiles& tiles, const Tile& tile, int64_t panel, const Operand* weights, float* sums,
                            int64_t lines, bool fresh, TilePrefetcher& prefetcher) {
  if (tile.k_rows) return multiply_rows<INT8, KEYS>(tiles, tile, panel * PANEL, weights, sums, lines, fresh, prefetcher);
  multiply<false>(tiles, tile.v + panel * TILE_KEYS * PANEL, weights, PANEL, KEYS, sums, lines, fresh, prefetcher);
}
inline const float* in_order(const float* panel, float*) { return panel; }
#else
// sums[line][V · 16] (+)= weights · rows of bf16 values. Of 16 values the even ones come first: a word holds two of them,
// and so no row has to be taken apart (see in_order). The sums are the ones of tile_bf16, bit by bit.
template <int M, int V>
void tile_rows(const uint8_t* const* rows, int64_t at, const Operand* x, int64_t keys, float* sums, bool fresh) {
  using Words = decltype(U32::low);
  F32 acc[M][V];
  EACH(m, M, EACH(v, V, acc[m][v] = fresh ? F32{} : load(sums + m * PANEL + v * LANES)));
  for (int64_t j = 0; j < keys; j++)
    EACH(v, V,
         const Words words = load_all<Words>(rows[j] + at + v * 2 * LANES);
         const F32 values{as<decltype(F32::low)>(words << 16), as<decltype(F32::low)>(words & 0xffff0000u)};
         EACH(m, M, accumulate(acc[m][v], values, splat(from_operand(x[m * PANEL + j])))));
  EACH(m, M, EACH(v, V, store(sums + m * PANEL + v * LANES, acc[m][v])));
}
template <bool INT8, int64_t KEYS>
inline void multiply_values(AmxTiles&, const Tile& tile, int64_t panel, const Operand* weights, float* sums, int64_t lines,
                            bool fresh, TilePrefetcher& prefetcher) {
  with_count<TOGETHER>(lines, [&](auto rows) {
    constexpr int span = BF16_TILE.span(rows);
    for (int64_t first = 0; first < VECTORS; first += span) {
      prefetcher.ask();
      tile_rows<rows, span>(tile.v_rows, (panel * PANEL + first * LANES) * 2, weights, KEYS, sums + first * LANES, fresh);
    }
  });
}
// A panel of the sums with its values in their order.
inline const float* in_order(const float* panel, float* to) {
  for (int i = 0; i < PANEL; i++) to[i] = panel[i / LANES * LANES + i % 2 * (LANES / 2) + i % LANES / 2];
  return to;
}
#endif

INLINE F32 tanh(F32 x) { return 1.0f - 2.0f / (exp(x + x) + 1.0f); }

// The state of a line's softmax over a span: the score that weighs 1, the sum of weights lane by lane, and the weighted
// values of `padded` elements.
struct Lines {
  float *top, *sum, *values;  // top: [count]; sum: [count][16]; values: [padded/64][stride][64]
  int64_t count, padded, stride;
  float* value(int64_t panel, int64_t line) const { return values + (panel * stride + line) * PANEL; }
  Lines from(int64_t line) const {
    return {top + line, sum + line * LANES, values + line * PANEL, count - line, padded, stride};
  }
  void shrink(int64_t line, float by) const {
    store(sum + line * LANES, load(sum + line * LANES) * by);
    for (int64_t p = 0; p < padded / PANEL; p++)
      for (int v = 0; v < VECTORS; v++) {
        float* at = value(p, line) + v * LANES;
        store(at, load(at) * by);
      }
  }
};

constexpr float LOWEST = -std::numeric_limits<float>::infinity();
alignas(64) constexpr int32_t LANE_BITS[LANES] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};

// Up to TOGETHER lines from `line` on with the keys of tile `which`, or (HALF) with its first 32, where their queries see no
// more: the same bits, as hidden keys add zeros. PLAIN: no soft cap, and no key is hidden.
template <bool INT8, bool HALF, bool PLAIN>
void attend_lines(AmxTiles& tiles, const Attended& what, const Lines& lines, int64_t line, int64_t rows,
                  int64_t which, Coming& coming) {
  constexpr int vectors = HALF ? VECTORS / 2 : VECTORS, keys = vectors * LANES;
  alignas(64) float scores[TOGETHER * PANEL];
  alignas(64) Operand weights[TOGETHER * PANEL];
  const Scores how = what.how;
  const Tile tile = what.tiles[which];
  // Scores in powers of 2: of a soft cap c, c·tanh(s/c).
  const F32 factor = splat(how.softcap != 0 ? how.scale / how.softcap : how.scale * LOG2E);
  const F32 cap = splat(how.softcap * LOG2E);
  float *tops = lines.top + line, *sums = lines.sum + line * LANES;
  const bool more = coming.any();
  score<INT8, HALF>(tiles, tile, what, line, lines.padded, scores, rows, coming.tile);
  for (int64_t i = 0; i < rows; i++) {
    if (more && i % 4 == 0) coming.ask(std::min<int64_t>(4, rows - i));
    F32 s[vectors];
    for (int v = 0; v < vectors; v++) {
      s[v] = load(scores + i * PANEL + v * LANES) * factor;
      if constexpr (INT8) s[v] *= load(tile.k_scales + v * LANES);
    }
    if constexpr (!PLAIN) {
      if (how.softcap != 0)
        for (int v = 0; v < vectors; v++) s[v] = tanh(s[v]) * cap;
      const int64_t at = what.position[line + i] - tile.begin;  // the last key that this query sees, counted in the tile
      const uint64_t seen = tile.seen ? tile.seen[line + i] : EVERY_KEY;
      if (at < keys - 1 || (how.window && at >= how.window) || seen != EVERY_KEY)
        for (int v = 0; v < vectors; v++) {
          const I32 key = lane_numbers() + v * LANES;
          I32 hidden = key > int32_t(std::min<int64_t>(at, TILE_KEYS));
          if (how.window) hidden |= key < int32_t(std::max<int64_t>(at - how.window, -1) + 1);
          if (seen != EVERY_KEY) hidden |= (load(LANE_BITS) & int32_t(seen >> (v * LANES))) == 0;
          s[v] = select(hidden, splat(LOWEST), s[v]);
        }
    }
    F32 most = s[0];
    for (int v = 1; v < vectors; v++) most = larger(most, s[v]);
    float top = tops[i];
    if (any_above(most, splat(top + SLACK))) {
      const float largest = max_lanes(most);
      if (top != LOWEST) lines.shrink(line + i, exp2(splat(top - largest))[0]);
      top = tops[i] = largest;
    }
    const float measure = top == LOWEST ? 0.0f : top;  // of a line that has seen nothing yet
    F32 total = load(sums + i * LANES);
    for (int v = 0; v < vectors; v += 2) {
      F32 p[2];
      for (int u = 0; u < 2; u++) {
        p[u] = exp2<3>(s[v + u] - measure);
        total += p[u];
        if constexpr (INT8) p[u] *= load(tile.v_scales + (v + u) * LANES);
      }
      store_operand(weights + i * PANEL + v * LANES, p[0], p[1]);
    }
    store(sums + i * LANES, total);
  }
  for (int64_t p = 0; p < lines.padded / PANEL; p++)
    multiply_values<INT8, keys>(tiles, tile, p, weights, lines.value(p, line), rows, what.fresh && which == 0, coming.tile);
}

// All tiles for some lines, then for the next.
template <bool INT8>
void attend_tiles(const Attended& what, const Lines& lines, Coming& coming) {
  AmxTiles tiles;
  // Equal numbers of lines: eight as four and four, not six and two. (AMX takes whole tiles.)
  const int64_t turns = (lines.count + TOGETHER - 1) / TOGETHER;
  const int64_t together = round_up((lines.count + turns - 1) / turns, TOGETHER > 16 ? 16 : 1);
  for (int64_t line = 0; line < lines.count; line += together)
    for (int64_t t = 0; t < what.count; t++) {
      const int64_t rows = std::min(together, lines.count - line), begin = what.tiles[t].begin;
      const int64_t least = what.position[line] - begin, most = what.position[line + rows - 1] - begin;
      if (most < 0) break;  // they see nothing from here on
      const bool plain = what.how.softcap == 0 && least >= TILE_KEYS - 1 && !what.tiles[t].seen &&
                         (!what.how.window || most < what.how.window);
      auto attend = plain                  ? attend_lines<INT8, false, true>
                    : most < TILE_KEYS / 2 ? attend_lines<INT8, true, false>
                                           : attend_lines<INT8, false, false>;
      attend(tiles, what, lines, line, rows, t, coming);
    }
}

// Nothing seen yet. Values are cleared of the first `unseen` lines only, which will see nothing of this span.
inline void clear(const Lines& lines, int64_t unseen) {
  for (int64_t i = 0; i < lines.count; i++) lines.top[i] = LOWEST;
  std::memset(lines.sum, 0, lines.count * LANES * sizeof(float));
  for (int64_t p = 0; p < lines.padded / PANEL; p++)
    std::memset(lines.value(p, 0), 0, unseen * PANEL * sizeof(float));
}

// whole <- whole merged with the next span.
inline void merge(const Lines& whole, const Lines& next) {
  for (int64_t i = 0; i < whole.count; i++) {
    const float top = std::max(whole.top[i], next.top[i]);
    if (top == LOWEST) {  // nothing seen, or only NaN
      store(whole.sum + i * LANES, load(whole.sum + i * LANES) + load(next.sum + i * LANES));
      continue;
    }
    const float a = exp2(splat(whole.top[i] - top))[0], b = exp2(splat(next.top[i] - top))[0];
    whole.top[i] = top;
    store(whole.sum + i * LANES, load(whole.sum + i * LANES) * a + load(next.sum + i * LANES) * b);
    for (int64_t p = 0; p < whole.padded / PANEL; p++)
      for (int v = 0; v < VECTORS; v++) {
        float* to = whole.value(p, i) + v * LANES;
        store(to, load(to) * a + load(next.value(p, i) + v * LANES) * b);
      }
  }
}

}  // namespace hasten

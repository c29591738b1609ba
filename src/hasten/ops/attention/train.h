// What the attention for training is made of: products of small tiles, and tiles of a tensor in the order they want.
//
// Everything is counted in 32-bit words: a word is two bf16 values or one float32, so both dtypes share one code. A
// product contracts along words: `panel` holds lines of words (one a lane, side by side), `x` rows of words that are
// broadcast. 64 × 64 scores of a head of 64 elements are one such product; nothing larger is ever in memory.
#pragma once

#include "../linear/amx.h"
#include "native.h"

namespace hasten {

using Word = uint32_t;
constexpr int64_t SIDE = 64;  // queries and keys of a tile
constexpr int64_t CELL = 16;  // a tile is seen or hidden in cells of 16 × 16
constexpr int32_t WHOLE = 0xffff;
template <class T>
constexpr int64_t PAIR = sizeof(Word) / sizeof(T);  // elements of a word

// acc += line · x, both words of T.
template <class T>
INLINE void add_product(F32& acc, const Word* line, Word x) {
  if constexpr (PAIR<T> == 2) {
    acc = dot_bf16(acc, load_line(line), x);
  } else {
    float one;
    std::memcpy(&one, &x, 4);
    accumulate(acc, as<F32>(load_line(line)), splat(one));
  }
}

// Words that are summed up in one chain. Sums of float32 run over chains of 32, and then over the chains: one chain of
// the 256 elements of a head errs twice as much. bf16 has rounded its elements long before that matters.
template <class T>
constexpr int64_t CHAIN = PAIR<T> == 1 ? 32 : INT32_MAX;

template <class T, int M, int V, class End>
INLINE void tile(const Word* panel, int64_t lanes, const Word* x, int64_t stride, int64_t steps, const End& end) {
  F32 sums[M][V], chain[M][V];
  for (int64_t first = 0; first < steps; first += CHAIN<T>) {
    EACH(m, M, EACH(v, V, chain[m][v] = F32{}));
    const int64_t last = std::min(steps, first + CHAIN<T>);
    for (int64_t s = first; s < last; s++)
      EACH(m, M,
           const Word word = x[m * stride + s];
           EACH(v, V, add_product<T>(chain[m][v], panel + s * lanes + v * LANES, word)));
    EACH(m, M, EACH(v, V, sums[m][v] = first ? sums[m][v] + chain[m][v] : chain[m][v]));
  }
  EACH(m, M, EACH(v, V, end(m, v, sums[m][v])));
}

#if defined(__AMX_TILE__)
// 32 rows by 2 vectors at a time; steps: a multiple of 16.
template <class End>
void amx_product_words(const Word* panel, int64_t lanes, int64_t vectors, const Word* x, int64_t stride, int64_t rows,
                 int64_t steps, const End& end) {
  constexpr int64_t deep = AMX_BYTES / sizeof(Word), wide = 2 * LANES;
  alignas(64) float sums[2 * AMX_ROWS * wide];
  AmxTiles tiles;
  before_tile_loads();
  for (int64_t m = 0; m < rows; m += 2 * AMX_ROWS) {
    const int64_t count = std::min(2 * AMX_ROWS, rows - m);
    const bool lower = count > AMX_ROWS;
    tiles.shape(count);
    for (int64_t v = 0; v < vectors; v += 2) {
      _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
      for (int64_t s = 0; s < steps; s += deep) {
        const Word *w = panel + s * lanes + v * LANES, *from = x + m * stride + s;
        _tile_loadd(6, w, lanes * sizeof(Word));
        _tile_loadd(7, w + LANES, lanes * sizeof(Word));
        _tile_loadd(4, from, stride * sizeof(Word));
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (!lower) continue;
        _tile_loadd(5, from + AMX_ROWS * stride, stride * sizeof(Word));
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(0, sums, wide * sizeof(float));
      _tile_stored(1, sums + LANES, wide * sizeof(float));
      if (lower) {
        _tile_stored(2, sums + AMX_ROWS * wide, wide * sizeof(float));
        _tile_stored(3, sums + AMX_ROWS * wide + LANES, wide * sizeof(float));
      }
      for (int64_t i = 0; i < count; i++)
        for (int64_t u = 0; u < 2; u++) end(m + i, v + u, load(sums + i * wide + u * LANES));
    }
  }
}
#endif

// end(row, vector, sum) for `rows` (even) rows of x and `vectors` (even) vectors of lanes of the panel.
template <class T, class End>
void product(const Word* panel, int64_t lanes, int64_t vectors, const Word* x, int64_t stride, int64_t rows,
             int64_t steps, const End& end) {
#if defined(__AMX_TILE__)
  if constexpr (PAIR<T> == 2) return amx_product_words(panel, lanes, vectors, x, stride, rows, steps, end);
#endif
  constexpr int tall = BF16_TILE.tile & ~1, wide = BF16_TILE.span(tall);
  auto columns = [&]<int V>(int64_t first) {
    int64_t row = 0;
    auto take = [&]<int M>() {
      tile<T, M, V>(panel + first * LANES, lanes, x + row * stride, stride, steps,
                    [&](int m, int v, F32 sum) { end(row + m, first + v, sum); });
      row += M;
    };
    while (row + tall <= rows) take.template operator()<tall>();
    if constexpr (tall > 4)
      if (row + 4 <= rows) take.template operator()<4>();
    if constexpr (tall > 2)
      if (row + 2 <= rows) take.template operator()<2>();
  };
  int64_t first = 0;
  for (; first + wide <= vectors; first += wide) columns.template operator()<wide>(first);
  if constexpr (wide > 2)
    if (first < vectors) columns.template operator()<2>(first);
}

// A tensor (B, T, H, D) with any strides (in elements) but 1 along D.
struct View {
  const void* data;
  int64_t batch, row, head;
  template <class T>
  const T* at(int64_t b, int64_t r, int64_t h) const {
    return static_cast<const T*>(data) + b * batch + r * row + h * head;
  }
};

// Rows [first, first + 64) of a head as [64][padded] elements; rows outside [0, count) and elements past `size`: zeros.
template <class T>
void gather(const View& from, int64_t b, int64_t h, int64_t first, int64_t count, int64_t size, int64_t padded,
            Word* out) {
  const int64_t bytes = size * sizeof(T), room = padded * sizeof(T);  // room: whole vectors
  auto* to = reinterpret_cast<char*>(out);
  for (int64_t i = 0; i < SIDE; i++, to += room) {
    const bool there = first + i >= 0 && first + i < count;
    const char* row = there ? reinterpret_cast<const char*>(from.at<T>(b, first + i, h)) : nullptr;
    for (int64_t at = 0; at < room; at += 64) {
      if (there && at + 64 <= bytes) {
        store_line(to + at, load_line(row + at));
        continue;
      }
      std::memset(to + at, 0, 64);
      if (there && at < bytes) std::memcpy(to + at, row + at, bytes - at);
    }
  }
}

// Asks for the rows that a gather will read.
template <class T>
void prefetch(const View& from, int64_t b, int64_t h, int64_t first, int64_t count, int64_t size) {
  for (int64_t i = std::max<int64_t>(0, first); i < std::min(count, first + SIDE); i++)
    for (int64_t d = 0; d < size; d += 64 / sizeof(T)) __builtin_prefetch(from.at<T>(b, i, h) + d);
}

// out [columns][rows] = in [rows][columns] of words; both multiples of 16.
inline void turn(const Word* in, int64_t rows, int64_t columns, Word* out) {
  for (int64_t c = 0; c < columns; c += 16)
    for (int64_t r = 0; r < rows; r += 16) {
      const Word* from[16];
      for (int i = 0; i < 16; i++) from[i] = in + (r + i) * columns + c;
      transpose16(from, out + c * rows + r, rows);
    }
}

// out [64 / PAIR][padded] words: the elements of PAIR rows side by side, from gathered rows.
template <class T>
void pair_rows(const Word* rows, int64_t padded, Word* out) {
  if constexpr (PAIR<T> == 1) {
    std::memcpy(out, rows, SIDE * padded * sizeof(Word));
  } else {
    const auto* in = reinterpret_cast<const uint16_t*>(rows);
    for (int64_t j = 0; j < SIDE; j += 2)
      for (int64_t d = 0; d < padded; d += LANES) {
        const U32 both = load_u16(in + j * padded + d) | (load_u16(in + (j + 1) * padded + d) << 16);
        store_line(out + j / 2 * padded + d, both);
      }
  }
}

// A row of `size` float32 values, times `factor`, into a tensor of T.
template <class T>
void put_row(const float* from, float factor, int64_t size, T* to) {
  constexpr Type type = PAIR<T> == 1 ? Type::f32 : Type::bf16;
  int64_t d = 0;
  for (; d + LANES <= size; d += LANES) store_as(to, type, d, load(from + d) * factor);
  for (; d < size; d++) store_one(to, type, d, from[d] * factor);
}

// Pieces of one thread's memory, handed out one after the other.
struct ThreadScratch {
  Word* next;
  Word* words(int64_t count) {
    Word* mine = next;
    next += round_up(count, LANES);
    return mine;
  }
  float* floats(int64_t count) { return reinterpret_cast<float*>(words(count)); }
};

// Which keys the queries see: an interval of keys a query, and, if there are any, the tiles of a block layout.
struct MaskSpec {
  bool causal;
  int64_t window;                 // keys up to the query's own; 0: all
  const int32_t *low, *high;      // (B, T) or null: the first and last key of each query
  const int32_t *starts, *columns, *cells;  // rows of tiles by position: starts [layouts][tiles + 1], or null
  int64_t layouts;                // 1, or one a query head
  int64_t queries, keys;
  int64_t offset() const { return std::max<int64_t>(0, keys - queries); }  // position of the first query
  int64_t tiles() const { return (keys + SIDE - 1) / SIDE; }
  int64_t first_tile() const { return offset() / SIDE; }
  int64_t last_tile() const { return (offset() + queries - 1) / SIDE; }
};

// Dropout of probabilities: whether one is kept is a hash of the seed and its place, the same in any order and tile.
struct Dropout {
  uint32_t threshold = 0;  // of 2^32: a hash below it is dropped; 0: nothing is
  float kept = 1;          // what the others are multiplied by
  uint64_t seed = 0;

  static uint64_t mixed(uint64_t x) {  // splitmix64
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }
  // Two words for each of 64 queries of a head (counted through the batch), from `first` on.
  void rows(int64_t head, int64_t first, uint32_t* one, uint32_t* two) const {
    const uint64_t own = mixed(seed ^ mixed(uint64_t(head)));
    for (int64_t i = 0; i < SIDE; i++) {
      const uint64_t word = mixed(own + uint64_t(first + i));
      one[i] = uint32_t(word), two[i] = uint32_t(word >> 32);
    }
  }
  // Lanes that are dropped; one of the row's words and the key may be lanes, too.
  template <class Key>
  INLINE I32 drops(U32 one, U32 two, Key key) const {
    U32 x = one ^ (key * 0x9e3779b9u);
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) + two;
    x = x * 0x846ca68bu;
    x = x ^ (x >> 16);
    // Compared as signed numbers, which every instruction set can.
    return as<I32>(x ^ 0x80000000u) < int32_t(threshold ^ 0x80000000u);
  }
};

// A key tile that is seen: all of it (`whole`), or what the queries' intervals and the cells leave of it.
struct VisibleTile {
  int64_t tile;
  int32_t cells;
  bool whole;
};

// The queries at positions [64·tile, 64·tile + 64): lanes [from, to) are there. `row`: of lane 0, may be negative.
struct Queries {
  int64_t tile, row, from, to;
  alignas(64) int32_t low[SIDE], high[SIDE];
  int32_t least, most, all_low, all_high;  // least … most: seen by any; all_low … all_high: by all of them

  Queries(const MaskSpec& mask, int64_t batch, int64_t tile) : tile(tile), row(tile * SIDE - mask.offset()) {
    from = std::max<int64_t>(0, -row), to = std::min(SIDE, mask.queries - row);
    least = all_low = INT32_MAX, most = all_high = -1;
    bool first = true;
    for (int64_t i = 0; i < SIDE; i++) {
      if (i < from || i >= to) {
        low[i] = 0, high[i] = INT32_MAX;  // lanes that nobody reads
        continue;
      }
      const int64_t at = tile * SIDE + i;
      int64_t l = 0, h = mask.keys - 1;
      if (mask.causal) h = std::min(h, at);
      if (mask.window) l = at - mask.window + 1;
      if (mask.low) l = std::max<int64_t>(l, mask.low[batch * mask.queries + row + i]);
      if (mask.high) h = std::min<int64_t>(h, mask.high[batch * mask.queries + row + i]);
      l = std::max<int64_t>(l, 0);
      if (l > h) l = INT32_MAX, h = -1;
      low[i] = int32_t(l), high[i] = int32_t(h);
      least = std::min(least, low[i]), most = std::max(most, high[i]);
      all_low = first ? low[i] : std::max(all_low, low[i]), all_high = first ? high[i] : std::min(all_high, high[i]);
      first = false;
    }
  }

  // The key tiles of which a query of this one may see something, in order. Returns how many.
  int64_t list(const MaskSpec& mask, int64_t head, VisibleTile* out) const {
    if (most < 0) return 0;
    int64_t count = 0;
    auto visit = [&](int64_t k, int32_t cells) {
      const int64_t begin = k * SIDE, end = begin + SIDE - 1;
      if (end >= least && begin <= most)
        out[count++] = {k, cells, cells == WHOLE && begin >= all_low && end <= all_high};
    };
    if (!mask.starts) {
      for (int64_t k = least / SIDE; k <= most / SIDE; k++) visit(k, WHOLE);
      return count;
    }
    const int32_t* row_starts = mask.starts + (mask.layouts > 1 ? head * (mask.tiles() + 1) : 0);
    for (int32_t i = row_starts[tile]; i < row_starts[tile + 1]; i++) visit(mask.columns[i], mask.cells[i]);
    return count;
  }
};

}  // namespace hasten

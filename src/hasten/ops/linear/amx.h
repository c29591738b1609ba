// AMX: products of whole tiles, 16 rows by 64 bytes, ten times the rate of AVX-512's dot products.
//
// The layout of the weights is already the one that AMX wants: a tile of W is 16 lines of 16 output rows, one line a
// panel apart (256 bytes), 32 bf16 or 64 int8 values deep. A tile of x is up to 16 rows as they lie.
//
// TDPBF16PS sums the 16 pairs of a tile in an order of its own before it adds them, so bf16 products take AMX for any
// number of rows, or a row's bits would depend on its neighbours. A tile is summed in the same order whatever its rows
// are: one row or a thousand give the same bits. Integer sums are exact anyway.
#pragma once

#include "gemm.h"

#if defined(__AMX_TILE__)
#include <immintrin.h>

namespace hasten {

constexpr int64_t AMX_BYTES = 64;              // of a tile's row: 32 bf16 or 64 int8 values along K
constexpr int64_t AMX_ROWS = 16;               // of x in a tile
constexpr int64_t AMX_LINES = 16 * PANEL * 4;  // bytes of a panel that one step takes

// The shapes of the eight tiles, for products of up to 32 rows of x: tiles 0 … 3 are sums, 4 and 5 x, 6 and 7 weights. With
// up to 16 rows tile 5 has the shape of the weights' tiles: attention sums the products of 16 keys in it.
// While it lives, this thread's tiles are in use; the system saves less for a thread that has given them back.
class AmxTiles {
 public:
  AmxTiles() = default;
  AmxTiles(const AmxTiles&) = delete;
  ~AmxTiles() {
    if (rows_) _tile_release();
  }
  // rows: of x. depth: bytes of x's rows and of weights that a step multiplies.
  void shape(int64_t rows, int64_t depth = AMX_BYTES) {
    if (rows == rows_ && depth == depth_) return;
    rows_ = rows, depth_ = depth;
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    const uint8_t upper = uint8_t(std::min(rows, AMX_ROWS)), lower = uint8_t(std::max<int64_t>(1, rows - AMX_ROWS));
    const bool one = rows <= AMX_ROWS;
    for (int t = 0; t < 8; t++) {
      const bool x = t == 4 || (t == 5 && !one), weights = t >= 5 && !x;
      config.bytes[t] = uint16_t(x ? depth : AMX_BYTES);
      config.rows[t] = weights ? uint8_t(depth / 4) : one || t == 0 || t == 1 || t == 4 ? upper : lower;
    }
    asm volatile("" ::"r"(&config) : "memory");  // or g++ drops what it writes there
    _tile_loadconfig(&config);
  }

 private:
  int64_t rows_ = 0, depth_ = 0;
};

// g++'s intrinsics that load tiles do not tell the compiler that they read memory, so what was written before must be
// there. One barrier before the loads is enough: those that store tiles do tell.
inline void before_tile_loads() { asm volatile("" ::: "memory"); }

enum class Dot { bf16, s8u8, s8s8 };  // x signed bytes, w unsigned or signed ones

#define HASTEN_AMX_DOT(sum, x, w)                               \
  do {                                                          \
    if constexpr (D == Dot::bf16) _tile_dpbf16ps(sum, x, w);    \
    else if constexpr (D == Dot::s8u8) _tile_dpbsud(sum, x, w); \
    else _tile_dpbssd(sum, x, w);                               \
  } while (0)

// Up to 16 rows: all 64 columns of the panel at a time, so that each line comes from memory once and in order.
template <Dot D, bool STREAM>
inline void amx_few(const char* w, const char* x, int64_t stride, int64_t steps, char* sums, bool fresh) {
  constexpr int64_t row = PANEL * 4;  // bytes from one line of sums, or of weights, to the next
  if (fresh) {
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
  } else {
    _tile_loadd(0, sums, row); _tile_loadd(1, sums + 64, row);
    _tile_loadd(2, sums + 128, row); _tile_loadd(3, sums + 192, row);
  }
  for (int64_t s = 0; s < steps; s++, w += AMX_LINES) {
    if constexpr (STREAM)
      for (int64_t i = 0; i < AMX_LINES; i += 64) __builtin_prefetch(w + AHEAD + i);
    _tile_loadd(4, x + s * AMX_BYTES, stride);
    _tile_loadd(6, w, row);
    HASTEN_AMX_DOT(0, 4, 6);
    _tile_loadd(7, w + 64, row);
    HASTEN_AMX_DOT(1, 4, 7);
    _tile_loadd(6, w + 128, row);
    HASTEN_AMX_DOT(2, 4, 6);
    _tile_loadd(7, w + 192, row);
    HASTEN_AMX_DOT(3, 4, 7);
  }
  _tile_stored(0, sums, row); _tile_stored(1, sums + 64, row);
  _tile_stored(2, sums + 128, row); _tile_stored(3, sums + 192, row);
}

// 17 to 32 rows by half a panel: four products for four loads, and `lines` of what comes next are asked for a step.
template <Dot D>
inline void amx_many(const char* w, const char* x, int64_t stride, int64_t steps, char* sums, bool fresh, Prefetcher& next,
                     int64_t lines) {
  constexpr int64_t row = PANEL * 4;
  char* lower = sums + AMX_ROWS * row;
  if (fresh) {
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
  } else {
    _tile_loadd(0, sums, row); _tile_loadd(1, sums + 64, row);
    _tile_loadd(2, lower, row); _tile_loadd(3, lower + 64, row);
  }
  for (int64_t s = 0; s < steps; s++, w += AMX_LINES, x += AMX_BYTES) {
    next.ask(lines);
    _tile_loadd(6, w, row);
    _tile_loadd(4, x, stride);
    HASTEN_AMX_DOT(0, 4, 6);
    _tile_loadd(7, w + 64, row);
    HASTEN_AMX_DOT(1, 4, 7);
    _tile_loadd(5, x + AMX_ROWS * stride, stride);
    HASTEN_AMX_DOT(2, 5, 6);
    HASTEN_AMX_DOT(3, 5, 7);
  }
  _tile_stored(0, sums, row); _tile_stored(1, sums + 64, row);
  _tile_stored(2, lower, row); _tile_stored(3, lower + 64, row);
}
#undef HASTEN_AMX_DOT

// sums [rows][64] (float32 of bf16, else int32) (+)= x·w over `steps` steps of 64 bytes of K. w: a panel's lines; x: rows
// `stride` bytes apart. STREAM: w comes from memory, and as many lines behind it are asked for: few rows wait for them,
// the products of many pass while they come. half: the first 32 of the panel's rows are enough (16 rows of x or fewer
// take them all).
template <Dot D, bool STREAM>
inline void amx_product(AmxTiles& tiles, const void* w, const void* x, int64_t stride, int64_t rows, int64_t steps,
                        void* sums, bool fresh, bool half = false) {
  before_tile_loads();
  constexpr int64_t both = 2 * AMX_ROWS;
  const char *lines = static_cast<const char*>(w), *from = static_cast<const char*>(x);
  char* to = static_cast<char*>(sums);
  Prefetcher next;
  if constexpr (STREAM) next = {lines + steps * AMX_LINES, lines + 2 * steps * AMX_LINES};
  const int64_t each = AMX_LINES / 128 / std::max<int64_t>(1, rows / both) + 1;  // of 32 rows, half a panel and a step
  for (int64_t m = 0; m < rows; m += both, from += both * stride, to += both * PANEL * 4) {
    const int64_t left = std::min(both, rows - m);
    tiles.shape(left);
    if (left > AMX_ROWS) {
      amx_many<D>(lines, from, stride, steps, to, fresh, next, each);
      if (!half) amx_many<D>(lines + 128, from, stride, steps, to + 128, fresh, next, each);
    } else if (m == 0) {
      amx_few<D, STREAM>(lines, from, stride, steps, to, fresh);
    } else {
      amx_few<D, false>(lines, from, stride, steps, to, fresh);
    }
  }
}

// Rows of planes from which AMX is quicker than AVX-512's dot products: integer sums are exact, so both give the same
// bits. (bf16 products take it for any number of rows.) Of int8 with one scale for each row, of int4 groups as they are stored,
// and of all other groups.
constexpr int64_t AMX_INT8_ROWS = 3, AMX_INT4_ROWS = 6, AMX_GROUP_ROWS = 48;

// sums [rows][64] of x's rows, `bytes` long and `stride` bytes apart, with a panel; the last bytes % 64 are left out.
template <Dot D>
void amx_sums(const void* panel, const void* x, int64_t stride, int64_t rows, int64_t bytes, void* sums);

struct Groups;

// sums [rows][64] += the products of rows of planes from `from_row` on with some groups of a panel, scaled. F: of the
// groups' lines, int4 or int8.
template <Format F>
void amx_groups(AmxTiles& tiles, const Groups& some, const Rows& x, int64_t from_row, int64_t rows, float* sums);

}  // namespace hasten
#else
namespace hasten {
struct AmxTiles {};  // of products that have none
}
#endif

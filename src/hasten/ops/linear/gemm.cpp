// The tiles of the products: which rows and vectors are multiplied together, and the three inner loops.
#include "amx.h"

namespace hasten {

// Steps along K between turning to the other vectors of a panel. Wide tiles take a line's neighbours soon after it, as
// the memory brings them: with whole rows between them, 8 rows took twice as long.
constexpr int64_t WIDE_STEPS = 64;
constexpr int64_t MANY_VALUES = 512;  // of K that all tiles of many rows pass before the next: 16 KB of int4 lines

constexpr int64_t SCALES_AHEAD = 8;     // groups

INLINE int64_t bytes_of(ScaleType type) { return type == ScaleType::f32 ? 4 : 2; }

template <int M>
using Count = std::integral_constant<int, M>;

// f(Count<m>) for a number of rows m between 1 and M.
template <int M, class F>
INLINE void with_count(int64_t m, const F& f) {
  if constexpr (M > 1)
    if (m < M) return with_count<M - 1>(m, f);
  f(Count<M>{});
}

// Cuts rows into tiles: f(row, Count<M>, Count<V>, STREAM) for M rows by V vectors; STREAM for the tile that takes the
// weights from memory, the others find them in the cache. A few rows are one tile, and somewhat more are equal ones: a
// pass over memory with two rows of work in it would leave the dot products idle.
template <class F>
INLINE void for_tiles(int64_t rows, const F& f) {
  if (rows <= TILE)
    return with_count<TILE>(rows, [&](auto m) { f(0, m, Count<SPAN>{}, std::true_type{}); });
  if (rows <= 2 * WIDE) {
    const int64_t size = rows <= WIDE ? rows : (rows + 1) / 2;
    with_count<WIDE>(size, [&](auto m) { f(0, m, Count<WIDE_SPAN>{}, std::true_type{}); });
    if (rows > size)
      with_count<WIDE>(rows - size, [&](auto m) { f(size, m, Count<WIDE_SPAN>{}, std::false_type{}); });
    return;
  }
  f(0, Count<TILE>{}, Count<SPAN>{}, std::true_type{});
  for (int64_t row = TILE; row < rows;) {
    const int64_t left = rows - row, size = left >= 2 * TILE ? TILE : left > TILE ? (left + 1) / 2 : left;
    with_count<TILE>(size, [&](auto m) { f(row, m, Count<SPAN>{}, std::false_type{}); });
    row += size;
  }
}

// Where the prefetch of a block of `steps` starts while its vectors from `first` on are multiplied: the passes over a
// block together ask for the memory behind it line after line.
INLINE const char* ahead_of(const void* block, int64_t first, int64_t steps) {
  return static_cast<const char*>(block) + AHEAD + first * steps * 64;
}

template <int M, int V, bool STREAM>
static void tile_int8(const uint8_t* w, const int8_t* x, int64_t stride, int64_t steps, int32_t* sums, bool fresh,
                      const char* ahead) {
  I32 acc[M][V];
  for (int m = 0; m < M; m++)
    for (int v = 0; v < V; v++) acc[m][v] = fresh ? I32{} : load(sums + m * PANEL + v * LANES);
  for (int64_t s = 0; s < steps; s++) {
    const uint8_t* line = w + s * PANEL * 4;
    if constexpr (STREAM)
      for (int v = 0; v < V; v++) __builtin_prefetch(ahead + (s * V + v) * 64);
    U32 wv[V];
    for (int v = 0; v < V; v++) wv[v] = load_line(line + v * 64);
    for (int m = 0; m < M; m++) {
      int32_t quad;
      std::memcpy(&quad, x + m * stride + 4 * s, 4);
      for (int v = 0; v < V; v++) acc[m][v] = dot_u8s8(acc[m][v], wv[v], quad);
    }
  }
  for (int m = 0; m < M; m++)
    for (int v = 0; v < V; v++) store(sums + m * PANEL + v * LANES, acc[m][v]);
}

// One group of int4 weights: sums[m][v] += scale · (w·q - zero · Σq), for M rows of digits from `row` on. lines: the
// group's first line of vector `first`.
template <int M, int V, bool STREAM>
static void tile_int4(const Weight& w, const uint8_t* lines, int64_t panel, int64_t first, int64_t g, const Rows& x,
                      int64_t row, float* sums, const char* ahead) {
  const int64_t at = (panel * x.groups + g) * PANEL + first * LANES;
  const int8_t* q = x.q + row * x.stride + g * w.group;
  if constexpr (STREAM) {  // a stream of their own, too thin for the prefetcher of the processor to see in time
    const char* scales = static_cast<const char*>(w.scales) + (at + SCALES_AHEAD * PANEL) * bytes_of(w.scale_type);
    for (int v = 0; v < V; v += 64 / LANES / bytes_of(w.scale_type)) __builtin_prefetch(scales + v * LANES * bytes_of(w.scale_type), 0, 3);
    if (w.zeros) __builtin_prefetch(w.zeros + at + SCALES_AHEAD * PANEL, 0, 3);
  }
  I32 acc[M][V];
  // The sums start at what the weights' offset will have added.
  for (int m = 0; m < M; m++)
    for (int v = 0; v < V; v++) acc[m][v] = I32{} - 8 * x.sums[(row + m) * x.groups + g];
  if (w.zeros)
    for (int v = 0; v < V; v++) {
      typedef uint8_t U8 __attribute__((vector_size(16)));
      U8 z; std::memcpy(&z, w.zeros + at + v * LANES, 16);
      for (int m = 0; m < M; m++) acc[m][v] = __builtin_convertvector(z, I32) * -x.sums[(row + m) * x.groups + g];
    }
  // With registers to spare, the high halves stay where they are, as 16 times their value, and have sums of their own:
  // no shifts, and twice as many dot products that do not wait for each other.
  constexpr bool APART = SPARE && M * V <= 8;
  I32 sixteenfold[APART ? M : 1][V] = {};
  for (int64_t s = 0; s < w.group / 8; s++) {
    const uint8_t* line = lines + s * PANEL * 4;
    if constexpr (STREAM)
      for (int v = 0; v < V; v++) __builtin_prefetch(ahead + (s * V + v) * 64);
    U32 low[V], high[V];
    for (int v = 0; v < V; v++) {
      U32 both = load_line(line + v * 64);
      low[v] = both & 0x0f0f0f0fu;
      high[v] = APART ? both & 0xf0f0f0f0u : (both >> 4) & 0x0f0f0f0fu;
    }
    for (int m = 0; m < M; m++) {
      // Two loads of 4 bytes, each broadcast as it is read: 8 at once would pass through a general register, and
      // moving them from there to all lanes costs as much as a dot product.
      int32_t quad, next;
      std::memcpy(&quad, q + m * x.stride + 8 * s, 4);
      for (int v = 0; v < V; v++) acc[m][v] = dot_u8s8(acc[m][v], low[v], quad);
      std::memcpy(&next, q + m * x.stride + 8 * s + 4, 4);
      for (int v = 0; v < V; v++) {
        I32& sum = APART ? sixteenfold[m][v] : acc[m][v];
        sum = dot_u8s8(sum, high[v], next);
      }
    }
  }
  if constexpr (APART)
    for (int m = 0; m < M; m++)
      for (int v = 0; v < V; v++) acc[m][v] += sixteenfold[m][v] >> 4;
  F32 scale[V];
  for (int v = 0; v < V; v++) scale[v] = load_scale(w.scales, w.scale_type, at + v * LANES);
  for (int m = 0; m < M; m++) {
    const int64_t digit_row = row + m;
    float own = x.scales[(digit_row >> (x.digits - 1)) * x.groups + g];
    if (x.digits == 2 && digit_row % 2 == 0) own *= 256.0f;
    for (int v = 0; v < V; v++) {
      float* out = sums + m * PANEL + v * LANES;
      store(out, multiply_add(to_float(acc[m][v]), scale[v] * own, g ? load(out) : F32{}));
    }
  }
}

static void product_bf16(const Weight& w, const Rows& x, int64_t panel, int64_t m0, int64_t rows, float* out) {
  const uint16_t* base = static_cast<const uint16_t*>(w.data) + panel * w.k * PANEL;
#if defined(__AMX_TILE__)
  amx_sums<Dot::bf16>(base, x.bf16 + m0 * x.stride, x.stride * 2, rows, w.k * 2, out);
#else
  const int64_t block = rows <= TILE ? w.k : rows <= 2 * WIDE ? WIDE_STEPS * 2 : 1024;
  for (int64_t k = 0; k < w.k; k += block) {
    const int64_t steps = std::min(block, w.k - k) / 2;
    for_tiles(rows, [&](int64_t m, auto count, auto span, auto stream) {
      const uint16_t* lines = base + k * PANEL;
      for (int64_t first = 0; first < VECTORS; first += span)
        tile_bf16<count, span, stream>(lines + first * 32, x.bf16 + (m0 + m) * x.stride + k, x.stride, steps,
                                       out + m * PANEL + first * LANES, k == 0, ahead_of(lines, first, steps));
    });
  }
#endif
}

static void product_int8(const Weight& w, const Rows& x, int64_t panel, int64_t m0, int64_t rows, float* out) {
  const int64_t digit_rows = rows * x.digits, from_row = m0 * x.digits;
  const int64_t block = digit_rows <= TILE ? w.k : digit_rows <= 2 * WIDE ? WIDE_STEPS * 4 : 2048;
  int32_t* sums = scratch<int32_t, 0>(ROW_BLOCK * 2 * PANEL);
  const uint8_t* base = static_cast<const uint8_t*>(w.data) + panel * w.k * PANEL;
  int64_t k = 0;
#if defined(__AMX_TILE__)
  if (digit_rows >= AMX_INT8_ROWS) {
    amx_sums<Dot::s8u8>(base, x.q + from_row * x.stride, x.stride, digit_rows, w.k, sums);
    k = w.k / AMX_BYTES * AMX_BYTES;
  }
#endif
  for (; k < w.k; k += block) {
    const int64_t steps = std::min(block, w.k - k) / 4;
    for_tiles(digit_rows, [&](int64_t m, auto count, auto span, auto stream) {
      const uint8_t* lines = base + k * PANEL;
      for (int64_t first = 0; first < VECTORS; first += span)
        tile_int8<count, span, stream>(lines + first * 64, x.q + (from_row + m) * x.stride + k, x.stride, steps,
                                       sums + m * PANEL + first * LANES, k == 0, ahead_of(lines, first, steps));
    });
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
}

static void product_int4(const Weight& w, const Rows& x, int64_t panel, int64_t m0, int64_t rows, float* out) {
  const int64_t digit_rows = rows * x.digits, from_row = m0 * x.digits;
  float* sums = x.digits == 1 ? out : scratch<float, 1>(ROW_BLOCK * 2 * PANEL);
  const int64_t steps = w.group / 8, size = steps * PANEL * 4;  // bytes of a packed group
  const uint8_t* base = static_cast<const uint8_t*>(w.data) + panel * x.groups * size;
  const int64_t block = digit_rows <= 2 * WIDE ? 1 : std::max<int64_t>(1, MANY_VALUES / w.group);
#if defined(__AMX_TILE__)
  if (digit_rows >= AMX_INT4_ROWS) amx_int4(w, base, panel, x, from_row, digit_rows, sums);
  else
#endif
    for (int64_t g0 = 0; g0 < x.groups; g0 += block)
      for_tiles(digit_rows, [&](int64_t m, auto count, auto span, auto stream) {
        for (int64_t g = g0; g < std::min(x.groups, g0 + block); g++)
          for (int64_t first = 0; first < VECTORS; first += span)
            tile_int4<count, span, stream>(w, base + g * size + first * 64, panel, first, g, x, from_row + m,
                                           sums + m * PANEL + first * LANES, ahead_of(base + g * size, first, steps));
      });
  if (x.digits == 2)
    for (int64_t m = 0; m < rows; m++)
      for (int v = 0; v < VECTORS; v++) {
        const float* pair = sums + 2 * m * PANEL + v * LANES;
        store(out + m * PANEL + v * LANES, load(pair) + load(pair + PANEL));
      }
}

void panel_product(const Weight& w, const Rows& x, int64_t panel, int64_t m0, int64_t m1, float* out) {
  switch (w.format) {
    case Format::bf16: return product_bf16(w, x, panel, m0, m1 - m0, out);
    case Format::int8: return product_int8(w, x, panel, m0, m1 - m0, out);
    case Format::int4: return product_int4(w, x, panel, m0, m1 - m0, out);
  }
}

}  // namespace hasten

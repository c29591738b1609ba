// The tiles of the products: which rows and vectors are multiplied together, and the three inner loops.
#include "amx.h"
#include "unpack.h"

namespace hasten {

// Steps along K between turning to the other vectors of a panel. Wide tiles take a line's neighbours soon after it, as
// the memory brings them: with whole rows between them, 8 rows took twice as long.
constexpr int64_t WIDE_STEPS = HASTEN_512 ? 64 : 32;  // with AVX2 a block is what is prefetched: AHEAD
constexpr int64_t MANY_VALUES = 512;  // of K that all tiles of many rows pass before the next: 16 KB of int4 lines
constexpr int64_t FEW_VALUES = 128;   // the same of few rows, which turn to the other vectors of a panel

constexpr int64_t SCALES_AHEAD = 8;     // groups

// Cuts rows into tiles: f(row, Count<M>, Count<V>, STREAM) for M rows by V vectors; STREAM for the tile that takes the
// weights from memory and asks for them ahead, the others find them in the cache. A few rows are one tile, and somewhat
// more are equal ones: a pass over memory with two rows of work in it would leave the dot products idle.
template <TileShape SHAPE, class F>
INLINE void for_tiles(int64_t rows, const F& f) {
  constexpr int tile = SHAPE.tile;
  auto one = [&](int64_t row, auto m, auto stream) { f(row, m, Count<SHAPE.span(m)>{}, stream); };
  if (rows <= 2 * SHAPE.most) {
    const int64_t size = rows <= SHAPE.most ? rows : (rows + 1) / 2;
    with_count<SHAPE.most>(size, [&](auto m) { one(0, m, std::bool_constant<(m > SHAPE.alone)>{}); });
    if (rows > size) with_count<SHAPE.most>(rows - size, [&](auto m) { one(size, m, std::false_type{}); });
    return;
  }
  one(0, Count<tile>{}, std::true_type{});
  for (int64_t row = tile; row < rows;) {
    const int64_t left = rows - row, size = left >= 2 * tile ? tile : left > tile ? (left + 1) / 2 : left;
    with_count<tile>(size, [&](auto m) { one(row, m, std::false_type{}); });
    row += size;
  }
}

// Values of K that all tiles pass before the next: all of them where one tile takes whole lines, few where a line's
// vectors are taken after each other, as the memory brings them, `many` where rows find the weights in the cache.
INLINE int64_t values_of_block(const TileShape& shape, int64_t rows, int64_t all, int64_t few, int64_t many) {
  return rows <= shape.most && shape.span(int(rows)) == VECTORS ? all : rows <= 2 * shape.most ? few : many;
}

// Where the prefetch of a block of `steps` starts while its vectors from `first` on are multiplied: the passes over a
// block together ask for the memory behind it line after line.
INLINE const char* ahead_of(const void* block, int64_t first, int64_t steps) {
  return static_cast<const char*>(block) + AHEAD + first * steps * 64;
}

INLINE int32_t word_at(const void* x) { int32_t word; std::memcpy(&word, x, 4); return word; }

// Four int8 weights of each of 16 rows, as they are packed: 128 too large, which is left in the sums.
constexpr int32_t SURPLUS = 128 - BYTE_OFFSET;
struct ByteWeights {
#if HASTEN_VNNI || !defined(__AVX2__)
  U32 w;
  INLINE explicit ByteWeights(U32 line) : w(to_dot(line)) {}
  INLINE void add_to(I32& acc, const int8_t* x) const { acc = dot_u8s8(acc, w, word_at(x)); }
#else
  U32 even, odd;
  INLINE explicit ByteWeights(U32 line) : even(line & 0x00ff00ffu), odd(odd_bytes(line)) {}
  INLINE void add_to(I32& acc, const int16_t* x) const {
    accumulate(acc, dot_words(even, splat(word_at(x))));
    accumulate(acc, dot_words(odd, splat(word_at(x + 2))));
  }
#endif
};

// acc[m][v] += w·x over `steps` steps of four values.
template <int M, int V, bool STREAM>
INLINE void multiply_bytes(I32 (&acc)[M][V], const uint8_t* w, const ByteOperand* x, int64_t stride, int64_t steps,
                           const char* next_lines) {
#if HASTEN_MMLA
  if constexpr (M > 1)
    return multiply_eights(acc, x, stride, steps / 2, [=](int64_t s, int v, U32& low, U32& high) __attribute__((always_inline)) {
      if constexpr (STREAM)
        for (int i = 0; i < 2; i++) ask_line<M <= INT8_TILE.waiting>(next_lines, 2 * (s * V + v) + i);
      low = load_line(w + 2 * s * PANEL * 4 + v * 64);
      high = load_line(w + (2 * s + 1) * PANEL * 4 + v * 64);
    });
#endif
  for (int64_t s = 0; s < steps; s++) {
    const uint8_t* line = w + s * PANEL * 4;
    if constexpr (STREAM)
      for (int v = 0; v < V; v++) ask_line<M <= INT8_TILE.waiting>(next_lines, s * V + v);
    if constexpr (SPARE && sizeof(ByteOperand) == 1) {  // each value of x is broadcast once for all vectors
      U32 lines[V];
      for (int v = 0; v < V; v++) lines[v] = load_line(line + v * 64);
      for (int m = 0; m < M; m++) {
        for (int v = 0; v < V; v++) ByteWeights(lines[v]).add_to(acc[m][v], x + m * stride + 4 * s);
      }
    } else {
      EACH(v, V,
           const ByteWeights weights(load_line(line + v * 64));
           EACH(m, M, weights.add_to(acc[m][v], x + m * stride + 4 * s)));
    }
  }
}

// The same over `steps` steps of eight values of 4 bits, a multiple of 4.
template <int M, int V, bool STREAM>
INLINE void multiply_nibbles(I32 (&acc)[M][V], const uint8_t* w, const int8_t* x, int64_t stride, int64_t steps,
                             const char* next_lines) {
  constexpr uint32_t nibbles = 0x0f0f0f0fu;
#if HASTEN_MMLA
  if constexpr (M > 1)
    return multiply_eights(acc, x, stride, steps, [=](int64_t s, int v, U32& low, U32& high) __attribute__((always_inline)) {
      if constexpr (STREAM) ask_line<M <= INT4_TILE.waiting>(next_lines, s * V + v);
      const U32 both = load_line(w + s * PANEL * 4 + v * 64);
      low = both & nibbles;
      high = (both >> 4) & nibbles;
    });
#endif
#if HASTEN_VNNI || !defined(__AVX2__)
  // With registers to spare, the high halves stay where they are, as 16 times their value, and have sums of their own:
  // no shifts, and twice as many dot products that do not wait for each other.
  constexpr bool APART = SPARE && M * V <= 8;
  I32 sixteenfold[APART ? M : 1][V] = {};
  for (int64_t s = 0; s < steps; s++) {
    const uint8_t* line = w + s * PANEL * 4;
    if constexpr (STREAM)
      for (int v = 0; v < V; v++) ask_line<M <= INT4_TILE.waiting>(next_lines, s * V + v);
    U32 low[V], high[V];
    for (int v = 0; v < V; v++) {
      U32 both = load_line(line + v * 64);
      low[v] = both & nibbles;
      high[v] = APART ? both & ~nibbles : (both >> 4) & nibbles;
    }
    for (int m = 0; m < M; m++) {
      // Two loads of 4 bytes, each broadcast as it is read: 8 at once would pass through a general register, and
      // moving them from there to all lanes costs as much as a dot product.
      const int8_t* from = x + m * stride + 8 * s;
      for (int v = 0; v < V; v++) acc[m][v] = dot_u8s8(acc[m][v], low[v], word_at(from));
      for (int v = 0; v < V; v++) {
        I32& sum = APART ? sixteenfold[m][v] : acc[m][v];
        sum = dot_u8s8(sum, high[v], word_at(from + 4));
      }
    }
  }
  if constexpr (APART)
    for (int m = 0; m < M; m++)
      for (int v = 0; v < V; v++) acc[m][v] += sixteenfold[m][v] >> 4;
#else
  // Eight pairs of products of at most 15·127 are summed in 16 bits before they are made wider.
  for (int64_t s = 0; s < steps; s += 4) {
    I32 pairs[M][V] = {};
#pragma GCC unroll 1  // or g++ sums in an order that spills
    for (int64_t t = s; t < s + 4; t++) {
      const uint8_t* line = w + t * PANEL * 4;
      if constexpr (STREAM)
        for (int v = 0; v < V; v++) ask_line<M <= INT4_TILE.waiting>(next_lines, t * V + v);
      const int8_t* from = x + 8 * t;
      EACH(v, V,
           const U32 low = load_line(line + v * 64) & nibbles;
           EACH(m, M, add_pairs(pairs[m][v], pairs_u8s8(low, splat(word_at(from + m * stride)))));
           const U32 high = (load_line(line + v * 64) >> 4) & nibbles;
           EACH(m, M, add_pairs(pairs[m][v], pairs_u8s8(high, splat(word_at(from + m * stride + 4))))));
    }
    EACH(m, M, EACH(v, V, acc[m][v] += sum_pairs(pairs[m][v])));
  }
#endif
}

// The same of values of fewer bits, made bytes in registers: for the few rows that wait for memory.
template <Format F, int M, int V, bool STREAM>
INLINE void multiply_packed(I32 (&acc)[M][V], const uint8_t* w, const ByteOperand* x, int64_t stride, int64_t values,
                            const char* next_lines) {
  using P = Packing<F>;
  for (int64_t k = 0, at = 0; k < values; k += 4 * P::words, w += P::lines * PANEL * 4, at += P::lines * V) {
    if constexpr (STREAM)
      for (int i = 0; i < P::lines * V; i++) ask_line<M <= INT4_TILE.waiting>(next_lines, at + i);
    EACH(v, V, each_word<F>(w + v * 64, [&](auto i, U32 word) __attribute__((always_inline)) {
      const ByteWeights weights(word);
      EACH(m, M, weights.add_to(acc[m][v], x + m * stride + k + 4 * i));
    }));
  }
}

// Multiplies the first or the second half of a unit of 32 three-bit values.
template <int HALF, int M, int V, bool STREAM>
INLINE void multiply_half(I32 (&acc)[M][V], const uint8_t* w, const ByteOperand* x, int64_t stride, const char* next_lines) {
  if constexpr (STREAM)
    for (int i = 0; i < (HALF ? 1 : 2) * V; i++) ask_line<M <= INT4_TILE.waiting>(next_lines, HALF * 2 * V + i);
  EACH(v, V, each_word<Format::int3, HALF, 1>(w + v * 64, [&](auto i, U32 word) __attribute__((always_inline)) {
    const ByteWeights weights(word);
    EACH(m, M, weights.add_to(acc[m][v], x + m * stride + 4 * (i - 4 * HALF)));
  }));
}

// int8 weights with one scale a row: their sums alone.
template <int M, int V, bool STREAM>
__attribute__((noinline)) static void tile_int8(const uint8_t* w, const ByteOperand* x, int64_t stride, int64_t steps, int32_t* sums, bool fresh,
                      const char* next_lines) {
  I32 acc[M][V];
  EACH(m, M, EACH(v, V, acc[m][v] = fresh ? I32{} : load(sums + m * PANEL + v * LANES)));
  multiply_bytes<M, V, STREAM>(acc, w, x, stride, steps, next_lines);
  EACH(m, M, EACH(v, V, store(sums + m * PANEL + v * LANES, acc[m][v])));
}

// sums[m][v] += scale · (w·q - zero · Σq) group by group, for M rows of planes from `row` on and the panel's vectors from
// `first` on. A group of 32 is four steps, so what is done once a group has to be short too.
template <Format F, int M, int V, bool STREAM>
__attribute__((noinline)) static void tile_groups(const Groups& w, int64_t first, const Rows& x, int64_t row, float* sums) {
  constexpr int32_t offset = F == Format::int8 ? SURPLUS : F == Format::int4 ? 0 : Packing<F>::surplus - BYTE_OFFSET;
  const int64_t steps = w.size * (F == Format::int8 ? 8 : Packing<F>::bits) / 32, bytes = steps * PANEL * 4;
  const int32_t less = -(offset + w.middle);
  for (int64_t i = 0; i < w.count; i++) {
    const int64_t g = w.first + i, at = i * PANEL + first * LANES;
    const uint8_t* lines = w.lines + i * bytes;
    const char* next_lines = ahead_of(w.next + i * bytes, first, steps);
    [[maybe_unused]] const int64_t unit = i / 2 * 3 * PANEL * 4;  // of 3 bits, which two groups of 16 share
    const int64_t scale_bytes = bytes_of(w.scale_type);
    const char* scales = static_cast<const char*>(w.scales) + at * scale_bytes;
    if constexpr (STREAM) {  // a stream of their own, too thin for the prefetcher of the processor to see in time
      const char* next = scales + SCALES_AHEAD * PANEL * scale_bytes;
      for (int v = 0; v < V; v += 64 / LANES / scale_bytes) __builtin_prefetch(next + v * LANES * scale_bytes, 0, 3);
      if (w.zeros) __builtin_prefetch(w.zeros + at + SCALES_AHEAD * PANEL, 0, 3);
    }
    // The sums start at what the weights' offset will have added.
    const int32_t* x_sums = x.sums + g * x.rows + row;
    I32 acc[M][V];
    if (!w.zeros)
      EACH(m, M,
           const I32 start = splat(less * x_sums[m]);
           EACH(v, V, acc[m][v] = start));
    else
      EACH(v, V,
           const I32 zero = load_int8(w.zeros + at + v * LANES) + offset;
           EACH(m, M, acc[m][v] = zero * -x_sums[m]));
    const int64_t from = row * x.stride + g * w.size;
    if constexpr (F == Format::int8)
      multiply_bytes<M, V, STREAM>(acc, lines + first * 64, x.bytes + from, x.stride, steps, next_lines);
    else if constexpr (F == Format::int4)
      multiply_nibbles<M, V, STREAM>(acc, lines + first * 64, x.q + from, x.stride, steps, next_lines);
    else if (F == Format::int3 && w.size == 16 && i % 2 == 0)
      multiply_half<0, M, V, STREAM>(acc, w.lines + unit + first * 64, x.bytes + from, x.stride, ahead_of(w.next + unit, first, 3));
    else if (F == Format::int3 && w.size == 16)
      multiply_half<1, M, V, STREAM>(acc, w.lines + unit + first * 64, x.bytes + from, x.stride, ahead_of(w.next + unit, first, 3));
    else multiply_packed<F, M, V, STREAM>(acc, lines + first * 64, x.bytes + from, x.stride, w.size, next_lines);
    asm("" ::: "memory");  // or g++ keeps sums in registers from group to group, and accumulators have none
    const float* x_scales = x.scales + g * x.rows + row;
    F32 scale[V];
    for (int v = 0; v < V; v++) scale[v] = load_scale(scales, w.scale_type, v * LANES);
    EACH(m, M,
         const F32 own = splat(x_scales[m]);
         EACH(v, V,
              float* out = sums + m * PANEL + v * LANES;
              store(out, multiply_add(to_float(acc[m][v]), scale[v] * own, load(out)))));
  }
}

// sums -= minimum · Σq of at most 8 groups, for rows of planes from `row` on. Asks for the next groups' minima.
static void take_minima(const Groups& w, const Rows& x, int64_t row, int64_t rows, float* sums) {
  const int64_t line = PANEL * bytes_of(w.minima_type);
  const char* next = static_cast<const char*>(w.minima) + w.count * line;
  if (w.minima_type == ScaleType::f16)
    for (int64_t at = 0; at < w.count * line; at += 64) __builtin_prefetch(next + at);
  for (int64_t m = 0; m < rows; m++) {
    float own[8];
    for (int64_t i = 0; i < w.count; i++) {
      const int64_t at = (w.first + i) * x.rows + row + m;
      own[i] = -x.scales[at] * float(x.sums[at]);
    }
    for (int v = 0; v < VECTORS; v++) {
      F32 sum = load(sums + m * PANEL + v * LANES);
      for (int64_t i = 0; i < w.count; i++)
        sum = multiply_add(load_scale(w.minima, w.minima_type, i * PANEL + v * LANES), splat(own[i]), sum);
      store(sums + m * PANEL + v * LANES, sum);
    }
  }
}

static void product_bf16(const Weight& w, const Rows& x, int64_t panel, int64_t m0, int64_t rows, float* out) {
  const uint16_t* base = static_cast<const uint16_t*>(w.data) + panel * w.k * PANEL;
#if defined(__AMX_TILE__)
  amx_sums<Dot::bf16>(base, x.plain + m0 * x.stride, x.stride * 2, rows, w.k * 2, out);
#else
  const int64_t block = values_of_block(BF16_TILE, rows, w.k, WIDE_STEPS * 2, 1024);
  for (int64_t k = 0; k < w.k; k += block) {
    const int64_t steps = std::min(block, w.k - k) / 2;
    for_tiles<BF16_TILE>(rows, [&](int64_t m, auto count, auto span, auto stream) {
      const uint16_t* lines = base + k * PANEL;
      for (int64_t first = 0; first < VECTORS; first += span)
        tile_bf16<count, span, stream>(lines + first * 32, x.plain + (m0 + m) * x.stride + k, x.stride, steps,
                                       out + m * PANEL + first * LANES, k == 0, ahead_of(lines, first, steps));
    });
  }
#endif
}

static void product_f16(const Weight& w, const Rows& x, int64_t panel, int64_t m0, int64_t rows, float* out) {
  const uint16_t* base = static_cast<const uint16_t*>(w.data) + panel * w.k * PANEL;
  const int64_t block = values_of_block(BF16_TILE, rows, w.k, WIDE_STEPS * 2, 1024);
  for (int64_t k = 0; k < w.k; k += block) {
    const int64_t values = std::min(block, w.k - k);
    for_tiles<BF16_TILE>(rows, [&](int64_t m, auto count, auto span, auto stream) {
      const uint16_t* lines = base + k * PANEL;
      for (int64_t first = 0; first < VECTORS; first += span)
        tile_f16<count, span, stream>(lines + first * LANES, x.wide + (m0 + m) * x.stride + k, x.stride, values,
                                      out + m * PANEL + first * LANES, k == 0, ahead_of(lines, first, values / 2));
    });
  }
}

static void product_int8(const Weight& w, const Rows& x, int64_t panel, int64_t m0, int64_t rows, float* out) {
  const int64_t plane_rows = rows * x.planes, from_row = m0 * x.planes;
  const int64_t block = values_of_block(INT8_TILE, plane_rows, w.k, WIDE_STEPS * 4, 2048);
  int32_t* sums = scratch<int32_t, 0>(ROW_BLOCK * 2 * PANEL);
  const uint8_t* base = static_cast<const uint8_t*>(w.data) + panel * w.k * PANEL;
  int64_t k = 0;
#if defined(__AMX_TILE__)
  if (plane_rows >= AMX_INT8_ROWS) {
    amx_sums<Dot::s8u8>(base, x.bytes + from_row * x.stride, x.stride, plane_rows, w.k, sums);
    k = w.k / AMX_BYTES * AMX_BYTES;
  }
#endif
  for (; k < w.k; k += block) {
    const int64_t steps = std::min(block, w.k - k) / 4;
    for_tiles<INT8_TILE>(plane_rows, [&](int64_t m, auto count, auto span, auto stream) {
      const uint8_t* lines = base + k * PANEL;
      for (int64_t first = 0; first < VECTORS; first += span)
        tile_int8<count, span, stream>(lines + first * 64, x.bytes + (from_row + m) * x.stride + k, x.stride, steps,
                                       sums + m * PANEL + first * LANES, k == 0, ahead_of(lines, first, steps));
    });
  }
  for (int64_t m = 0; m < rows; m++)
    for (int v = 0; v < VECTORS; v++) {
      F32 total = {};
      for (int d = 0; d < x.planes; d++) {
        const int64_t row = m * x.planes + d;
        F32 part = to_float(load(sums + row * PANEL + v * LANES) - SURPLUS * x.sums[from_row + row]);
        total = d + 1 < x.planes ? part * float(PLANE_BASE) : total + part;
      }
      F32 scale = load(static_cast<const float*>(w.scales) + panel * PANEL + v * LANES);
      store(out + m * PANEL + v * LANES, total * (scale * x.scales[from_row + (m + 1) * x.planes - 1]));
    }
}

#if defined(__AMX_TILE__)
// Values of K that are made bf16 at a time: 8 KB of lines for few rows, 32 KB for many.
inline int64_t fp8_values(int64_t rows) { return rows <= AMX_ROWS ? 64 : 256; }
#else
inline int64_t fp8_values(int64_t) { return 64; }
#endif

// sums [rows][64] (+)= lines of bf16 in the cache · x, `stride` values from row to row, over `values` of K.
static void add_bf16(AmxTiles& tiles, const uint16_t* lines, const Operand* x, int64_t stride, int64_t rows, int64_t values,
                     float* sums, bool fresh) {
#if defined(__AMX_TILE__)
  amx_product<Dot::bf16, false>(tiles, lines, x, stride * 2, rows, values * 2 / AMX_BYTES, sums, fresh);
#else
  for_tiles<BF16_TILE>(rows, [&](int64_t m, auto count, auto span, auto) {
    for (int64_t first = 0; first < VECTORS; first += span)
      tile_bf16<count, span>(lines + first * 32, x + m * stride, stride, values / 2, sums + m * PANEL + first * LANES, fresh);
  });
#endif
}

// fp8 weights as bf16, whose products those of a row or group are, before its scale.
static void product_fp8(const Weight& w, const Rows& x, int64_t panel, int64_t m0, int64_t rows, float* out) {
  const int64_t most = fp8_values(rows), size = w.group ? w.group : w.k;
  uint16_t* lines = scratch<uint16_t, 16>(most * PANEL);
  float* sums = scratch<float, 17>(ROW_BLOCK * PANEL);
  const uint8_t* base = static_cast<const uint8_t*>(w.data) + panel * w.panel_bytes();
  AmxTiles tiles;
  for (int64_t k = 0; k < w.k;) {
    const int64_t count = std::min(most, size - k % size), group = k / size;
    unpack_fp8(base + k * PANEL, count / 4, lines);
    add_bf16(tiles, lines, x.plain + m0 * x.stride + k, x.stride, rows, count, sums, k % size == 0);
    k += count;
    if (k % size) continue;
    for (int64_t i = 0; i < rows * PANEL; i += LANES) {
      const F32 scale = load_scale(w.scales, w.scale_type, (panel * w.groups() + group) * PANEL + i % PANEL);
      store(out + i, multiply_add(load(sums + i), scale, group ? load(out + i) : F32{}));
    }
  }
}

// Rows of planes that are multiplied with values of fewer bits in registers; for more they are made bytes before.
constexpr int PACKED_ROWS = std::min(4, INT8_TILE.most);

template <Format F>
static void few_rows(const Weight& w, const Rows& x, int64_t panel, int64_t from_row, int64_t rows, float* sums) {
  for (int64_t g0 = 0; g0 < x.groups; g0 += groups_made(w)) {
    const Groups some = groups_of<false>(w, panel, g0, groups_made(w));
    if (some.minima) take_minima(some, x, from_row, rows, sums);
    with_count<PACKED_ROWS>(rows, [&](auto count) {
      constexpr int span = INT8_TILE.span(count);
      for (int64_t first = 0; first < VECTORS; first += span)
        tile_groups<F, count, span, true>(some, first, x, from_row, sums + first * LANES);
    });
  }
}

#if defined(__AMX_TILE__)
// Whether AMX multiplies `rows` plane rows with groups: of int4 as it is stored, and of 32 values or more without zero points.
// (Scaling the sums of groups of 16 takes all the time that the products save.)
static bool takes_amx(const Weight& w, int64_t rows) {
  if (w.format == Format::int4 && !made(w)) return rows >= AMX_INT4_ROWS;
  return rows >= AMX_GROUP_ROWS && w.group >= 32 && !w.zeros;
}
#else
constexpr bool takes_amx(const Weight&, int64_t) { return false; }
template <Format F>
void amx_groups(AmxTiles&, const Groups&, const Rows&, int64_t, int64_t, float*) {}
#endif

// F: of the lines that are multiplied.
template <Format F>
static void product_groups(const Weight& w, const Rows& x, int64_t panel, int64_t m0, int64_t rows, float* out) {
  constexpr TileShape shape = F == Format::int4 ? INT4_TILE : INT8_TILE;
  const int64_t plane_rows = rows * x.planes, from_row = m0 * x.planes, groups = x.groups;
  float* sums = x.planes == 1 ? out : scratch<float, 1>(ROW_BLOCK * 2 * PANEL);
  std::fill(sums, sums + plane_rows * PANEL, 0.0f);
  const int64_t values = values_of_block(shape, plane_rows, w.k, FEW_VALUES, MANY_VALUES);
  const bool amx = takes_amx(w, plane_rows);
  AmxTiles tiles;
  const int64_t block = made(w) ? groups_made(w) : amx ? groups : std::max<int64_t>(1, values / w.group);
  auto each = [&](int64_t g0) {
    const Groups some = groups_of<F == Format::int8>(w, panel, g0, block);
    if (some.minima) take_minima(some, x, from_row, plane_rows, sums);
    if (amx) return amx_groups<F>(tiles, some, x, from_row, plane_rows, sums);
    for_tiles<shape>(plane_rows, [&](int64_t m, auto count, auto span, auto stream) {
      for (int64_t first = 0; first < VECTORS; first += span)
        tile_groups<F, count, span, stream>(some, first, x, from_row + m, sums + m * PANEL + first * LANES);
    });
  };
  if (F == Format::int8 && w.format != F && plane_rows <= PACKED_ROWS)
    with_packing(w.format, [&](auto format) { few_rows<format.value>(w, x, panel, from_row, plane_rows, sums); });
  else
    for (int64_t g0 = 0; g0 < groups; g0 += block) each(g0);
  if (x.planes == 2)
    for (int64_t m = 0; m < rows; m++)
      for (int v = 0; v < VECTORS; v++) {
        const float* pair = sums + 2 * m * PANEL + v * LANES;
        store(out + m * PANEL + v * LANES, load(pair) + load(pair + PANEL));
      }
}

void panel_product(const Weight& w, const Rows& x, int64_t panel, int64_t m0, int64_t m1, float* out) {
  const int64_t rows = m1 - m0;
  switch (w.format) {
    case Format::bf16: return product_bf16(w, x, panel, m0, rows, out);
    case Format::f16: return product_f16(w, x, panel, m0, rows, out);
    case Format::fp8: return product_fp8(w, x, panel, m0, rows, out);
    case Format::int8: return w.group ? product_groups<Format::int8>(w, x, panel, m0, rows, out) : product_int8(w, x, panel, m0, rows, out);
    case Format::int4: return product_groups<Format::int4>(w, x, panel, m0, rows, out);
    default: return product_groups<Format::int8>(w, x, panel, m0, rows, out);
  }
}

}  // namespace hasten

// The products with a panel by AMX.
#include "amx.h"

#if defined(__AMX_TILE__)
#include "unpack.h"

namespace hasten {

// Values of a panel's rows that are multiplied with all rows of x before the next: 32 KB, which stay in the first-level
// cache. A few rows of x take the panel in one go.
constexpr int64_t AMX_BLOCK = 8 * AMX_BYTES;

template <Dot D>
void amx_sums(const void* panel, const void* x, int64_t stride, int64_t rows, int64_t bytes, void* sums) {
  AmxTiles tiles;
  const char* lines = static_cast<const char*>(panel);
  const int64_t whole = bytes / AMX_BYTES * AMX_BYTES, block = rows <= AMX_ROWS ? whole : AMX_BLOCK;
  for (int64_t at = 0; at < whole; at += block)
    amx_product<D, true>(tiles, lines + at * PANEL, static_cast<const char*>(x) + at, stride, rows,
                         std::min(block, whole - at) / AMX_BYTES, sums, at == 0);
}
template void amx_sums<Dot::bf16>(const void*, const void*, int64_t, int64_t, int64_t, void*);
template void amx_sums<Dot::s8u8>(const void*, const void*, int64_t, int64_t, int64_t, void*);

// The lines of a group as signed bytes, zero points of int4 taken away, and zeros behind them up to `end`.
template <Format F>
static void signed_lines(const Groups& some, int64_t group, int8_t* to, const int8_t* end) {
  typedef int8_t Bytes __attribute__((vector_size(64)));
  constexpr int each = F == Format::int4 ? 2 : 1;  // lines of bytes from one
  const int64_t steps = some.size / (4 * each);
  const uint8_t* from = some.lines + group * steps * PANEL * 4;
  const int64_t ahead = some.next - some.lines + AHEAD;
  [[maybe_unused]] Bytes zero[VECTORS];
  for (int v = 0; F == Format::int4 && v < VECTORS; v++)
    zero[v] = some.zeros ? (Bytes)(load_int8(some.zeros + group * PANEL + v * LANES) * 0x01010101) : Bytes{} + int8_t(some.middle);
  for (int64_t s = 0; s < steps; s++, from += PANEL * 4, to += each * PANEL * 4)
    for (int v = 0; v < VECTORS; v++) {
      __builtin_prefetch(from + v * 64 + ahead);
      const U32 line = load_line(from + v * 64);
      if constexpr (F == Format::int8) {
        store_line(to + v * 64, line ^ 0x80808080u);
      } else {
        const Bytes low = (Bytes)(line & 0x0f0f0f0fu) - zero[v], high = (Bytes)((line >> 4) & 0x0f0f0f0fu) - zero[v];
        std::memcpy(to + v * 64, &low, 64);
        std::memcpy(to + PANEL * 4 + v * 64, &high, 64);
      }
    }
  if (to < end) std::memset(to, 0, end - to);
}

constexpr int64_t AMX_VALUES = 256;  // of K that are made bytes at a time: 16 KB
constexpr int64_t AMX_GROUPS = 4;    // whose products are scaled and added at a time

// sums [rows][64] += scales · x_scales · products, [group][16][64], group after group. Asks for `next`.
template <int GROUPS>
static void add_products(const int32_t* products, const float* scales, const float* x_scales, int64_t x_stride, int64_t rows,
                         float* sums, RowsAhead<false>& next) {
  for (int half = 0; half < VECTORS; half += 2) {
    F32 scale[GROUPS][2];
    for (int g = 0; g < GROUPS; g++)
      for (int v = 0; v < 2; v++) scale[g][v] = load(scales + g * PANEL + (half + v) * LANES);
    for (int64_t i = 0; i < rows; i++) {
      next.ask(1);
      for (int v = 0; v < 2; v++) {
        float* out = sums + i * PANEL + (half + v) * LANES;
        F32 sum = load(out);
        for (int g = 0; g < GROUPS; g++)
          sum = multiply_add(to_float(load(products + (g * AMX_ROWS + i) * PANEL + (half + v) * LANES)),
                             scale[g][v] * x_scales[g * x_stride + i], sum);
        store(out, sum);
      }
    }
  }
}

template <Format F>
void amx_groups(AmxTiles& tiles, const Groups& some, const Rows& x, int64_t from_row, int64_t rows, float* sums) {
  const int64_t depth = std::min(some.size, AMX_BYTES), steps = (some.size + depth - 1) / depth;
  const int64_t size = steps * depth * PANEL;  // bytes of a group
  // Few rows wait for memory, which goes on while they are multiplied.
  const int64_t block = std::clamp<int64_t>((rows <= 2 * AMX_ROWS ? AMX_VALUES / 2 : AMX_VALUES) / some.size, 1, some.count);
  int8_t* bytes = scratch<int8_t, 14>(block * size);
  float* scales = scratch<float, 15>(block * PANEL);
  int32_t* products = scratch<int32_t, 27>(AMX_GROUPS * AMX_ROWS * PANEL);
  const char* from = reinterpret_cast<const char*>((F == Format::int4 ? x.q : x.bytes) + from_row * x.stride);
  for (int64_t g0 = 0; g0 < some.count; g0 += block) {
    const int64_t count = std::min(block, some.count - g0), first = some.first + g0;
    for (int64_t g = 0; g < count; g++) {
      signed_lines<F>(some, g0 + g, bytes + g * size, bytes + (g + 1) * size);
      for (int64_t i = 0; i < PANEL; i += LANES)
        store(scales + g * PANEL + i, load_scale(some.scales, some.scale_type, (g0 + g) * PANEL + i));
    }
    for (int64_t m = 0; m < rows; m += AMX_ROWS) {
      const int64_t together = std::min(AMX_ROWS, rows - m);
      const char* x_rows = from + m * x.stride + first * some.size;
      RowsAhead<false> next{x_rows + AMX_ROWS * x.stride, count * some.size, x.stride, std::min(AMX_ROWS, rows - m - together)};
      tiles.shape(together, depth);
      for (int64_t g = 0; g < count; g += AMX_GROUPS) {
        before_tile_loads();
        with_count<AMX_GROUPS>(std::min(AMX_GROUPS, count - g), [&](auto groups) {
          for (int64_t i = 0; i < groups; i++)
            amx_few<Dot::s8s8, false>(reinterpret_cast<const char*>(bytes + (g + i) * size), x_rows + (g + i) * some.size,
                                      x.stride, steps, reinterpret_cast<char*>(products + i * AMX_ROWS * PANEL), true);
          add_products<groups>(products, scales + g * PANEL, x.scales + (first + g) * x.rows + from_row + m, x.rows, together,
                               sums + m * PANEL, next);
        });
      }
    }
  }
}
template void amx_groups<Format::int4>(AmxTiles&, const Groups&, const Rows&, int64_t, int64_t, float*);
template void amx_groups<Format::int8>(AmxTiles&, const Groups&, const Rows&, int64_t, int64_t, float*);

}  // namespace hasten
#endif

// The products with a panel by AMX.
#include "amx.h"

#if defined(__AMX_TILE__)
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

constexpr int64_t AMX_INT4_VALUES = 512;  // of K that are made bytes at a time, for many rows

// A few groups as signed bytes, which stay in the first-level cache, then 32 rows at a time.
void amx_int4(const Weight& w, const uint8_t* lines, int64_t panel, const Rows& x, int64_t from_row, int64_t rows,
              float* sums) {
  typedef int8_t Bytes __attribute__((vector_size(64)));
  const int64_t steps = (w.group + AMX_BYTES - 1) / AMX_BYTES, size = steps * AMX_LINES;
  // Few rows wait for memory, which goes on while a group is multiplied.
  const int64_t block = rows <= 2 * AMX_ROWS ? 1 : std::max<int64_t>(1, AMX_INT4_VALUES / w.group);
  int8_t* bytes = scratch<int8_t, 14>(block * size);
  float* scales = scratch<float, 15>(block * PANEL);
  AmxTiles tiles;
  for (int64_t g0 = 0; g0 < x.groups; g0 += block) {
    const int64_t g1 = std::min(x.groups, g0 + block);
    for (int64_t g = g0; g < g1; g++) {
      const int64_t at = (panel * x.groups + g) * PANEL;
      const uint8_t* from = lines + g * w.group / 2 * PANEL;
      int8_t* to = bytes + (g - g0) * size;
      Bytes zero[VECTORS];
      for (int v = 0; v < VECTORS; v++) {
        zero[v] = w.zeros ? (Bytes)(load_int8(w.zeros + at + v * LANES) * 0x01010101) : Bytes{} + 8;
        store(scales + (g - g0) * PANEL + v * LANES, load_scale(w.scales, w.scale_type, at + v * LANES));
      }
      for (int64_t s = 0; s < w.group / 8; s++, from += PANEL * 4, to += 2 * PANEL * 4)
        for (int v = 0; v < VECTORS; v++) {
          __builtin_prefetch(from + v * 64 + AHEAD);
          const U32 both = load_line(from + v * 64);
          const Bytes low = (Bytes)(both & 0x0f0f0f0fu) - zero[v], high = (Bytes)((both >> 4) & 0x0f0f0f0fu) - zero[v];
          std::memcpy(to + v * 64, &low, 64);
          std::memcpy(to + (VECTORS + v) * 64, &high, 64);
        }
      // A step that reaches into the next group of x multiplies it with zeros.
      std::memset(to, 0, size - w.group * PANEL);
    }
    alignas(64) int32_t acc[2 * AMX_ROWS * PANEL];
    for (int64_t m = 0; m < rows; m += 2 * AMX_ROWS) {
      const int64_t count = std::min(2 * AMX_ROWS, rows - m);
      for (int64_t g = g0; g < g1; g++) {
        amx_product<Dot::s8s8, false>(tiles, bytes + (g - g0) * size,
                                      x.q + (from_row + m) * x.stride + g * w.group, x.stride, count, steps, acc, true);
        F32 scale[VECTORS];
        for (int v = 0; v < VECTORS; v++) scale[v] = load(scales + (g - g0) * PANEL + v * LANES);
        for (int64_t i = 0; i < count; i++) {
          const float own = x.scales[g * x.rows + from_row + m + i];
          for (int v = 0; v < VECTORS; v++) {
            float* out = sums + (m + i) * PANEL + v * LANES;
            store(out, multiply_add(to_float(load(acc + i * PANEL + v * LANES)), scale[v] * own, g ? load(out) : F32{}));
          }
        }
      }
    }
  }
}

}  // namespace hasten
#endif

// A packed weight as floats, for the gradient of its input: dx = dy·W is a product of PyTorch's with some panels at a time.
#include "../tensors.h"
#include "unpack.h"

namespace hasten {

// One panel's values of K from `from` on: vector v of value k goes to out[k·stride + 16·v], scaled; k at or past `end` is
// padding.
template <int BITS>
static void widen_groups(const Groups& some, int64_t from, int64_t end, int64_t stride, float* out) {
  constexpr int each = 32 / BITS;
  const int64_t steps = some.size / each;
  for (int64_t i = 0; i < some.count; i++)
    for (int v = 0; v < VECTORS; v++) {
      const int64_t at = i * PANEL + v * LANES;
      const F32 scale = load_scale(some.scales, some.scale_type, at);
      I32 zero = I32{} + (BITS == 8 ? 128 : some.minima ? 0 : 8);
      if (some.zeros) zero = load_int8(some.zeros + at) + (BITS == 8 ? 128 : 0);
      const F32 least = some.minima ? load(some.minima + at) : F32{};
      for (int64_t s = 0; s < steps; s++) {
        const U32 line = load_line(some.lines + (i * steps + s) * PANEL * 4 + v * 64);
        for (int j = 0; j < each; j++) {
          const int64_t k = from + i * some.size + s * each + j;
          if (k >= end) break;
          const int shift = BITS == 8 ? 8 * j : j % 4 * 8 + j / 4 * 4;
          const I32 value = as<I32>((line >> shift) & (BITS == 8 ? 0xffu : 0xfu)) - zero;
          store(out + k * stride + v * LANES, to_float(value) * scale - least);
        }
      }
    }
}

// The same of lines of bf16, with a scale (64) or none.
static void widen_bf16(const uint16_t* lines, const float* scales, int64_t from, int64_t end, int64_t stride, float* out) {
  for (int64_t k = from; k < end; k++)
    for (int v = 0; v < VECTORS; v++) {
      const U32 line = load_line(lines + (k - from) / 2 * PANEL * 2 + v * 32);
      const F32 value = as<F32>((k - from) % 2 ? line & 0xffff0000u : line << 16);
      store(out + k * stride + v * LANES, scales ? value * load(scales + v * LANES) : value);
    }
}

static void widen_panel(const Weight& w, int64_t panel, int64_t k, int64_t stride, float* out) {
  const char* base = static_cast<const char*>(w.data) + panel * w.panel_bytes();
  const int64_t groups = w.groups(), size = w.group ? w.group : w.k;
  switch (w.format) {
    case Format::bf16: return widen_bf16(reinterpret_cast<const uint16_t*>(base), nullptr, 0, k, stride, out);
    case Format::fp8:
      for (int64_t from = 0; from < k;) {
        const int64_t count = std::min<int64_t>(64, size - from % size);
        uint16_t* lines = scratch<uint16_t, 16>(64 * PANEL);
        float scales[PANEL];
        for (int v = 0; v < VECTORS; v++)
          store(scales + v * LANES, load_scale(w.scales, w.scale_type, (panel * groups + from / size) * PANEL + v * LANES));
        unpack_fp8(reinterpret_cast<const uint8_t*>(base) + from * PANEL, count / 4, lines);
        widen_bf16(lines, scales, from, std::min(k, from + count), stride, out);
        from += count;
      }
      return;
    case Format::int8:
      if (!w.group) {
        Groups all{.lines = reinterpret_cast<const uint8_t*>(base), .scale_type = ScaleType::f32, .size = w.k, .count = 1};
        all.scales = static_cast<const float*>(w.scales) + panel * PANEL;
        return widen_groups<8>(all, 0, k, stride, out);
      }
      [[fallthrough]];
    case Format::int6:
      for (int64_t g = 0; g < groups; g += 8) widen_groups<8>(groups_of<8>(w, panel, g, 8), g * size, k, stride, out);
      return;
    case Format::int4:
      for (int64_t g = 0; g < groups; g += 8) widen_groups<4>(groups_of<4>(w, panel, g, 8), g * size, k, stride, out);
  }
}

// The rows of `count` panels from `first` on, as float32 columns: (K, 64·count), those past the weight's last row 0 or
// what its padding holds.
Tensor transposed_panels(Tensor data, std::optional<Tensor> scales, std::optional<Tensor> zeros,
                         std::optional<Tensor> outer, int64_t first, int64_t count, int64_t in_features,
                         int64_t group_size) {
  const Weight w = weight_of(data, scales, zeros, outer, data.size(0) * PANEL, in_features, group_size);
  STD_TORCH_CHECK(first >= 0 && count > 0 && first + count <= w.panels(), "there are no panels ", first, " to ", first + count);
  Tensor out = empty({in_features, count * PANEL}, ScalarType::Float);
  float* to = static_cast<float*>(out.mutable_data_ptr());
  for_chunks(count, [&](int64_t p) { widen_panel(w, first + p, in_features, count * PANEL, to + p * PANEL); });
  return out;
}

}  // namespace hasten

STABLE_TORCH_LIBRARY_FRAGMENT(HASTEN_LIBRARY, m) {
  m.def("transposed_panels(Tensor data, Tensor? scales, Tensor? zeros, Tensor? outer, int first, int count, int in_features, int group_size) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(HASTEN_LIBRARY, CPU, m) {
  m.impl("transposed_panels", TORCH_BOX(&hasten::transposed_panels));
}

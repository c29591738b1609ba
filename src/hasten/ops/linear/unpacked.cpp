// A packed weight as floats: single rows, as an embedding reads them, and some panels at a time for the gradient of its
// input, dx = dy·W, which is a product of PyTorch's.
#include "../tensors.h"
#include "unpack.h"

namespace hasten {

// A panel's vectors from `first` to `last`, and their destination: vector v of value k goes to
// to[k·stride + (v - first)·LANES].
struct Target {
  int first, last;
  int64_t stride;
  float* to;
  void put(int64_t k, int v, F32 value) const { store(to + k * stride + (v - first) * LANES, value); }
};

// A row of a panel, of which one lane of one vector is kept: value k goes to to[k].
struct RowTarget {
  RowTarget(int64_t row, float* to) : first(int(row % PANEL / LANES)), last(first + 1), lane(int(row % LANES)), to(to) {}
  const int first, last, lane;
  float* const to;
  void put(int64_t k, int, F32 value) const { to[k] = value[lane]; }
};

// A panel's values of K from `from` on, scaled; k at or past `end` is padding.
template <int BITS, class Out>
static void widen_groups(const Groups& some, int64_t from, int64_t end, const Out& out) {
  constexpr int each = 32 / BITS;
  const int64_t steps = some.size / each;
  for (int64_t i = 0; i < some.count; i++)
    for (int v = out.first; v < out.last; v++) {
      const int64_t at = i * PANEL + v * LANES;
      const F32 scale = load_scale(some.scales, some.scale_type, at);
      I32 zero = I32{} + (BITS == 8 ? 128 : some.middle);
      if (some.zeros) zero = load_int8(some.zeros + at) + (BITS == 8 ? 128 : 0);
      const F32 least = some.minima ? load_scale(some.minima, some.minima_type, at) : F32{};
      for (int64_t s = 0; s < steps; s++) {
        const U32 line = load_line(some.lines + (i * steps + s) * PANEL * 4 + v * 64);
        for (int j = 0; j < each; j++) {
          const int64_t k = from + i * some.size + s * each + j;
          if (k >= end) break;
          const int shift = BITS == 8 ? 8 * j : j % 4 * 8 + j / 4 * 4;
          const I32 value = as<I32>((line >> shift) & (BITS == 8 ? 0xffu : 0xfu)) - zero;
          out.put(k, v, to_float(value) * scale - least);
        }
      }
    }
}

// The same of lines of bf16, with a scale (64) or none.
template <class Out>
static void widen_bf16(const uint16_t* lines, const float* scales, int64_t from, int64_t end, const Out& out) {
  for (int64_t k = from; k < end; k++)
    for (int v = out.first; v < out.last; v++) {
      const U32 line = load_line(lines + (k - from) / 2 * PANEL * 2 + v * 32);
      const F32 value = as<F32>((k - from) % 2 ? line & 0xffff0000u : line << 16);
      out.put(k, v, scales ? value * load(scales + v * LANES) : value);
    }
}

template <class Out>
static void widen_panel(const Weight& w, int64_t panel, int64_t k, const Out& out) {
  const char* base = static_cast<const char*>(w.data) + panel * w.panel_bytes();
  const int64_t groups = w.groups(), size = w.group ? w.group : w.k;
  switch (w.format) {
    case Format::bf16: return widen_bf16(reinterpret_cast<const uint16_t*>(base), nullptr, 0, k, out);
    case Format::f16:
      for (int64_t i = 0; i < k; i++)
        for (int v = out.first; v < out.last; v++)
          out.put(i, v, load_f16(reinterpret_cast<const uint16_t*>(base) + i * PANEL + v * LANES));
      return;
    case Format::fp8:
      for (int64_t from = 0; from < k;) {
        const int64_t count = std::min<int64_t>(64, size - from % size);
        uint16_t* lines = scratch<uint16_t, 16>(64 * PANEL);
        float scales[PANEL];
        for (int v = 0; v < VECTORS; v++)
          store(scales + v * LANES, load_scale(w.scales, w.scale_type, (panel * groups + from / size) * PANEL + v * LANES));
        unpack_fp8(reinterpret_cast<const uint8_t*>(base) + from * PANEL, count / 4, lines);
        widen_bf16(lines, scales, from, std::min(k, from + count), out);
        from += count;
      }
      return;
    case Format::int8:
      if (!w.group) {
        Groups all{.lines = reinterpret_cast<const uint8_t*>(base), .scale_type = ScaleType::f32, .size = w.k, .count = 1, .middle = 0};
        all.scales = static_cast<const float*>(w.scales) + panel * PANEL;
        return widen_groups<8>(all, 0, k, out);
      }
      [[fallthrough]];
    default:
      for (int64_t g = 0; g < groups; g += groups_made(w))
        widen_groups<8>(groups_of<true>(w, panel, g, groups_made(w)), g * size, k, out);
      return;
    case Format::int4:
      for (int64_t g = 0; g < groups; g += groups_made(w))
        widen_groups<4>(groups_of<false>(w, panel, g, groups_made(w)), g * size, k, out);
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
  for_chunks(count, [&](int64_t p) {
    widen_panel(w, first + p, in_features, Target{0, VECTORS, count * PANEL, to + p * PANEL});
  });
  return out;
}

constexpr int64_t ROWS_OF_A_CHUNK = 16;

// The rows of these numbers, int64, in their order: (R, K).
Tensor unpacked_rows(Tensor ids, Tensor data, std::optional<Tensor> scales, std::optional<Tensor> zeros,
                     std::optional<Tensor> outer, int64_t out_features, int64_t in_features, int64_t group_size) {
  const Weight w = weight_of(data, scales, zeros, outer, out_features, in_features, group_size);
  STD_TORCH_CHECK(ids.scalar_type() == ScalarType::Long && ids.is_contiguous(), "the numbers of rows are int64");
  STD_TORCH_CHECK(out_features <= w.panels() * PANEL && in_features <= w.k, "the packed weight is no ", out_features, "×",
                  in_features);
  const int64_t count = ids.numel();
  const int64_t* rows = static_cast<const int64_t*>(ids.const_data_ptr());
  for (int64_t i = 0; i < count; i++)
    STD_TORCH_CHECK(rows[i] >= 0 && rows[i] < out_features, "there is no row ", rows[i], " of ", out_features);
  Tensor out = empty({count, in_features}, ScalarType::Float);
  float* to = static_cast<float*>(out.mutable_data_ptr());
  for_chunks((count + ROWS_OF_A_CHUNK - 1) / ROWS_OF_A_CHUNK, [&](int64_t chunk) {
    for (int64_t i = chunk * ROWS_OF_A_CHUNK; i < std::min(count, (chunk + 1) * ROWS_OF_A_CHUNK); i++)
      widen_panel(w, rows[i] / PANEL, in_features, RowTarget(rows[i], to + i * in_features));
  });
  return out;
}

}  // namespace hasten

STABLE_TORCH_LIBRARY_FRAGMENT(HASTEN_LIBRARY, m) {
  m.def("transposed_panels(Tensor data, Tensor? scales, Tensor? zeros, Tensor? outer, int first, int count, int in_features, int group_size) -> Tensor");
  m.def("unpacked_rows(Tensor ids, Tensor data, Tensor? scales, Tensor? zeros, Tensor? outer, int out_features, int in_features, int group_size) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(HASTEN_LIBRARY, CPU, m) {
  m.impl("transposed_panels", TORCH_BOX(&hasten::transposed_panels));
  m.impl("unpacked_rows", TORCH_BOX(&hasten::unpacked_rows));
}

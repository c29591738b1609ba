// y = x·Wᵀ + b from packed weights, and the packing itself, as torch operators.
#include "../tensors.h"
#include "rows.h"

namespace hasten {

using torch::stable::Tensor;

// x (…, K) bf16 or float32 -> (…, N) in x's dtype.
Tensor linear(Tensor x, Tensor data, std::optional<Tensor> scales, std::optional<Tensor> zeros,
              std::optional<Tensor> bias, int64_t out_features, int64_t group_size, int64_t digits) {
  const int64_t k = x.size(-1), rows = k ? x.numel() / k : 0;
  const Weight w = weight_of(data, scales, zeros, out_features, k, group_size);
  const Type type = type_of(x);
  x = as_contiguous(x);
  Tensor y = empty_like_with_last(x, out_features);
  const Rows prepared = prepare(w, x.const_data_ptr(), type, rows, k, Norm{}, int(digits));
  void* out = y.mutable_data_ptr();
  const void* b = bias ? bias->const_data_ptr() : nullptr;
  const Type bias_type = bias ? type_of(*bias) : Type::f32;
  product(w, prepared, rows, [&](int64_t panel, int64_t m0, int64_t m1, const float* values) {
    const int64_t n0 = panel * PANEL, n = std::min<int64_t>(PANEL, out_features - n0);
    for (int64_t m = m0; m < m1; m++) {
      const float* from = values + (m - m0) * PANEL;
      int64_t i = 0;
      for (; i + LANES <= n; i += LANES) {
        F32 v = load(from + i);
        if (b) v += load_as(b, bias_type, n0 + i);
        store_as(out, type, m * out_features + n0 + i, v);
      }
      for (; i < n; i++)
        store_one(out, type, m * out_features + n0 + i, from[i] + (b ? load_one(b, bias_type, n0 + i) : 0.0f));
    }
  });
  return y;
}

// Rows of bytes to panels: out[panel][step][row][bytes] from rows (N, K·size) whose K is cut into `step`s of 4 bytes.
static void interleave(const uint8_t* from, int64_t n, int64_t row_bytes, int64_t steps, uint32_t filler, uint8_t* to) {
  const int64_t panels = (n + PANEL - 1) / PANEL;
  for_chunks(panels, [&](int64_t panel) {
    uint8_t* base = to + panel * steps * PANEL * 4;
    for (int64_t r = 0; r < PANEL; r++) {
      const int64_t row = panel * PANEL + r;
      for (int64_t s = 0; s < steps; s++) {
        uint32_t word = filler;
        if (row < n && s * 4 < row_bytes) std::memcpy(&word, from + row * row_bytes + s * 4, std::min<int64_t>(4, row_bytes - s * 4));
        std::memcpy(base + (s * PANEL + r) * 4, &word, 4);
      }
    }
  });
}

// w (N, K) bf16 -> uint16 panels with K padded to a multiple of 32.
Tensor pack_bf16(Tensor w) {
  const int64_t n = w.size(0), k = w.size(1), padded = round_up(k, 32), panels = (n + PANEL - 1) / PANEL;
  w = as_contiguous(w);
  Tensor out = empty({panels, padded / 2, PANEL, 2}, torch::headeronly::ScalarType::BFloat16);
  interleave(static_cast<const uint8_t*>(w.const_data_ptr()), n, k * 2, padded / 2, 0,
             static_cast<uint8_t*>(out.mutable_data_ptr()));
  return out;
}

// q (N, K) int8 -> uint8 panels, offset by 128, K padded to a multiple of 32.
Tensor pack_int8(Tensor q) {
  const int64_t n = q.size(0), k = q.size(1), padded = round_up(k, 32), panels = (n + PANEL - 1) / PANEL;
  q = as_contiguous(q);
  const uint8_t* from = static_cast<const uint8_t*>(q.const_data_ptr());
  Tensor out = empty({panels, padded / 4, PANEL, 4}, torch::headeronly::ScalarType::Byte);
  uint8_t* to = static_cast<uint8_t*>(out.mutable_data_ptr());
  for_chunks(panels, [&](int64_t panel) {
    uint8_t* base = to + panel * padded * PANEL;
    for (int64_t r = 0; r < PANEL; r++) {
      const int64_t row = panel * PANEL + r;
      for (int64_t c = 0; c < padded; c++)
        base[(c / 4 * PANEL + r) * 4 + c % 4] = row < n && c < k ? from[row * k + c] ^ 0x80 : 0x80;
    }
  });
  return out;
}

// q (N, K) uint8 with values 0 … 15 -> uint8 panels; K padded to a multiple of the group with 8s, whose activations
// are zero.
Tensor pack_int4(Tensor q, int64_t group_size) {
  const int64_t n = q.size(0), k = q.size(1), padded = round_up(k, group_size), panels = (n + PANEL - 1) / PANEL;
  q = as_contiguous(q);
  const uint8_t* from = static_cast<const uint8_t*>(q.const_data_ptr());
  Tensor out = empty({panels, padded / 8, PANEL, 4}, torch::headeronly::ScalarType::Byte);
  uint8_t* to = static_cast<uint8_t*>(out.mutable_data_ptr());
  for_chunks(panels, [&](int64_t panel) {
    uint8_t* base = to + panel * (padded / 2) * PANEL;
    for (int64_t r = 0; r < PANEL; r++) {
      const int64_t row = panel * PANEL + r;
      auto value = [&](int64_t c) -> uint8_t { return row < n && c < k ? from[row * k + c] & 15 : 8; };
      for (int64_t s = 0; s < padded / 8; s++)
        for (int64_t j = 0; j < 4; j++)
          base[(s * PANEL + r) * 4 + j] = uint8_t(value(8 * s + j) | value(8 * s + 4 + j) << 4);
    }
  });
  return out;
}

}  // namespace hasten

STABLE_TORCH_LIBRARY_FRAGMENT(HASTEN_LIBRARY, m) {
  m.def("linear(Tensor x, Tensor data, Tensor? scales, Tensor? zeros, Tensor? bias, int out_features, int group_size, int digits) -> Tensor");
  m.def("pack_bf16(Tensor w) -> Tensor");
  m.def("pack_int8(Tensor q) -> Tensor");
  m.def("pack_int4(Tensor q, int group_size) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(HASTEN_LIBRARY, CPU, m) {
  m.impl("linear", TORCH_BOX(&hasten::linear));
  m.impl("pack_bf16", TORCH_BOX(&hasten::pack_bf16));
  m.impl("pack_int8", TORCH_BOX(&hasten::pack_int8));
  m.impl("pack_int4", TORCH_BOX(&hasten::pack_int4));
}

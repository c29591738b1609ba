// y = x·Wᵀ + b from packed weights, and the packing itself, as torch operators.
#include "../tensors.h"
#include "pack.h"
#include "rows.h"

namespace hasten {

using torch::stable::Tensor;

static void check_group(int64_t group_size) {
  STD_TORCH_CHECK(group_size > 0 && group_size % PADDING == 0, "the group size must be a multiple of 32");
}

// x (…, K) bf16 or float32 -> (…, N) in x's dtype.
Tensor linear(Tensor x, Tensor data, std::optional<Tensor> scales, std::optional<Tensor> zeros,
              std::optional<Tensor> outer, std::optional<Tensor> bias, int64_t out_features, int64_t group_size, int64_t planes) {
  STD_TORCH_CHECK(x.dim() > 0 && x.size(-1) > 0, "x needs a last dimension of at least one value");
  const int64_t k = x.size(-1), rows = x.numel() / k;
  Weight w = weight_of(data, scales, zeros, outer, out_features, k, group_size);
  w.planes = int(planes);
  STD_TORCH_CHECK(w.k - k < std::max({group_size, PADDING, w.outer ? SUPER_BLOCK : 0}), "x has ", k,
                  " columns, the weight ", w.k, " with its padding");
  STD_TORCH_CHECK(planes == 1 || planes == 2, "planes must be 1 or 2");
  const Type type = type_of(x);
  x = as_contiguous(x);
  Tensor y = empty_like_with_last(x, out_features);
  Arena arena;
  const Preparation prepared(arena, w, x.const_data_ptr(), type, rows, k, Norm{});
  void* out = y.mutable_data_ptr();
  STD_TORCH_CHECK(!bias || (bias->is_contiguous() && bias->numel() == out_features), "the bias does not fit");
  const void* b = bias ? bias->const_data_ptr() : nullptr;
  const Type bias_type = bias ? type_of(*bias) : Type::f32;
  auto finish = [&](int64_t, int64_t panel, int64_t m0, int64_t m1, const float* values) {
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
  };
  parallel_region([&](Worker& worker) { product(worker, w, prepared, rows, finish); });
  return y;
}

// Rows of weights to panels of 4-byte words: to[panel][step][row] = word(row, step). The first `whole` steps lie fully
// inside K; edge(row, step) makes the others, and rows beyond n are filled up.
template <class Word, class Edge>
static void interleave(int64_t n, int64_t steps, int64_t whole, uint32_t filler, void* to, const Word& word,
                       const Edge& edge) {
  for_chunks((n + PANEL - 1) / PANEL, [&](int64_t panel) {
    uint32_t* base = static_cast<uint32_t*>(to) + panel * steps * PANEL;
    const int64_t first = panel * PANEL, rows = std::min<int64_t>(PANEL, n - first);
    int64_t s = 0;
    // 16 steps at a time: what is written then fits the first-level cache, and a row is read a line at a time.
    for (; s + LANES <= whole; s += LANES)
      for (int64_t r = 0; r < rows; r++) {
        uint32_t words[LANES];
        for (int i = 0; i < LANES; i++) words[i] = word(first + r, s + i);
        for (int i = 0; i < LANES; i++) base[(s + i) * PANEL + r] = words[i];
      }
    for (; s < steps; s++)
      for (int64_t r = 0; r < rows; r++)
        base[s * PANEL + r] = s < whole ? word(first + r, s) : edge(first + r, s);
    for (s = 0; s < steps && rows < PANEL; s++)
      for (int64_t r = rows; r < PANEL; r++) base[s * PANEL + r] = filler;
  });
}

// What is made at the end of rows only: not worth the seconds that it takes to compile it into the loop.
#define SELDOM __attribute__((noinline, cold))

// w (N, K) bf16 -> panels with K padded to a multiple of 32.
Tensor pack_bf16(Tensor w) {
  const int64_t n = w.size(0), k = w.size(1), steps = round_up(k, PADDING) / 2, panels = (n + PANEL - 1) / PANEL;
  w = as_contiguous(w);
  const uint8_t* from = static_cast<const uint8_t*>(w.const_data_ptr());
  Tensor out = empty({panels, steps, PANEL, 2}, ScalarType::BFloat16);
  interleave(
      n, steps, k / 2, 0, out.mutable_data_ptr(),
      [=](int64_t row, int64_t s) { return word_at(from + (row * k + 2 * s) * 2); },
      [=](int64_t row, int64_t s) SELDOM {
        uint16_t last = 0;
        if (2 * s < k) std::memcpy(&last, from + (row * k + 2 * s) * 2, 2);
        return uint32_t(last);
      });
  return out;
}

// w (N, K) -> uint8 panels: int8 values offset by 128; of others (uint8, which are fp8) the second and third of four
// change places. K is padded with zeros to a multiple of the group, or of 32.
Tensor pack_bytes(Tensor w, int64_t group_size) {
  if (group_size) check_group(group_size);
  const int64_t n = w.size(0), k = w.size(1), steps = round_up(k, group_size ? group_size : PADDING) / 4;
  const int64_t panels = (n + PANEL - 1) / PANEL;
  w = as_contiguous(w);
  const uint8_t* from = static_cast<const uint8_t*>(w.const_data_ptr());
  const bool integers = w.scalar_type() == ScalarType::Char;
  const uint32_t offset = integers ? 0x80808080u : 0;
  auto packed = [=](uint32_t word) {
    if (integers) return word ^ offset;
    return (word & 0xff0000ffu) | (word << 8 & 0x00ff0000u) | (word >> 8 & 0x0000ff00u);
  };
  Tensor out = empty({panels, steps, PANEL, 4}, ScalarType::Byte);
  interleave(
      n, steps, k / 4, offset, out.mutable_data_ptr(),
      [=](int64_t row, int64_t s) { return packed(word_at(from + row * k + 4 * s)); },
      [=](int64_t row, int64_t s) SELDOM {
        uint32_t word = 0;
        for (int64_t j = 0; 4 * s + j < k && j < 4; j++) word |= uint32_t(from[row * k + 4 * s + j]) << (8 * j);
        return packed(word);
      });
  return out;
}

// q (N, K) uint8 with values of 6, 5, 3 or 2 bits, K a multiple of 32 -> uint8 panels.
Tensor pack_integers(Tensor q, int64_t bits) {
  STD_TORCH_CHECK(bits == 6 || bits == 5 || bits == 3 || bits == 2, "there is no layout of ", bits, " bits");
  const int64_t n = q.size(0), k = q.size(1), steps = k * bits / 32;
  STD_TORCH_CHECK(k % PADDING == 0, "rows of ", bits, " bits are multiples of 32 values, not ", k);
  q = as_contiguous(q);
  const uint8_t* from = static_cast<const uint8_t*>(q.const_data_ptr());
  Tensor out = empty({(n + PANEL - 1) / PANEL, steps, PANEL, 4}, ScalarType::Byte);
  const Unit unit = unit_of(bits);
  auto word = [=](int64_t row, int64_t s) {
    return unit_line(from + row * k + s / unit.lines * unit.values, s % unit.lines, bits);
  };
  interleave(n, steps, steps, 0, out.mutable_data_ptr(), word, word);
  return out;
}

// q (N, K) uint8 with values 0 … 15 -> uint8 panels; K padded to a multiple of the group with 8s, whose activations
// are zero.
Tensor pack_int4(Tensor q, int64_t group_size) {
  check_group(group_size);
  const int64_t n = q.size(0), k = q.size(1), steps = round_up(k, group_size) / 8, panels = (n + PANEL - 1) / PANEL;
  q = as_contiguous(q);
  const uint8_t* from = static_cast<const uint8_t*>(q.const_data_ptr());
  Tensor out = empty({panels, steps, PANEL, 4}, ScalarType::Byte);
  interleave(
      n, steps, k / 8, 0x88888888u, out.mutable_data_ptr(),
      [=](int64_t row, int64_t s) { return nibbles_at(from + row * k + 8 * s); },
      [=](int64_t row, int64_t s) SELDOM {
        uint32_t word = 0x88888888u;
        for (int64_t j = 0; 8 * s + j < k && j < 8; j++) {
          const int shift = int(j % 4 * 8 + j / 4 * 4);
          word = (word & ~(15u << shift)) | uint32_t(from[row * k + 8 * s + j] & 15) << shift;
        }
        return word;
      });
  return out;
}

// words (N, K/8) int32, nibble i of word j the value 8j + i (0 … 15), as compressed-tensors stores them -> as pack_int4.
Tensor pack_int4_words(Tensor words, int64_t group_size) {
  check_group(group_size);
  const int64_t n = words.size(0), k = words.size(1), steps = round_up(k * 8, group_size) / 8;
  words = as_contiguous(words);
  const uint8_t* from = static_cast<const uint8_t*>(words.const_data_ptr());
  Tensor out = empty({(n + PANEL - 1) / PANEL, steps, PANEL, 4}, ScalarType::Byte);
  auto spread = [](uint32_t four) {  // nibbles 0 … 3 to the low halves of four bytes
    four = (four | four << 8) & 0x00ff00ffu;
    return (four | four << 4) & 0x0f0f0f0fu;
  };
  interleave(
      n, steps, k, 0x88888888u, out.mutable_data_ptr(),
      [=](int64_t row, int64_t s) {
        const uint32_t word = word_at(from + (row * k + s) * 4);
        return spread(word & 0xffff) | spread(word >> 16) << 4;
      },
      [](int64_t, int64_t) { return 0x88888888u; });
  return out;
}

}  // namespace hasten

STABLE_TORCH_LIBRARY_FRAGMENT(HASTEN_LIBRARY, m) {
  m.def("linear(Tensor x, Tensor data, Tensor? scales, Tensor? zeros, Tensor? outer, Tensor? bias, int out_features, int group_size, int planes) -> Tensor");
  m.def("pack_bf16(Tensor w) -> Tensor");
  m.def("pack_bytes(Tensor w, int group_size) -> Tensor");
  m.def("pack_integers(Tensor q, int bits) -> Tensor");
  m.def("pack_int4(Tensor q, int group_size) -> Tensor");
  m.def("pack_int4_words(Tensor words, int group_size) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(HASTEN_LIBRARY, CPU, m) {
  m.impl("linear", TORCH_BOX(&hasten::linear));
  m.impl("pack_bf16", TORCH_BOX(&hasten::pack_bf16));
  m.impl("pack_bytes", TORCH_BOX(&hasten::pack_bytes));
  m.impl("pack_integers", TORCH_BOX(&hasten::pack_integers));
  m.impl("pack_int4", TORCH_BOX(&hasten::pack_int4));
  m.impl("pack_int4_words", TORCH_BOX(&hasten::pack_int4_words));
}

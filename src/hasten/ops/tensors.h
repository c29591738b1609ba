// Between torch's tensors (through its stable ABI, so one binary serves many versions) and the kernels' plain pointers.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>
#include <vector>

#include "linear/rows.h"

namespace hasten {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t PADDING = 32;  // K of weights without groups is padded to a multiple of this

inline int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

inline Tensor as_contiguous(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

inline std::optional<Tensor> as_contiguous(const std::optional<Tensor>& t) {
  return t ? std::optional<Tensor>(as_contiguous(*t)) : std::nullopt;
}

inline Tensor empty(std::vector<int64_t> size, ScalarType type) {
  return torch::stable::empty(size, type);
}

inline Tensor empty_like_with_last(const Tensor& x, int64_t last, ScalarType type) {
  std::vector<int64_t> size;
  for (int64_t i = 0; i + 1 < x.dim(); i++) size.push_back(x.size(i));
  size.push_back(last);
  return empty(size, type);
}
inline Tensor empty_like_with_last(const Tensor& x, int64_t last) {
  return empty_like_with_last(x, last, x.scalar_type());
}

inline Type type_of(const Tensor& t) {
  if (t.scalar_type() == ScalarType::Float) return Type::f32;
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::BFloat16, "expected a float32 or bfloat16 tensor");
  return Type::bf16;
}

inline Weight weight_of(const Tensor& data, const std::optional<Tensor>& scales, const std::optional<Tensor>& zeros,
                        const std::optional<Tensor>& outer, int64_t n, int64_t k, int64_t group) {
  Weight w{};
  w.n = n;
  w.group = group;
  w.data = data.const_data_ptr();
  STD_TORCH_CHECK(data.dim() == 4 && data.is_contiguous(), "the packed weight must be contiguous, of 4 dimensions");
  if (data.scalar_type() == ScalarType::BFloat16) {
    w.format = Format::bf16;
    w.k = data.size(1) * 2;
  } else {
    STD_TORCH_CHECK(scales.has_value(), "quantized weights need scales");
    STD_TORCH_CHECK(outer ? group == 32 || group == 16 : group >= 0 && group % PADDING == 0, "no kernel has groups of ", group);
    w.k = round_up(k, outer ? SUPER_BLOCK : group ? group : PADDING);
    const int64_t bits = data.size(1) * 32 / w.k, rows = data.size(0) * PANEL;  // the dimension counts words of 4 bytes
    const bool floats = data.scalar_type() == ScalarType::Float8_e4m3fn;
    w.format = floats ? Format::fp8 : bits == 8 ? Format::int8 : bits == 6 ? Format::int6 : Format::int4;
    const bool q4 = outer && group == 32, fits = outer ? w.format == (q4 ? Format::int4 : Format::int6) : bits != 6;
    STD_TORCH_CHECK(fits && (group || bits == 8) && data.size(1) * 32 == w.k * w.bits(), "x has ", k,
                    " columns, the packed weight others");
    const int64_t blocks = rows * (w.k / SUPER_BLOCK), count = q4 ? 3 * blocks : rows * w.groups();
    STD_TORCH_CHECK(scales->is_contiguous() && scales->numel() == count, "the scales do not fit the packed weight");
    STD_TORCH_CHECK(group || scales->scalar_type() == ScalarType::Float, "a scale for each row is float32");
    const ScalarType zero_type = w.format == Format::int8 ? ScalarType::Char : ScalarType::Byte;
    STD_TORCH_CHECK(!zeros || (group && !outer && !floats && zeros->is_contiguous() && zeros->numel() == count &&
                               zeros->scalar_type() == zero_type), "the zeros do not fit the packed weight");
    w.scales = scales->const_data_ptr();
    if (zeros) w.zeros = static_cast<const int8_t*>(zeros->const_data_ptr());
    if (outer) {
      STD_TORCH_CHECK(scales->scalar_type() == (q4 ? ScalarType::Int : ScalarType::Char) && outer->is_contiguous() &&
                          outer->scalar_type() == ScalarType::Half && outer->numel() == blocks * (q4 ? 2 : 1),
                      "the scales of scales do not fit the packed weight");
      w.outer = static_cast<const uint16_t*>(outer->const_data_ptr());
    } else {
      switch (scales->scalar_type()) {
        case ScalarType::Float: w.scale_type = ScaleType::f32; break;
        case ScalarType::BFloat16: w.scale_type = ScaleType::bf16; break;
        case ScalarType::Half: w.scale_type = ScaleType::f16; break;
        default: STD_TORCH_CHECK(false, "scales must be float32, bfloat16 or float16");
      }
    }
  }
  STD_TORCH_CHECK(data.size(0) * PANEL >= n && w.k >= k, "the packed weight is smaller than the product needs");
  return w;
}

}  // namespace hasten

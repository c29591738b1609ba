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

inline ScaleType scale_type_of(const Tensor& scales, bool outer) {
  switch (scales.scalar_type()) {
    case ScalarType::Float: return ScaleType::f32;
    case ScalarType::BFloat16: return ScaleType::bf16;
    case ScalarType::Half: return ScaleType::f16;
    case ScalarType::Byte: return outer ? ScaleType::nibbles : ScaleType::e8m0;
    case ScalarType::Char: return ScaleType::int8;
    case ScalarType::Int: return ScaleType::words;
    default: STD_TORCH_CHECK(false, "scales must be float32, bfloat16, float16 or integers of 8 or 32 bits");
  }
}

// Format of data of a dtype with `bits` bits a value; signed bytes hold indices into a table.
inline Format format_of(ScalarType type, int64_t bits, ScaleType scale_type) {
  if (type == ScalarType::Float8_e4m3fn) return Format::fp8;
  if (type == ScalarType::Char) return scale_type == ScaleType::e8m0 ? Format::fp4 : Format::iq4;
  switch (bits) {
    case 8: return Format::int8;
    case 6: return Format::int6;
    case 5: return Format::int5;
    case 3: return Format::int3;
    case 2: return Format::int2;
    default: return Format::int4;
  }
}

// A quantized weight's parts, checked.
inline void take_scales(Weight& w, const Tensor& data, const Tensor& scales, const std::optional<Tensor>& zeros,
                        const std::optional<Tensor>& outer, int64_t k) {
  const bool levels = outer.has_value();
  w.k = round_up(k, levels ? SUPER_BLOCK : w.group ? w.group : PADDING);
  w.scale_type = scale_type_of(scales, levels);
  w.format = format_of(data.scalar_type(), data.size(1) * 32 / w.k, w.scale_type);  // the dimension counts words of 4 bytes
  STD_TORCH_CHECK((w.group || w.bits() == 8) && data.size(1) * 32 == w.k * w.bits(), "x has ", k,
                  " columns, the packed weight others");
  STD_TORCH_CHECK(levels ? w.group == 32 || w.group == 16 : w.group >= 0 && w.group % PADDING == 0,
                  "no kernel has groups of ", w.group);
  STD_TORCH_CHECK(levels == (w.scale_type > ScaleType::e8m0) && (w.scale_type == ScaleType::e8m0) == (w.format == Format::fp4) &&
                      (w.scale_type != ScaleType::words || w.group == 32) && (!levels || w.integers()),
                  "no kernel has such scales for ", w.bits(), " bits");
  const int64_t rows = data.size(0) * PANEL, blocks = rows * (w.k / SUPER_BLOCK);
  const int64_t count = rows * w.groups(), stored = w.scale_type == ScaleType::words ? 3 * blocks : count;
  STD_TORCH_CHECK(scales.is_contiguous() && scales.numel() == stored, "the scales do not fit the packed weight");
  STD_TORCH_CHECK(w.group || w.scale_type == ScaleType::f32, "a scale for each row is float32");
  w.scales = scales.const_data_ptr();
  if (zeros) {
    const bool minima = zeros->scalar_type() == ScalarType::Half;
    const ScalarType points = w.format == Format::int8 ? ScalarType::Char : ScalarType::Byte;
    STD_TORCH_CHECK(w.group && !levels && w.integers() && data.scalar_type() == ScalarType::Byte && zeros->is_contiguous() &&
                        zeros->numel() == count && (minima || zeros->scalar_type() == points),
                    "the zeros do not fit the packed weight");
    if (minima) w.minima = static_cast<const uint16_t*>(zeros->const_data_ptr());
    else w.zeros = static_cast<const int8_t*>(zeros->const_data_ptr());
  }
  if (outer) {
    STD_TORCH_CHECK(outer->is_contiguous() && outer->scalar_type() == ScalarType::Half &&
                        outer->numel() == blocks * (w.scale_type == ScaleType::int8 ? 1 : 2),
                    "the scales of scales do not fit the packed weight");
    w.outer = static_cast<const uint16_t*>(outer->const_data_ptr());
  }
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
  } else if (data.scalar_type() == ScalarType::Half) {
    w.format = Format::f16;
    w.k = data.size(1);
  } else {
    STD_TORCH_CHECK(scales.has_value(), "quantized weights need scales");
    take_scales(w, data, *scales, zeros, outer, k);
  }
  STD_TORCH_CHECK(data.size(0) * PANEL >= n && w.k >= k, "the packed weight is smaller than the product needs");
  return w;
}

}  // namespace hasten

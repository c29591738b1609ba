// The steps of a decoder block, each one call: what stands between two products is done on the way in (norm, rounding)
// or on the way out (rotary turn, cache write, activation, residual), so that nothing wide goes through memory twice.
#include "../tensors.h"

namespace hasten {

using torch::stable::Tensor;
typedef std::optional<Tensor> Maybe;

static Norm norm_of(const Maybe& weight, const Maybe& bias, double eps, double offset, bool centred) {
  Norm n;
  if (!weight) return n;
  n.weight = weight->const_data_ptr();
  n.type = type_of(*weight);
  if (bias) n.bias = bias->const_data_ptr();
  n.eps = float(eps);
  n.offset = float(offset);
  n.centred = centred;
  return n;
}

// values (row, column) of a product, kept as float32 rows of n.
static float* whole_product(const Weight& w, const Rows& x, int64_t rows, const Maybe& bias) {
  const int64_t n = w.n;
  float* out = scratch<float, 14>(rows * n + LANES);
  const void* b = bias ? bias->const_data_ptr() : nullptr;
  const Type type = bias ? type_of(*bias) : Type::f32;
  product(w, x, rows, [&](int64_t panel, int64_t m0, int64_t m1, const float* values) {
    const int64_t n0 = panel * PANEL, count = std::min<int64_t>(PANEL, n - n0);
    for (int64_t m = m0; m < m1; m++)
      for (int64_t i = 0; i < count; i++)
        out[m * n + n0 + i] = values[(m - m0) * PANEL + i] + (b ? load_one(b, type, n0 + i) : 0.0f);
  });
  return out;
}

// One head: norm, then the rotary turn of its first 2·half elements (element i with element i + half).
static void finish_head(float* x, int64_t size, const Norm& norm, const float* cos, const float* sin, int64_t half) {
  if (norm.weight) {
    alignas(64) float copy[256 + LANES];
    std::memcpy(copy, x, size * sizeof(float));
    widen(copy, Type::f32, 0, size, size, norm, x);
  }
  if (!cos) return;
  for (int64_t i = 0; i < half; i++) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cos[i] - b * sin[i];
    x[i + half] = b * cos[i] + a * sin[i];
  }
}

// In all of them the leading shape of x is free: R rows, whatever they are called.
//
// norm + q, k, v + head norms + rotary turn + cache write. x (R, C), cos and sin (R, dim/2) -> q (R, H, D) in x's
// dtype; k, v go into row slots[r] of the caches (slots, Hkv, D), -1 being the last row, which nobody reads.
Tensor attention_input(Tensor x, Maybe norm_weight, Maybe norm_bias, double eps, double offset, bool centred, Tensor data,
                       Maybe scales, Maybe zeros, Maybe bias, int64_t group_size, int64_t digits, int64_t heads,
                       int64_t head_dim, Maybe q_norm, Maybe k_norm, Maybe cos, Maybe sin, Tensor k_cache,
                       Tensor v_cache, Tensor slots) {
  x = as_contiguous(x);
  const int64_t c = x.size(-1), rows = x.numel() / c, kv_heads = k_cache.size(1), all = heads + 2 * kv_heads;
  STD_TORCH_CHECK(k_cache.scalar_type() == ScalarType::BFloat16 && k_cache.is_contiguous() && v_cache.is_contiguous(),
                  "the fused step writes a contiguous bfloat16 cache");
  STD_TORCH_CHECK(head_dim <= 256, "head sizes up to 256");
  const Weight w = weight_of(data, scales, zeros, all * head_dim, c, group_size);
  const Type type = type_of(x);
  const Norm norm = norm_of(norm_weight, norm_bias, eps, offset, centred);
  const Norm q_n = norm_of(q_norm, std::nullopt, eps, offset, centred), k_n = norm_of(k_norm, std::nullopt, eps, offset, centred);
  const Rows ready = prepare(w, x.const_data_ptr(), type, rows, c, norm, int(digits));
  float* values = whole_product(w, ready, rows, bias);
  Tensor q = empty({rows, heads, head_dim}, x.scalar_type());
  void* q_out = q.mutable_data_ptr();
  auto* k_out = static_cast<uint16_t*>(k_cache.mutable_data_ptr());
  auto* v_out = static_cast<uint16_t*>(v_cache.mutable_data_ptr());
  const int64_t last = k_cache.size(0) - 1, half = cos ? cos->size(-1) : 0;
  const auto* slot = static_cast<const int64_t*>(slots.const_data_ptr());
  const auto* cosines = cos ? static_cast<const float*>(cos->const_data_ptr()) : nullptr;
  const auto* sines = sin ? static_cast<const float*>(sin->const_data_ptr()) : nullptr;
  auto one_row = [&](int64_t r) {
    float* row = values + r * all * head_dim;
    const int64_t to = slot[r] < 0 ? last : slot[r];
    const float* co = cosines ? cosines + r * half : nullptr;
    const float* si = sines ? sines + r * half : nullptr;
    for (int64_t h = 0; h < all; h++) {
      float* head = row + h * head_dim;
      if (h < heads + kv_heads) finish_head(head, head_dim, h < heads ? q_n : k_n, co, si, half);
      if (h < heads) {
        for (int64_t i = 0; i < head_dim; i++) store_one(q_out, type, (r * heads + h) * head_dim + i, head[i]);
      } else {
        const bool key = h < heads + kv_heads;
        uint16_t* out = (key ? k_out : v_out) + (to * kv_heads + h - heads - (key ? 0 : kv_heads)) * head_dim;
        for (int64_t i = 0; i < head_dim; i++) out[i] = to_bf16(head[i]);
      }
    }
  };
  if (rows <= 4) for (int64_t r = 0; r < rows; r++) one_row(r);
  else for_chunks(rows, one_row);
  return q;
}

// residual + norm(x·Wᵀ + b), the norm being optional. x (R, K), residual (R, N) -> the residual's shape and dtype.
Tensor linear_add(Tensor x, Tensor data, Maybe scales, Maybe zeros, Maybe bias, int64_t group_size, int64_t digits,
                  Tensor residual, Maybe norm_weight, Maybe norm_bias, double eps, double offset, bool centred) {
  x = as_contiguous(x);
  residual = as_contiguous(residual);
  const int64_t n = residual.size(-1), rows = residual.numel() / n, k = rows ? x.numel() / rows : 0;
  const Weight w = weight_of(data, scales, zeros, n, k, group_size);
  const Type type = type_of(residual), bias_type = bias ? type_of(*bias) : Type::f32;
  const Norm norm = norm_of(norm_weight, norm_bias, eps, offset, centred);
  const Rows ready = prepare(w, x.const_data_ptr(), type_of(x), rows, k, Norm{}, int(digits));
  Tensor out = empty_like_with_last(residual, n);
  void* to = out.mutable_data_ptr();
  const void* before = residual.const_data_ptr();
  if (norm.weight) {
    float* values = whole_product(w, ready, rows, bias);
    for_chunks(rows, [&](int64_t r) {
      float* normal = scratch<float, 7>(n + LANES);
      widen(values, Type::f32, r, n, n, norm, normal);
      for (int64_t i = 0; i < n; i++) store_one(to, type, r * n + i, load_one(before, type, r * n + i) + normal[i]);
    });
    return out;
  }
  const void* b = bias ? bias->const_data_ptr() : nullptr;
  product(w, ready, rows, [&](int64_t panel, int64_t m0, int64_t m1, const float* values) {
    const int64_t n0 = panel * PANEL, count = std::min<int64_t>(PANEL, n - n0);
    for (int64_t m = m0; m < m1; m++) {
      const float* from = values + (m - m0) * PANEL;
      const int64_t base = m * n + n0;
      int64_t i = 0;
      for (; i + LANES <= count; i += LANES) {
        F32 v = load(from + i) + load_as(before, type, base + i);
        if (b) v += load_as(b, bias_type, n0 + i);
        store_as(to, type, base + i, v);
      }
      for (; i < count; i++)
        store_one(to, type, base + i,
                  from[i] + load_one(before, type, base + i) + (b ? load_one(b, bias_type, n0 + i) : 0.0f));
    }
  });
  return out;
}

INLINE F32 logistic(F32 x) { return 1.0f / (1.0f + exp(-x)); }
// erf by Abramowitz and Stegun 7.1.26, absolute error below 1.5e-7.
INLINE F32 erf(F32 x) {
  F32 a = abs(x), t = 1.0f / (1.0f + 0.3275911f * a);
  F32 p = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
  F32 y = 1.0f - p * exp(-(a * a));
  return (F32)((U32)y | ((U32)x & 0x80000000u));
}
enum class Activation { silu, gelu, gelu_tanh, relu };
INLINE F32 activate(F32 x, Activation kind) {
  switch (kind) {
    case Activation::silu: return x * logistic(x);
    case Activation::gelu: return 0.5f * x * (1.0f + erf(x * 0.70710678118654752f));
    // 0.5·(1 + tanh(y)) is the logistic function of 2·y.
    case Activation::gelu_tanh: return x * logistic(1.5957691216057308f * (x + 0.044715f * x * x * x));
    default: return max(x, F32{});
  }
}

// norm + act(x·Gateᵀ)·(x·Upᵀ), or act(x·Upᵀ) if not gated. x (R, C) -> (R, I) in x's dtype. Gated weights alternate
// 32 rows of gate and 32 rows of up, so that both halves of a product meet in one panel.
Tensor mlp_input(Tensor x, Maybe norm_weight, Maybe norm_bias, double eps, double offset, bool centred, Tensor data,
                 Maybe scales, Maybe zeros, Maybe bias, int64_t group_size, int64_t digits, int64_t inner,
                 bool gated, int64_t activation) {
  x = as_contiguous(x);
  const int64_t c = x.size(-1), rows = x.numel() / c, each = gated ? PANEL / 2 : PANEL;
  const int64_t n = (inner + each - 1) / each * PANEL;
  const Weight w = weight_of(data, scales, zeros, n, c, group_size);
  const Type type = type_of(x), bias_type = bias ? type_of(*bias) : Type::f32;
  const Activation kind = Activation(activation);
  const Rows ready = prepare(w, x.const_data_ptr(), type, rows, c, norm_of(norm_weight, norm_bias, eps, offset, centred), int(digits));
  Tensor out = empty_like_with_last(x, inner);
  void* to = out.mutable_data_ptr();
  const void* b = bias ? bias->const_data_ptr() : nullptr;
  product(w, ready, rows, [&](int64_t panel, int64_t m0, int64_t m1, const float* values) {
    const int64_t i0 = panel * each, count = std::min<int64_t>(each, inner - i0);
    for (int64_t m = m0; m < m1; m++)
      for (int64_t i = 0; i < count; i += LANES) {
        const float* from = values + (m - m0) * PANEL + i;
        F32 first = load(from), second = gated ? load(from + PANEL / 2) : F32{};
        if (b) {
          first += load_as(b, bias_type, panel * PANEL + i);
          if (gated) second += load_as(b, bias_type, panel * PANEL + PANEL / 2 + i);
        }
        F32 y = activate(first, kind);
        if (gated) y *= second;
        const int64_t base = m * inner + i0 + i;
        if (i + LANES <= count) store_as(to, type, base, y);
        else for (int64_t j = 0; j < count - i; j++) store_one(to, type, base + j, y[j]);
      }
  });
  return out;
}

}  // namespace hasten

STABLE_TORCH_LIBRARY_FRAGMENT(HASTEN_LIBRARY, m) {
  m.def("attention_input(Tensor x, Tensor? norm_weight, Tensor? norm_bias, float eps, float offset, bool centred, Tensor data, Tensor? scales, Tensor? zeros, Tensor? bias, int group_size, int digits, int heads, int head_dim, Tensor? q_norm, Tensor? k_norm, Tensor? cos, Tensor? sin, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots) -> Tensor");
  m.def("linear_add(Tensor x, Tensor data, Tensor? scales, Tensor? zeros, Tensor? bias, int group_size, int digits, Tensor residual, Tensor? norm_weight, Tensor? norm_bias, float eps, float offset, bool centred) -> Tensor");
  m.def("mlp_input(Tensor x, Tensor? norm_weight, Tensor? norm_bias, float eps, float offset, bool centred, Tensor data, Tensor? scales, Tensor? zeros, Tensor? bias, int group_size, int digits, int inner, bool gated, int activation) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(HASTEN_LIBRARY, CPU, m) {
  m.impl("attention_input", TORCH_BOX(&hasten::attention_input));
  m.impl("linear_add", TORCH_BOX(&hasten::linear_add));
  m.impl("mlp_input", TORCH_BOX(&hasten::mlp_input));
}

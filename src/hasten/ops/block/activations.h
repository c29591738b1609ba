// The activation functions of MLPs, on 16 lanes.
#pragma once

#include "../simd.h"

namespace hasten {

INLINE F32 logistic(F32 x) { return 1.0f / (1.0f + exp(-x)); }
// erf by Abramowitz and Stegun 7.1.26, absolute error below 1.5e-7.
INLINE F32 erf(F32 x) {
  F32 a = abs(x), t = 1.0f / (1.0f + 0.3275911f * a);
  F32 p = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
  F32 y = 1.0f - p * exp(-(a * a));
  return as<F32>(as<U32>(y) | (as<U32>(x) & 0x80000000u));
}
// xIELU (model/activations.py): positive·x² or negative·(e^min(x, ε) - 1 - x), plus x/2.
INLINE F32 xielu(F32 x, float positive, float negative) {
  const F32 below = (exp(min(x, splat(-1e-6f))) - 1.0f - x) * negative;
  return select(x > F32{}, positive * x * x, below) + 0.5f * x;
}
enum class Activation { silu, gelu, gelu_tanh, relu, relu2, quick_gelu, xielu };
// positive, negative: of xIELU.
INLINE F32 activate(F32 x, Activation kind, float positive = 0, float negative = 0) {
  switch (kind) {
    case Activation::silu: return x * logistic(x);
    case Activation::gelu: return 0.5f * x * (1.0f + erf(x * 0.70710678118654752f));
    // 0.5·(1 + tanh(y)) is the logistic function of 2·y.
    case Activation::gelu_tanh: return x * logistic(1.5957691216057308f * (x + 0.044715f * x * x * x));
    case Activation::relu2: return max(x, F32{}) * max(x, F32{});
    case Activation::quick_gelu: return x * logistic(1.702f * x);
    case Activation::xielu: return xielu(x, positive, negative);
    default: return max(x, F32{});
  }
}

}  // namespace hasten

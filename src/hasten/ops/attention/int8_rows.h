// Cached keys and values in int8: a row is one head's vector of one token, D values and then their scale (float32, at
// any address). The scale is the row's largest magnitude / 127; int8_rows.py is the reference of these bytes.
#pragma once

#include "../tensors.h"

namespace hasten {

constexpr int64_t SCALE_BYTES = 4;

// Whether a cache (slots, Hkv, …) of heads of `size` holds such rows; bf16 is the other thing it can hold.
inline bool holds_int8(const torch::stable::Tensor& cache, int64_t size) {
  const bool int8 = cache.scalar_type() == ScalarType::Char;
  STD_TORCH_CHECK(int8 || cache.scalar_type() == ScalarType::BFloat16, "the native cache holds bfloat16 or int8");
  STD_TORCH_CHECK(cache.dim() == 3 && cache.size(2) == size + (int8 ? SCALE_BYTES : 0),
                  "the cache does not fit heads of ", size, " values");
  return int8;
}

// Both caches have their rows at the same places, each row in one piece.
inline bool lie_alike(const torch::stable::Tensor& k, const torch::stable::Tensor& v) {
  bool alike = k.stride(2) == 1;
  for (int64_t i = 0; i < 3; i++) alike &= k.size(i) == v.size(i) && k.stride(i) == v.stride(i);
  return alike;
}

INLINE float scale_of(const uint8_t* row, int64_t size) {
  float scale;
  std::memcpy(&scale, row + size, SCALE_BYTES);
  return scale;
}

// x (size values, at most 256) -> row. With a NaN or an infinity among them the scale is NaN. Values that are all below
// 1e-34 count as zeros: the scale's inverse would overflow.
inline void quantize_row(const float* x, int64_t size, uint8_t* row) {
  alignas(64) float padded[256] = {};
  alignas(16) int8_t values[256];
  std::memcpy(padded, x, size * sizeof(float));
  const float top = largest_magnitude(padded, round_up(size, LANES));
  const bool finite = std::isfinite(top), any = finite && top > 1e-34f;
  const float scale = any ? top / 127.0f : finite ? 0.0f : __builtin_nanf("");
  const double up = any ? 127.0f / top : 0.0f;
  // In double the product is exact, so that it is rounded once, to even, whether or not a compiler fuses it with the
  // addition: the same bytes on every machine. Adding and taking away 1.5·2^52 rounds to the nearest integer.
  constexpr int half = NATIVE / 2;
  typedef double F64 __attribute__((vector_size(REGISTER)));
  typedef float Floats __attribute__((vector_size(REGISTER / 2)));
  typedef int32_t Ints __attribute__((vector_size(REGISTER / 2)));
  alignas(64) int32_t nearest[LANES];
  for (int64_t i = 0; any && i < size; i += LANES) {
    for (int j = 0; j < LANES; j += half) {
      Floats x; std::memcpy(&x, padded + i + j, sizeof x);
      const F64 n = (__builtin_convertvector(x, F64) * up + 0x1.8p52) - 0x1.8p52;
      const Ints whole = __builtin_convertvector(n, Ints);
      std::memcpy(nearest + j, &whole, sizeof whole);
    }
    store_int8(values + i, load(nearest));
  }
  if (any) std::memcpy(row, values, size);
  else std::memset(row, 0, size);
  std::memcpy(row + size, &scale, SCALE_BYTES);
}

// Small integers as bf16 pairs, exactly: the lower half of each word from a, the upper from b.
INLINE U32 pairs_of(I32 a, I32 b) { return (as<U32>(to_float(a)) >> 16) | as<U32>(to_float(b)); }

}  // namespace hasten

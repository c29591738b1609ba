// Rows of cached keys and values: one head's vector of one token in bf16, int8 with a scale, or int4 with a scale for
// each 32 values, perhaps turned before it is rounded. cache_rows.py describes them and is the reference of their bytes.
#pragma once

#include "../tensors.h"

namespace hasten {

constexpr int64_t SCALE_BYTES = 4;                   // of an int8 row: a float32, at any address
constexpr int64_t GROUP = 32, GROUP_BYTES = 16;      // of an int4 row: values that share a bf16 scale
constexpr int64_t LARGEST_ROW = 576;                 // values

enum class RowFormat { bf16, int8, int4 };

inline int64_t row_bytes(RowFormat rows, int64_t size) {
  if (rows == RowFormat::int4) return (size + GROUP - 1) / GROUP * (GROUP_BYTES + 2);
  return rows == RowFormat::int8 ? size + SCALE_BYTES : 2 * size;
}

// The keys and values of a layer, (slots, Hkv, …), whose rows are at the same places of both tensors, each in one piece.
struct Cache {
  Cache(const torch::stable::Tensor& keys, const torch::stable::Tensor& values)
      : k(static_cast<uint8_t*>(keys.mutable_data_ptr())), v(static_cast<uint8_t*>(values.mutable_data_ptr())) {
    const ScalarType type = keys.scalar_type();
    STD_TORCH_CHECK(type == ScalarType::BFloat16 || type == ScalarType::Char || type == ScalarType::Byte,
                    "the native cache holds bfloat16, int8 or int4 (as uint8)");
    STD_TORCH_CHECK(values.scalar_type() == type, "keys and values must be of one dtype");
    bool alike = keys.dim() == 3 && values.dim() == 3 && keys.stride(2) == 1;
    for (int64_t i = 0; i < 3 && alike; i++) alike = keys.size(i) == values.size(i) && keys.stride(i) == values.stride(i);
    STD_TORCH_CHECK(alike, "keys and values (slots, heads, values) must lie alike, each head's row in one piece");
    rows = type == ScalarType::BFloat16 ? RowFormat::bf16 : type == ScalarType::Char ? RowFormat::int8 : RowFormat::int4;
    const int64_t value_bytes = rows == RowFormat::bf16 ? 2 : 1;
    slots = keys.size(0), heads = keys.size(1), bytes = keys.size(2) * value_bytes;
    slot_bytes = keys.stride(0) * value_bytes, head_bytes = keys.stride(1) * value_bytes;
  }
  void check(int64_t size) const {
    STD_TORCH_CHECK(bytes == row_bytes(rows, size), "the cache does not fit heads of ", size, " values");
  }

  uint8_t *k, *v;
  RowFormat rows;
  int64_t slots, heads, bytes;      // bytes: of a row
  int64_t slot_bytes, head_bytes;   // from a slot to the next, from a head's row to the next head's
};

// x[i] ± x[i ^ H] of a register.
template <int H, int... I, class V>
INLINE V butterfly(V x, std::integer_sequence<int, I...>) {
  return shuffle<(I ^ H)...>(x, x) + x * V{(I & H ? -1.0f : 1.0f)...};
}

// x, at most LARGEST_ROW values, times the Hadamard matrix of the largest power of two that divides their number, divided
// by its root: `turn` in cache_rows.py, bit by bit on every instruction set, since sums of two are all that is rounded.
inline void turn(float* x, int64_t size) {
  typedef Native<float>::type V;
  const int64_t order = size & -size, count = (size + NATIVE - 1) / NATIVE;
  constexpr auto lanes = std::make_integer_sequence<int, NATIVE>{};
  V v[LARGEST_ROW / NATIVE];
  v[count - 1] = V{};  // what is behind x is zeros
  std::memcpy(v, x, size * sizeof(float));
  for (int64_t i = 0; i < count; i++) {
    if (order > 1) v[i] = butterfly<1>(v[i], lanes);
    if (order > 2) v[i] = butterfly<2>(v[i], lanes);
    if (NATIVE > 4 && order > 4) v[i] = butterfly<4 % NATIVE>(v[i], lanes);
    if (NATIVE > 8 && order > 8) v[i] = butterfly<8 % NATIVE>(v[i], lanes);
  }
  for (int64_t half = 1; half * NATIVE < order; half *= 2)
    for (int64_t i = 0; i < count; i += 2 * half)
      for (int64_t j = i; j < i + half; j++) {
        const V a = v[j], b = v[j + half];
        v[j] = a + b, v[j + half] = a - b;
      }
  const float factor = float(1 / std::sqrt(double(order)));
  for (int64_t i = 0; i < count; i++) v[i] *= factor;
  std::memcpy(x, v, size * sizeof(float));
}

INLINE float scale_of(const uint8_t* row, int64_t size) {
  float scale;
  std::memcpy(&scale, row + size, SCALE_BYTES);
  return scale;
}

// size values of x with zeros behind them, up to a multiple of `unit`; padded: room for LARGEST_ROW.
INLINE void pad(const float* x, int64_t size, int64_t unit, float* padded) {
  std::memcpy(padded, x, size * sizeof(float));
  std::memset(padded + size, 0, (round_up(size, unit) - size) * sizeof(float));
}

// x (size values, at most LARGEST_ROW) -> an int8 row. With a NaN or an infinity among them the scale is NaN. Values that
// are all below 1e-34 count as zeros: the scale's inverse would overflow.
inline void store_int8_row(const float* x, int64_t size, uint8_t* row) {
  alignas(64) float padded[LARGEST_ROW];
  alignas(16) int8_t values[LARGEST_ROW];
  pad(x, size, LANES, padded);
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

// x (size values, at most LARGEST_ROW) -> an int4 row. What is not finite makes its group's scale NaN, as in int8 rows.
inline void store_int4_row(const float* x, int64_t size, uint8_t* row) {
  alignas(64) float padded[LARGEST_ROW];
  pad(x, size, GROUP, padded);
  const int64_t groups = (size + GROUP - 1) / GROUP;
  uint8_t* scales = row + groups * GROUP_BYTES;
  for (int64_t g = 0; g < groups; g++) {
    const F32 low = load(padded + g * GROUP), high = load(padded + g * GROUP + LANES);
    const float magnitude = largest_magnitude(padded + g * GROUP, GROUP);
    const float above = max_lanes(max(low, high)), below = -max_lanes(max(-low, -high));
    const float top = above > -below ? above : below;
    const bool finite = std::isfinite(magnitude), any = finite && magnitude > 1e-34f;
    const float exact = any ? top / -8.0f : 0.0f;
    uint32_t bits;
    std::memcpy(&bits, &exact, 4);
    const uint16_t scale = finite ? bits >> 16 & 0xfff8 : 0x7fc0;
    // A quotient, which no compiler fuses with the addition: the same bytes on every machine.
    const float step = any ? from_bf16(scale) : 1.0f;
    auto nearest = [&](F32 v) {
      const I32 n = to_int((v / step + 12582912.0f) - 12582912.0f);
      return select(n > 7, splat(7), select(n < -8, splat(-8), n));
    };
    if (any) store_int8(row + g * GROUP_BYTES, (nearest(low) & 15) | (nearest(high) << 4));
    else std::memset(row + g * GROUP_BYTES, 0, GROUP_BYTES);
    std::memcpy(scales + 2 * g, &scale, 2);
  }
}

// x as a cache keeps it; x may be turned on the way.
inline void store_cached(RowFormat rows, bool rotated, float* x, int64_t size, uint8_t* row) {
  if (rotated) turn(x, size);
  if (rows == RowFormat::int8) return store_int8_row(x, size, row);
  if (rows == RowFormat::int4) return store_int4_row(x, size, row);
  store_row(row, Type::bf16, 0, x, size);
}

// What bf16 holds exactly as pairs of it: the lower half of each word from a, the upper from b.
INLINE U32 pairs_of(F32 a, F32 b) { return (as<U32>(a) >> 16) | as<U32>(b); }
INLINE U32 pairs_of(I32 a, I32 b) { return pairs_of(to_float(a), to_float(b)); }

}  // namespace hasten

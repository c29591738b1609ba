// Vectors of 16 lanes, the same on every machine: the compiler splits them into what the instruction set has. Only
// the three dot products, where instruction sets really differ, are written for each.
//
// Compiled once for each instruction set, chosen by the flags that native.py passes: AMX (its tiles are in
// linear/amx.h), AVX-512 with VNNI and BF16, AVX-512, AVX2 with FMA, or none of them (portable; ARM takes that).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

namespace hasten {

constexpr int LANES = 16;
typedef float F32 __attribute__((vector_size(64)));
typedef int32_t I32 __attribute__((vector_size(64)));
typedef int8_t I8 __attribute__((vector_size(16)));
typedef uint32_t U32 __attribute__((vector_size(64)));
typedef uint16_t U16 __attribute__((vector_size(32)));

INLINE F32 load(const float* p) { F32 v; std::memcpy(&v, p, 64); return v; }
INLINE I32 load(const int32_t* p) { I32 v; std::memcpy(&v, p, 64); return v; }
INLINE void store(float* p, F32 v) { std::memcpy(p, &v, 64); }
INLINE void store(int32_t* p, I32 v) { std::memcpy(p, &v, 64); }
INLINE U32 load_line(const void* p) { U32 v; std::memcpy(&v, p, 64); return v; }
INLINE F32 splat(float x) { return F32{} + x; }
INLINE F32 to_float(I32 v) { return __builtin_convertvector(v, F32); }
INLINE I32 to_int(F32 v) { return __builtin_convertvector(v, I32); }

// bfloat16 is the upper half of a float32; rounding is to the nearest, ties to even. NaN stays NaN.
INLINE float from_bf16(uint16_t x) { uint32_t u = uint32_t(x) << 16; float f; std::memcpy(&f, &u, 4); return f; }
INLINE uint16_t to_bf16(float f) {
  uint32_t u; std::memcpy(&u, &f, 4);
  if (f != f) return uint16_t((u >> 16) | 0x40);
  return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
INLINE F32 load_bf16(const uint16_t* p) {
  U16 h; std::memcpy(&h, p, 32);
  U32 u = __builtin_convertvector(h, U32) << 16;
  return (F32)u;
}
INLINE void store_bf16(uint16_t* p, F32 v) {
#if defined(__AVX512BF16__)
  __m256bh h = _mm512_cvtneps_pbh((__m512)v);
  std::memcpy(p, &h, 32);
#else
  U32 u = (U32)v;
  U32 rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  U32 nan = (U32)(v != v);  // all ones where NaN
  U16 h = __builtin_convertvector((rounded & ~nan) | (((u >> 16) | 0x40) & nan), U16);
  std::memcpy(p, &h, 32);
#endif
}

INLINE void store_bf16(uint16_t* p, F32 low, F32 high) {  // 32 values
#if defined(__AVX512BF16__)
  const __m512bh h = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  std::memcpy(p, &h, 64);
#else
  store_bf16(p, low);
  store_bf16(p + LANES, high);
#endif
}

// 16 signed bytes. (g++ 12 makes a conversion to four times the width value by value.)
INLINE I32 load_int8(const void* p) {
#if defined(__AVX512F__)
  return (I32)_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(p));
  __m256i wide[2] = {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))};
  I32 v; std::memcpy(&v, wide, 64);
  return v;
#else
  I8 v; std::memcpy(&v, p, 16);
  return __builtin_convertvector(v, I32);
#endif
}

// IEEE half precision, for the scales of published int4 checkpoints.
INLINE F32 load_f16(const uint16_t* p) {
#if defined(__AVX512F__)
  __m256i h; std::memcpy(&h, p, 32);
  return (F32)_mm512_cvtph_ps(h);
#else
  U16 h16; std::memcpy(&h16, p, 32);
  U32 h = __builtin_convertvector(h16, U32);
  // Shift exponent and mantissa into place, then correct the bias by a product, which also handles subnormals.
  F32 magnitude = (F32)((h & 0x7fff) << 13) * 0x1p112f;
  U32 special = (U32)((I32)(h & 0x7c00) == 0x7c00) & 0x7f800000u;
  return (F32)(((U32)magnitude | special) | ((h & 0x8000) << 16));
#endif
}

// Lanes 8 … 15, 4 … 7, 2 … 3 or 1 in the place of the first ones.
#define HASTEN_UPPER(v, n)                                                                                         \
  __builtin_shufflevector(v, v, (n), (n) + 1, (n) + 2, (n) + 3, (n) + 4, (n) + 5, (n) + 6, (n) + 7, 8, 9, 10, 11, \
                          12, 13, 14, 15)
// A fixed tree, so that every instruction set and batch sums in the same order.
INLINE float sum_lanes(F32 v) {
  v += HASTEN_UPPER(v, 8);
  v += HASTEN_UPPER(v, 4);
  v += HASTEN_UPPER(v, 2);
  v += HASTEN_UPPER(v, 1);
  return v[0];
}
INLINE float max_lanes(F32 v) {
  F32 u = HASTEN_UPPER(v, 8);
  v = v > u ? v : u;
  u = HASTEN_UPPER(v, 4);
  v = v > u ? v : u;
  u = HASTEN_UPPER(v, 2);
  v = v > u ? v : u;
  u = HASTEN_UPPER(v, 1);
  v = v > u ? v : u;
  return v[0];
}
#undef HASTEN_UPPER
INLINE F32 max(F32 a, F32 b) { return a > b ? a : b; }
INLINE bool any_above(F32 a, F32 b) {  // whether a lane of a is larger than that of b
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ);
#else
  const I32 above = a > b;
  int32_t x[LANES], all = 0;
  store(x, above);
  for (int32_t one : x) all |= one;
  return all;
#endif
}
INLINE F32 abs(F32 v) { return (F32)((U32)v & 0x7fffffffu); }

// e^x by range reduction and a polynomial of degree 6; error below 2 units in the last place over the whole range.
INLINE F32 exp(F32 x) {
  x = x > splat(88.3762626647949f) ? splat(88.3762626647949f) : x;  // NaN stays NaN
  F32 low = splat(-87.3365478515625f);
  I32 underflow = x < low;
  x = underflow ? low : x;
  F32 shifted = x * 1.44269504088896341f + 12582912.0f;  // 1.5·2^23: the nearest integer stands in the low bits
  F32 n = shifted - 12582912.0f;
  F32 r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  F32 p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  I32 exponent = ((I32)shifted - 0x4b400000 + 127) << 23;
  F32 result = p * (F32)exponent;
  return underflow ? F32{} : result;
}

INLINE F32 larger(F32 a, F32 b) {  // b where either is NaN
#if defined(__AVX512F__)
  return (F32)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}

// a·b + c, rounded once where the instruction set can. Written out, so that no compiler decides it tile by tile.
INLINE F32 multiply_add(F32 a, F32 b, F32 c) {
#if defined(__AVX512F__)
  return (F32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return a * b + c;
#endif
}

// 2^x for x below 128, 0 below -126.5, by a polynomial of least relative error on [-½, ½]: 8e-8 of degree 5, 1e-4 of
// degree 3, which is enough where the result is rounded to bf16. NaN stays NaN. (AVX-512's own scalef takes Intel's
// processors 63 ns where a lane underflows.)
template <int DEGREE = 5>
INLINE F32 exp2(F32 x) {
  static_assert(DEGREE == 5 || DEGREE == 3);
  constexpr float magic = 12582912.0f + 127.0f;  // 1.5·2^23: the nearest integer, and the exponent's bias, in the low bits
  x = larger(splat(-127.0f), x);
  const F32 shifted = x + magic, r = x - (shifted - magic);
  F32 p;
  if constexpr (DEGREE == 5) {
    p = multiply_add(splat(1.327647198e-3f), r, splat(9.675541334e-3f));
    p = multiply_add(p, r, splat(5.550713274e-2f));
    p = multiply_add(p, r, splat(2.402211972e-1f));
    p = multiply_add(p, r, splat(6.931469671e-1f));
  } else {
    p = multiply_add(splat(5.500893e-2f), r, splat(2.4221097e-1f));
    p = multiply_add(p, r, splat(6.9328293e-1f));
  }
  p = multiply_add(p, r, splat(1.0f));
  return p * (F32)((I32)shifted << 23);
}

// acc += w·x for 16 rows: a line holds, row by row, the two bf16 weights for x0 and x1 (packed in `pair`).
INLINE F32 dot_bf16(F32 acc, const uint16_t* line, uint32_t pair) {
#if defined(__AVX512BF16__)
  return (F32)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_loadu_si512(line), (__m512bh)_mm512_set1_epi32(pair));
#else
  U32 w = load_line(line);
  acc += (F32)(w << 16) * from_bf16(uint16_t(pair));
  acc += (F32)(w & 0xffff0000u) * from_bf16(uint16_t(pair >> 16));
  return acc;
#endif
}

// acc += w·x for 16 rows: each 32-bit lane holds four unsigned bytes of a row, `quad` the four signed bytes of x.
INLINE I32 dot_u8s8(I32 acc, U32 w, int32_t quad) {
#if defined(__AVX512VNNI__)
  return (I32)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(quad));
#elif defined(__AVX2__)
  // Bytes 0, 2 and bytes 1, 3 as pairs of 16-bit integers: exact, where the 8-bit instruction would saturate.
  int32_t even = int32_t(uint16_t(int8_t(quad))) | (int32_t(int8_t(quad >> 16)) << 16);
  int32_t odd = int32_t(uint16_t(int8_t(quad >> 8))) | (int32_t(int8_t(quad >> 24)) << 16);
  U32 we = w & 0x00ff00ffu, wo = (w >> 8) & 0x00ff00ffu;
#if defined(__AVX512BW__)
  acc += (I32)_mm512_madd_epi16((__m512i)we, _mm512_set1_epi32(even));
  return acc + (I32)_mm512_madd_epi16((__m512i)wo, _mm512_set1_epi32(odd));
#else
  __m256i e[2], o[2], r[2];
  std::memcpy(e, &we, 64); std::memcpy(o, &wo, 64);
  for (int i = 0; i < 2; i++)
    r[i] = _mm256_add_epi32(_mm256_madd_epi16(e[i], _mm256_set1_epi32(even)),
                            _mm256_madd_epi16(o[i], _mm256_set1_epi32(odd)));
  I32 sum; std::memcpy(&sum, r, 64);
  return acc + sum;
#endif
#else
  for (int j = 0; j < 4; j++) acc += (I32)((w >> (8 * j)) & 0xffu) * int32_t(int8_t(quad >> (8 * j)));
  return acc;
#endif
}

}  // namespace hasten

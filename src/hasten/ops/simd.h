// What the kernels compute with 16 lanes (lanes.h): bfloat16, exponentials, and the dot products in which instruction
// sets really differ.
//
// Compiled once for each instruction set, chosen by the flags that native.py passes: AMX (its tiles are in
// linear/amx.h), AVX-512 with VNNI and BF16, AVX-512, AVX2 with VNNI, AVX2 with FMA, NEON with dot products, also with
// products of matrices (linear/neon.h), or none of them (portable).
#pragma once

#include <cmath>

#include "lanes.h"

namespace hasten {

constexpr float LOG2E = 1.44269504088896341f;

INLINE F32 max(F32 a, F32 b) { return select(a > b, a, b); }  // b where either is NaN
INLINE F32 min(F32 a, F32 b) { return select(a < b, a, b); }  // likewise
INLINE F32 abs(F32 v) { return as<F32>(as<U32>(v) & 0x7fffffffu); }

INLINE F32 larger(F32 a, F32 b) {  // b where either is NaN
#if HASTEN_512
  return (F32)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
#else
  return select(a > b, a, b);
#endif
}

INLINE bool any_above(F32 a, F32 b) {  // whether a lane of a is larger than that of b
#if HASTEN_512
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ);
#elif defined(__AVX2__)
  const auto above = (a.low > b.low) | (a.high > b.high);
  return !_mm256_testz_si256((__m256i)above, (__m256i)above);
#else
  return join_lanes(a > b, [](auto x, auto y) { return x | y; });
#endif
}

INLINE bool all_below(F32 a, F32 b) {  // whether every lane of a is smaller than that of b, and a number
#if HASTEN_512
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LT_OQ) == 0xffff;
#elif defined(__AVX2__)
  const auto below = (a.low < b.low) & (a.high < b.high);
  return _mm256_movemask_ps((__m256)below) == 0xff;
#else
  return join_lanes(a < b, [](auto x, auto y) { return x & y; });
#endif
}

INLINE bool any(U32 bits) {  // whether one is set
#if HASTEN_512
  return _mm512_test_epi32_mask((__m512i)bits, (__m512i)bits);
#elif defined(__AVX2__)
  const auto both = (__m256i)(bits.low | bits.high);
  return !_mm256_testz_si256(both, both);
#else
  return join_lanes(bits, [](auto x, auto y) { return x | y; });
#endif
}

// a·b + c, rounded once where the instruction set can. Written out, so that no compiler decides it tile by tile.
INLINE F32 multiply_add(F32 a, F32 b, F32 c) {
#if HASTEN_512
  return (F32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
#elif defined(__aarch64__)
  return each_part_of<F32>(
      [](auto a, auto b, auto c) {
        return (Native<float>::type)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
      }, a, b, c);
#else
  return a * b + c;
#endif
}

// acc += a·b, in the register that acc has: g++ moves accumulators about where a tile fills all 16 of AVX2's registers.
INLINE void accumulate(F32& acc, F32 a, F32 b) {
#if defined(__FMA__) && !HASTEN_512
  asm("vfmadd231ps %2, %1, %0" : "+x"(acc.low) : "x"(a.low), "x"(b.low));
  asm("vfmadd231ps %2, %1, %0" : "+x"(acc.high) : "x"(a.high), "x"(b.high));
#else
  acc = multiply_add(a, b, acc);
#endif
}

INLINE void accumulate(I32& acc, I32 v) {
#if defined(__AVX2__) && !HASTEN_512
  asm("vpaddd %1, %0, %0" : "+x"(acc.low) : "x"(v.low));
  asm("vpaddd %1, %0, %0" : "+x"(acc.high) : "x"(v.high));
#else
  acc += v;
#endif
}

// bfloat16 is the upper half of a float32; rounding is to the nearest, ties to even. NaN stays NaN.
INLINE float from_bf16(uint16_t x) { uint32_t u = uint32_t(x) << 16; float f; std::memcpy(&f, &u, 4); return f; }
INLINE uint16_t to_bf16(float f) {
  uint32_t u; std::memcpy(&u, &f, 4);
  if (f != f) return uint16_t((u >> 16) | 0x40);
  return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
INLINE F32 load_bf16(const uint16_t* p) { return as<F32>(load_u16(p) << 16); }
// The rounded value in the upper half of each lane.
INLINE U32 round_bf16(F32 v) {
  const U32 u = as<U32>(v);
  return as<U32>(select(v != v, as<I32>(u | 0x400000u), as<I32>(u + 0x7fffu + ((u >> 16) & 1u))));
}
INLINE void store_bf16(uint16_t* p, F32 v) {
#if defined(__AVX512BF16__)
  __m256bh h = _mm512_cvtneps_pbh((__m512)v);
  std::memcpy(p, &h, 32);
#else
  store_u16(p, round_bf16(v) >> 16);
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
// Words of bf16 values of a (lower half) and b.
INLINE U32 pair_bf16(F32 a, F32 b) {
#if defined(__AVX512BF16__)
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22,
                                                6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return (U32)_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
#else
  return (round_bf16(a) >> 16) | (round_bf16(b) & 0xffff0000u);
#endif
}

// IEEE half precision, for the scales of published int4 checkpoints.
INLINE F32 load_f16(const uint16_t* p) {
#if HASTEN_512
  return (F32)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  const auto* from = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(from)), _mm256_cvtph_ps(_mm_loadu_si128(from + 1))};
#else
  const U32 h = load_u16(p);
  // Shift exponent and mantissa into place, then correct the bias by a product, which also handles subnormals.
  const F32 magnitude = as<F32>((h & 0x7fffu) << 13) * 0x1p112f;
  const U32 special = as<U32>((h & 0x7c00u) == 0x7c00u) & 0x7f800000u;
  return as<F32>(as<U32>(magnitude) | special | ((h & 0x8000u) << 16));
#endif
}

// e^x by range reduction and a polynomial of degree 6; error below 2 units in the last place over the whole range.
INLINE F32 exp(F32 x) {
  x = select(x > splat(88.3762626647949f), splat(88.3762626647949f), x);  // NaN stays NaN
  const F32 low = splat(-87.3365478515625f);
  const I32 underflow = x < low;
  x = select(underflow, low, x);
  F32 shifted = x * LOG2E + 12582912.0f;  // 1.5·2^23: the nearest integer is in the low bits
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
  const I32 exponent = (as<I32>(shifted) - 0x4b400000 + 127) << 23;
  const F32 result = p * as<F32>(exponent);
  return select(underflow, F32{}, result);
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
  return p * as<F32>(as<I32>(shifted) << 23);
}

// ARM's products of two rows by two, in bfloat16 and of bytes.
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && defined(__ARM_FEATURE_MATMUL_INT8)
#define HASTEN_MMLA 1
#else
#define HASTEN_MMLA 0
#endif

// What rows of x are, that bf16 weights are multiplied with: bf16 where an instruction multiplies several of them, else
// float32, which costs no rounding and no conversion.
#if defined(__AVX512BF16__) || HASTEN_MMLA
using Operand = uint16_t;
INLINE void store_operand(Operand* p, F32 v) { store_bf16(p, v); }
INLINE void store_operand(Operand* p, F32 low, F32 high) { store_bf16(p, low, high); }
INLINE Operand to_operand(float x) { return to_bf16(x); }
INLINE float from_operand(Operand x) { return from_bf16(x); }
#else
using Operand = float;
INLINE void store_operand(Operand* p, F32 v) { store(p, v); }
INLINE void store_operand(Operand* p, F32 low, F32 high) { store(p, low), store(p + LANES, high); }
INLINE Operand to_operand(float x) { return x; }
INLINE float from_operand(Operand x) { return x; }
#endif

// acc += w·x for 16 rows: a line holds, row by row, the two bf16 weights for x[0] and x[1], which are bf16 too.
INLINE F32 dot_bf16(F32 acc, U32 line, uint32_t x) {
#if defined(__AVX512BF16__)
  return (F32)_mm512_dpbf16_ps((__m512)acc, (__m512bh)line, (__m512bh)_mm512_set1_epi32(x));
#else
  const U32 both = splat(x);
  acc = multiply_add(as<F32>(line << 16), as<F32>(both << 16), acc);
  return multiply_add(as<F32>(line & 0xffff0000u), as<F32>(both & 0xffff0000u), acc);
#endif
}

#if defined(__AVXVNNI__) || defined(__AVX512VNNI__)
#define HASTEN_VNNI 1
#else
#define HASTEN_VNNI 0
#endif

INLINE void store_quantized(int8_t* p, I32 v) { store_int8(p, v); }

#if HASTEN_VNNI || !defined(__AVX2__)
using ByteOperand = int8_t;  // what rows of x are, that int8 weights are multiplied with
// Unsigned bytes as dot_u8s8 multiplies them: BYTE_OFFSET less where both its operands have a sign (bytes below 128 may
// go there as they are).
#if defined(__ARM_FEATURE_DOTPROD) && !HASTEN_MMLA
constexpr int32_t BYTE_OFFSET = 128;
INLINE U32 to_dot(U32 bytes) { return bytes ^ 0x80808080u; }
#else
constexpr int32_t BYTE_OFFSET = 0;
INLINE U32 to_dot(U32 bytes) { return bytes; }
#endif
// acc += w·x for 16 rows: each 32-bit lane holds four bytes of a row (see to_dot), `quad` the four signed bytes of x.
INLINE I32 dot_u8s8(I32 acc, U32 w, int32_t quad) {
#if HASTEN_512
  return (I32)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(quad));
#elif HASTEN_VNNI
#if defined(__AVXVNNI__)
#define HASTEN_DOT(acc, w) (Native<int32_t>::type)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, x)
#else
#define HASTEN_DOT(acc, w) (Native<int32_t>::type)_mm256_dpbusd_epi32((__m256i)acc, (__m256i)w, x)
#endif
  const __m256i x = _mm256_set1_epi32(quad);
  return {HASTEN_DOT(acc.low, w.low), HASTEN_DOT(acc.high, w.high)};
#undef HASTEN_DOT
#elif defined(__SSE2__)
  // Bytes 0, 2 and bytes 1, 3 as pairs of 16-bit integers.
  const __m128i x = _mm_set1_epi32(quad), even = _mm_srai_epi16(_mm_slli_epi16(x, 8), 8), odd = _mm_srai_epi16(x, 8);
  const I32 sums = each_part<I32>(w, [=](auto part) {
    const __m128i low = _mm_and_si128((__m128i)part, _mm_set1_epi16(0xff)), high = _mm_srli_epi16((__m128i)part, 8);
    return (Native<int32_t>::type)_mm_add_epi32(_mm_madd_epi16(low, even), _mm_madd_epi16(high, odd));
  });
  return acc + sums;
#elif defined(__ARM_FEATURE_DOTPROD)
  const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(quad));
  return each_part_of<I32>(
      [=](auto sum, auto bytes) {
#if HASTEN_MMLA
        return (Native<int32_t>::type)vusdotq_s32((int32x4_t)sum, (uint8x16_t)bytes, x);
#else
        return (Native<int32_t>::type)vdotq_s32((int32x4_t)sum, (int8x16_t)bytes, x);
#endif
      }, acc, w);
#else
  for (int j = 0; j < 4; j++) acc += as<I32>((w >> (8 * j)) & 0xffu) * int32_t(int8_t(quad >> (8 * j)));
  return acc;
#endif
}
#else
// Without VNNI: products of bytes summed in pairs of 16 bits (vpmaddubsw), which has to be done where no pair can be
// larger than 32767; or products of 16 bits summed in pairs (vpmaddwd). For int8 weights the latter: bytes would take a
// third multiplication, by the sign.
using ByteOperand = int16_t;  // of four the even ones, then the odd ones: k, k+2, k+1, k+3
constexpr int32_t BYTE_OFFSET = 0;
INLINE void store_quantized(int16_t* p, I32 v) {
#if HASTEN_512
  const __m256i words = _mm512_cvtepi32_epi16((__m512i)v);
#else
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)v.low, (__m256i)v.high), 0xd8);
#endif
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xd8), 0xd8));
}
#if HASTEN_512
INLINE I32 pairs_u8s8(U32 w, I32 x) { return (I32)_mm512_maddubs_epi16((__m512i)w, (__m512i)x); }
INLINE void add_pairs(I32& acc, I32 v) { acc = (I32)_mm512_add_epi16((__m512i)acc, (__m512i)v); }
INLINE I32 dot_words(U32 w, I32 x) { return (I32)_mm512_madd_epi16((__m512i)w, (__m512i)x); }
INLINE U32 odd_bytes(U32 w) { return (U32)_mm512_srli_epi16((__m512i)w, 8); }
#else
INLINE I32 pairs_u8s8(U32 w, I32 x) {
  return {(Native<int32_t>::type)_mm256_maddubs_epi16((__m256i)w.low, (__m256i)x.low),
          (Native<int32_t>::type)_mm256_maddubs_epi16((__m256i)w.high, (__m256i)x.high)};
}
INLINE void add_pairs(I32& acc, I32 v) {  // in its place, as accumulate
  asm("vpaddw %1, %0, %0" : "+x"(acc.low) : "x"(v.low));
  asm("vpaddw %1, %0, %0" : "+x"(acc.high) : "x"(v.high));
}
INLINE I32 dot_words(U32 w, I32 x) {
  return {(Native<int32_t>::type)_mm256_madd_epi16((__m256i)w.low, (__m256i)x.low),
          (Native<int32_t>::type)_mm256_madd_epi16((__m256i)w.high, (__m256i)x.high)};
}
INLINE U32 odd_bytes(U32 w) {  // of each pair, as 16 bits
  return each_part<U32>(w, [](auto part) { return (Native<uint32_t>::type)_mm256_srli_epi16((__m256i)part, 8); });
}
#endif
INLINE I32 sum_pairs(I32 v) { return dot_words(as<U32>(v), splat(0x00010001)); }
#endif

}  // namespace hasten

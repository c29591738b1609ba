// Weights that are stored in fewer bits than are multiplied, as lines of a format that is: a few at a time, in memory that
// stays in the first-level cache, from which all rows of x take them.
#pragma once

#include "gemm.h"

namespace hasten {

// float8_e4m3fn (1 bit of sign, 4 of exponent, 3 of mantissa; no infinity) as the bits of the same number in bfloat16.
constexpr uint16_t widened_fp8(uint32_t code) {
  const uint32_t sign = (code & 0x80) << 8, exponent = code >> 3 & 15, mantissa = code & 7;
  if ((code & 0x7f) == 0x7f) return uint16_t(sign | 0x7fc0);  // NaN
  if (exponent) return uint16_t(sign | (exponent + 120) << 7 | mantissa << 4);
  if (!mantissa) return uint16_t(sign);
  const uint32_t top = mantissa >= 4 ? 2 : mantissa >= 2 ? 1 : 0;  // a subnormal number: mantissa · 2^-9
  return uint16_t(sign | (118 + top) << 7 | ((mantissa << (3 - top)) & 7) << 4);
}
struct Fp8Table {
  alignas(64) uint16_t values[256];
  constexpr Fp8Table() : values() {
    for (uint32_t code = 0; code < 256; code++) values[code] = widened_fp8(code);
  }
};
inline constexpr Fp8Table FP8;

// `steps` steps of fp8 lines (four values) -> twice as many of bf16 lines. A word has the values k, k + 2, k + 1 and k + 3
// in its bytes, so that bytes 0 and 2 become a word of the first line, and bytes 1 and 3 one of the second.
#if HASTEN_512
// By tables of the 128 magnitudes, two registers of 32 to a lookup by 6 bits; the seventh chooses between two lookups.
inline void unpack_fp8(const uint8_t* from, int64_t steps, uint16_t* to) {
  const __m512i t0 = _mm512_load_si512(FP8.values), t1 = _mm512_load_si512(FP8.values + 32),
                t2 = _mm512_load_si512(FP8.values + 64), t3 = _mm512_load_si512(FP8.values + 96);
  auto widened = [&](__m512i code) {  // in the lower half of each 16 bits; what is above does not count
    const __m512i small = _mm512_permutex2var_epi16(t0, code, t1), large = _mm512_permutex2var_epi16(t2, code, t3);
    const __mmask32 is_large = _mm512_test_epi16_mask(code, _mm512_set1_epi16(0x40));
    const __m512i sign = _mm512_and_si512(_mm512_slli_epi16(code, 8), _mm512_set1_epi16(int16_t(0x8000)));
    return (U32)_mm512_or_si512(_mm512_mask_blend_epi16(is_large, small, large), sign);
  };
  for (int64_t s = 0; s < steps; s++, from += PANEL * 4, to += 2 * PANEL * 2)
    for (int v = 0; v < VECTORS; v++) {
      __builtin_prefetch(from + AHEAD + v * 64);
      const __m512i codes = (__m512i)load_line(from + v * 64);
      store_line(to + v * 32, widened(codes));
      store_line(to + PANEL * 2 + v * 32, widened(_mm512_srli_epi16(codes, 8)));
    }
}
#else
// Any value: exponent and mantissa where float32 has them make a number 2^120 times too small, subnormal ones included.
INLINE U32 widened_fp8(U32 word, int byte) {
  const U32 code = word >> (8 * byte);
  const F32 magnitude = as<F32>((code & 0x7fu) << 20) * 0x1p120f;
  const U32 nan = as<U32>((code & 0x7fu) == 0x7fu) & 0x7fc00000u;
  return as<U32>(magnitude) | nan | ((code & 0x80u) << 24);
}
__attribute__((noinline)) static void widen_any_fp8(const uint8_t* from, uint16_t* to) {
  for (int v = 0; v < VECTORS; v++) {
    const U32 word = load_line(from + v * 64);
    for (int i = 0; i < 2; i++)
      store_line(to + i * PANEL * 2 + v * 32, (widened_fp8(word, i) >> 16) | widened_fp8(word, 2 + i));
  }
}
// Values with an exponent of their own by shifts: sign, exponent and mantissa go where bfloat16 has them, and the exponent
// grows by 120. Few weights have none (zero and subnormal numbers: of a normal distribution that uses the whole range, one
// in 8,000), so a step seldom has to be made again.
inline void unpack_fp8(const uint8_t* from, int64_t steps, uint16_t* to) {
  for (int64_t s = 0; s < steps; s++, from += PANEL * 4, to += 2 * PANEL * 2) {
    U32 others = {};  // the highest bit of a byte is set for no exponent, and for NaN
    EACH(v, VECTORS,
         __builtin_prefetch(from + AHEAD + v * 64);
         const U32 word = load_line(from + v * 64), magnitudes = word & 0x7f7f7f7fu;
         others |= ~(magnitudes + 0x78787878u) | (magnitudes + 0x01010101u);
         store_line(to + v * 32, (((word & 0x007f007fu) << 4) + 0x3c003c00u) | ((word & 0x00800080u) << 8));
         store_line(to + PANEL * 2 + v * 32, (((word & 0x7f007f00u) >> 4) + 0x3c003c00u) | (word & 0x80008000u)));
    if (any(others & 0x80808080u)) [[unlikely]] widen_any_fp8(from, to);
  }
}
#endif

// Eight groups of Q6_K's values as lines of int8.
inline void unpack_int6(const uint8_t* from, uint8_t* to) {
  constexpr uint32_t low = 0x0f0f0f0fu, upper = 0x30303030u, offset = 0x60606060u;  // the middle is 32, int8's is 128
  for (int64_t s = 0; s < 8; s++, from += 3 * PANEL * 4, to += 4 * PANEL * 4)
    for (int v = 0; v < VECTORS; v++) {
      const uint8_t* line = from + v * 64;
      const U32 a = load_line(line), b = load_line(line + PANEL * 4), rest = load_line(line + 2 * PANEL * 4);
      uint8_t* out = to + v * 64;
      store_line(out, ((a & low) | ((rest << 4) & upper)) + offset);
      store_line(out + PANEL * 4, (((a >> 4) & low) | ((rest << 2) & upper)) + offset);
      store_line(out + 2 * PANEL * 4, ((b & low) | (rest & upper)) + offset);
      store_line(out + 3 * PANEL * 4, (((b >> 4) & low) | ((rest >> 2) & upper)) + offset);
    }
}

// The scales [8][64] of eight groups of Q6_K, and the next ones asked for, whose stream is too thin for the processor's
// own prefetch.
inline void unpack_scales6(const int8_t* scales, const uint16_t* outer, float* to) {
  for (int v = 0; v < VECTORS; v++) {
    const F32 d = load_f16(outer + v * LANES);
    for (int i = 0; i < 2; i++) __builtin_prefetch(scales + (16 + 2 * v + i) * PANEL);
    __builtin_prefetch(outer + (2 + v / 2) * PANEL);
    for (int g = 0; g < 8; g++)
      store(to + g * PANEL + v * LANES, d * to_float(load_int8(scales + g * PANEL + v * LANES)));
  }
}

// A super-block's scales [8][64] and minima [8][64] of Q4_K.
inline void unpack_scales4(const uint32_t* words, const uint16_t* outer, float* scales, float* minima) {
  for (int v = 0; v < VECTORS; v++) {
    const F32 d = load_f16(outer + v * LANES), least = load_f16(outer + PANEL + v * LANES);
    const U32 low = load_line(words + v * LANES), low_minima = load_line(words + PANEL + v * LANES);
    const U32 upper = load_line(words + 2 * PANEL + v * LANES);
    for (int i = 0; i < 3; i++) __builtin_prefetch(words + (3 + i) * PANEL + v * LANES);
    __builtin_prefetch(outer + 2 * PANEL + v * 32);
    for (int g = 0; g < 8; g++) {
      const U32 scale = ((low >> (4 * g)) & 15u) | (((upper >> (2 * g)) & 3u) << 4);
      const U32 minimum = ((low_minima >> (4 * g)) & 15u) | (((upper >> (16 + 2 * g)) & 3u) << 4);
      store(scales + g * PANEL + v * LANES, d * to_float(as<I32>(scale)));
      store(minima + g * PANEL + v * LANES, least * to_float(as<I32>(minimum)));
    }
  }
}

INLINE int64_t bytes_of(ScaleType type) { return type == ScaleType::f32 ? 4 : 2; }

// Groups of a panel's rows, after each other: lines of BITS for each value, [count][64] scales and zeros.
struct Groups {
  const uint8_t* lines;
  const uint8_t* next;   // memory that is read soon: that of these lines, if they are no copies
  const void* scales;
  ScaleType scale_type;
  const int8_t* zeros;   // null: all are the middle
  const float* minima;   // [count][64], which are taken from each weight; null: there are none
  int64_t size;          // values of a group
  int64_t first, count;  // which of the row's they are
};

// The groups of a panel from g0 on, at most `count` of them: as they stand, or unpacked: eight of Q4_K and Q6_K.
template <int BITS>
Groups groups_of(const Weight& w, int64_t panel, int64_t g0, int64_t count) {
  const int64_t groups = w.groups(), at = (panel * groups + g0) * PANEL;
  const uint8_t* base = static_cast<const uint8_t*>(w.data) + panel * w.panel_bytes() + g0 * w.group * w.bits() / 8 * PANEL;
  Groups some{.lines = base, .next = base, .size = w.group, .first = g0, .count = std::min(groups - g0, count)};
  if (!w.outer) {
    some.scales = static_cast<const char*>(w.scales) + at * bytes_of(w.scale_type);
    some.scale_type = w.scale_type;
    some.zeros = w.zeros ? w.zeros + at : nullptr;
    return some;
  }
  const int64_t block = (panel * groups + g0) * w.group / SUPER_BLOCK;
  float* scales = scratch<float, 18>(16 * PANEL);
  some.scales = scales;
  if constexpr (BITS == 8) {
    uint8_t* lines = scratch<uint8_t, 19>(8 * 16 * PANEL);
    unpack_int6(base, lines);
    unpack_scales6(static_cast<const int8_t*>(w.scales) + at, w.outer + block * PANEL, scales);
    some.lines = lines;
    some.next = base + 6 * 16 * PANEL - AHEAD;
  } else {
    unpack_scales4(static_cast<const uint32_t*>(w.scales) + block * 3 * PANEL, w.outer + block * 2 * PANEL, scales,
                   scales + 8 * PANEL);
    some.minima = scales + 8 * PANEL;
  }
  return some;
}

}  // namespace hasten

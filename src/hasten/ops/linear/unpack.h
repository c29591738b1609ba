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

// Numbers by their places in a table, 128 added: IQ4_NL's, and twice those of e2m1.
struct alignas(16) NibbleTable { uint8_t values[16]; };
inline constexpr NibbleTable IQ4{{1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241}};
inline constexpr NibbleTable FP4{{128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116}};
INLINE U32 looked_up(const NibbleTable& table, U32 places) {
#if HASTEN_512
  const __m512i all = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table.values)));
  return (U32)_mm512_shuffle_epi8(all, (__m512i)places);
#elif defined(__AVX2__)
  const __m256i all = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table.values)));
  return each_part<U32>(places, [=](auto part) { return (Native<uint32_t>::type)_mm256_shuffle_epi8(all, (__m256i)part); });
#elif defined(__aarch64__)
  const uint8x16_t all = vld1q_u8(table.values);
  return each_part<U32>(places, [=](auto part) { return (Native<uint32_t>::type)vqtbl1q_u8(all, (uint8x16_t)part); });
#else
  uint8_t bytes[64];
  store_line(bytes, places);
  for (uint8_t& byte : bytes) byte = table.values[byte];
  return load_line(bytes);
#endif
}
// Layout of values of fewer than 8 bits in a panel's lines: units of `words` times four of each row, in LOW lines of 4 or 2
// bits for each value (LOW_BITS), then one of their upper bits, if they have more.
template <Format F>
struct Packing {
  static constexpr bool table = F == Format::iq4 || F == Format::fp4;
  static constexpr int bits = F == Format::int6 ? 6 : F == Format::int5 ? 5 : F == Format::int3 ? 3 : F == Format::int2 ? 2 : 4;
  static constexpr int low_bits = bits >= 4 ? 4 : 2, upper_bits = bits - low_bits;
  static constexpr int words = table ? 2 : upper_bits == 1 ? 8 : 4;
  static constexpr int low_lines = words * low_bits / 8, lines = low_lines + (upper_bits ? 1 : 0);
  static constexpr int surplus = table ? 128 : 0;  // what is added to numbers of a table
};

// Calls take(i, word) for each word of a unit of 16 rows, bytes without sign, or for those of COUNT low lines from FIRST on.
// own: those rows in its first line.
template <Format F, int FIRST = 0, int COUNT = Packing<F>::low_lines, class Take>
INLINE void each_word(const uint8_t* own, const Take& take) {
  using P = Packing<F>;
  constexpr uint32_t mask = P::low_bits == 4 ? 0x0f0f0f0fu : 0x03030303u;
  constexpr uint32_t upper_mask = (P::upper_bits == 2 ? 0x03030303u : 0x01010101u) << P::low_bits;
  constexpr int each = 8 / P::low_bits;  // words of a line
  U32 upper{};
  if constexpr (P::upper_bits > 0) upper = load_line(own + P::low_lines * PANEL * 4);
  EACH(l, COUNT,
       const U32 low = load_line(own + (FIRST + l) * PANEL * 4);
       EACH(j, each,
            constexpr int word = (FIRST + l) * each + j;
            U32 value = (low >> (j * P::low_bits)) & mask;
            if constexpr (F == Format::iq4) value = looked_up(IQ4, value);
            if constexpr (F == Format::fp4) value = looked_up(FP4, value);
            if constexpr (P::upper_bits > 0) {
              constexpr int up = P::low_bits - word * P::upper_bits;
              if constexpr (up >= 0) value = value | ((upper << up) & upper_mask);
              else value = value | ((upper >> -up) & upper_mask);
            }
            take(std::integral_constant<int, word>{}, value)));
}

// `count` values of K as lines of int8: `middle` of them being 0.
template <Format F>
inline void unpack_values(const uint8_t* from, int64_t count, int middle, uint8_t* to) {
  using P = Packing<F>;
  const uint32_t offset = uint32_t(128 - P::surplus - middle) * 0x01010101u;
  for (int64_t k = 0; k < count; k += 4 * P::words, from += P::lines * PANEL * 4, to += P::words * PANEL * 4)
    for (int v = 0; v < VECTORS; v++)
      each_word<F>(from + v * 64, [&](auto i, U32 word) __attribute__((always_inline)) {
        store_line(to + i * PANEL * 4 + v * 64, word + offset);
      });
}

// Scales of scales: those [count][64] of groups whose own are int8, `blocks` of 256 values, and the next ones asked for,
// whose stream is too thin for the processor's own prefetch.
inline void unpack_scales(const int8_t* scales, const uint16_t* outer, int64_t count, float* to) {
  for (int v = 0; v < VECTORS; v++) {
    const F32 d = load_f16(outer + v * LANES);
    for (int i = 0; i < 2; i++) __builtin_prefetch(scales + (2 * count + 2 * v + i) * PANEL);
    __builtin_prefetch(outer + (2 + v / 2) * PANEL);
    for (int64_t g = 0; g < count; g++)
      store(to + g * PANEL + v * LANES, d * to_float(load_int8(scales + g * PANEL + v * LANES)));
  }
}

// The same of scales and minima of 4 bits.
inline void unpack_nibble_scales(const uint8_t* both, const uint16_t* outer, int64_t count, float* scales, float* minima) {
  for (int v = 0; v < VECTORS; v++) {
    const F32 d = load_f16(outer + v * LANES), least = load_f16(outer + PANEL + v * LANES);
    for (int i = 0; i < 2; i++) __builtin_prefetch(both + (2 * count + 2 * v + i) * PANEL);
    __builtin_prefetch(outer + 2 * PANEL + v * 32);
    for (int64_t g = 0; g < count; g++) {
      const I32 own = load_int8(both + g * PANEL + v * LANES);
      store(scales + g * PANEL + v * LANES, d * to_float(own & 15));
      store(minima + g * PANEL + v * LANES, least * to_float((own >> 4) & 15));
    }
  }
}

// A super-block's scales [8][64] and minima [8][64] of 6 bits.
inline void unpack_word_scales(const uint32_t* words, const uint16_t* outer, float* scales, float* minima) {
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

// Half of each e8m0 scale (a power of two from 2^-127 on), because the table holds fp4's numbers doubled.
inline void unpack_exponents(const uint8_t* exponents, int64_t count, float* to) {
  for (int64_t i = 0; i < count * PANEL; i += LANES) {
    const U32 e = as<U32>(load_int8(exponents + i)) & 0xffu;
    const U32 subnormal = as<U32>(e == splat(0u)) & 0x00200000u;
    const U32 one = as<U32>(e == splat(1u)) & 0x00400000u;
    const U32 normal = as<U32>(as<I32>(e) > splat(1)) & ((e - 1u) << 23);
    store(to + i, as<F32>(subnormal | one | normal));
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
  const void* minima;    // [count][64], which are taken from each weight; null: there are none
  ScaleType minima_type; // f32 or f16
  int64_t size;          // values of a group
  int64_t first, count;  // which of the row's they are
  int32_t middle;        // that all zeros are
};

// Whether lines, scales or minima are made of what is stored, for some groups at a time.
INLINE bool made(const Weight& w) {
  return w.outer || w.minima || (w.format != Format::int8 && w.format != Format::int4);
}
INLINE int64_t groups_made(const Weight& w) { return w.group <= 32 ? 8 : std::max<int64_t>(1, SUPER_BLOCK / w.group); }

// The middle of integers without sign that have no zeros of their own.
INLINE int middle_of(const Weight& w) {
  const bool own = w.zeros || w.minima || w.scale_type == ScaleType::words || w.scale_type == ScaleType::nibbles;
  return own || w.format == Format::int8 || w.format == Format::iq4 || w.format == Format::fp4 ? 0 : 1 << (w.bits() - 1);
}

// Calls f(Packed<F>{}) for the format of a weight of fewer bits than 8, but int4.
template <Format F>
using Packed = std::integral_constant<Format, F>;
template <class Run>
INLINE void with_packing(Format format, const Run& run) {
  switch (format) {
    case Format::int6: return run(Packed<Format::int6>{});
    case Format::int5: return run(Packed<Format::int5>{});
    case Format::int3: return run(Packed<Format::int3>{});
    case Format::int2: return run(Packed<Format::int2>{});
    case Format::iq4: return run(Packed<Format::iq4>{});
    case Format::fp4: return run(Packed<Format::fp4>{});
    default: return;
  }
}

// At most `count` groups of a panel from g0 on: as stored, or (UNPACKED) with their lines unpacked to int8.
template <bool UNPACKED>
Groups groups_of(const Weight& w, int64_t panel, int64_t g0, int64_t count) {
  const int64_t groups = w.groups(), at = (panel * groups + g0) * PANEL;
  const uint8_t* base = static_cast<const uint8_t*>(w.data) + panel * w.panel_bytes() + g0 * w.group * w.bits() / 8 * PANEL;
  Groups some{.lines = base, .next = base, .scale_type = w.scale_type, .size = w.group, .first = g0,
              .count = std::min(groups - g0, count), .middle = middle_of(w)};
  some.zeros = w.zeros ? w.zeros + at : nullptr;
  if (w.scale_type <= ScaleType::f16)
    some.scales = static_cast<const char*>(w.scales) + at * bytes_of(w.scale_type);
  if (!made(w)) return some;
  if (UNPACKED && w.format != Format::int8) {
    const int64_t values = some.count * w.group;
    uint8_t* lines = scratch<uint8_t, 19>(values * PANEL);
    with_packing(w.format, [&](auto format) { unpack_values<format.value>(base, values, some.middle, lines); });
    some.lines = lines;
    some.next = base + values * w.bits() / 8 * PANEL - AHEAD;
    some.middle = 0;
  }
  if (w.minima) {
    some.minima = w.minima + at;
    some.minima_type = ScaleType::f16;
  }
  if (w.scale_type <= ScaleType::f16) return some;
  float* scales = scratch<float, 18>(2 * some.count * PANEL);
  float* minima = scales + some.count * PANEL;
  const int64_t block = (panel * groups + g0) * w.group / SUPER_BLOCK;
  const uint16_t* outer = w.outer ? w.outer + block * PANEL * (w.scale_type == ScaleType::int8 ? 1 : 2) : nullptr;
  const char* own = static_cast<const char*>(w.scales);
  switch (w.scale_type) {
    case ScaleType::e8m0: unpack_exponents(reinterpret_cast<const uint8_t*>(own) + at, some.count, scales); break;
    case ScaleType::int8: unpack_scales(reinterpret_cast<const int8_t*>(own) + at, outer, some.count, scales); break;
    case ScaleType::words:
      unpack_word_scales(reinterpret_cast<const uint32_t*>(own) + at / 8 * 3, outer, scales, minima);
      some.minima = minima;
      break;
    case ScaleType::nibbles:
      unpack_nibble_scales(reinterpret_cast<const uint8_t*>(own) + at, outer, some.count, scales, minima);
      some.minima = minima;
      break;
    default: break;
  }
  some.scales = scales;
  some.scale_type = ScaleType::f32;
  return some;
}

}  // namespace hasten

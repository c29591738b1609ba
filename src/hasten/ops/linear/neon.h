// ARM's products of two rows by two: USMMLA of bytes, eight values deep, and BFMMLA of bfloat16, four values deep.
//
// They want two rows of eight bytes in each register. Two words of each of 16 rows, as lines hold them (gemm.h), become eight
// registers of that form by one instruction each; sums are kept in the products' form, two rows of weights by two of x.
//
// BFMMLA rounds in a way of its own, so bfloat16 takes it for any number of rows, a last one twice: a row's bits would
// depend on its neighbours otherwise. Sums of integers are exact anyway.
#pragma once

#include "../simd.h"

namespace hasten {

// Register J of a vector.
template <int J, class V>
INLINE auto& register_of(V& v) {
  if constexpr (requires { v.low; }) {
    constexpr int half = Of<decltype(v.low)>::count / NATIVE;
    if constexpr (J < half) return register_of<J>(v.low);
    else return register_of<J - half>(v.high);
  } else {
    return v;
  }
}

// Words of rows 2i and 2i + 1 in register i: of each that of a, then that of b.
INLINE void zip_rows(U32 a, U32 b, uint32x4_t (&rows)[8]) {
  EACH(j, 4,
       const auto first = (uint32x4_t)register_of<j>(a), second = (uint32x4_t)register_of<j>(b);
       rows[2 * j] = vzip1q_u32(first, second);
       rows[2 * j + 1] = vzip2q_u32(first, second));
}

// acc[m][v] += w·x over `steps` steps of eight values. take(s, v, a, b) sets the words of the first and the last four.
template <int M, int V, class Take>
INLINE void multiply_eights(I32 (&acc)[M][V], const int8_t* x, int64_t stride, int64_t steps, const Take& take) {
  typedef Native<int32_t>::type Ints;
  int32x4_t sums[M / 2][V][8];
  EACH(p, M / 2, EACH(v, V, EACH(i, 8, sums[p][v][i] = vdupq_n_s32(0))));
  for (int64_t s = 0; s < steps; s++) {
    const int8_t* from = x + 8 * s;
    EACH(v, V,
         U32 a, b;
         take(s, v, a, b);
         uint32x4_t rows[8];
         zip_rows(a, b, rows);
         EACH(p, M / 2,
              const int8x16_t both = vcombine_s8(vld1_s8(from + 2 * p * stride), vld1_s8(from + (2 * p + 1) * stride));
              EACH(i, 8, sums[p][v][i] = vusmmlaq_s32(sums[p][v][i], (uint8x16_t)rows[i], both)));
         if constexpr (M % 2) {
           int32_t words[2];
           std::memcpy(words, from + (M - 1) * stride, 8);
           acc[M - 1][v] = dot_u8s8(dot_u8s8(acc[M - 1][v], a, words[0]), b, words[1]);
         });
  }
  EACH(p, M / 2, EACH(v, V, EACH(j, 4,
       const int32x4_t low = sums[p][v][2 * j], high = sums[p][v][2 * j + 1];
       register_of<j>(acc[2 * p][v]) += (Ints)vuzp1q_s32(low, high);
       register_of<j>(acc[2 * p + 1][v]) += (Ints)vuzp2q_s32(low, high))));
}

// tile_bf16 (gemm.h). ask(step): asks for what comes next.
template <int M, int V, class Ask>
INLINE void tile_pairs(const uint16_t* w, const uint16_t* x, int64_t stride, int64_t steps, float* sums, bool fresh,
                       const Ask& ask) {
  typedef Native<float>::type Floats;
  constexpr int PAIRS = (M + 1) / 2;
  constexpr int panel = 4 * LANES, words = 2 * panel;  // values of a row of sums, of a line of each of four vectors
  float32x4_t acc[PAIRS][V][8];
  EACH(p, PAIRS,
       constexpr int other = 2 * p + 1 < M ? 2 * p + 1 : 2 * p;
       EACH(v, V,
            F32 first{}; F32 second{};
            if (!fresh) first = load(sums + 2 * p * panel + v * LANES), second = load(sums + other * panel + v * LANES);
            EACH(j, 4,
                 const auto a = (float32x4_t)register_of<j>(first); const auto b = (float32x4_t)register_of<j>(second);
                 acc[p][v][2 * j] = vzip1q_f32(a, b);
                 acc[p][v][2 * j + 1] = vzip2q_f32(a, b))));
  for (int64_t s = 0; s < steps; s += 2) {
    ask(s);
    ask(s + 1);
    EACH(v, V,
         uint32x4_t rows[8];
         zip_rows(load_line(w + s * words + v * 32), load_line(w + (s + 1) * words + v * 32), rows);
         EACH(p, PAIRS,
              constexpr int other = 2 * p + 1 < M ? 2 * p + 1 : 2 * p;
              const uint16_t* from = x + 2 * s;
              const auto both = (bfloat16x8_t)vcombine_u16(vld1_u16(from + 2 * p * stride), vld1_u16(from + other * stride));
              EACH(i, 8, acc[p][v][i] = vbfmmlaq_f32(acc[p][v][i], (bfloat16x8_t)rows[i], both))));
  }
  EACH(p, PAIRS, EACH(v, V,
       F32 first{}; F32 second{};
       EACH(j, 4,
            const float32x4_t low = acc[p][v][2 * j], high = acc[p][v][2 * j + 1];
            register_of<j>(first) = (Floats)vuzp1q_f32(low, high);
            register_of<j>(second) = (Floats)vuzp2q_f32(low, high));
       store(sums + 2 * p * panel + v * LANES, first);
       if constexpr (2 * p + 1 < M) store(sums + (2 * p + 1) * panel + v * LANES, second)));
}

}  // namespace hasten

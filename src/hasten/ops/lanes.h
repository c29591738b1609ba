// Vectors of 16 lanes: one register of AVX-512, two of AVX2, four of 16 bytes elsewhere (SSE2, NEON).
//
// A vector type that is wider than the registers lives in memory: g++ inserts its elements one by one. So F32, I32 and
// U32 are made of vectors that fit, put together in pairs, with the operators of one vector. What a pair cannot have is
// a ternary operator (select), element access that writes, and casts (as<F32>(bits), to_float, to_int).
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE inline __attribute__((always_inline))

namespace hasten {

// Statements for each i from 0 to N - 1, as constants: the accumulators of a tile then are registers from the first to the
// last. (Loops are unrolled after g++ has decided that an array is memory.)
template <int... I, class F>
INLINE void each_of(std::integer_sequence<int, I...>, const F& f) { (f(std::integral_constant<int, I>{}), ...); }
#define EACH(i, N, ...) \
  each_of(std::make_integer_sequence<int, N>{}, [&](auto i) __attribute__((always_inline)) { __VA_ARGS__; })

// HASTEN_256: registers of 32 bytes, whatever else the flags allow (the 256-bit kernels with AVX-512's encoding).
#if defined(__AVX512F__) && !defined(HASTEN_256)
#define HASTEN_512 1
#else
#define HASTEN_512 0
#endif

constexpr int LANES = 16;
#if HASTEN_512
constexpr int REGISTER = 64;  // bytes
#elif defined(__AVX2__)
constexpr int REGISTER = 32;
#else
constexpr int REGISTER = 16;
#endif
constexpr int NATIVE = REGISTER / 4;  // 32-bit lanes of a register

template <class T>
struct Native;
template <> struct Native<float> { typedef float type __attribute__((vector_size(REGISTER))); };
template <> struct Native<int32_t> { typedef int32_t type __attribute__((vector_size(REGISTER))); };
template <> struct Native<uint32_t> { typedef uint32_t type __attribute__((vector_size(REGISTER))); };

template <class H>
struct Pair;
template <class V>
struct Of {  // a register
  using Element = std::remove_cvref_t<decltype(V{}[0])>;
  static constexpr int count = NATIVE;
};
template <class H>
struct Of<Pair<H>> {
  using Element = typename Of<H>::Element;
  static constexpr int count = 2 * Of<H>::count;
};
template <class V> using Element = typename Of<V>::Element;

template <class H>
struct Pair {
  H low, high;
  INLINE Element<H> operator[](int i) const {
    constexpr int half = Of<H>::count;
    return i < half ? low[i] : high[i - half];
  }
};

template <class V, int N = NATIVE>
using Widened = std::conditional_t<N == LANES, V, std::conditional_t<2 * N == LANES, Pair<V>, Pair<Pair<V>>>>;
using F32 = Widened<Native<float>::type>;
using I32 = Widened<Native<int32_t>::type>;
using U32 = Widened<Native<uint32_t>::type>;

#define HASTEN_OPERATOR(op)                                                                                            \
  template <class H>                                                                                                   \
  INLINE auto operator op(Pair<H> a, Pair<H> b) { return Pair<decltype(a.low op b.low)>{a.low op b.low, a.high op b.high}; } \
  template <class H>                                                                                                   \
  INLINE auto operator op(Pair<H> a, Element<H> b) { return Pair<decltype(a.low op b)>{a.low op b, a.high op b}; }     \
  template <class H>                                                                                                   \
  INLINE auto operator op(Element<H> a, Pair<H> b) { return Pair<decltype(a op b.low)>{a op b.low, a op b.high}; }
HASTEN_OPERATOR(+) HASTEN_OPERATOR(-) HASTEN_OPERATOR(*) HASTEN_OPERATOR(/) HASTEN_OPERATOR(&) HASTEN_OPERATOR(|) HASTEN_OPERATOR(^)
HASTEN_OPERATOR(<) HASTEN_OPERATOR(>) HASTEN_OPERATOR(==) HASTEN_OPERATOR(!=)
#undef HASTEN_OPERATOR
template <class H> INLINE Pair<H> operator<<(Pair<H> a, int by) { return {a.low << by, a.high << by}; }
template <class H> INLINE Pair<H> operator>>(Pair<H> a, int by) { return {a.low >> by, a.high >> by}; }
template <class H> INLINE Pair<H> operator~(Pair<H> a) { return {~a.low, ~a.high}; }
template <class H> INLINE Pair<H> operator-(Pair<H> a) { return {-a.low, -a.high}; }
template <class H, class B> INLINE Pair<H>& operator+=(Pair<H>& a, B b) { return a = a + b; }
template <class H, class B> INLINE Pair<H>& operator-=(Pair<H>& a, B b) { return a = a - b; }
template <class H, class B> INLINE Pair<H>& operator*=(Pair<H>& a, B b) { return a = a * b; }
template <class H, class B> INLINE Pair<H>& operator|=(Pair<H>& a, B b) { return a = a | b; }

// f(part, at) for each register of a vector, `at` being its first lane, in order.
template <class V, class F>
INLINE void parts(V& v, const F& f, int at = 0) { f(v, at); }
template <class H, class F>
INLINE void parts(Pair<H>& v, const F& f, int at = 0) {
  parts(v.low, f, at);
  parts(v.high, f, at + Of<H>::count);
}
// The vector of what f makes of each register of `v`.
template <class To, class V, class F>
INLINE To each_part(V v, const F& f) {
  if constexpr (requires { v.low; }) return {each_part<decltype(To::low)>(v.low, f), each_part<decltype(To::low)>(v.high, f)};
  else return f(v);
}

// The same of several vectors.
template <class To, class F, class V, class... More>
INLINE To each_part_of(const F& f, V v, More... more) {
  if constexpr (requires { v.low; })
    return {each_part_of<decltype(To::low)>(f, v.low, more.low...), each_part_of<decltype(To::low)>(f, v.high, more.high...)};
  else return f(v, more...);
}

// The same bits as another kind of lanes.
template <class To, class V>
INLINE To as(V v) { return (To)v; }
template <class To, class H>
INLINE To as(Pair<H> v) { return {as<decltype(To::low)>(v.low), as<decltype(To::low)>(v.high)}; }

template <class M, class V>
INLINE V select(M mask, V yes, V no) { return mask ? yes : no; }
template <class M, class H>
INLINE Pair<H> select(Pair<M> mask, Pair<H> yes, Pair<H> no) {
  return {select(mask.low, yes.low, no.low), select(mask.high, yes.high, no.high)};
}

// The lanes `I` of two registers, counted through both. (g++ knows clang's form of it since 12 only.)
template <int... I, class V>
INLINE V shuffle(V a, V b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, I...);
#else
  using Lane = std::remove_cvref_t<decltype(a[0])>;
  using Index = std::conditional_t<sizeof(Lane) == 1, int8_t, std::conditional_t<sizeof(Lane) == 2, int16_t, int32_t>>;
  typedef Index Indices __attribute__((vector_size(sizeof(V))));
  return __builtin_shuffle(a, b, Indices{I...});
#endif
}

template <class V>
INLINE V load_all(const void* p) {
  V v;
  parts(v, [p](auto& part, int at) { std::memcpy(&part, static_cast<const char*>(p) + 4 * at, REGISTER); });
  return v;
}
template <class V>
INLINE void store_all(void* p, V v) {
  parts(v, [p](auto& part, int at) { std::memcpy(static_cast<char*>(p) + 4 * at, &part, REGISTER); });
}
INLINE F32 load(const float* p) { return load_all<F32>(p); }
INLINE I32 load(const int32_t* p) { return load_all<I32>(p); }
INLINE U32 load_line(const void* p) { return load_all<U32>(p); }
INLINE void store(float* p, F32 v) { store_all(p, v); }
INLINE void store(int32_t* p, I32 v) { store_all(p, v); }
INLINE void store_line(void* p, U32 v) { store_all(p, v); }

template <class V>
INLINE V splat_all(Element<V> x) {
  if constexpr (requires(V v) { v.low; }) {
    const auto half = splat_all<decltype(V::low)>(x);
    return {half, half};
  } else {
    return x - V{};  // not x + 0, which would have to make +0 of -0
  }
}
INLINE F32 splat(float x) { return splat_all<F32>(x); }
INLINE I32 splat(int32_t x) { return splat_all<I32>(x); }
INLINE U32 splat(uint32_t x) { return splat_all<U32>(x); }
INLINE I32 lane_numbers() {
  static constexpr int32_t numbers[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load(numbers);
}

INLINE F32 to_float(I32 v) {
  return each_part<F32>(v, [](auto part) { return __builtin_convertvector(part, Native<float>::type); });
}
INLINE I32 to_int(F32 v) {
  return each_part<I32>(v, [](auto part) { return __builtin_convertvector(part, Native<int32_t>::type); });
}

// 16 values of 16 bits, made wider by zeros.
INLINE U32 load_u16(const void* p) {
#if HASTEN_512
  return (U32)_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
#else
  U32 v;
  parts(v, [p](auto& part, int at) {
    const auto* from = static_cast<const char*>(p) + 2 * at;
#if defined(__AVX2__)
    part = (Native<uint32_t>::type)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    typedef uint16_t Half __attribute__((vector_size(8)));
    Half half; std::memcpy(&half, from, 8);
    part = __builtin_convertvector(half, Native<uint32_t>::type);
#endif
  });
  return v;
#endif
}
// The lower 16 bits of each lane; the upper ones are zeros.
INLINE void store_u16(void* p, U32 v) {
#if HASTEN_512
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16((__m512i)v));
#elif defined(__AVX2__)
  const __m256i packed = _mm256_packus_epi32((__m256i)v.low, (__m256i)v.high);
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
#else
  typedef uint16_t Half __attribute__((vector_size(8)));
  parts(v, [p](auto& part, int at) {
    const Half half = __builtin_convertvector(part, Half);
    std::memcpy(static_cast<char*>(p) + 2 * at, &half, 8);
  });
#endif
}
// 16 signed bytes. (g++ 12 makes a conversion to four times the width value by value.)
INLINE I32 load_int8(const void* p) {
#if HASTEN_512
  return (I32)_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(p));
  return {(Native<int32_t>::type)_mm256_cvtepi8_epi32(bytes),
          (Native<int32_t>::type)_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))};
#else
  typedef int8_t Bytes __attribute__((vector_size(16)));
  typedef Native<int32_t>::type Ints;
  Bytes b; std::memcpy(&b, p, 16);
  // Each byte to the top of a lane, then down with its sign.
#define HASTEN_BYTES(i) ((Ints)shuffle<i, i, i, i, i + 1, i + 1, i + 1, i + 1, i + 2, i + 2, i + 2, i + 2, i + 3, i + 3, i + 3, \
                                       i + 3>(b, b) >> 24)
  return {{HASTEN_BYTES(0), HASTEN_BYTES(4)}, {HASTEN_BYTES(8), HASTEN_BYTES(12)}};
#undef HASTEN_BYTES
#endif
}
// 16 values from -128 to 127 as bytes.
INLINE void store_int8(void* p, I32 v) {
#if HASTEN_512
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)v));
#elif defined(__AVX2__)
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)v.low, (__m256i)v.high), 0xd8);
  _mm_storeu_si128(static_cast<__m128i*>(p),
                   _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
#else
  typedef int8_t Quarter __attribute__((vector_size(4)));
  parts(v, [p](auto& part, int at) {
    const Quarter quarter = __builtin_convertvector(part, Quarter);
    std::memcpy(static_cast<char*>(p) + at, &quarter, 4);
  });
#endif
}

// Lanes joined in a fixed tree (8 apart, 4, 2, 1), so that every instruction set sums in the same order.
template <class F, class V>
INLINE auto join_lanes(V v, const F& f) {
  if constexpr (requires { v.low; }) {
    return join_lanes(f(v.low, v.high), f);
  } else {
    typedef Element<V> Quarter __attribute__((vector_size(16)));
    Quarter q[NATIVE / 4];
    std::memcpy(q, &v, REGISTER);
    for (int n = NATIVE / 8; n > 0; n /= 2)
      for (int i = 0; i < n; i++) q[i] = f(q[i], q[i + n]);
    q[0] = f(q[0], shuffle<2, 3, 0, 1>(q[0], q[0]));
    q[0] = f(q[0], shuffle<1, 0, 3, 2>(q[0], q[0]));
    return q[0][0];
  }
}
INLINE float sum_lanes(F32 v) { return join_lanes(v, [](auto a, auto b) { return a + b; }); }
INLINE int32_t sum_lanes(I32 v) { return join_lanes(v, [](auto a, auto b) { return a + b; }); }
INLINE float max_lanes(F32 v) { return join_lanes(v, [](auto a, auto b) { return select(a > b, a, b); }); }
INLINE int32_t max_lanes(I32 v) { return join_lanes(v, [](auto a, auto b) { return select(a > b, a, b); }); }

}  // namespace hasten

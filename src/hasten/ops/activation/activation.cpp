// Activation functions for training, forward and backward, each one pass through memory.
//
// gelu(z + b): what the product left out, the bias, is added here, and its gradient, a sum over all rows, falls out of
// the backward pass. silu(gate) · up: both factors' gradients in one pass. Sums of columns are taken over blocks of rows
// of a fixed size and then over the blocks in their order: the same bits on any number of threads.
#include "../parallel.h"
#include "../simd.h"
#include "../tensors.h"

namespace hasten {

constexpr int64_t BLOCK = 64;  // rows whose columns are summed by one thread

INLINE F32 load_as(const float* p) { return load(p); }
INLINE F32 load_as(const uint16_t* p) { return load_bf16(p); }
INLINE void store_as(float* p, F32 v) { store(p, v); }
INLINE void store_as(uint16_t* p, F32 v) { store_bf16(p, v); }

// 1/(1 + e^-x), within 2e-7. With AVX-512 the scaling by 2^n saturates by itself, and an estimate of the reciprocal is
// made exact by one step of Newton's.
INLINE F32 logistic(F32 x) {
#if HASTEN_512
  const __m512 y = _mm512_mul_ps((__m512)x, _mm512_set1_ps(-LOG2E));
  const __m512 n = _mm512_roundscale_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 r = _mm512_sub_ps(y, n);
  __m512 p = _mm512_set1_ps(1.327647198e-3f);  // 2^r on [-½, ½]
  for (float c : {9.675541334e-3f, 5.550713274e-2f, 2.402211972e-1f, 6.931469671e-1f, 1.0f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  // No larger than 2^126, whose reciprocal is still a number that Newton's step can be made with.
  const __m512 d = _mm512_min_ps(_mm512_add_ps(_mm512_scalef_ps(p, n), _mm512_set1_ps(1.0f)), _mm512_set1_ps(0x1p126f));
  const __m512 guess = _mm512_rcp14_ps(d);
  return (F32)_mm512_mul_ps(guess, _mm512_fnmadd_ps(d, guess, _mm512_set1_ps(2.0f)));
#else
  return 1.0f / (1.0f + exp2(-larger(splat(-126.0f), x * LOG2E)));  // NaN stays NaN
#endif
}

// x·Φ(x) with Φ(x) ≈ logistic(u), u = 2·√(2/π)·(x + 0.044715·x³), and its derivative Φ + x·Φ·(1 - Φ)·u'.
constexpr float GELU_LINEAR = 1.5957691216057308f, GELU_CUBIC = 0.07135481627f;
INLINE F32 gelu(F32 x) { return x * logistic(x * (GELU_LINEAR + GELU_CUBIC * (x * x))); }
INLINE F32 gelu_slope(F32 x) {
  const F32 square = x * x, share = logistic(x * (GELU_LINEAR + GELU_CUBIC * square));
  return share + x * share * (1.0f - share) * (GELU_LINEAR + 3.0f * GELU_CUBIC * square);
}

// Calls f(column, count) for every 16 columns; count < 16 for a remainder at the end of the row.
template <class F>
INLINE void columns(int64_t width, const F& f) {
  int64_t c = 0;
  for (; c + LANES <= width; c += LANES) f(c, LANES);
  if (c < width) f(c, int(width - c));
}

template <class T>
INLINE F32 take(const T* p, int count) {
  if (count == LANES) return load_as(p);
  T whole[LANES] = {};
  std::memcpy(whole, p, count * sizeof(T));
  return load_as(whole);
}
template <class T>
INLINE void put(T* p, F32 v, int count) {
  if (count == LANES) return store_as(p, v);
  T whole[LANES];
  store_as(whole, v);
  std::memcpy(p, whole, count * sizeof(T));
}

struct Sheet {  // a tensor as rows of its last dimension
  int64_t rows, width;
  int64_t blocks() const { return (rows + BLOCK - 1) / BLOCK; }
};

inline Sheet sheet_of(const Tensor& t) {
  const int64_t width = t.dim() ? t.size(t.dim() - 1) : 1;
  return {width ? t.numel() / width : 0, width};
}

inline Tensor like(const Tensor& t) {
  std::vector<int64_t> size;
  for (int64_t i = 0; i < t.dim(); i++) size.push_back(t.size(i));
  return empty(size, t.scalar_type());
}

inline void check_same(const Tensor& a, const Tensor& b) {
  STD_TORCH_CHECK(a.scalar_type() == b.scalar_type() && a.dim() == b.dim(), "the tensors must have one dtype and shape");
  for (int64_t i = 0; i < a.dim(); i++) STD_TORCH_CHECK(a.size(i) == b.size(i), "the tensors must have one shape");
}

// The bias as float32 values in memory, zeros where there is none.
inline std::vector<float> bias_of(const std::optional<Tensor>& bias, int64_t width) {
  std::vector<float> values(width + LANES, 0.0f);
  if (!bias) return values;
  STD_TORCH_CHECK(bias->is_contiguous() && bias->numel() == width, "the bias must have one value a column");
  if (type_of(*bias) == Type::f32)
    std::memcpy(values.data(), bias->const_data_ptr(), width * sizeof(float));
  else
    for (int64_t c = 0; c < width; c++) values[c] = from_bf16(static_cast<const uint16_t*>(bias->const_data_ptr())[c]);
  return values;
}

template <class F>
void for_rows(const Sheet& sheet, const F& f) {
  for_chunks(sheet.blocks(), [&](int64_t block) {
    for (int64_t r = block * BLOCK; r < std::min(sheet.rows, (block + 1) * BLOCK); r++) f(block, r);
  });
}

template <class F>
auto with_type(const Tensor& t, const F& f) {
  return type_of(t) == Type::f32 ? f(float{}) : f(uint16_t{});
}

// z (…, W) float32 or bf16, bias (W,) or none -> gelu(z + bias), as z.
Tensor bias_gelu(Tensor z, std::optional<Tensor> bias) {
  z = as_contiguous(z);
  const Sheet sheet = sheet_of(z);
  Tensor out = like(z);
  if (!z.numel()) return out;
  const auto added = bias_of(bias, sheet.width);
  with_type(z, [&](auto kind) {
    using T = decltype(kind);
    auto *from = static_cast<const T*>(z.const_data_ptr());
    auto *to = static_cast<T*>(out.mutable_data_ptr());
    for_rows(sheet, [&](int64_t, int64_t r) {
      columns(sheet.width, [&](int64_t c, int count) {
        put(to + r * sheet.width + c, gelu(take(from + r * sheet.width + c, count) + load(added.data() + c)), count);
      });
    });
  });
  return out;
}

// The gradients of z, as z, and of the bias, float32 (W,), which is summed up before it is rounded.
std::tuple<Tensor, Tensor> bias_gelu_backward(Tensor dout, Tensor z, std::optional<Tensor> bias) {
  z = as_contiguous(z), dout = as_contiguous(dout);
  check_same(dout, z);
  const Sheet sheet = sheet_of(z);
  Tensor dz = like(z), dbias = empty({sheet.width}, ScalarType::Float);
  auto* total = static_cast<float*>(dbias.mutable_data_ptr());
  std::memset(total, 0, sheet.width * sizeof(float));
  if (!z.numel()) return {dz, dbias};
  const auto added = bias_of(bias, sheet.width);
  const int64_t stride = round_up(sheet.width, LANES);
  Arena arena;
  float* sums = arena.take<float>(sheet.blocks() * stride);
  with_type(z, [&](auto kind) {
    using T = decltype(kind);
    auto *from = static_cast<const T*>(z.const_data_ptr()), *upper = static_cast<const T*>(dout.const_data_ptr());
    auto *to = static_cast<T*>(dz.mutable_data_ptr());
    for_rows(sheet, [&](int64_t block, int64_t r) {
      float* own = sums + block * stride;
      if (r == block * BLOCK) std::memset(own, 0, stride * sizeof(float));
      columns(sheet.width, [&](int64_t c, int count) {
        const int64_t at = r * sheet.width + c;
        const F32 gradient = take(upper + at, count) * gelu_slope(take(from + at, count) + load(added.data() + c));
        put(to + at, gradient, count);
        store(own + c, load(own + c) + gradient);
      });
    });
  });
  for_chunks(stride / LANES, [&](int64_t v) {
    F32 sum{};
    for (int64_t block = 0; block < sheet.blocks(); block++) sum += load(sums + block * stride + v * LANES);
    put(total + v * LANES, sum, int(std::min<int64_t>(LANES, sheet.width - v * LANES)));
  });
  return {dz, dbias};
}

// gate, up (…, W) -> gate · logistic(gate) · up.
Tensor silu_mul(Tensor gate, Tensor up) {
  gate = as_contiguous(gate), up = as_contiguous(up);
  check_same(gate, up);
  const Sheet sheet = sheet_of(gate);
  Tensor out = like(gate);
  if (!gate.numel()) return out;
  with_type(gate, [&](auto kind) {
    using T = decltype(kind);
    auto *g = static_cast<const T*>(gate.const_data_ptr()), *u = static_cast<const T*>(up.const_data_ptr());
    auto *to = static_cast<T*>(out.mutable_data_ptr());
    for_rows(sheet, [&](int64_t, int64_t r) {
      columns(sheet.width, [&](int64_t c, int count) {
        const int64_t at = r * sheet.width + c;
        const F32 x = take(g + at, count);
        put(to + at, x * logistic(x) * take(u + at, count), count);
      });
    });
  });
  return out;
}

// The gradients of gate and up.
std::tuple<Tensor, Tensor> silu_mul_backward(Tensor dout, Tensor gate, Tensor up) {
  gate = as_contiguous(gate), up = as_contiguous(up), dout = as_contiguous(dout);
  check_same(gate, up);
  check_same(dout, up);
  const Sheet sheet = sheet_of(gate);
  Tensor dgate = like(gate), dup = like(up);
  if (!gate.numel()) return {dgate, dup};
  with_type(gate, [&](auto kind) {
    using T = decltype(kind);
    auto *g = static_cast<const T*>(gate.const_data_ptr()), *u = static_cast<const T*>(up.const_data_ptr()),
         *upper = static_cast<const T*>(dout.const_data_ptr());
    auto *to_gate = static_cast<T*>(dgate.mutable_data_ptr()), *to_up = static_cast<T*>(dup.mutable_data_ptr());
    for_rows(sheet, [&](int64_t, int64_t r) {
      columns(sheet.width, [&](int64_t c, int count) {
        const int64_t at = r * sheet.width + c;
        const F32 x = take(g + at, count), share = logistic(x), above = take(upper + at, count);
        put(to_up + at, above * (x * share), count);
        put(to_gate + at, above * take(u + at, count) * share * (1.0f + x * (1.0f - share)), count);
      });
    });
  });
  return {dgate, dup};
}

}  // namespace hasten

STABLE_TORCH_LIBRARY_FRAGMENT(HASTEN_LIBRARY, m) {
  m.def("bias_gelu(Tensor z, Tensor? bias) -> Tensor");
  m.def("bias_gelu_backward(Tensor dout, Tensor z, Tensor? bias) -> (Tensor, Tensor)");
  m.def("silu_mul(Tensor gate, Tensor up) -> Tensor");
  m.def("silu_mul_backward(Tensor dout, Tensor gate, Tensor up) -> (Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(HASTEN_LIBRARY, CPU, m) {
  m.impl("bias_gelu", TORCH_BOX(&hasten::bias_gelu));
  m.impl("bias_gelu_backward", TORCH_BOX(&hasten::bias_gelu_backward));
  m.impl("silu_mul", TORCH_BOX(&hasten::silu_mul));
  m.impl("silu_mul_backward", TORCH_BOX(&hasten::silu_mul_backward));
}

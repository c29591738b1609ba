// Rows of x made ready for a product: normalised if asked for, and rounded to bf16 or to int8 planes.
#pragma once

#include "../parallel.h"
#include "gemm.h"

namespace hasten {

enum class Type { f32, bf16 };

struct Norm {
  const void* weight = nullptr;  // null: no norm
  const void* bias = nullptr;    // LayerNorm's
  Type type = Type::f32;
  float eps = 0, offset = 0;
  bool centred = false;          // LayerNorm subtracts the mean, RMSNorm does not
};

INLINE F32 load_as(const void* p, Type type, int64_t i) {
  return type == Type::f32 ? load(static_cast<const float*>(p) + i) : load_bf16(static_cast<const uint16_t*>(p) + i);
}
INLINE float load_one(const void* p, Type type, int64_t i) {
  return type == Type::f32 ? static_cast<const float*>(p)[i] : from_bf16(static_cast<const uint16_t*>(p)[i]);
}
INLINE void store_as(void* p, Type type, int64_t i, F32 v) {
  if (type == Type::f32) store(static_cast<float*>(p) + i, v);
  else store_bf16(static_cast<uint16_t*>(p) + i, v);
}
INLINE void store_one(void* p, Type type, int64_t i, float v) {
  if (type == Type::f32) static_cast<float*>(p)[i] = v;
  else static_cast<uint16_t*>(p)[i] = to_bf16(v);
}

inline void store_row(void* p, Type type, int64_t at, const float* values, int64_t count) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store_as(p, type, at + i, load(values + i));
  for (; i < count; i++) store_one(p, type, at + i, values[i]);
}

// One row of x (k values) as float32, normalised, followed by zeros up to `padded`.
inline void widen(const void* x, Type type, int64_t row, int64_t k, int64_t padded, const Norm& norm, float* out) {
  const int64_t whole = k / LANES * LANES, base = row * k;
  for (int64_t i = 0; i < whole; i += LANES) store(out + i, load_as(x, type, base + i));
  for (int64_t i = whole; i < k; i++) out[i] = load_one(x, type, base + i);
  for (int64_t i = k; i < padded; i++) out[i] = 0;
  if (!norm.weight) return;
  float mean = 0;
  if (norm.centred) {
    F32 total = {};
    float rest = 0;
    for (int64_t i = 0; i < whole; i += LANES) total += load(out + i);
    for (int64_t i = whole; i < k; i++) rest += out[i];
    mean = (sum_lanes(total) + rest) / float(k);
    for (int64_t i = 0; i < whole; i += LANES) store(out + i, load(out + i) - mean);
    for (int64_t i = whole; i < k; i++) out[i] -= mean;
  }
  F32 squares = {};
  float rest = 0;
  for (int64_t i = 0; i < whole; i += LANES) squares += load(out + i) * load(out + i);
  for (int64_t i = whole; i < k; i++) rest += out[i] * out[i];
  const float factor = 1.0f / std::sqrt((sum_lanes(squares) + rest) / float(k) + norm.eps);
  for (int64_t i = 0; i < whole; i += LANES) {
    F32 v = load(out + i) * factor * (load_as(norm.weight, norm.type, i) + norm.offset);
    if (norm.bias) v += load_as(norm.bias, norm.type, i);
    store(out + i, v);
  }
  for (int64_t i = whole; i < k; i++) {
    float v = out[i] * factor * (load_one(norm.weight, norm.type, i) + norm.offset);
    out[i] = norm.bias ? v + load_one(norm.bias, norm.type, i) : v;
  }
}

// Of k values (a multiple of 16); NaN or infinity if there is one among them.
inline float largest_magnitude(const float* x, int64_t k) {
  // As integers, magnitudes order like the numbers, with infinity and then NaN above all finite ones.
  I32 bits = {};
  for (int64_t i = 0; i < k; i += LANES) {
    const I32 own = as<I32>(abs(load(x + i)));
    bits = select(own > bits, own, bits);
  }
  const int32_t largest = max_lanes(bits);
  float top; std::memcpy(&top, &largest, 4);
  return top;
}

// k values (a multiple of 16) to int8 planes, each with its scale and sum: x = scale·q, or scales[0]·high +
// scales[1]·low with scales[0] = 255·scales[1]. With a NaN or an infinity among them the scale is NaN, and so is every
// output that they reach. Values that are all below 1e-34 count as zeros: the scale's inverse would overflow.
template <class Q>
void quantize(const float* x, int64_t k, int planes, int64_t plane_stride, Q* q, float* scales, int32_t* sums) {
  const float top = largest_magnitude(x, k);
  const bool finite = std::isfinite(top), any = finite && top > 1e-34f;
  const float steps = planes == 1 ? 127.0f : 127.0f * PLANE_BASE + 127.0f;
  const float up = any ? steps / top : 0.0f;
  const float scale = any ? top / steps : finite ? 0.0f : __builtin_nanf("");
  const int32_t keep = finite ? -1 : 0;
  // Adding and taking away 1.5·2^23 rounds to the nearest integer, ties to even.
  auto nearest = [](F32 v) { return to_int((v + 12582912.0f) - 12582912.0f); };
  I32 high_sum = {}, low_sum = {};
  for (int64_t i = 0; i < k; i += LANES) {
    const I32 n = nearest(load(x + i) * up) & keep;
    I32 high = n;
    if (planes == 2) {
      high = nearest(to_float(n) * (1.0f / PLANE_BASE));  // never near a tie: 255 is odd
      const I32 low = n - high * PLANE_BASE;
      low_sum += low;
      store_quantized(q + plane_stride + i, low);
    }
    high_sum += high;
    store_quantized(q + i, high);
  }
  scales[0] = planes == 2 ? scale * PLANE_BASE : scale;
  sums[0] = sum_lanes(high_sum);
  if (planes == 2) scales[1] = scale, sums[1] = sum_lanes(low_sum);
}

// The rows of x made ready for a weight. A few rows are prepared by every thread for itself, which takes a microsecond or
// two and no waiting; many are shared out, in a phase of their own.
class Preparation {
 public:
  // x (rows, k) may be written until the product's phase begins.
  Preparation(Arena& arena, const Weight& w, const void* x, Type type, int64_t rows, int64_t k, const Norm& norm,
              int planes)
      : w_(w), x_(x), type_(type), rows_(rows), k_(k), norm_(norm), planes_(w.integers() ? planes : 1) {
    if (own()) return;
    shared_ = place([&](int64_t count, auto slot) { return arena.take<typename decltype(slot)::type>(count); });
  }
  // A phase for many rows, nothing for few.
  void share_out(Worker& worker) const {
    if (own()) return;
    const int64_t block = rows_ < 64 ? 1 : 16;  // of few rows nobody should have more than others
    worker.each((rows_ + block - 1) / block, [&](int64_t chunk) {
      fill(shared_, chunk * block, std::min(rows_, (chunk + 1) * block));
    });
  }
  // The rows, for one thread; valid until it asks for others.
  Rows ready() const {
    if (!own()) return shared_;
    Rows out = place([](int64_t count, auto slot) {
      return scratch<typename decltype(slot)::type, decltype(slot)::number>(count);
    });
    fill(out, 0, rows_);
    return out;
  }

 private:
  template <class T, int NUMBER>
  struct Slot { using type = T; static constexpr int number = NUMBER; };
  bool own() const { return rows_ <= 4; }
  bool nibbles() const { return w_.format == Format::int4; }
  template <class Take>
  Rows place(const Take& take) const {
    Rows out;
    const bool plain = !w_.integers();
    const int64_t bytes = nibbles() ? spread_rows<int8_t>(w_.k) : spread_rows<ByteOperand>(w_.k);
    out.stride = plain ? spread_rows<Operand>(w_.k) : bytes;
    out.planes = planes_;
    out.groups = w_.groups();
    if (plain) {
      out.plain = take(rows_ * out.stride, Slot<Operand, 3>{});
      return out;
    }
    out.rows = rows_ * planes_;
    if (nibbles()) out.q = take(out.rows * out.stride, Slot<int8_t, 4>{});
    else out.bytes = take(out.rows * out.stride, Slot<ByteOperand, 4>{});
    out.scales = take(out.rows * out.groups, Slot<float, 5>{});
    out.sums = take(out.rows * out.groups, Slot<int32_t, 6>{});
    return out;
  }
  void fill(const Rows& out, int64_t m0, int64_t m1) const {
    float* wide = scratch<float, 7>(w_.k + LANES);
    for (int64_t m = m0; m < m1; m++) {
      widen(x_, type_, m, k_, w_.k, norm_, wide);
      if (!w_.integers()) {
        for (int64_t i = 0; i < w_.k; i += LANES) store_operand(out.plain + m * out.stride + i, load(wide + i));
        continue;
      }
      const int64_t size = w_.k / out.groups;
      auto round = [&](auto* q) {
        for (int64_t g = 0; g < out.groups; g++)
          quantize(wide + g * size, size, planes_, out.stride, q + m * planes_ * out.stride + g * size,
                   out.scales + g * out.rows + m * planes_, out.sums + g * out.rows + m * planes_);
      };
      if (nibbles()) round(out.q);
      else round(out.bytes);
    }
  }
  const Weight w_;
  const void* x_;
  const Type type_;
  const int64_t rows_, k_;
  const Norm norm_;
  const int planes_;
  Rows shared_;
};

// Where a thread begins to stream through w, if it does.
inline Prefetcher beginning(const Worker& worker, const Weight& w, int64_t rows) {
#if !HASTEN_OPENMP
  return {};  // torch shares each phase out among threads that are not the team's
#endif
  if (rows > row_block(w)) return {};
  const int64_t size = w.panel_bytes(), first = worker.first_of(w.panels());
  const char* at = static_cast<const char*>(w.data) + first * size;
  return {at, at + std::min<int64_t>((w.panels() - first) * size, BEGINNING)};
}

// The phases of a product of x with w: calls finish(panel, m0, m1, values [m1 - m0][64]) for every panel and block of
// rows.
template <class Finish>
void product(Worker& worker, const Weight& w, const Preparation& x, int64_t rows, const Finish& finish) {
  const int64_t block = row_block(w), blocks = (rows + block - 1) / block;
  Rows ready;
  auto one = [&](int64_t panel, int64_t m0, int64_t m1) {
    float* values = scratch<float, 2>(ROW_BLOCK * PANEL);
    panel_product(w, ready, panel, m0, m1, values);
    finish(panel, m0, m1, values);
  };
  x.share_out(worker);
  if (blocks == 1)
    return worker.stream(w.panels(), [&] { ready = x.ready(); }, [&](int64_t panel) { one(panel, 0, rows); },
                         beginning(worker, w, rows));
  ready = x.ready();
  worker.each(w.panels() * blocks, [&](int64_t chunk) {
#if defined(__AMX_TILE__)
    const int64_t panel = chunk % w.panels(), m0 = chunk / w.panels() * block;  // x stays in the second-level cache
#else
    const int64_t panel = chunk / blocks, m0 = chunk % blocks * block;  // the panel stays
#endif
    one(panel, m0, std::min(rows, m0 + block));
  });
}

}  // namespace hasten

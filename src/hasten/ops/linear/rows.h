// Rows of x made ready for a product: normalised if asked for, and rounded to bf16 or to int8 planes.
#pragma once

#include <torch/headeronly/util/Exception.h>

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

// Largest magnitude of k values (a multiple of 16); NaN or infinity if one of them is.
inline float largest_magnitude(const float* x, int64_t k) {
  // Read as integers, magnitudes order like the numbers, with infinity and then NaN above all finite ones.
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

// The weights that are multiplied with the same x, each of its own format: q, k and v, or the six of Gated DeltaNet.
// Only those that there are take time to copy: a step makes hundreds.
template <class T>
struct Few {
  static constexpr int64_t MOST = 6;
  static_assert(std::is_trivially_copyable_v<T>);
  Few() {}
  Few(const T& only) { add(only); }
  Few(const Few& other) { *this = other; }
  Few& operator=(const Few& other) {
    std::copy_n(other.items, other.count, items);
    count = other.count;
    return *this;
  }
  void add(const T& one) {
    STD_TORCH_CHECK(count < MOST, "a product has at most ", MOST, " parts");
    items[count++] = one;
  }
  T& operator[](int64_t i) { return items[i]; }
  const T& operator[](int64_t i) const { return items[i]; }
  const T* begin() const { return items; }
  const T* end() const { return items + count; }
  union {
    T items[MOST];
  };
  int64_t count = 0;
};

inline bool nibbles(const Weight& w) { return w.format == Format::int4; }
inline bool wide(const Weight& w) { return w.format == Format::f16; }
// Whether rows of x that are ready for one weight are so for the other.
inline bool taken_alike(const Weight& a, const Weight& b) {
  return a.k == b.k && a.integers() == b.integers() && wide(a) == wide(b) &&
         (!a.integers() || (nibbles(a) == nibbles(b) && a.group == b.group && a.planes == b.planes));
}

// The rows of x made ready for weights, once for those that take them alike. A few rows are prepared by every thread for
// itself, which takes a microsecond or two and no waiting; many are shared out, in a phase of their own.
class Preparation {
 public:
  // x (…, k) may be written until the product's phase begins. from [rows]: which row of x each is; null: its own number.
  Preparation(Arena& arena, const Few<Weight>& weights, const void* x, Type type, int64_t rows, int64_t k,
              const Norm& norm, const int64_t* from = nullptr)
      : x_(x), type_(type), rows_(rows), k_(k), norm_(norm), from_(from) {
    for (const Weight& w : weights) {
      padded_ = std::max(padded_, w.k);
      int64_t kind = 0;
      while (kind < kinds_.count && !taken_alike(kinds_[kind], w)) kind++;
      if (kind == kinds_.count) kinds_.add(w);
      kind_of_.add(kind);
    }
    if (!own()) shared_ = place([&](int64_t bytes) { return arena.take<char>(bytes); });
  }
  // A phase for many rows, nothing for few.
  void share_out(Worker& worker) const {
    if (own()) return;
    const int64_t block = rows_ < 64 ? 1 : 16;  // of few rows nobody should have more than others
    worker.each((rows_ + block - 1) / block, [&](int64_t chunk) {
      fill(shared_, chunk * block, std::min(rows_, (chunk + 1) * block));
    });
  }
  // The rows as each weight takes them, for one thread; valid until it asks for others.
  Few<Rows> ready() const {
    if (!own()) return by_weight(shared_);
    int64_t bytes = 0;
    place([&](int64_t more) { return bytes += more, nullptr; });
    char* at = scratch<char, 3>(bytes);
    const Few<Rows> out = place([&](int64_t more) { return (at += more) - more; });
    fill(out, 0, rows_);
    return by_weight(out);
  }

 private:
  bool own() const { return rows_ <= 4; }
  // take(bytes): memory that begins at a cache line, or null to count.
  template <class Take>
  Few<Rows> place(const Take& take) const {
    auto some = [&]<class T>(T*& where, int64_t count) {  // a line more: kernels may read whole vectors
      where = reinterpret_cast<T*>(static_cast<char*>(take((count * int64_t(sizeof(T)) + 127) / 64 * 64)));
    };
    Few<Rows> all;
    for (const Weight& w : kinds_) {
      Rows out;
      out.groups = w.groups();
      out.planes = w.integers() ? w.planes : 1;
      out.rows = rows_ * out.planes;
      if (wide(w)) {
        out.stride = spread_rows<float>(w.k);
        some(out.wide, rows_ * out.stride);
      } else if (!w.integers()) {
        out.stride = spread_rows<Operand>(w.k);
        some(out.plain, rows_ * out.stride);
      } else {
        out.stride = nibbles(w) ? spread_rows<int8_t>(w.k) : spread_rows<ByteOperand>(w.k);
        if (nibbles(w)) some(out.q, out.rows * out.stride);
        else some(out.bytes, out.rows * out.stride);
        some(out.scales, out.rows * out.groups);
        some(out.sums, out.rows * out.groups);
      }
      all.add(out);
    }
    return all;
  }
  Few<Rows> by_weight(const Few<Rows>& by_kind) const {
    Few<Rows> found;
    for (int64_t kind : kind_of_) found.add(by_kind[kind]);
    return found;
  }
  void fill(const Few<Rows>& all, int64_t m0, int64_t m1) const {
    float* values = scratch<float, 7>(padded_ + LANES);
    for (int64_t m = m0; m < m1; m++) {
      widen(x_, type_, from_ ? from_[m] : m, k_, padded_, norm_, values);
      for (int64_t kind = 0; kind < kinds_.count; kind++) fill_row(kinds_[kind], all[kind], m, values);
    }
  }
  static void fill_row(const Weight& w, const Rows& out, int64_t m, const float* values) {
    if (!w.integers()) {
      for (int64_t i = 0; i < w.k; i += LANES) {
        if (wide(w)) store(out.wide + m * out.stride + i, load(values + i));
        else store_operand(out.plain + m * out.stride + i, load(values + i));
      }
      return;
    }
    const int64_t size = w.k / out.groups;
    auto round = [&](auto* q) {
      for (int64_t g = 0; g < out.groups; g++)
        quantize(values + g * size, size, w.planes, out.stride, q + m * w.planes * out.stride + g * size,
                 out.scales + g * out.rows + m * w.planes, out.sums + g * out.rows + m * w.planes);
    };
    if (nibbles(w)) round(out.q);
    else round(out.bytes);
  }
  const void* x_;
  const Type type_;
  const int64_t rows_, k_;
  const Norm norm_;
  const int64_t* const from_;
  int64_t padded_ = 0;
  Few<Weight> kinds_;      // one of each that take the rows alike
  Few<int64_t> kind_of_;   // of each weight
  Few<Rows> shared_;
};

// The part and the panel in it, of the item-th panel of concatenated weights.
struct Place {
  int64_t part, panel;
  Place(const Few<Weight>& weights, int64_t item) : part(0), panel(item) {
    while (part + 1 < weights.count && panel >= weights[part].panels()) panel -= weights[part++].panels();
  }
};
inline int64_t panels_of(const Few<Weight>& weights) {
  int64_t panels = 0;
  for (const Weight& w : weights) panels += w.panels();
  return panels;
}
inline int64_t row_block(const Few<Weight>& weights) {
  int64_t block = ROW_BLOCK;
  for (const Weight& w : weights) block = std::min(block, row_block(w));
  return block;
}

// Where a thread begins to stream through weights, if it does.
inline Prefetcher beginning(const Worker& worker, const Few<Weight>& weights, int64_t rows) {
#if !HASTEN_OPENMP
  return {};  // torch shares each phase out among threads that are not the team's
#endif
  if (rows > row_block(weights)) return {};
  const Place first(weights, worker.first_of(panels_of(weights)));
  const Weight& w = weights[first.part];
  const int64_t size = w.panel_bytes();
  const char* at = static_cast<const char*>(w.data) + first.panel * size;
  return {at, at + std::min<int64_t>((w.panels() - first.panel) * size, BEGINNING)};
}

// The phases of a product: calls each(ready rows, item, m0, m1) for every item, which are as many as panels of `weights`
// unless there are `items` of another kind, and every block of rows.
template <class Each>
void over_panels(Worker& worker, const Few<Weight>& weights, int64_t items, const Preparation& x, int64_t rows,
                 const Each& each) {
  const int64_t block = row_block(weights), blocks = (rows + block - 1) / block;
  Few<Rows> ready;
  x.share_out(worker);
  if (blocks == 1)
    return worker.stream(items, [&] { ready = x.ready(); }, [&](int64_t item) { each(ready, item, 0, rows); },
                         beginning(worker, weights, rows));
  ready = x.ready();
  worker.each(items * blocks, [&](int64_t chunk) {
#if defined(__AMX_TILE__)
    const int64_t item = chunk % items, m0 = chunk / items * block;  // x stays in the second-level cache
#else
    const int64_t item = chunk / blocks, m0 = chunk % blocks * block;  // the panel stays
#endif
    each(ready, item, m0, std::min(rows, m0 + block));
  });
}

// The products of x with weights: calls finish(part, panel, m0, m1, values [m1 - m0][64]) for every panel and block of rows.
template <class Finish>
void product(Worker& worker, const Few<Weight>& weights, const Preparation& x, int64_t rows, const Finish& finish) {
  over_panels(worker, weights, panels_of(weights), x, rows,
              [&](const Few<Rows>& ready, int64_t item, int64_t m0, int64_t m1) {
    const Place at(weights, item);
    float* values = scratch<float, 2>(ROW_BLOCK * PANEL);
    panel_product(weights[at.part], ready[at.part], at.panel, m0, m1, values);
    finish(at.part, at.panel, m0, m1, values);
  });
}

// The products with two weights of as many rows, panel by panel: calls finish(panel, m0, m1, values of the first, of the
// second).
template <class Finish>
void product_of_two(Worker& worker, const Few<Weight>& weights, const Preparation& x, int64_t rows, const Finish& finish) {
  over_panels(worker, weights, weights[0].panels(), x, rows,
              [&](const Few<Rows>& ready, int64_t panel, int64_t m0, int64_t m1) {
    float* values = scratch<float, 2>(2 * ROW_BLOCK * PANEL);
    for (int64_t part = 0; part < 2; part++)
      panel_product(weights[part], ready[part], panel, m0, m1, values + part * ROW_BLOCK * PANEL);
    finish(panel, m0, m1, values, values + ROW_BLOCK * PANEL);
  });
}

}  // namespace hasten

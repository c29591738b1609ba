// The way into attention as phases of a team. R rows of x, C: hidden size, H: query heads, D: head size.
#pragma once

#include "../attention/cache_rows.h"
#include "phases.h"

namespace hasten {

// Where queries and keys are normalised: each head before its rotary turn, each head after it, or all heads as one vector.
enum class HeadNorm { head, rotated_head, projection };

inline void normalize_head(float* x, int64_t size, const Norm& norm) {
  if (!norm.weight) return;
  alignas(64) float copy[LARGEST_ROW + LANES];
  std::memcpy(copy, x, size * sizeof(float));
  widen(copy, Type::f32, 0, size, size, norm, x);
}

// The rotary turn of a head's first 2·half elements: element i with element i + half, or (pairs) 2i with 2i + 1.
inline void turn_head(float* x, const float* cos, const float* sin, int64_t half, bool pairs) {
  int64_t i = 0;
  if (pairs) {
    for (; i < half; i++) {
      const float a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = a * cos[i] - b * sin[i];
      x[2 * i + 1] = b * cos[i] + a * sin[i];
    }
    return;
  }
  for (; i + LANES <= half; i += LANES) {
    const F32 a = load(x + i), b = load(x + i + half), c = load(cos + i), s = load(sin + i);
    store(x + i, a * c - b * s);
    store(x + i + half, b * c + a * s);
  }
  for (; i < half; i++) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cos[i] - b * sin[i];
    x[i + half] = b * cos[i] + a * sin[i];
  }
}

// The rotary turn of each of R rows: cosines and sines are those of row r, or of row rows[r] of a table of `count` rows,
// (…, half). factors, of the same rows: multiply a row's queries.
struct Rotary {
  Rotary() = default;
  Rotary(const Tensor& cos, const Tensor& sin, const Maybe& query_factors)
      : cosines(static_cast<const float*>(cos.const_data_ptr())), sines(static_cast<const float*>(sin.const_data_ptr())),
        factors(query_factors ? static_cast<const float*>(query_factors->const_data_ptr()) : nullptr), half(cos.size(-1)),
        count(cos.numel() / std::max<int64_t>(half, 1)) {
    for (const Tensor& one : {cos, sin})
      STD_TORCH_CHECK(one.scalar_type() == ScalarType::Float && one.is_contiguous() && one.numel() == count * half,
                      "cos and sin must be float32, with one row for each row of x");
    STD_TORCH_CHECK(!query_factors || (query_factors->scalar_type() == ScalarType::Float &&
                                       query_factors->is_contiguous() && query_factors->numel() == count),
                    "there must be one factor for each row of cos, float32");
  }
  // Refuses angles of other rows, or of heads that turn fewer than 2·half values.
  void check(int64_t needed, int64_t size) const {
    STD_TORCH_CHECK(!cosines || ((rows || count == needed) && 2 * half <= size),
                    "cos and sin must be float32, with one row for each row of x");
  }
  explicit operator bool() const { return cosines; }
  void turn(float* x, int64_t r, bool pairs) const {
    const int64_t at = (rows ? rows[r] : r) * half;
    if (cosines) turn_head(x, cosines + at, sines + at, half, pairs);
  }
  void scale(float* x, int64_t r, int64_t size) const {
    if (!factors) return;
    const float by = factors[rows ? rows[r] : r];
    for (int64_t i = 0; i < size; i++) x[i] *= by;
  }

  const float *cosines = nullptr, *sines = nullptr, *factors = nullptr;
  const int64_t* rows = nullptr;
  int64_t half = 0, count = 0;
};

// The slot of each of R rows in the cache.
inline const int64_t* slots_of(const Tensor& slot_mapping, int64_t rows) {
  STD_TORCH_CHECK(slot_mapping.scalar_type() == ScalarType::Long && slot_mapping.is_contiguous() &&
                      slot_mapping.numel() == rows,
                  "there must be one slot for each row of x, int64");
  return static_cast<const int64_t*>(slot_mapping.const_data_ptr());
}

// norm + q, k, v + head norms + rotary turn + cache write. x (R, C) -> q (R, H, D) in x's dtype; k, v go into row slot[r] of
// the cache, as attention/cache_rows.h says, rotated or not; -1 is the last row, which nobody reads. gated: each head of q is
// followed by its gate in the product. written: what the product has beside q: 2, keys and values; 1, keys, which are the
// values too, before norm and turn; 0, neither: the cache is that of an earlier layer.
struct AttentionInput {
  AttentionInput(Arena& arena, const void* x, Type type, int64_t rows, void* q, const Norm& norm,
                 const Few<PackedWeight>& weights, int64_t heads, int64_t head_dim, const Norm& q_norm, const Norm& k_norm,
                 const Rotary& rotary, const Cache& cache, const int64_t* slot, bool rotated, const int64_t* chosen = nullptr,
                 HeadNorm place = HeadNorm::head, bool pairs = false, bool gated = false, const Norm& v_norm = {},
                 int64_t written = 2)
      : heads(heads), kv_heads(cache.heads), head_dim(head_dim), written(written), q(q), type(type), place(place),
        pairs(pairs), query_size(head_dim * (1 + gated)), q_norm(q_norm), k_norm(k_norm), v_norm(v_norm),
        linear(arena, x, type, rows, norm, weights, chosen),
        values(arena.take<float>(rows * linear.n)), rotary(rotary), cache(cache), slot(slot), rotated(rotated) {
    cache.check(head_dim);
    rotary.check(rows, head_dim);
    STD_TORCH_CHECK(linear.n == heads * query_size + written * kv_heads * head_dim,
                    "the weights of q, k and v do not fit the cache");
    STD_TORCH_CHECK(head_dim <= LARGEST_ROW, "head sizes up to ", LARGEST_ROW);
    STD_TORCH_CHECK((!gated && written == 2) || place != HeadNorm::projection,
                    "queries with gates, or without values of their own, are normalised head by head");
  }

  void run(Worker& worker) const {
    linear.run_into(worker, values);
    if (place == HeadNorm::projection)
      worker.each(2 * linear.rows, [&](int64_t item) {
        const bool key = item % 2;
        float* x = values + item / 2 * linear.n + (key ? heads * head_dim : 0);
        const int64_t size = (key ? kv_heads : heads) * head_dim;
        widen(x, Type::f32, 0, size, size, key ? k_norm : q_norm, x);
      });
    // The heads of few rows are shared out too; of many, whole rows.
    const int64_t all = heads + written * kv_heads, step = linear.rows <= 4 ? kv_heads : all;
    worker.each(linear.rows * (all / step), [&](int64_t item) {
      const int64_t r = item / (all / step), from = item % (all / step) * step;
      for (int64_t h = from; h < from + step; h++) one(r, h);
    });
  }
  // attended (R, H, D) times the sigmoid of the gates, each of which follows its head of q.
  void multiply_gates(Worker& worker, float* attended) const {
    worker.each(linear.rows, [&](int64_t r) {
      for (int64_t h = 0; h < heads; h++) {
        const float* gate = values + r * linear.n + h * query_size + head_dim;
        float* y = attended + (r * heads + h) * head_dim;
        int64_t i = 0;
        for (; i + LANES <= head_dim; i += LANES) store(y + i, load(y + i) * logistic(load(gate + i)));
        for (; i < head_dim; i++) y[i] /= 1.0f + std::exp(-gate[i]);
      }
    });
  }

 private:
  void one(int64_t r, int64_t h) const {
    float* x = values + r * linear.n + (h < heads ? h * query_size : heads * query_size + (h - heads) * head_dim);
    if (h >= heads && written == 1) {
      alignas(64) float value[LARGEST_ROW];
      std::memcpy(value, x, head_dim * sizeof(float));
      keep_value(r, h - heads, value);
    }
    if (h < heads + kv_heads) {
      const Norm& norm = h < heads ? q_norm : k_norm;
      if (place == HeadNorm::head) normalize_head(x, head_dim, norm);
      rotary.turn(x, r, pairs);
      if (place == HeadNorm::rotated_head) normalize_head(x, head_dim, norm);
    }
    if (h < heads) {
      rotary.scale(x, r, head_dim);
      return store_row(q, type, (r * heads + h) * head_dim, x, head_dim);
    }
    if (h < heads + kv_heads) return store_cached(cache.rows, rotated, x, head_dim, cache.k + row_at(r, h - heads));
    keep_value(r, h - heads - kv_heads, x);
  }
  void keep_value(int64_t r, int64_t head, float* x) const {
    normalize_head(x, head_dim, v_norm);
    store_cached(cache.rows, rotated, x, head_dim, cache.v + row_at(r, head));
  }
  // Where a head's row is in its cache, in bytes.
  int64_t row_at(int64_t r, int64_t head) const {
    return (slot[r] < 0 ? cache.slots - 1 : slot[r]) * cache.slot_bytes + head * cache.head_bytes;
  }

  const int64_t heads, kv_heads, head_dim, written;
  void* const q;
  const Type type;
  const HeadNorm place;
  const bool pairs;
  const int64_t query_size;  // of a head with its gate
  const Norm q_norm, k_norm, v_norm;
  const Linear linear;
  float* const values;
  const Rotary rotary;
  const Cache cache;
  const int64_t* const slot;
  const bool rotated;
};

}  // namespace hasten

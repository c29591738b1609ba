// The steps of a decoder block as phases of a team: whatever comes between two products is done on the way in (norm,
// rounding) or on the way out (rotary turn, cache write, activation, residual), so that nothing wide goes through memory
// twice. R rows of x, C: hidden size, H: query heads, D: head size.
#pragma once

#include "../collective/collective.h"
#include "activations.h"

namespace hasten {

using torch::stable::Tensor;
typedef std::optional<Tensor> Maybe;

// What adapters (LoRA) add to a product with a weight: B·(A·x), of each row with the factors that it takes.
struct Adapters {
  const float* a = nullptr;  // [adapters][K][rank]; null: there are none
  const float* b = nullptr;  // [adapters][N/64][rank][64], scaled
  int64_t count = 0, rank = 0;  // rank: of all, filled up with zeros to a multiple of 16
};

// A packed weight (N, K) with what belongs to it.
struct PackedWeight {
  Weight w{};
  int64_t k = 0;
  const void* bias = nullptr;
  Type bias_type = Type::f32;
  Adapters adapters;
};

// Bias of 16 output features from `row` on; zero past the last feature.
inline F32 load_bias(const PackedWeight& weight, int64_t row) {
  if (row + LANES <= weight.w.n) return load_as(weight.bias, weight.bias_type, row);
  alignas(64) float some[LANES] = {};
  for (int64_t j = row; j < weight.w.n; j++) some[j - row] = load_one(weight.bias, weight.bias_type, j);
  return load(some);
}

// A product and the rows it multiplies: one weight, or several parts whose outputs are concatenated.
struct Linear {
  // x (rows, K), may be written until the phases begin. chosen [rows]: the adapter that each row takes, -1 for none;
  // null: nobody takes any.
  Linear(Arena& arena, const void* x, Type type, int64_t rows, const Norm& norm, const Few<PackedWeight>& parts,
         const int64_t* chosen = nullptr)
      : parts(parts), weights(weights_of(parts)), rows(rows), x(arena, weights, x, type, rows, parts[0].k, norm), from(x),
        type(type), norm(norm), chosen(chosen) {
    for (const PackedWeight& part : parts) {
      STD_TORCH_CHECK(part.k == parts[0].k, "the parts of a product take ", parts[0].k, " and ", part.k, " features");
      n += part.w.n;
      adapted = adapted || (chosen && part.adapters.a);
      narrow.add(chosen && part.adapters.a ? arena.take<float>(rows * part.adapters.rank) : nullptr);
    }
  }

  // Calls finish(part, panel, m0, m1, values).
  template <class Finish>
  void run(Worker& worker, const Finish& finish) const {
    if (!adapted) return product(worker, weights, x, rows, finish);
    worker.each(rows, [&](int64_t r) { narrow_row(r); });
    product(worker, weights, x, rows, [&](int64_t part, int64_t panel, int64_t m0, int64_t m1, float* values) {
      add_adapted(part, panel, m0, m1, values);
      finish(part, panel, m0, m1, values);
    });
  }
  // For two parts with the same number of rows: calls finish(panel, m0, m1, values of the first, values of the second).
  template <class Finish>
  void run_both(Worker& worker, const Finish& finish) const {
    if (adapted) worker.each(rows, [&](int64_t r) { narrow_row(r); });
    product_of_two(worker, weights, x, rows, [&](int64_t panel, int64_t m0, int64_t m1, float* first, float* second) {
      add_adapted(0, panel, m0, m1, first);
      add_adapted(1, panel, m0, m1, second);
      finish(panel, m0, m1, first, second);
    });
  }
  // All of it as float32 rows, bias added.
  void run_into(Worker& worker, float* out) const {
    int64_t begins[Few<Weight>::MOST] = {};
    for (int64_t part = 1; part < parts.count; part++) begins[part] = begins[part - 1] + weights[part - 1].n;
    run(worker, [&](int64_t part, int64_t panel, int64_t m0, int64_t m1, const float* values) {
      const PackedWeight& own = parts[part];
      const int64_t n0 = panel * PANEL, count = std::min<int64_t>(PANEL, own.w.n - n0);
      for (int64_t m = m0; m < m1; m++) {
        const float* from = values + (m - m0) * PANEL;
        float* to = out + m * n + begins[part] + n0;
        int64_t i = 0;
        for (; i + LANES <= count; i += LANES) {
          F32 v = load(from + i);
          if (own.bias) v += load_as(own.bias, own.bias_type, n0 + i);
          store(to + i, v);
        }
        for (; i < count; i++) to[i] = from[i] + (own.bias ? load_one(own.bias, own.bias_type, n0 + i) : 0.0f);
      }
    });
  }

  const Few<PackedWeight> parts;
  const Few<Weight> weights;
  const int64_t rows;
  const Preparation x;
  int64_t n = 0;  // outputs of all parts

 private:
  static Few<Weight> weights_of(const Few<PackedWeight>& parts) {
    Few<Weight> found;
    for (const PackedWeight& part : parts) found.add(part.w);
    return found;
  }
  // A·x of one row, in four chains along K that are the same for any number of rows.
  void narrow_row(int64_t r) const {
    if (chosen[r] < 0) return;
    const int64_t k = parts[0].k;
    float* wide = scratch<float, 20>(k + 2 * LANES);
    widen(from, type, r, k, k, norm, wide);
    for (int64_t part = 0; part < parts.count; part++) {
      const Adapters& own = parts[part].adapters;
      if (!narrow[part]) continue;
      const float* a = own.a + chosen[r] * k * own.rank;
      for (int64_t i = 0; i < own.rank; i += LANES) {
        F32 acc[4] = {};
        for (int64_t j = 0; j < k; j++) accumulate(acc[j % 4], load(a + j * own.rank + i), splat(wide[j]));
        store(narrow[part] + r * own.rank + i, (acc[0] + acc[1]) + (acc[2] + acc[3]));
      }
    }
  }
  void add_adapted(int64_t part, int64_t panel, int64_t m0, int64_t m1, float* values) const {
    if (!narrow[part]) return;
    const Adapters& own = parts[part].adapters;
    for (int64_t m = m0; m < m1; m++, values += PANEL) {
      if (chosen[m] < 0) continue;
      const float* b = own.b + (chosen[m] * weights[part].panels() + panel) * own.rank * PANEL;
      const float* h = narrow[part] + m * own.rank;
      F32 acc[VECTORS] = {};
      for (int64_t i = 0; i < own.rank; i++)
        for (int v = 0; v < VECTORS; v++) accumulate(acc[v], load(b + i * PANEL + v * LANES), splat(h[i]));
      for (int v = 0; v < VECTORS; v++) store(values + v * LANES, load(values + v * LANES) + acc[v]);
    }
  }
  const void* const from;
  const Type type;
  const Norm norm;
  const int64_t* const chosen;
  bool adapted = false;
  Few<float*> narrow;  // A·x of each part's adapters, or null
};

// whole·(residual + scale·norm(x·Wᵀ + b)), the norm being optional. x (R, K), residual and out (R, N). ranks: those whose
// products are parts of one sum, which the norm and the residual wait for.
struct LinearAdd {
  LinearAdd(Arena& arena, const void* x, Type x_type, int64_t rows, const PackedWeight& weight, const void* residual,
            void* out, Type type, const Norm& norm, const int64_t* chosen = nullptr,
            Ranks* ranks = nullptr, float scale = 1, float whole = 1)
      : linear(arena, x, x_type, rows, Norm{}, weight, chosen), norm(norm), residual(residual), out(out), type(type),
        scale(scale), whole(whole), ranks(ranks), values(norm.weight || ranks ? arena.take<float>(rows * linear.n) : nullptr) {}

  Prefetcher beginning(const Worker& worker) const { return hasten::beginning(worker, linear.weights, linear.rows); }
  void run(Worker& worker) const {
    const int64_t n = linear.n;
    if (norm.weight || ranks) {
      linear.run_into(worker, values);
      if (ranks) worker.each(1, [&](int64_t) { ranks->sum(values, Type::f32, linear.rows * n); });
      return worker.each(linear.rows, [&](int64_t r) {
        if (!norm.weight) return add(values + r * n, r * n, n, nullptr, Type::f32, 0);
        float* normal = scratch<float, 7>(n + LANES);
        widen(values, Type::f32, r, n, n, norm, normal);
        add(normal, r * n, n, nullptr, Type::f32, 0);
      });
    }
    const PackedWeight& only = linear.parts[0];
    linear.run(worker, [&](int64_t, int64_t panel, int64_t m0, int64_t m1, const float* values) {
      const int64_t n0 = panel * PANEL, count = std::min<int64_t>(PANEL, n - n0);
      for (int64_t m = m0; m < m1; m++)
        add(values + (m - m0) * PANEL, m * n + n0, count, only.bias, only.bias_type, n0);
    });
  }

 private:
  void add(const float* values, int64_t at, int64_t count, const void* b, Type bias_type, int64_t n0) const {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
      F32 v = load(values + i) * scale + load_as(residual, type, at + i);
      if (b) v += load_as(b, bias_type, n0 + i) * scale;
      store_as(out, type, at + i, v * whole);
    }
    for (; i < count; i++)
      store_one(out, type, at + i,
                (values[i] * scale + load_one(residual, type, at + i) +
                 (b ? load_one(b, bias_type, n0 + i) * scale : 0.0f)) * whole);
  }

  const Linear linear;
  const Norm norm;
  const void* const residual;
  void* const out;
  const Type type;
  const float scale, whole;
  Ranks* const ranks;
  float* const values;
};

// norm + act(x·Gateᵀ)·(x·Upᵀ), or act(x·Upᵀ) if not gated. x (R, C) -> out (R, I), both of one dtype. Weights of gate and up
// of one format are one, which alternates 32 rows of gate and 32 rows of up, so that both halves of a product meet in one
// panel; else they are two parts.
struct MlpInput {
  MlpInput(Arena& arena, const void* x, Type type, int64_t rows, void* out, const Norm& norm,
           const Few<PackedWeight>& weights, int64_t inner, bool gated, Activation kind, const int64_t* chosen = nullptr,
           float positive = 0, float negative = 0)
      : interleaved(gated && weights.count == 1), inner(inner), gated(gated), kind(kind), positive(positive),
        negative(negative), out(out), type(type), linear(arena, x, type, rows, norm, weights, chosen) {}
  // Checks the weights of a plan and returns them unchanged. An interleaved weight has whole panels.
  static Few<PackedWeight> checked(Few<PackedWeight> weights, int64_t inner, bool gated) {
    const bool interleaved = gated && weights.count == 1;
    const int64_t n = interleaved ? (inner + PANEL / 2 - 1) / (PANEL / 2) * PANEL : inner;
    STD_TORCH_CHECK(weights.count == (gated && !interleaved ? 2 : 1), "gate and up are one weight or two");
    for (const PackedWeight& one : weights)
      STD_TORCH_CHECK(one.w.n == n, "a weight has ", one.w.n, " rows; expected ", n);
    return weights;
  }

  void run(Worker& worker) const {
    const PackedWeight &first = linear.parts[0], &second = linear.parts[gated && !interleaved ? 1 : 0];
    if (gated && !interleaved)
      return linear.run_both(worker, [&](int64_t panel, int64_t m0, int64_t m1, const float* gate, const float* up) {
        finish(first, second, panel * PANEL, panel * PANEL, panel * PANEL, PANEL, m0, m1, gate, up);
      });
    const int64_t each = interleaved ? PANEL / 2 : PANEL;
    linear.run(worker, [&](int64_t, int64_t panel, int64_t m0, int64_t m1, const float* values) {
      finish(first, second, panel * PANEL, panel * PANEL + PANEL / 2, panel * each, each, m0, m1, values,
             values + PANEL / 2);
    });
  }

 private:
  // Up to `most` outputs from i0 on, of values of gate (or of up alone) and of up, whose rows begin at row1 and row2.
  void finish(const PackedWeight& first, const PackedWeight& second, int64_t row1, int64_t row2, int64_t i0, int64_t most,
              int64_t m0, int64_t m1, const float* gate, const float* up) const {
    const int64_t count = std::min(most, inner - i0);
    for (int64_t m = m0; m < m1; m++, gate += PANEL, up += PANEL)
      for (int64_t i = 0; i < count; i += LANES) {
        F32 y = load(gate + i);
        if (first.bias) y += load_bias(first, row1 + i);
        y = activate(y, kind, positive, negative);
        if (gated) {
          F32 by = load(up + i);
          if (second.bias) by += load_bias(second, row2 + i);
          y *= by;
        }
        const int64_t base = m * inner + i0 + i;
        if (i + LANES <= count) store_as(out, type, base, y);
        else for (int64_t j = 0; j < count - i; j++) store_one(out, type, base + j, y[j]);
      }
  }

  const bool interleaved;
  const int64_t inner;
  const bool gated;
  const Activation kind;
  const float positive, negative;  // of xIELU
  void* const out;
  const Type type;
  const Linear linear;
};

}  // namespace hasten

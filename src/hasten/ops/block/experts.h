// Experts, of which each row of x takes a few: act(x·Gateᵀ)·(x·Upᵀ)·Downᵀ of each, with their biases, as phases of a team.
//
// The pairs of a row and an expert that it takes are sorted by expert. So an expert's weights are read once for all of its
// rows, and those of experts that no row takes are not read. A row's outputs are added in the order in which it names its
// experts: they do not depend on the other rows.
#pragma once

#include <cmath>
#include <limits>

#include "calls.h"

namespace hasten {

constexpr int64_t ROWS_AT_ONCE = 512;  // rows of x in one go: what lies between the products stays of bounded size

struct ExpertsPlan {
  static constexpr const char* name = "experts";
  const ExpertsPlan* self;
  std::vector<PackedWeight> gate, up, down;
  Activation kind;
  float limit, up_offset;  // as in PlanExpertsCall
  PlanExpertsCall held;  // what the pointers point to
  int64_t count() const { return int64_t(gate.size()); }
  int64_t hidden() const { return gate[0].k; }
  int64_t inner() const { return down[0].k; }
};

// How a row chooses experts by its logits, one for each (model/experts.py, `route`). groups: of consecutive experts, of which
// those are kept whose best scores (group_scores: one or two) sum highest. choice_bias: is added to the scores that choose, not to those that weigh.
// expert_scale: multiplies the shares of each expert.
struct Routing {
  int64_t top = 0, groups = 1, kept_groups = 1, group_scores = 2;
  bool sigmoid = false, normalize = false;
  float sum_floor = 0, scale = 1;
  const float *choice_bias = nullptr, *expert_scale = nullptr;

  // The numbers of the chosen experts and their shares, the best first.
  void choose(const float* logits, int64_t experts, int64_t* chosen, float* shares) const {
    float* score = scratch<float, 22>(3 * experts);
    float *choice = score + experts, *left = choice + experts;  // left: 1 for those that may still be chosen
    float most = logits[0], sum = 0;
    for (int64_t e = 1; e < experts; e++) most = std::max(most, logits[e]);
    for (int64_t e = 0; e < experts; e++) {
      score[e] = sigmoid ? 1.0f / (1.0f + std::exp(-logits[e])) : std::exp(logits[e] - most);
      sum += score[e];
    }
    for (int64_t e = 0; e < experts; e++) {
      if (!sigmoid) score[e] /= sum;
      choice[e] = score[e] + (choice_bias ? choice_bias[e] : 0.0f);
      left[e] = 1;
    }
    if (groups > 1) keep_best_groups(choice, experts, left);
    float total = 0;
    for (int64_t j = 0; j < top; j++) {
      const int64_t best = best_of(choice, experts, left);
      left[best] = 0;
      chosen[j] = best;
      shares[j] = score[best];
      total += shares[j];
    }
    for (int64_t j = 0; j < top; j++) {
      shares[j] = (normalize ? shares[j] / std::max(total, sum_floor) : shares[j]) * scale;
      if (expert_scale) shares[j] *= expert_scale[chosen[j]];
    }
  }

 private:
  // The highest value of those that are left; some expert whatever the values are.
  static int64_t best_of(const float* values, int64_t count, const float* left) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; i++)
      if (left[i] && (best < 0 || values[i] > values[best])) best = i;
    return std::max<int64_t>(best, 0);
  }
  void keep_best_groups(const float* choice, int64_t experts, float* left) const {
    const int64_t size = experts / groups;
    float* sums = scratch<float, 23>(2 * groups);
    float* open = sums + groups;
    for (int64_t g = 0; g < groups; g++) {
      float first = -std::numeric_limits<float>::infinity(), second = first;
      for (int64_t e = g * size; e < (g + 1) * size; e++) {
        if (choice[e] > first) second = first, first = choice[e];
        else second = std::max(second, choice[e]);
      }
      sums[g] = group_scores == 1 ? first : first + second;
      open[g] = 1;
    }
    std::fill(left, left + experts, 0.0f);
    for (int64_t kept = 0; kept < kept_groups; kept++) {
      const int64_t best = best_of(sums, groups, open);
      open[best] = 0;
      std::fill(left + best * size, left + (best + 1) * size, 1.0f);
    }
  }
};

// The pairs of rows and the experts that they take, sorted by expert and then by row.
struct Pairs {
  // An expert that is taken, and the pairs that take it.
  struct Run {
    int64_t expert, begin, end;
  };
  Pairs(Arena& arena, int64_t rows, int64_t top, int64_t experts)
      : rows(rows), top(top), experts(experts), row(arena.take<int64_t>(rows * top)), place(arena.take<int64_t>(rows * top)),
        next(arena.take<int64_t>(experts + 1)), taken(arena.take<int64_t>(1)),
        runs(arena.take<Run>(std::min(experts, rows * top))) {}
  // chosen [rows][top]: the experts of each row.
  void sort(const int64_t* chosen) const {
    std::fill(next, next + experts + 1, 0);
    for (int64_t i = 0; i < count(); i++) {
      STD_TORCH_CHECK(chosen[i] >= 0 && chosen[i] < experts, "there is no expert ", chosen[i]);
      next[chosen[i] + 1]++;
    }
    *taken = 0;
    for (int64_t e = 0; e < experts; e++) {
      if (next[e + 1]) runs[(*taken)++] = {e, next[e], next[e] + next[e + 1]};
      next[e + 1] += next[e];
    }
    for (int64_t i = 0; i < count(); i++) {
      place[i] = next[chosen[i]]++;
      row[place[i]] = i / top;
    }
  }
  int64_t count() const { return rows * top; }
  const int64_t rows, top, experts;
  int64_t* const row;    // of each pair in its order
  int64_t* const place;  // [rows][top]: where in that order
  int64_t* const next;
  int64_t* const taken;  // the number of runs
  Run* const runs;
};

// out = base + the sum of the chosen experts' outputs of norm(x), each times its share. x, base and out (rows, C) float32;
// no base: zero. It may be out. chosen and shares [rows][top] may be written until the phases begin.
struct ExpertsPhases {
  ExpertsPhases(Arena& arena, const ExpertsPlan& p, const float* x, int64_t rows, const Norm& norm, int64_t top,
                const int64_t* chosen, const float* shares, const float* base, float* out)
      : p(p), pairs(arena, rows, top, p.count()), chosen(chosen), shares(shares), base(base), out(out), alone(rows == 1),
        inner(arena.take<float>(pairs.count() * p.inner())), parts(arena.take<float>(pairs.count() * p.hidden())),
        input(arena, both(p.gate[0].w, p.up[0].w), x, Type::f32, alone ? 1 : pairs.count(), p.hidden(), norm,
              alone ? nullptr : pairs.row),
        middle(arena, p.down[0].w, inner, Type::f32, pairs.count(), p.inner(), Norm{}) {}

  void run(Worker& worker) const {
    worker.each(1, [&](int64_t) { pairs.sort(chosen); });
    worker.each(0, [](int64_t) {});  // all wait for the runs
    over_experts(worker, input, p.gate, [&](const Few<Rows>& x, const Pairs::Run& run, int64_t panel, int64_t m0, int64_t m1) {
      float* gate = scratch<float, 2>(2 * ROW_BLOCK * PANEL);
      float* up = gate + ROW_BLOCK * PANEL;
      const PackedWeight &gates = p.gate[run.expert], &ups = p.up[run.expert];
      const int64_t from = alone ? 0 : m0, to = alone ? 1 : m1;  // all experts of one row take that row
      panel_product(gates.w, x[0], panel, from, to, gate);
      panel_product(ups.w, x[1], panel, from, to, up);
      const int64_t count = (m1 - m0) * PANEL;
      if (gates.bias) add_bias(gates, panel, count, gate);
      if (ups.bias) add_bias(ups, panel, count, up);
      if (p.limit || p.up_offset) confine(count, gate, up);
      for (int64_t i = 0; i < count; i += LANES) store(gate + i, activate(load(gate + i), p.kind) * load(up + i));
      store_panel(gate, panel, m0, m1, p.inner(), inner);
    });
    over_experts(worker, middle, p.down, [&](const Few<Rows>& x, const Pairs::Run& run, int64_t panel, int64_t m0, int64_t m1) {
      const PackedWeight& downs = p.down[run.expert];
      float* values = scratch<float, 2>(2 * ROW_BLOCK * PANEL);
      panel_product(downs.w, x[0], panel, m0, m1, values);
      if (downs.bias) add_bias(downs, panel, (m1 - m0) * PANEL, values);
      store_panel(values, panel, m0, m1, p.hidden(), parts);
    });
    const int64_t c = p.hidden(), piece = pairs.rows < 16 ? 256 : c, pieces = (c + piece - 1) / piece;
    worker.each(pairs.rows * pieces, [&](int64_t item) {
      add_parts(item / pieces, item % pieces * piece, std::min(c, (item % pieces + 1) * piece));
    });
  }

 private:
  static Few<Weight> both(const Weight& first, const Weight& second) {
    Few<Weight> found(first);
    found.add(second);
    return found;
  }
  // Adds its bias to `count` values of a panel, rows after each other.
  static void add_bias(const PackedWeight& weight, int64_t panel, int64_t count, float* values) {
    for (int64_t i = 0; i < count; i += LANES)
      store(values + i, load(values + i) + load_bias(weight, panel * PANEL + i % PANEL));
  }
  // The limits of gate and up, and the offset of up.
  void confine(int64_t count, float* gate, float* up) const {
    const F32 most = splat(p.limit ? p.limit : std::numeric_limits<float>::infinity());  // NaN stays NaN
    for (int64_t i = 0; i < count; i += LANES) {
      store(gate + i, min(most, load(gate + i)));
      store(up + i, max(-most, min(most, load(up + i))) + p.up_offset);
    }
  }
  // Calls f(ready rows, run, panel, m0, m1) for each panel of each expert that is taken, and each block of its pairs.
  template <class F>
  void over_experts(Worker& worker, const Preparation& x, const std::vector<PackedWeight>& weights, const F& f) const {
    const int64_t panels = weights[0].w.panels(), block = row_block(weights[0].w);
    Few<Rows> ready;
    x.share_out(worker);
    worker.stream(*pairs.taken * panels, [&] { ready = x.ready(); }, [&](int64_t item) {
      const Pairs::Run& run = pairs.runs[item / panels];
      for (int64_t m0 = run.begin; m0 < run.end; m0 += block)
        f(ready, run, item % panels, m0, std::min(run.end, m0 + block));
    });
  }
  // Values of a panel for some pairs, to rows of n outputs.
  static void store_panel(const float* values, int64_t panel, int64_t m0, int64_t m1, int64_t n, float* to) {
    const int64_t n0 = panel * PANEL, count = std::min<int64_t>(PANEL, n - n0);
    for (int64_t m = m0; m < m1; m++, values += PANEL) std::memcpy(to + m * n + n0, values, count * sizeof(float));
  }
  // Outputs i0 … i1 of a row.
  void add_parts(int64_t r, int64_t i0, int64_t i1) const {
    const int64_t c = p.hidden();
    for (int64_t i = i0; i < i1; i++) {
      float sum = 0;
      for (int64_t j = 0; j < pairs.top; j++) sum += shares[r * pairs.top + j] * parts[pairs.place[r * pairs.top + j] * c + i];
      out[r * c + i] = base ? base[r * c + i] + sum : sum;
    }
  }

  const ExpertsPlan& p;
  const Pairs pairs;
  const int64_t* const chosen;
  const float *const shares, *const base;
  float* const out;
  const bool alone;
  float *const inner, *const parts;  // of each pair: what is between its products, and its output
  const Preparation input, middle;
};

}  // namespace hasten

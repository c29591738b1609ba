// Experts, of which each row of x takes a few: act(x·Gateᵀ)·(x·Upᵀ)·Downᵀ of each, with their biases, as one torch operator.
//
// The pairs of a row and an expert that it takes are sorted by expert. So an expert's weights are read once for all of its
// rows, and those of experts that no row takes are not read. A row's outputs are added in the order in which it names its
// experts: they do not depend on the other rows.
#include <limits>

#include "calls.h"

namespace hasten {

constexpr int64_t ROWS_AT_ONCE = 512;  // rows of x in one go: what lies between the products stays of bounded size

struct ExpertsPlan {
  static constexpr const char* name = "experts";
  const ExpertsPlan* self;
  std::vector<PackedWeight> gate, up, down;
  Activation kind;
  float limit, up_offset;  // no limit: infinity
  PlanExpertsCall held;  // what the pointers point to
  int64_t count() const { return int64_t(gate.size()); }
  int64_t hidden() const { return gate[0].k; }
  int64_t inner() const { return down[0].k; }
};

// The weights of plans, all (n, k); 0: of the first one's size.
static std::vector<PackedWeight> weights_of(const std::vector<Tensor>& plans, int64_t n, int64_t k) {
  std::vector<PackedWeight> found;
  for (const Tensor& plan : plans) found.push_back(plan_in<WeightPlan>(plan).weight);
  for (const PackedWeight& one : found) {
    STD_TORCH_CHECK(one.w.n == (n ? n : found[0].w.n) && one.k == (k ? k : found[0].k), "an expert's weight is ", one.w.n,
                    "×", one.k, ", which does not fit the others");
    STD_TORCH_CHECK(taken_alike(one.w, found[0].w), "the experts' weights take rows in different formats");
    STD_TORCH_CHECK(!one.adapters.a, "experts with adapters are not known here");
  }
  return found;
}

Tensor plan_experts(PlanExpertsCall call) {
  const size_t count = call.gate.size();
  STD_TORCH_CHECK(count && call.up.size() == count && call.down.size() == count, "each expert has a gate, an up and a down");
  auto plan = std::make_unique<ExpertsPlan>(ExpertsPlan{
      .gate = weights_of(call.gate, 0, 0), .kind = Activation(call.activation),
      .limit = call.limit ? float(call.limit) : std::numeric_limits<float>::infinity(), .up_offset = float(call.up_offset)});
  plan->up = weights_of(call.up, plan->gate[0].w.n, plan->gate[0].k);
  plan->down = weights_of(call.down, plan->gate[0].k, plan->gate[0].w.n);
  plan->held = std::move(call);
  return as_bytes(std::move(plan));
}

// The pairs of rows and the experts that they take, sorted by expert and then by row.
struct Pairs {
  // An expert that is taken, and the pairs that take it.
  struct Run {
    int64_t expert, begin, end;
  };
  Pairs(const int64_t* chosen, int64_t rows, int64_t top, int64_t experts) : row(rows * top), place(rows * top) {
    std::vector<int64_t> next(experts + 1);
    for (int64_t i = 0; i < rows * top; i++) {
      STD_TORCH_CHECK(chosen[i] >= 0 && chosen[i] < experts, "there is no expert ", chosen[i]);
      next[chosen[i] + 1]++;
    }
    for (int64_t e = 0; e < experts; e++) {
      if (next[e + 1]) runs.push_back({e, next[e], next[e] + next[e + 1]});
      next[e + 1] += next[e];
    }
    for (int64_t i = 0; i < rows * top; i++) {
      place[i] = next[chosen[i]]++;
      row[place[i]] = i / top;
    }
  }
  int64_t count() const { return int64_t(row.size()); }
  std::vector<Run> runs;
  std::vector<int64_t> row;    // of each pair in its order
  std::vector<int64_t> place;  // [rows][top]: where in that order
};

struct ExpertsPhases {
  ExpertsPhases(Arena& arena, const ExpertsPlan& p, const Pairs& pairs, const float* x, const float* shares, int64_t rows,
                int64_t top, float* out)
      : p(p), pairs(pairs), shares(shares), rows(rows), top(top), out(out), alone(rows == 1),
        inner(arena.take<float>(pairs.count() * p.inner())), parts(arena.take<float>(pairs.count() * p.hidden())),
        input(arena, both(p.gate[0].w, p.up[0].w), x, Type::f32, alone ? 1 : pairs.count(), p.hidden(), Norm{},
              alone ? nullptr : pairs.row.data()),
        middle(arena, p.down[0].w, inner, Type::f32, pairs.count(), p.inner(), Norm{}) {}

  void run(Worker& worker) const {
    over_experts(worker, input, p.gate, [&](const Few<Rows>& x, const Pairs::Run& run, int64_t panel, int64_t m0, int64_t m1) {
      float* gate = scratch<float, 2>(2 * ROW_BLOCK * PANEL);
      float* up = gate + ROW_BLOCK * PANEL;
      const PackedWeight &gates = p.gate[run.expert], &ups = p.up[run.expert];
      const int64_t from = alone ? 0 : m0, to = alone ? 1 : m1;  // all experts of one row take that row
      panel_product(gates.w, x[0], panel, from, to, gate);
      panel_product(ups.w, x[1], panel, from, to, up);
      for (int64_t i = 0; i < (m1 - m0) * PANEL; i += LANES) {
        const int64_t row = panel * PANEL + i % PANEL;
        store(gate + i, product_of(biased(gate + i, gates, row), biased(up + i, ups, row)));
      }
      store_panel(gate, panel, m0, m1, p.inner(), inner);
    });
    over_experts(worker, middle, p.down, [&](const Few<Rows>& x, const Pairs::Run& run, int64_t panel, int64_t m0, int64_t m1) {
      const PackedWeight& downs = p.down[run.expert];
      float* values = scratch<float, 2>(2 * ROW_BLOCK * PANEL);
      panel_product(downs.w, x[0], panel, m0, m1, values);
      if (downs.bias)
        for (int64_t i = 0; i < (m1 - m0) * PANEL; i += LANES)
          store(values + i, biased(values + i, downs, panel * PANEL + i % PANEL));
      store_panel(values, panel, m0, m1, p.hidden(), parts);
    });
    const int64_t c = p.hidden(), piece = rows < 16 ? 256 : c, pieces = (c + piece - 1) / piece;
    worker.each(rows * pieces, [&](int64_t item) {
      add_parts(item / pieces, item % pieces * piece, std::min(c, (item % pieces + 1) * piece));
    });
  }

 private:
  static Few<Weight> both(const Weight& first, const Weight& second) {
    Few<Weight> found(first);
    found.add(second);
    return found;
  }
  // act(gate)·up, after their limits.
  F32 product_of(F32 gate, F32 up) const {
    const F32 most = splat(p.limit), least = splat(-p.limit);
    gate = select(gate > most, most, gate);
    up = select(up > most, most, select(up < least, least, up));
    return activate(gate, p.kind) * (up + p.up_offset);
  }
  // Calls f(ready rows, run, panel, m0, m1) for each panel of each expert that is taken, and each block of its pairs.
  template <class F>
  void over_experts(Worker& worker, const Preparation& x, const std::vector<PackedWeight>& weights, const F& f) const {
    const int64_t panels = weights[0].w.panels(), block = row_block(weights[0].w);
    Few<Rows> ready;
    x.share_out(worker);
    worker.stream(int64_t(pairs.runs.size()) * panels, [&] { ready = x.ready(); }, [&](int64_t item) {
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
    for (int64_t j = 0; j < top; j++) {
      const float share = shares[r * top + j];
      const float* from = parts + pairs.place[r * top + j] * c;
      for (int64_t i = i0; i < i1; i++) out[r * c + i] = (j ? out[r * c + i] : 0.0f) + share * from[i];
    }
  }

  const ExpertsPlan& p;
  const Pairs& pairs;
  const float* const shares;
  const int64_t rows, top;
  float* const out;
  const bool alone;
  float *const inner, *const parts;  // of each pair: what is between its products, and its output
  const Preparation input, middle;
};

Tensor experts(ExpertsCall call) {
  const ExpertsPlan& p = plan_in<ExpertsPlan>(call.plan);
  const Tensor x = as_contiguous(call.x), chosen = as_contiguous(call.chosen), shares = as_contiguous(call.shares);
  const int64_t c = p.hidden(), rows = x.numel() / c, top = chosen.size(-1);
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float && x.size(-1) == c, "the experts want x (…, ", c, ") in float32");
  STD_TORCH_CHECK(chosen.scalar_type() == ScalarType::Long && chosen.numel() == rows * top &&
                      shares.scalar_type() == ScalarType::Float && shares.numel() == rows * top,
                  "each row needs the experts that it takes, int64, and as many shares, float32");
  Tensor out = empty_like_with_last(x, c);
  Arena arena;
  const Arena::Mark mark = arena.mark();
  for (int64_t r = 0; r < rows; r += ROWS_AT_ONCE) {
    const int64_t some = std::min(ROWS_AT_ONCE, rows - r);
    const Pairs pairs(static_cast<const int64_t*>(chosen.const_data_ptr()) + r * top, some, top, p.count());
    arena.back_to(mark);
    const ExpertsPhases phases(arena, p, pairs, static_cast<const float*>(x.const_data_ptr()) + r * c,
                               static_cast<const float*>(shares.const_data_ptr()) + r * top, some, top,
                               static_cast<float*>(out.mutable_data_ptr()) + r * c);
    parallel_region([&](Worker& worker) { phases.run(worker); });
  }
  return out;
}

}  // namespace hasten

STABLE_TORCH_LIBRARY_FRAGMENT(HASTEN_LIBRARY, m) {
  hasten::define<hasten::plan_experts>(m, "plan_experts");
  hasten::define<hasten::experts>(m, "experts");
}
STABLE_TORCH_LIBRARY_IMPL(HASTEN_LIBRARY, CPU, m) {
  hasten::implement<hasten::plan_experts>(m, "plan_experts");
  hasten::implement<hasten::experts>(m, "experts");
}

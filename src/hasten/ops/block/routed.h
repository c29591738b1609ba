// The second half of a block with experts.
#pragma once

#include "plan.h"

namespace hasten {

// The second half of a block with experts: out = x + what they give of norm(x), and what an MLP beside them gives, if
// there is one, both scaled as the block's branches are. x and out (rows, C) float32. Where each of both has a norm behind it
// (and the experts and the router one before them), their sum is normalised and added when both are there.
struct RoutedPhases {
  RoutedPhases(Arena& arena, const Plan& p, const float* x, float* out, int64_t rows)
      : routing(p.routing), rows(rows), count(p.experts->count()), inner(p.inner), logits(arena.take<float>(rows * count)),
        shares(arena.take<float>(rows * p.routing.top)), act(arena.take<float>(p.mlp.count ? rows * p.inner : 0)),
        gates(arena.take<float>(p.shared_gate.k ? rows : 0)), chosen(arena.take<int64_t>(rows * p.routing.top)),
        out(out), x(x), p(p), router(arena, x, Type::f32, rows, p.router_norm, p.router) {
    if (p.mlp.count) {
      mlp.emplace(arena, x, Type::f32, rows, act, p.mlp_norm, p.mlp, p.inner, p.gated, p.kind);
      if (normed()) shared.emplace(arena, act, Type::f32, rows, Norm{}, p.down);
      else down.emplace(arena, act, Type::f32, rows, p.down, x, out, Type::f32, Norm{}, nullptr, nullptr,
                        float(p.residual_scale));
    }
    if (p.shared_gate.k) gate.emplace(arena, x, Type::f32, rows, p.mlp_norm, p.shared_gate);
    const int64_t c = p.c, top = p.routing.top;
    if (normed()) from_mlp = arena.take<float>(rows * c), from_experts = arena.take<float>(rows * c);
    const float* base = p.mlp.count ? out : x;
    float* to = normed() ? from_experts : out;
    const Arena::Mark mark = arena.mark();
    for (int64_t r = 0; r < rows; r += ROWS_AT_ONCE) {
      arena.back_to(mark);  // they run after each other
      experts.emplace_back(arena, *p.experts, x + r * c, std::min(ROWS_AT_ONCE, rows - r), p.expert_norm, top,
                           chosen + r * top, shares + r * top, normed() ? nullptr : base + r * c, to + r * c);
    }
  }
  // Chooses the experts, and adds the MLP beside them.
  void choose(Worker& worker) const {
    router.run_into(worker, logits);
    worker.each(rows, [&](int64_t r) {
      routing.choose(logits + r * count, count, chosen + r * routing.top, shares + r * routing.top);
    });
    if (!mlp) return;
    mlp->run(worker);
    if (gate) {
      gate->run_into(worker, gates);
      worker.each(rows, [&](int64_t r) {
        const float factor = 1.0f / (1.0f + std::exp(-gates[r]));
        for (int64_t i = 0; i < inner; i++) act[r * inner + i] *= factor;
      });
    }
    if (normed()) shared->run_into(worker, from_mlp);
    else down->run(worker);
  }
  void run(Worker& worker) const {
    for (const ExpertsPhases& some : experts) some.run(worker);
    if (normed()) worker.each(rows, [&](int64_t r) { join(r); });
  }

  bool normed() const { return p.shared_post_norm.weight; }

 private:
  // out = scale·(x + norm(norm(from_mlp) + norm(from_experts))) of one row.
  void join(int64_t r) const {
    const int64_t c = p.c;
    float* sum = scratch<float, 25>(2 * (c + LANES));
    float* other = sum + c + LANES;
    widen(from_mlp, Type::f32, r, c, c, p.shared_post_norm, sum);
    widen(from_experts, Type::f32, r, c, c, p.expert_post_norm, other);
    for (int64_t i = 0; i < c; i++) sum[i] += other[i];
    widen(sum, Type::f32, 0, c, c, p.down_norm, other);
    const float scale = float(p.residual_scale), whole = float(p.block_scale);
    for (int64_t i = 0; i < c; i++) out[r * c + i] = whole * (x[r * c + i] + scale * other[i]);
  }

  const Routing routing;
  const int64_t rows, count, inner;
  float *logits, *shares, *act, *gates;
  int64_t* chosen;
  float* const out;
  const float* const x;
  const Plan& p;
  float *from_mlp = nullptr, *from_experts = nullptr;  // what each gives, where it is normalised
  const Linear router;
  std::optional<MlpInput> mlp;
  std::optional<LinearAdd> down;
  std::optional<Linear> gate, shared;
  std::vector<ExpertsPhases> experts;
};

}  // namespace hasten

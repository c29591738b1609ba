// Experts as one torch operator (experts.h), and their plan.
#include "experts.h"

namespace hasten {

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
      .limit = float(call.limit), .up_offset = float(call.up_offset)});
  plan->up = weights_of(call.up, plan->gate[0].w.n, plan->gate[0].k);
  plan->down = weights_of(call.down, plan->gate[0].k, plan->gate[0].w.n);
  plan->held = std::move(call);
  return as_bytes(std::move(plan));
}

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
    arena.back_to(mark);
    const ExpertsPhases phases(arena, p, static_cast<const float*>(x.const_data_ptr()) + r * c,
                               std::min(ROWS_AT_ONCE, rows - r), Norm{}, top,
                               static_cast<const int64_t*>(chosen.const_data_ptr()) + r * top,
                               static_cast<const float*>(shares.const_data_ptr()) + r * top, nullptr,
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

// The steps of a decoder block as torch operators: one by one, and all of a row of blocks in one call.
#include "../attention/phases.h"
#include "../delta/phases.h"
#include "attention_input.h"
#include "experts.h"
#include "part_times.h"

namespace hasten {

Tensor plan_weight(PlanWeightCall call) {
  const int64_t n = call.out_features, k = call.in_features;
  const Maybe &bias = call.weight.bias, &a = call.lora_a, &b = call.lora_b;
  STD_TORCH_CHECK(n > 0 && k > 0 && (!bias || bias->numel() >= n), "a weight ", n, "×", k, " has no such size, or bias");
  PackedWeight weight = call.weight.packed(n, k);
  if (a) {
    const int64_t count = a->size(0), rank = a->size(2);
    for (const Maybe& one : {a, b})
      STD_TORCH_CHECK(one && one->is_contiguous() && one->scalar_type() == ScalarType::Float, "adapters are in float32");
    STD_TORCH_CHECK(rank % LANES == 0 && a->numel() == count * k * rank &&
                        b->numel() == count * weight.w.panels() * rank * PANEL,
                    "the adapters do not fit a weight ", n, "×", k);
    weight.adapters = {static_cast<const float*>(a->const_data_ptr()), static_cast<const float*>(b->const_data_ptr()),
                       count, rank};
  }
  return as_bytes(std::make_unique<WeightPlan>(WeightPlan{.weight = weight, .held = std::move(call)}));
}

// The weights of plans, of a product's parts.
static Few<PackedWeight> parts_of(const std::vector<Tensor>& plans, int64_t k) {
  Few<PackedWeight> found;
  STD_TORCH_CHECK(!plans.empty(), "a product needs its weight");
  for (const Tensor& plan : plans) {
    found.add(plan_in<WeightPlan>(plan).weight);
    STD_TORCH_CHECK(found[found.count - 1].k == k, "a weight has ", found[found.count - 1].k, " input features; x has ", k);
  }
  return found;
}

// In all of them the leading shape of x is free: R rows, whatever they are called.

Tensor attention_input(AttentionInputCall call) {
  const Tensor x = as_contiguous(call.x);
  const Maybe cos = as_contiguous(call.cos), sin = as_contiguous(call.sin);
  const int64_t c = x.size(-1), rows = x.numel() / c;
  Tensor q = empty({rows, call.heads, call.head_dim}, x.scalar_type());
  Arena arena;
  const AttentionInput step(arena, x.const_data_ptr(), type_of(x), rows, q.mutable_data_ptr(), call.norm.norm(),
                            parts_of(call.weights, c), call.heads, call.head_dim, call.norm.like(call.q_norm),
                            call.norm.like(call.k_norm), cos, sin, call.k, call.v, call.slot_mapping, call.rotated);
  parallel_region([&](Worker& worker) { step.run(worker); });
  return q;
}

Tensor linear_add(LinearAddCall call) {
  const Tensor x = as_contiguous(call.x), residual = as_contiguous(call.residual);
  const int64_t n = residual.size(-1), rows = residual.numel() / n, k = rows ? x.numel() / rows : 0;
  Tensor out = empty_like_with_last(residual, n);
  Arena arena;
  const LinearAdd step(arena, x.const_data_ptr(), type_of(x), rows, call.weight.packed(n, k), residual.const_data_ptr(),
                       out.mutable_data_ptr(), type_of(residual), call.norm.norm());
  parallel_region([&](Worker& worker) { step.run(worker); });
  return out;
}

Tensor mlp_input(MlpInputCall call) {
  const Tensor x = as_contiguous(call.x);
  const int64_t c = x.size(-1), rows = x.numel() / c;
  Tensor out = empty_like_with_last(x, call.inner_size);
  Arena arena;
  const MlpInput step(arena, x.const_data_ptr(), type_of(x), rows, out.mutable_data_ptr(), call.norm.norm(),
                      MlpInput::checked(parts_of(call.weights, c), call.inner_size, call.gated), call.inner_size,
                      call.gated, Activation(call.activation));
  parallel_region([&](Worker& worker) { step.run(worker); });
  return out;
}

Tensor norm_linear(NormLinearCall call) {
  const Tensor x = as_contiguous(call.x);
  const int64_t n = call.out_features, c = x.size(-1), rows = x.numel() / c;
  Tensor out = empty_like_with_last(x, n, ScalarType::Float);
  Arena arena;
  const Linear step(arena, x.const_data_ptr(), type_of(x), rows, call.norm.norm(), call.weight.packed(n, c));
  float* to = static_cast<float*>(out.mutable_data_ptr());
  parallel_region([&](Worker& worker) { step.run_into(worker, to); });
  return out;
}

struct Plan {
  static constexpr const char* name = "a block";
  const Plan* self;
  int64_t c, heads, head_dim, window, inner;
  double scale, softcap, residual_scale;
  bool gated, rope_pairs, parallel, attention_gate;
  Activation kind;
  float positive, negative;  // of xIELU
  HeadNorm head_norm;
  Norm attention_norm, q_norm, k_norm, output_norm, mlp_norm, down_norm;
  Few<PackedWeight> qkv, mlp;
  PackedWeight output, down;
  const DeltaPlan* delta;      // in the place of attention, or nullptr
  const ExpertsPlan* experts;  // or nullptr
  PackedWeight router, shared_gate;
  Routing routing;
  Ranks* ranks;    // with which the sums of output and down are shared, or nullptr
  PlanBlockCall held;  // what the pointers point to
  int64_t mixed() const { return delta ? delta->values() : heads * head_dim; }  // features that attention gives
  bool ends_early() const { return !experts && !down.k; }  // behind attention
};

// Whether the experts of a block fit it.
static void check_routing(const RoutingFields& to, const ExpertsPlan& experts, int64_t c, const PlanBlockCall& call) {
  const int64_t count = experts.count(), size = to.expert_groups > 0 ? count / to.expert_groups : 0;
  STD_TORCH_CHECK(to.router && experts.hidden() == c && experts.down[0].w.n == c, "the experts do not fit the block");
  STD_TORCH_CHECK(to.expert_groups > 0 && size * to.expert_groups == count && to.kept_groups > 0 &&
                      to.kept_groups <= to.expert_groups && to.top_experts > 0 && to.top_experts <= to.kept_groups * size,
                  "of ", count, " experts in ", to.expert_groups, " groups, ", to.top_experts, " cannot be taken");
  STD_TORCH_CHECK(!to.choice_bias || (to.choice_bias->scalar_type() == ScalarType::Float &&
                                      to.choice_bias->is_contiguous() && to.choice_bias->numel() == count),
                  "each expert needs its bias, float32");
  STD_TORCH_CHECK(!call.ranks && !call.down_norm_weight && !call.parallel,
                  "a block with experts has no ranks, no norm behind its MLP, and attention before it");
}

Tensor plan_block(PlanBlockCall call) {
  STD_TORCH_CHECK(!call.qkv.empty(), "a block needs the weights of q, k and v");
  const int64_t c = plan_in<WeightPlan>(call.qkv[0]).weight.k, q_size = call.heads * call.head_dim;
  const DeltaPlan* delta = call.delta ? &plan_in<DeltaPlan>(*call.delta) : nullptr;
  const int64_t features = delta ? delta->features()
                                 : q_size * (1 + call.attention_gate) + 2 * call.kv_heads * call.head_dim;
  auto weights = [](const std::vector<Tensor>& plans, int64_t n, int64_t k) {
    const Few<PackedWeight> found = parts_of(plans, k);
    int64_t rows = 0;
    for (const PackedWeight& one : found) rows += one.w.n;
    STD_TORCH_CHECK(rows == n, "the weights have ", rows, " rows; the block has ", n);
    return found;
  };
  const auto one = [&](const Maybe& plan, int64_t n, int64_t k) {
    return plan ? weights({*plan}, n, k)[0] : PackedWeight{};
  };
  const RoutingFields& to = call.routing;
  const ExpertsPlan* experts = to.experts ? &plan_in<ExpertsPlan>(*to.experts) : nullptr;
  const bool dense = call.down.has_value();
  STD_TORCH_CHECK(dense || experts || (call.mlp.empty() && !call.parallel), "a block without down has no MLP");
  if (experts) check_routing(to, *experts, c, call);
  const bool learned = Activation(call.activation) == Activation::xielu;
  STD_TORCH_CHECK(call.xielu.size() == size_t(2 * learned), "xIELU has two factors, and no other activation has any");
  auto plan = std::make_unique<Plan>(Plan{
      .c = c, .heads = call.heads, .head_dim = call.head_dim, .window = call.window, .inner = call.inner_size,
      .scale = call.scale, .softcap = call.softcap, .residual_scale = call.residual_scale, .gated = call.gated,
      .rope_pairs = call.rope_pairs, .parallel = call.parallel, .attention_gate = call.attention_gate,
      .kind = Activation(call.activation),
      .positive = learned ? float(call.xielu[0]) : 0.0f, .negative = learned ? float(call.xielu[1]) : 0.0f,
      .head_norm = HeadNorm(call.head_norm),
      .attention_norm = call.norm.norm(), .q_norm = call.norm.like(call.q_norm), .k_norm = call.norm.like(call.k_norm),
      .output_norm = call.norm.like(call.output_norm_weight, call.output_norm_bias),
      .mlp_norm = call.norm.like(call.mlp_norm_weight, call.mlp_norm_bias),
      .down_norm = call.norm.like(call.down_norm_weight, call.down_norm_bias),
      .qkv = weights(call.qkv, features, c),
      .mlp = dense ? MlpInput::checked(parts_of(call.mlp, c), call.inner_size, call.gated) : Few<PackedWeight>(),
      .output = weights({call.output}, c, delta ? delta->values() : q_size)[0],
      .down = one(call.down, c, call.inner_size),
      .delta = delta,
      .experts = experts,
      .router = one(to.router, experts ? experts->count() : 0, c),
      .shared_gate = one(to.shared_gate, 1, c),
      .routing = {.top = to.top_experts, .groups = to.expert_groups, .kept_groups = to.kept_groups,
                  .sigmoid = to.sigmoid_scores, .normalize = to.normalize_shares, .sum_floor = float(to.share_floor),
                  .scale = float(to.share_scale * call.residual_scale),
                  .choice_bias = to.choice_bias ? static_cast<const float*>(to.choice_bias->const_data_ptr()) : nullptr},
      .ranks = call.ranks ? &mutable_plan<Ranks>(*call.ranks) : nullptr});
  plan->held = std::move(call);
  return as_bytes(std::move(plan));
}

// The second half of a block with experts: out = x + what they give of norm(x), and what an MLP beside them gives, if
// there is one, both scaled as the block's branches are. x and out (rows, C) float32.
struct RoutedPhases {
  RoutedPhases(Arena& arena, const Plan& p, const float* x, float* out, int64_t rows)
      : routing(p.routing), rows(rows), count(p.experts->count()), inner(p.inner), logits(arena.take<float>(rows * count)),
        shares(arena.take<float>(rows * p.routing.top)), act(arena.take<float>(p.mlp.count ? rows * p.inner : 0)),
        gates(arena.take<float>(p.shared_gate.k ? rows : 0)), chosen(arena.take<int64_t>(rows * p.routing.top)),
        router(arena, x, Type::f32, rows, p.mlp_norm, p.router) {
    if (p.mlp.count) {
      mlp.emplace(arena, x, Type::f32, rows, act, p.mlp_norm, p.mlp, p.inner, p.gated, p.kind);
      down.emplace(arena, act, Type::f32, rows, p.down, x, out, Type::f32, Norm{}, nullptr, nullptr,
                   float(p.residual_scale));
    }
    if (p.shared_gate.k) gate.emplace(arena, x, Type::f32, rows, p.mlp_norm, p.shared_gate);
    const float* base = p.mlp.count ? out : x;
    const int64_t c = p.c, top = p.routing.top;
    const Arena::Mark mark = arena.mark();
    for (int64_t r = 0; r < rows; r += ROWS_AT_ONCE) {
      arena.back_to(mark);  // they run after each other
      experts.emplace_back(arena, *p.experts, x + r * c, std::min(ROWS_AT_ONCE, rows - r), p.mlp_norm, top,
                           chosen + r * top, shares + r * top, base + r * c, out + r * c);
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
    down->run(worker);
  }
  void run(Worker& worker) const {
    for (const ExpertsPhases& some : experts) some.run(worker);
  }

  const Routing routing;
  const int64_t rows, count, inner;
  float *logits, *shares, *act, *gates;
  int64_t* chosen;
  const Linear router;
  std::optional<MlpInput> mlp;
  std::optional<LinearAdd> down;
  std::optional<Linear> gate;
  std::vector<ExpertsPhases> experts;
};

// One block of a stack: attention_input and attention, or gated_delta behind its product; linear_add; and mlp_input and
// linear_add, or experts.
struct BlockPhases {
  // Block i of a call, whose cache or state is the one in `place`. x and out (rows, C) float32.
  BlockPhases(Arena& arena, const BlocksCall& call, int64_t i, int64_t place, const Plan& p, const float* x, float* out,
              int64_t rows, const int64_t* chosen)
      : gated(p.attention_gate), mixed(arena.take<float>(rows * p.mixed())), middle(arena.take<float>(rows * p.c)),
        act(arena.take<float>(p.experts ? 0 : rows * p.inner)),
        output(arena, mixed, Type::f32, rows, p.output, x, p.ends_early() ? out : middle, Type::f32, p.output_norm, chosen,
               p.ranks, float(p.residual_scale)) {
    if (p.delta) {
      inputs.emplace(arena, x, Type::f32, rows, p.attention_norm, p.qkv, chosen);
      projected = arena.take<float>(rows * p.delta->features());
      delta.emplace(arena, *p.delta, projected, mixed, rows, call.inputs[place], call.matrices[place], *call.state_slots,
                    call.certain, call.query_start_loc, call.seq_lens, call.slot_mapping);
    } else {
      attend(arena, call, call.rope_index[i], place, p, x, rows, chosen);
    }
    if (p.ends_early()) return;
    if (p.experts) {
      routed.emplace(arena, p, middle, out, rows);
      return;
    }
    mlp.emplace(arena, p.parallel ? x : middle, Type::f32, rows, act, p.mlp_norm, p.mlp, p.inner, p.gated, p.kind, chosen,
                p.positive, p.negative);
    down.emplace(arena, act, Type::f32, rows, p.down, middle, out, Type::f32, p.down_norm, chosen, p.ranks,
                 float(p.residual_scale));
  }

  void attend(Arena& arena, const BlocksCall& call, int64_t rope, int64_t place, const Plan& p, const float* x, int64_t rows,
              const int64_t* chosen) {
    float* q = arena.take<float>(rows * p.heads * p.head_dim);
    const Tensor &k = call.k[place], &v = call.v[place];
    input.emplace(arena, x, Type::f32, rows, q, p.attention_norm, p.qkv, p.heads, p.head_dim, p.q_norm, p.k_norm,
                  table(call.cos, rope), table(call.sin, rope), k, v, call.slot_mapping, call.rotated, chosen, p.head_norm,
                  p.rope_pairs, call.query_factors.empty() ? Maybe() : table(call.query_factors, rope), gated);
    attention.emplace(arena, q, mixed, Type::f32, rows, p.heads, p.head_dim, k, v, call.query_start_loc, call.seq_lens,
                      call.first_slots, call.block_table, call.block_size, call.rotated, p.scale, p.window, p.softcap,
                      call.seen.empty() ? nullptr : &plan_in<Pattern>(call.seen[place]), p.held.sinks);
  }
  static Maybe table(const std::vector<Tensor>& tables, int64_t index) {
    return index < 0 ? Maybe() : Maybe(tables[index]);
  }

  // ended(part): called by each worker when it has done its share of a part.
  static constexpr int64_t PARTS = 5;
  template <class Ended>
  void run(Worker& worker, const Ended& ended) const {
    inputs ? inputs->run_into(worker, projected) : input->run(worker);
    ended(0);
    delta ? delta->run(worker) : attention->run(worker, output.beginning(worker));
    if (gated) input->multiply_gates(worker, mixed);
    ended(1);
    output.run(worker);
    ended(2);
    if (routed) routed->choose(worker);
    if (mlp) mlp->run(worker);
    ended(3);
    if (routed) routed->run(worker);
    if (down) down->run(worker);
    ended(4);
  }

  const bool gated;
  float *mixed, *middle, *act, *projected = nullptr;
  LinearAdd output;
  std::optional<AttentionInput> input;
  std::optional<AttentionPhases> attention;
  std::optional<Linear> inputs;
  std::optional<DeltaPhases> delta;
  std::optional<MlpInput> mlp;
  std::optional<LinearAdd> down;
  std::optional<RoutedPhases> routed;
};

Tensor blocks(BlocksCall call) {
  const Tensor x = as_contiguous(call.x);
  const int64_t count = int64_t(call.plans.size()), c = x.size(-1), rows = x.numel() / c;
  const size_t cached = call.k.size(), states = call.matrices.size();
  STD_TORCH_CHECK(count && int64_t(call.rope_index.size()) == count && int64_t(cached + states) == count &&
                      call.v.size() == cached && call.inputs.size() == states && (!states || call.state_slots) &&
                      call.cos.size() == call.sin.size() && (call.seen.empty() || call.seen.size() == cached) &&
                      (call.query_factors.empty() || call.query_factors.size() == call.cos.size()),
                  "each block needs its plan, its cache or state, its rope_index, and its pattern and factors if any");
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float, "the blocks want x in float32");
  const Maybe& adapters = call.adapters;
  STD_TORCH_CHECK(!adapters || (adapters->scalar_type() == ScalarType::Long && adapters->is_contiguous() &&
                                adapters->numel() == rows),
                  "each row needs its adapter, int64");
  const int64_t* own = adapters ? static_cast<const int64_t*>(adapters->const_data_ptr()) : nullptr;
  for (auto* tables : {&call.cos, &call.sin, &call.query_factors})
    for (Tensor& one : *tables) one = as_contiguous(one);
  Tensor out = empty_like_with_last(x, c);
  Arena arena;
  float* between[] = {arena.take<float>(rows * c), arena.take<float>(rows * c)};
  const float* from = static_cast<const float*>(x.const_data_ptr());
  const Arena::Mark mark = arena.mark();
  std::vector<BlockPhases> phases;
  phases.reserve(count);
  size_t places[2] = {};  // of the next cache and the next state
  for (int64_t i = 0; i < count; i++) {
    const Plan& p = plan_in<Plan>(call.plans[i]);
    STD_TORCH_CHECK(p.c == c, "a block of size ", p.c, " cannot take x (…, ", c, ")");
    if (own)
      for (const Few<PackedWeight>& parts : {p.qkv, Few<PackedWeight>(p.output), p.mlp, Few<PackedWeight>(p.down)})
        for (const PackedWeight& weight : parts)
          for (int64_t r = 0; weight.adapters.a && r < rows; r++)
            STD_TORCH_CHECK(own[r] < weight.adapters.count, "there is no adapter ", own[r]);
    STD_TORCH_CHECK(call.rope_index[i] < int64_t(call.cos.size()), "there is no rotary table ", call.rope_index[i]);
    float* to = i + 1 < count ? between[i % 2] : static_cast<float*>(out.mutable_data_ptr());
    size_t& place = places[p.delta != nullptr];
    STD_TORCH_CHECK(place < (p.delta ? states : cached), "a block has no ", p.delta ? "state" : "cache");
    arena.back_to(mark);  // a block begins when the one before it has ended: they share their memory
    phases.emplace_back(arena, call, i, int64_t(place++), p, from, to, rows, own);
    from = to;
  }
  const auto run = [&](const auto& ended) {
    parallel_region([&](Worker& worker) {
      for (int64_t i = 0; i < count; i++)
        phases[i].run(worker, [&](int64_t part) { ended(BlockPhases::PARTS * i + part); });
    });
  };
  if (call.times) {
    PartTimes parts(BlockPhases::PARTS * count);
    run([&](int64_t part) { parts.ended(part); });
    parts.store(*call.times);
  } else {
    run([](int64_t) {});
  }
  return out;
}

}  // namespace hasten

STABLE_TORCH_LIBRARY_FRAGMENT(HASTEN_LIBRARY, m) {
  hasten::define<hasten::attention_input>(m, "attention_input");
  hasten::define<hasten::plan_weight>(m, "plan_weight");
  hasten::define<hasten::plan_block>(m, "plan_block");
  hasten::define<hasten::blocks>(m, "blocks");
  hasten::define<hasten::linear_add>(m, "linear_add");
  hasten::define<hasten::norm_linear>(m, "norm_linear");
  hasten::define<hasten::mlp_input>(m, "mlp_input");
}
STABLE_TORCH_LIBRARY_IMPL(HASTEN_LIBRARY, CPU, m) {
  hasten::implement<hasten::attention_input>(m, "attention_input");
  hasten::implement<hasten::plan_weight>(m, "plan_weight");
  hasten::implement<hasten::plan_block>(m, "plan_block");
  hasten::implement<hasten::blocks>(m, "blocks");
  hasten::implement<hasten::linear_add>(m, "linear_add");
  hasten::implement<hasten::norm_linear>(m, "norm_linear");
  hasten::implement<hasten::mlp_input>(m, "mlp_input");
}

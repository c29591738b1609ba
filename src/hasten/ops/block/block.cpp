// The steps of a decoder block as torch operators: one by one, and all of a row of blocks in one call.
#include "../attention/phases.h"
#include "attention_input.h"
#include "part_times.h"
#include "routed.h"
#include "token_gate.h"

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
  const bool normed = to.shared_post_norm.has_value();
  for (const Maybe& norm : {to.router_norm, to.expert_norm, to.expert_post_norm})
    STD_TORCH_CHECK(norm.has_value() == normed && (!norm || norm->numel() == c), "experts have all norms or none");
  STD_TORCH_CHECK(!to.expert_scale || (to.expert_scale->scalar_type() == ScalarType::Float &&
                                       to.expert_scale->is_contiguous() && to.expert_scale->numel() == count),
                  "each expert needs its scale, float32");
  STD_TORCH_CHECK(!call.ranks && !call.parallel && !call.reduce, "a block with experts has no ranks, and attention before it");
  STD_TORCH_CHECK(normed ? call.down.has_value() : !call.down_norm_weight && call.block_scale == 1,
                  "a norm or a scale behind experts wants norms of their own, and an MLP beside them");
}

Tensor plan_block(PlanBlockCall call) {
  STD_TORCH_CHECK(!call.qkv.empty(), "a block needs the weights of q, k and v");
  const int64_t c = plan_in<WeightPlan>(call.qkv[0]).weight.k, q_size = call.heads * call.head_dim;
  const Mixer* mixer = call.mixer ? plan_in<MixerPlan>(*call.mixer).mixer.get() : nullptr;
  const LatentPlan* latent = call.latent ? &plan_in<LatentPlan>(*call.latent) : nullptr;
  STD_TORCH_CHECK(!latent || (!mixer && call.heads == latent->heads && call.kv_heads == 1 &&
                              call.qkv.size() == 2 && call.head_dim == latent->kept() &&
                              plan_in<WeightPlan>(call.qkv[0]).weight.w.n == latent->narrow()),
                  "the latent attention does not fit the block");
  const int64_t features = mixer    ? mixer->features()
                           : latent ? latent->narrow() + latent->kept()
                                    : q_size * (1 + call.attention_gate) + call.written * call.kv_heads * call.head_dim;
  const int64_t mixed = mixer ? mixer->values() : latent ? call.heads * latent->value_dim : q_size;
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
  STD_TORCH_CHECK(call.written >= 0 && call.written <= 2, "a block writes keys and values, keys that are both, or neither");
  const int64_t features_of_a_token = call.reduce ? plan_in<WeightPlan>(*call.reduce).weight.w.n : 0;
  STD_TORCH_CHECK(call.reduce.has_value() == call.expand.has_value() && (!call.reduce || dense),
                  "a token gate has both products, behind an MLP");
  const Norm mlp_norm = call.norm.like(call.mlp_norm_weight, call.mlp_norm_bias);
  auto own_or_mlp = [&](const Maybe& weight) { return weight ? call.norm.like(weight) : mlp_norm; };
  auto plan = std::make_unique<Plan>(Plan{
      .c = c, .heads = call.heads, .head_dim = call.head_dim, .written = call.written, .window = call.window,
      .inner = call.inner_size, .scale = call.scale, .softcap = call.softcap, .residual_scale = call.residual_scale,
      .block_scale = call.block_scale, .gated = call.gated,
      .rope_pairs = call.rope_pairs, .parallel = call.parallel, .attention_gate = call.attention_gate,
      .kind = Activation(call.activation),
      .positive = learned ? float(call.xielu[0]) : 0.0f, .negative = learned ? float(call.xielu[1]) : 0.0f,
      .head_norm = HeadNorm(call.head_norm),
      .attention_norm = call.norm.norm(), .q_norm = call.norm.like(call.q_norm), .k_norm = call.norm.like(call.k_norm),
      .v_norm = call.norm.like(call.v_norm),
      .output_norm = call.norm.like(call.output_norm_weight, call.output_norm_bias),
      .mlp_norm = mlp_norm, .down_norm = call.norm.like(call.down_norm_weight, call.down_norm_bias),
      .token_norm = call.norm.like(call.token_norm_weight), .router_norm = own_or_mlp(to.router_norm),
      .expert_norm = own_or_mlp(to.expert_norm), .expert_post_norm = call.norm.like(to.expert_post_norm),
      .shared_post_norm = call.norm.like(to.shared_post_norm),
      .qkv = weights(call.qkv, features, c),
      .mlp = dense ? MlpInput::checked(parts_of(call.mlp, c), call.inner_size, call.gated) : Few<PackedWeight>(),
      .output = weights({call.output}, c, mixed)[0],
      .down = one(call.down, c, call.inner_size),
      .reduce = one(call.reduce, features_of_a_token, c),
      .expand = one(call.expand, c, features_of_a_token),
      .mixer = mixer,
      .latent = latent,
      .experts = experts,
      .router = one(to.router, experts ? experts->count() : 0, c),
      .shared_gate = one(to.shared_gate, 1, c),
      .routing = {.top = to.top_experts, .groups = to.expert_groups, .kept_groups = to.kept_groups,
                  .group_scores = to.group_scores, .sigmoid = to.sigmoid_scores, .normalize = to.normalize_shares, .sum_floor = float(to.share_floor),
                  .scale = float(to.share_scale * (to.shared_post_norm ? 1 : call.residual_scale)),
                  .choice_bias = to.choice_bias ? static_cast<const float*>(to.choice_bias->const_data_ptr()) : nullptr,
                  .expert_scale = to.expert_scale ? static_cast<const float*>(to.expert_scale->const_data_ptr()) : nullptr},
      .ranks = call.ranks ? &mutable_plan<Ranks>(*call.ranks) : nullptr});
  plan->held = std::move(call);
  return as_bytes(std::move(plan));
}

// A weight of every head of latent attention, whose `n` rows begin at a panel.
static PackedWeight of_heads(const Tensor& plan, int64_t heads, int64_t n) {
  const PackedWeight& found = plan_in<WeightPlan>(plan).weight;
  STD_TORCH_CHECK(found.w.n == heads * ((n + PANEL - 1) / PANEL) * PANEL && !found.bias && !found.adapters.a,
                  "a weight of ", heads, " heads of ", n, " rows each has ", found.w.n, " rows");
  return found;
}

Tensor plan_latent(PlanLatentCall call) {
  STD_TORCH_CHECK(call.heads > 0 && call.rank > 0 && call.value_dim > 0 && call.turned >= 0, "heads have sizes above 0");
  auto plan = std::make_unique<LatentPlan>(LatentPlan{
      .keys = of_heads(call.keys, call.heads, call.rank), .values = of_heads(call.values, call.heads, call.value_dim),
      .up = call.up ? plan_in<WeightPlan>(*call.up).weight : PackedWeight{}, .q_norm = call.norm.like(call.q_norm),
      .norm = call.norm.norm(), .heads = call.heads, .rank = call.rank, .value_dim = call.value_dim,
      .turned = call.turned});
  STD_TORCH_CHECK(plan->values.k == call.rank && plan->kept() <= LARGEST_ROW && plan->norm.weight &&
                      call.norm.norm_weight->numel() == call.rank,
                  "keys, values and norm of the latent do not fit each other");
  STD_TORCH_CHECK(!call.up || (plan->up.w.n == plan->queries() && plan->q_norm.weight && call.q_norm->numel() == plan->up.k),
                  "the queries do not fit their latent");
  plan->held = std::move(call);
  return as_bytes(std::move(plan));
}

// One block of a stack: attention_input and attention, or a mixer behind its product; linear_add; and mlp_input and
// linear_add, or experts; and a token gate, if it has one.
struct BlockPhases {
  // Block i of a call, whose cache or state is the one in `place`. x and out (rows, C) float32.
  BlockPhases(Arena& arena, const BlocksCall& call, int64_t i, int64_t place, const Plan& p, const float* x, float* out,
              int64_t rows, const int64_t* chosen)
      : gated(p.attention_gate), mixed(arena.take<float>(rows * p.mixed())), middle(arena.take<float>(rows * p.c)),
        act(arena.take<float>(p.experts ? 0 : rows * p.inner)),
        output(arena, mixed, Type::f32, rows, p.output, x, p.ends_early() ? out : middle, Type::f32, p.output_norm, chosen,
               p.ranks, float(p.residual_scale)) {
    if (p.mixer) {
      inputs.emplace(arena, x, Type::f32, rows, p.attention_norm, p.qkv, chosen);
      projected = arena.take<float>(rows * p.mixer->features());
      mixer = p.mixer->phases(arena, projected, mixed, rows,
                              {call.inputs[place], call.matrices.empty() ? Maybe() : Maybe(call.matrices[place]),
                               *call.state_slots, call.certain, call.query_start_loc, call.seq_lens, call.slot_mapping});
    } else {
      attend(arena, call, call.rope_index[i], place, p, x, rows, chosen);
    }
    if (p.ends_early()) return;
    if (p.experts) {
      routed.emplace(arena, p, middle, out, rows);
      return;
    }
    float* behind = p.reduce.k ? arena.take<float>(rows * p.c) : out;
    mlp.emplace(arena, p.parallel ? x : middle, Type::f32, rows, act, p.mlp_norm, p.mlp, p.inner, p.gated, p.kind, chosen,
                p.positive, p.negative);
    down.emplace(arena, act, Type::f32, rows, p.down, middle, behind, Type::f32, p.down_norm, chosen, p.ranks,
                 float(p.residual_scale), p.reduce.k ? 1 : float(p.block_scale));
    if (p.reduce.k) token_gate.emplace(arena, p, behind, features_of(call, i, rows, p.reduce.w.n), out, rows, chosen);
  }
  static const float* features_of(const BlocksCall& call, int64_t i, int64_t rows, int64_t size) {
    const Maybe& all = call.features;
    STD_TORCH_CHECK(all && all->scalar_type() == ScalarType::Float && all->is_contiguous() && all->dim() == 3 &&
                        all->size(0) > i && all->size(1) == rows && all->size(2) == size,
                    "the token gate of block ", i, " wants features float32 (blocks, ", rows, ", ", size, ")");
    return static_cast<const float*>(all->const_data_ptr()) + i * rows * size;
  }

  void attend(Arena& arena, const BlocksCall& call, int64_t rope, int64_t place, const Plan& p, const float* x, int64_t rows,
              const int64_t* chosen) {
    float* q = arena.take<float>(rows * p.heads * p.head_dim);
    const Tensor &k = call.k[place], &v = call.v[place];
    const Maybe cos = table(call.cos, rope), sin = table(call.sin, rope);
    const Maybe query_factors = call.query_factors.empty() ? Maybe() : table(call.query_factors, rope);
    float* found = mixed;
    if (p.latent) {
      latent_input.emplace(arena, *p.latent, x, rows, q, p.attention_norm, p.qkv, cos, sin, k, call.slot_mapping, call.rotated,
                           chosen, p.rope_pairs, query_factors);
      found = arena.take<float>(rows * p.heads * p.head_dim);
      latent_output.emplace(arena, *p.latent, found, mixed, rows);
    } else {
      input.emplace(arena, x, Type::f32, rows, q, p.attention_norm, p.qkv, p.heads, p.head_dim, p.q_norm, p.k_norm, cos, sin,
                    k, v, call.slot_mapping, call.rotated, chosen, p.head_norm, p.rope_pairs, query_factors, gated, p.v_norm,
                    p.written);
    }
    attention.emplace(arena, q, found, Type::f32, rows, p.heads, p.head_dim, k, v, call.query_start_loc, call.seq_lens,
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
    inputs ? inputs->run_into(worker, projected) : latent_input ? latent_input->run(worker) : input->run(worker);
    ended(0);
    if (mixer) mixer->run(worker);
    else attention->run(worker, output.beginning(worker));
    if (latent_output) latent_output->run(worker);
    if (gated) input->multiply_gates(worker, mixed);
    ended(1);
    output.run(worker);
    ended(2);
    if (routed) routed->choose(worker);
    if (mlp) mlp->run(worker);
    ended(3);
    if (routed) routed->run(worker);
    if (down) down->run(worker);
    if (token_gate) token_gate->run(worker);
    ended(4);
  }

  const bool gated;
  float *mixed, *middle, *act, *projected = nullptr;
  LinearAdd output;
  std::optional<AttentionInput> input;
  std::optional<LatentInput> latent_input;
  std::optional<LatentOutput> latent_output;
  std::optional<AttentionPhases> attention;
  std::optional<Linear> inputs;
  std::unique_ptr<MixerPhases> mixer;
  std::optional<MlpInput> mlp;
  std::optional<LinearAdd> down;
  std::optional<RoutedPhases> routed;
  std::optional<TokenGate> token_gate;
};

Tensor blocks(BlocksCall call) {
  const Tensor x = as_contiguous(call.x);
  const int64_t count = int64_t(call.plans.size()), c = x.size(-1), rows = x.numel() / c;
  const size_t cached = call.k.size(), states = call.inputs.size();
  STD_TORCH_CHECK(count && int64_t(call.rope_index.size()) == count && int64_t(cached + states) == count &&
                      call.v.size() == cached && (call.matrices.empty() || call.matrices.size() == states) && (!states || call.state_slots) &&
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
      for (const Few<PackedWeight>& parts : {p.qkv, p.mlp, Few<PackedWeight>(p.output), Few<PackedWeight>(p.down),
                                             Few<PackedWeight>(p.reduce), Few<PackedWeight>(p.expand),
                                             Few<PackedWeight>(p.latent ? p.latent->up : PackedWeight{})})
        for (const PackedWeight& weight : parts)
          for (int64_t r = 0; weight.adapters.a && r < rows; r++)
            STD_TORCH_CHECK(own[r] < weight.adapters.count, "there is no adapter ", own[r]);
    STD_TORCH_CHECK(call.rope_index[i] < int64_t(call.cos.size()), "there is no rotary table ", call.rope_index[i]);
    float* to = i + 1 < count ? between[i % 2] : static_cast<float*>(out.mutable_data_ptr());
    size_t& place = places[p.mixer != nullptr];
    STD_TORCH_CHECK(place < (p.mixer ? states : cached), "a block has no ", p.mixer ? "state" : "cache");
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
  hasten::define<hasten::plan_latent>(m, "plan_latent");
  hasten::define<hasten::plan_block>(m, "plan_block");
  hasten::define<hasten::blocks>(m, "blocks");
  hasten::define<hasten::linear_add>(m, "linear_add");
  hasten::define<hasten::norm_linear>(m, "norm_linear");
  hasten::define<hasten::mlp_input>(m, "mlp_input");
}
STABLE_TORCH_LIBRARY_IMPL(HASTEN_LIBRARY, CPU, m) {
  hasten::implement<hasten::attention_input>(m, "attention_input");
  hasten::implement<hasten::plan_weight>(m, "plan_weight");
  hasten::implement<hasten::plan_latent>(m, "plan_latent");
  hasten::implement<hasten::plan_block>(m, "plan_block");
  hasten::implement<hasten::blocks>(m, "blocks");
  hasten::implement<hasten::linear_add>(m, "linear_add");
  hasten::implement<hasten::norm_linear>(m, "norm_linear");
  hasten::implement<hasten::mlp_input>(m, "mlp_input");
}

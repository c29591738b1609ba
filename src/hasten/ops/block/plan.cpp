// What stays the same of a model's blocks and of its cache from step to step, laid out once.
#include "plan.h"

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

Tensor plan_stack(PlanStackCall call) {
  auto plan = std::make_unique<StackPlan>();
  STD_TORCH_CHECK(!call.plans.empty() && call.plans.size() == call.rope_index.size(),
                  "each block needs its plan and its rope_index");
  for (const Tensor& one : call.plans) {
    plan->blocks.push_back(&plan_in<Plan>(one));
    STD_TORCH_CHECK(plan->blocks.back()->c == plan->blocks[0]->c, "blocks of sizes ", plan->blocks[0]->c, " and ",
                    plan->blocks.back()->c, " cannot follow each other");
  }
  plan->held = std::move(call);
  return as_bytes(std::move(plan));
}

Tensor plan_cache(PlanCacheCall call) {
  auto plan = std::make_unique<CachePlan>();
  const size_t cached = call.k.size(), states = call.inputs.size();
  STD_TORCH_CHECK(call.v.size() == cached && (call.seen.empty() || call.seen.size() == cached) &&
                      (call.matrices.empty() || call.matrices.size() == states),
                  "each layer needs its keys and values, and its pattern if any; or its state");
  for (size_t i = 0; i < cached; i++) {
    plan->rows.emplace_back(call.k[i], call.v[i]);
    plan->seen.push_back(call.seen.empty() ? nullptr : &plan_in<Pattern>(call.seen[i]));
  }
  plan->held = std::move(call);
  return as_bytes(std::move(plan));
}

}  // namespace hasten

STABLE_TORCH_LIBRARY_FRAGMENT(HASTEN_LIBRARY, m) {
  hasten::define<hasten::plan_weight>(m, "plan_weight");
  hasten::define<hasten::plan_latent>(m, "plan_latent");
  hasten::define<hasten::plan_block>(m, "plan_block");
  hasten::define<hasten::plan_stack>(m, "plan_stack");
  hasten::define<hasten::plan_cache>(m, "plan_cache");
}
STABLE_TORCH_LIBRARY_IMPL(HASTEN_LIBRARY, CPU, m) {
  hasten::implement<hasten::plan_weight>(m, "plan_weight");
  hasten::implement<hasten::plan_latent>(m, "plan_latent");
  hasten::implement<hasten::plan_block>(m, "plan_block");
  hasten::implement<hasten::plan_stack>(m, "plan_stack");
  hasten::implement<hasten::plan_cache>(m, "plan_cache");
}

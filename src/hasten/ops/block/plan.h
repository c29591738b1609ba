// What stays the same of a block from step to step, as `plan_block` makes it.
#pragma once

#include "../states/mixer.h"
#include "../attention/pattern.h"
#include "attention_input.h"
#include "experts.h"
#include "latent.h"

namespace hasten {

struct Plan {
  static constexpr const char* name = "a block";
  const Plan* self;
  int64_t c, heads, head_dim, written, window, inner;
  double scale, softcap, residual_scale, block_scale;
  bool gated, rope_pairs, parallel, attention_gate;
  Activation kind;
  float positive, negative;  // of xIELU
  HeadNorm head_norm;
  Norm attention_norm, q_norm, k_norm, v_norm, output_norm, mlp_norm, down_norm, token_norm;
  Norm router_norm, expert_norm, expert_post_norm, shared_post_norm;
  Few<PackedWeight> qkv, mlp;
  PackedWeight output, down, reduce, expand;
  const Mixer* mixer;          // in the place of attention, or nullptr
  const LatentPlan* latent;    // in the place of plain attention, or nullptr
  const ExpertsPlan* experts;  // or nullptr
  PackedWeight router, shared_gate;
  Routing routing;
  Ranks* ranks;    // with which the sums of output and down are shared, or nullptr
  PlanBlockCall held;  // what the pointers point to
  // Features that attention, or what is in its place, gives.
  int64_t mixed() const { return mixer ? mixer->values() : heads * (latent ? latent->value_dim : head_dim); }
  bool ends_early() const { return !experts && !down.k; }  // behind attention
};

struct StackPlan {
  static constexpr const char* name = "a stack of blocks";
  const StackPlan* self;
  std::vector<const Plan*> blocks;
  PlanStackCall held;
};

struct CachePlan {
  static constexpr const char* name = "a cache";
  const CachePlan* self;
  std::vector<Cache> rows;            // of each layer with attention
  std::vector<const Pattern*> seen;   // of each of them; nullptr: all
  PlanCacheCall held;
};

// The weights of plans, of a product's parts.
inline Few<PackedWeight> parts_of(const std::vector<Tensor>& plans, int64_t k) {
  Few<PackedWeight> found;
  STD_TORCH_CHECK(!plans.empty(), "a product needs its weight");
  for (const Tensor& plan : plans) {
    found.add(plan_in<WeightPlan>(plan).weight);
    STD_TORCH_CHECK(found[found.count - 1].k == k, "a weight has ", found[found.count - 1].k, " input features; x has ", k);
  }
  return found;
}

}  // namespace hasten

// What stays the same of a block from step to step, as `plan_block` makes it.
#pragma once

#include "../states/mixer.h"
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

}  // namespace hasten

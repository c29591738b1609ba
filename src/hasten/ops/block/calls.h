// The arguments of the block operators, by name (fields.h). R: rows of x, C: hidden size, H: query heads, D: head size.
#pragma once

#include "../fields.h"
#include "../plans.h"
#include "phases.h"

namespace hasten {

// A norm, or none where norm_weight is not given. centred: LayerNorm subtracts the mean, RMSNorm does not.
struct NormFields {
  Maybe norm_weight, norm_bias;
  double eps = 0, offset = 0;
  bool centred = false;
  HASTEN_FIELDS(norm_weight, norm_bias, eps, offset, centred)

  Norm norm() const { return like(norm_weight, norm_bias); }
  // A norm of the same kind with other factors.
  Norm like(const Maybe& weight, const Maybe& bias = std::nullopt) const {
    Norm n;
    if (!weight) return n;
    n.weight = weight->const_data_ptr();
    n.type = type_of(*weight);
    if (bias) n.bias = bias->const_data_ptr();
    n.eps = float(eps);
    n.offset = float(offset);
    n.centred = centred;
    return n;
  }
};

// A weight in panels (linear/gemm.h), its bias, and the int8 planes that its activations become.
struct WeightFields {
  Tensor data;
  Maybe scales, zeros, outer, bias;
  int64_t group_size = 0, planes = 1;
  HASTEN_FIELDS(data, scales, zeros, outer, bias, group_size, planes)

  PackedWeight packed(int64_t n, int64_t k) const {
    PackedWeight found;
    found.w = weight_of(data, scales, zeros, outer, n, k, group_size);
    found.w.planes = int(planes);
    found.k = k;
    if (bias) {
      found.bias = bias->const_data_ptr();
      found.bias_type = type_of(*bias);
    }
    return found;
  }
};

// A weight (N, K) for other operators. lora_a (adapters, K, rank) and lora_b (adapters, panels, rank, 64) float32: see
// Adapters.
struct PlanWeightCall {
  int64_t out_features = 0, in_features = 0;
  WeightFields weight;
  Maybe lora_a, lora_b;
  HASTEN_FIELDS(out_features, in_features, weight, lora_a, lora_b)
};
struct WeightPlan {
  static constexpr const char* name = "a weight";
  const WeightPlan* self;
  PackedWeight weight;
  PlanWeightCall held;  // what the pointers point to
};

// How rows are sent to experts; all empty for a block without. experts: of plan_experts. router: the plan of a weight (E, C).
// shared_gate: that of a weight (1, C), whose product's sigmoid multiplies what the MLP beside the experts gives. The norms,
// all or none: of what the router and the experts read, instead of the MLP's, and of what experts and MLP give. expert_scale
// float32 (E,): multiplies the shares of each expert. The others: see Routing.
struct RoutingFields {
  Maybe experts, router, choice_bias, shared_gate, router_norm, expert_norm, expert_post_norm, shared_post_norm, expert_scale;
  int64_t top_experts = 0, expert_groups = 1, kept_groups = 1, group_scores = 2;
  bool sigmoid_scores = false, normalize_shares = false;
  double share_floor = 0, share_scale = 1;
  HASTEN_FIELDS(experts, router, choice_bias, shared_gate, router_norm, expert_norm, expert_post_norm, shared_post_norm,
                expert_scale, top_experts, expert_groups, kept_groups, group_scores, sigmoid_scores, normalize_shares,
                share_floor, share_scale)
};

// A block of plans of weights: those of q, k and v, that of gate and up or both. With experts, mlp and down are those of an
// MLP beside them, which may be missing; without experts too, the block ends behind attention. norm: before attention; the
// others are of its kind. head_norm: a HeadNorm. rope_pairs: neighbouring elements of a head are turned together.
// attention_gate: each head of q is followed by its gate. mixer: the plan of what keeps a state in the place of attention
// (states/mixer.h); qkv then are the plans of the products that it reads, and heads are none. latent: of plan_latent; qkv then
// are the plans of the queries, or of their latent, and of what the cache keeps, which has heads of head_dim. residual_scale: a
// factor of what output and down add. parallel: the MLP reads x, as attention does. ranks: with which the sums of output and
// down are shared. sinks: as in AttentionPhases. xielu: the two factors of xIELU, where it is the activation. v_norm: of each
// head of the values. written: see AttentionInput. reduce, expand: the plans of a TokenGate, with the norm behind it;
// block_scale: multiplies what the block returns.
struct PlanBlockCall {
  NormFields norm;
  std::vector<Tensor> qkv;
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  Maybe q_norm, k_norm;
  int64_t head_norm = 0;
  bool rope_pairs = false;
  double residual_scale = 1;
  bool parallel = false;
  double scale = 0;
  int64_t window = 0;
  double softcap = 0;
  Tensor output;
  Maybe output_norm_weight, output_norm_bias, mlp_norm_weight, mlp_norm_bias;
  std::vector<Tensor> mlp;
  int64_t inner_size = 0;
  bool gated = false;
  int64_t activation = 0;
  Maybe down, down_norm_weight, down_norm_bias, ranks, sinks;
  RoutingFields routing;
  bool attention_gate = false;
  Maybe mixer, latent;
  std::vector<double> xielu;
  Maybe v_norm;
  int64_t written = 2;
  Maybe reduce, expand, token_norm_weight;
  double block_scale = 1;
  HASTEN_FIELDS(norm, qkv, heads, kv_heads, head_dim, q_norm, k_norm, head_norm, rope_pairs, residual_scale, parallel,
                scale, window, softcap, output, output_norm_weight, output_norm_bias, mlp_norm_weight, mlp_norm_bias, mlp,
                inner_size, gated, activation, down, down_norm_weight, down_norm_bias, ranks, sinks, routing, attention_gate,
                mixer, latent, xielu, v_norm, written, reduce, expand, token_norm_weight, block_scale)
};

// Blocks in their order. plans: of plan_block, of one C. rope_index[i]: which rotary table block i takes, -1 for none.
struct PlanStackCall {
  std::vector<Tensor> plans;
  std::vector<int64_t> rope_index;
  HASTEN_FIELDS(plans, rope_index)
};

// What a model keeps of its tokens. k, v: the caches of the layers with attention, which have the same slots. seen: what each
// of them sees, of plan_pattern; empty: all. inputs, matrices: the states of the layers that keep any, matrices only where
// they have them. A call with the plan writes to them.
struct PlanCacheCall {
  std::vector<Tensor> k, v, seen, inputs, matrices;
  HASTEN_FIELDS(k, v, seen, inputs, matrices)
};

// Blocks after each other, x (…, C) float32 -> the same, the threads started once. stack: of plan_stack; cache: of plan_cache,
// of the same layers. Where the step's tokens are in the cache is said by the fields of AttentionMetadata (attention/view.py).
// cos, sin: of each rotary table, whose row rope_rows[r], int64 (rows,), belongs to row r of x; without rope_rows its row r.
// query_factors, of the same rows: of each rotary table, what queries are multiplied by; empty: nothing. state_slots int64
// (B,): the place of each sequence's states, certain int64 (B,): after how many of its tokens they are kept, without it after
// all. adapters int64 (rows,): the one that each row takes, -1 for none. times int64 (1 + 5·blocks,): where somebody wants to
// know, when the blocks began and when each part of each ended, in nanoseconds of the steady clock. features float32 (blocks
// or more, rows, P): what the rows bring to the token gates of the blocks. Nothing is marked as written: a compiler may copy
// what is, and a copy of a plan is none. Calls follow each other by x.
struct BlocksCall {
  Tensor x, stack, cache;
  std::vector<Tensor> cos, sin;
  Maybe rope_rows;
  std::vector<Tensor> query_factors;
  Tensor slot_mapping, query_start_loc, seq_lens;
  Maybe first_slots, block_table;
  int64_t block_size = 0;
  bool rotated = false;
  Maybe adapters, times, state_slots, certain, features;
  HASTEN_FIELDS(x, stack, cache, cos, sin, rope_rows, query_factors, slot_mapping, query_start_loc, seq_lens, first_slots,
                block_table, block_size, rotated, adapters, times, state_slots, certain, features)
};
Tensor blocks(BlocksCall call);

// x (…, C) -> q (R, H, D); see AttentionInput. weights: plans of those of q, k and v.
struct AttentionInputCall {
  Tensor x;
  NormFields norm;
  std::vector<Tensor> weights;
  int64_t heads = 0, head_dim = 0;
  Maybe q_norm, k_norm, cos, sin;
  Tensor k, v, slot_mapping;
  bool rotated = false;
  HASTEN_FIELDS(x, norm, weights, heads, head_dim, q_norm, k_norm, cos, sin, k, v, slot_mapping, rotated)
  HASTEN_WRITTEN(k, v)
};

// x (R, K), residual (…, N) -> the residual's shape and dtype; see LinearAdd.
struct LinearAddCall {
  Tensor x;
  WeightFields weight;
  Tensor residual;
  NormFields norm;
  HASTEN_FIELDS(x, weight, residual, norm)
};

// x (…, C) -> (…, I) in x's dtype; see MlpInput. weights: plans of that of gate and up, or of each.
struct MlpInputCall {
  Tensor x;
  NormFields norm;
  std::vector<Tensor> weights;
  int64_t inner_size = 0;
  bool gated = false;
  int64_t activation = 0;
  HASTEN_FIELDS(x, norm, weights, inner_size, gated, activation)
};

// Experts of plans of weights, the same number of each: gate and up (I, C), down (C, I). activation: an Activation. limit: of
// gate from above and of up on both sides, 0 for none; up_offset: is added to up after that.
struct PlanExpertsCall {
  std::vector<Tensor> gate, up, down;
  int64_t activation = 0;
  double limit = 0, up_offset = 0;
  HASTEN_FIELDS(gate, up, down, activation, limit, up_offset)
};

// x (…, C) float32 -> the same: of each row the sum of `top` experts' outputs, each times its share. plan: of
// plan_experts. chosen int64 and shares float32 (rows, top).
struct ExpertsCall {
  Tensor plan, x, chosen, shares;
  HASTEN_FIELDS(plan, x, chosen, shares)
};

// norm(x)·Wᵀ + b in float32, x (…, C) -> (…, N).
struct NormLinearCall {
  Tensor x;
  NormFields norm;
  WeightFields weight;
  int64_t out_features = 0;
  HASTEN_FIELDS(x, norm, weight, out_features)
};
Tensor norm_linear(NormLinearCall call);

}  // namespace hasten

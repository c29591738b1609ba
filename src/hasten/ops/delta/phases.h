// Gated DeltaNet (arXiv 2412.06464) as phases of a team: convolution, gated delta rule, norm and output gate of each head.
// Compiled once, in delta.cpp. Of S (Dk, Dv) of a head, and a token's q, k, v, log decay g and strength β:
//
//   S ← e^g S;  S ← S + k (β (v - Sᵀk))ᵀ;  o = Sᵀq
//
// A column of S needs no other one. So a few columns go through all tokens of a sequence while they lie in the first-level
// cache, where a token takes 3.5 multiply-adds for each number of S: fewer than the products of chunks take, which save
// memory traffic that there is none of here. Prompts go token by token too, and a text has the same bits however it is cut.
#pragma once

#include "../block/calls.h"
#include "../states/step.h"

namespace hasten {

// conv (channels, K): the factors of the last K tokens, the oldest first. rate (H,): of decay, positive. rate_bias (H,). All
// are float32. norm: of each head's output.
struct PlanDeltaCall {
  Tensor conv, rate, rate_bias;
  NormFields norm;
  int64_t key_heads = 0, key_dim = 0, value_dim = 0;
  HASTEN_FIELDS(conv, rate, rate_bias, norm, key_heads, key_dim, value_dim)
};

struct DeltaPlan {
  static constexpr const char* name = "Gated DeltaNet";
  const DeltaPlan* self;
  int64_t key_heads, heads, key_dim, value_dim, kernel;
  std::vector<float> conv;  // [kernel][channels]
  const float *rate, *rate_bias;
  Norm norm;
  PlanDeltaCall held;  // what the pointers point to
  int64_t shared() const { return heads / key_heads; }  // value heads of a key head
  int64_t keys() const { return key_heads * key_dim; }
  int64_t values() const { return heads * value_dim; }
  int64_t channels() const { return 2 * keys() + values(); }
  int64_t features() const { return channels() + values() + 2 * heads; }
};

class DeltaPhases {
 public:
  // x (R, features) float32: the projections to q, k, v, z, strength and decay, end to end; may be written until the phases
  // begin. out (R, H·Dv) float32; padding becomes zeros. inputs (places, K - 1, channels) and matrices (places, H, Dk, Dv):
  // the states. The others: see StateStep.
  DeltaPhases(Arena& arena, const DeltaPlan& plan, const float* x, float* out, int64_t rows, const Tensor& inputs,
              const Tensor& matrices, const Tensor& slots, const Maybe& certain, const Tensor& query_start_loc,
              const Tensor& seq_lens, const Tensor& slot_mapping);
  void run(Worker& worker) const;

 private:
  void convolve(const StateRows& own, int64_t row, int64_t from, int64_t count) const;
  void mix(const StateRows& own, int64_t row, int64_t key_head) const;
  void recur(const StateRows& own, int64_t head, int64_t from, int64_t count) const;
  template <int V>
  void take_one(const StateRows& own, int64_t head, int64_t from) const;
  template <int V>
  void advance(int64_t row, int64_t tokens, int64_t head, int64_t from, int64_t count, float* s) const;
  void finish(int64_t row, int64_t head) const;
  void keep(const StateRows& own, int64_t from, int64_t count) const;

  const DeltaPlan& p;
  const float* const x;
  float *const out, *const mixed, *const decays, *const strengths;  // mixed (R, channels); the others (R, H)
  const int64_t rows;
  uint8_t* const inputs;
  const Type input_type;
  float* const matrices;
  const StateStep step;
};

// x (R, features) -> (R, H·Dv) float32; see DeltaPhases. plan: of plan_delta.
struct GatedDeltaCall {
  Tensor plan, x, inputs, matrices, slots;
  Maybe certain;
  Tensor query_start_loc, seq_lens, slot_mapping;
  HASTEN_FIELDS(plan, x, inputs, matrices, slots, certain, query_start_loc, seq_lens, slot_mapping)
  HASTEN_WRITTEN(inputs, matrices)
};

}  // namespace hasten

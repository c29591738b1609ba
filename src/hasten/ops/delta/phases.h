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
#include "../states/convolution.h"
#include "../states/mixer.h"

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
  int64_t key_heads, heads, key_dim, value_dim;
  ConvolutionPlan conv;
  const float *rate, *rate_bias;
  Norm norm;
  PlanDeltaCall held;  // what the pointers point to
  int64_t shared() const { return heads / key_heads; }  // value heads of a key head
  int64_t keys() const { return key_heads * key_dim; }
  int64_t values() const { return heads * value_dim; }
  int64_t channels() const { return 2 * keys() + values(); }
  int64_t features() const { return channels() + values() + 2 * heads; }
};

class DeltaPhases final : public MixerPhases {
 public:
  // x: the projections to q, k, v, z, strength and decay, end to end. out (R, H·Dv). Of the states the matrices are (places, H,
  // Dk, Dv).
  DeltaPhases(Arena& arena, const DeltaPlan& plan, const float* x, float* out, int64_t rows, const StateFields& states);
  void run(Worker& worker) const override;

 private:
  void mix(const StateRows& own, int64_t row, int64_t key_head) const;
  void recur(const StateRows& own, int64_t head, int64_t from, int64_t count) const;
  template <int V>
  void take_one(const StateRows& own, int64_t head, int64_t from) const;
  template <int V>
  void advance(int64_t row, int64_t tokens, int64_t head, int64_t from, int64_t count, float* s) const;
  void finish(int64_t row, int64_t head) const;

  const DeltaPlan& p;
  const float* const x;
  float *const out, *const mixed, *const decays, *const strengths;  // mixed (R, channels); the others (R, H)
  const int64_t rows;
  float* const matrices;
  const Convolution convolution;
  const StateStep step;
};

}  // namespace hasten

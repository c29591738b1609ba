// Mamba-2 (arXiv 2405.21060) as phases of a team: convolution, recurrence, output gate, and the norm of each group. Compiled
// once, in mamba.cpp. Of S (N, P) of a head, and a token's key k (the paper's B), query q (C), value v (x) and step Δ:
//
//   S ← e^(-Δ·rate) S + k (Δ v)ᵀ;  y = Sᵀq + skip·v
//
// A column of S needs no other one, as in Gated DeltaNet (../delta/phases.h), and a token takes 3 multiply-adds for each
// number of S. Of a decode step S comes from memory: a head's rows are read in their order. Of several tokens, a few columns
// lie in the first-level cache, and pass through registers once for some tokens. Each number goes through the same operations
// however many that are, so a text has the same bits however it is cut.
#pragma once

#include "../block/calls.h"
#include "../states/convolution.h"
#include "../states/mixer.h"

namespace hasten {

// conv (channels, K): the factors of the last K tokens, the oldest first, of all values, keys and queries. bias (channels,).
// rate (H,): of decay, positive. step_bias and skip (H,). All are float32. norm: of each group's output, (H·P) factors.
struct PlanMambaCall {
  Tensor conv;
  Maybe bias;
  Tensor rate, step_bias, skip;
  NormFields norm;
  int64_t groups = 0, state_dim = 0, head_dim = 0;
  HASTEN_FIELDS(conv, bias, rate, step_bias, skip, norm, groups, state_dim, head_dim)
};

struct MambaPlan {
  int64_t heads, groups, state_dim, head_dim;
  ConvolutionPlan conv;
  const float *rate, *step_bias, *skip;
  Norm norm;
  PlanMambaCall held;  // what the pointers point to
  int64_t keys() const { return groups * state_dim; }
  int64_t values() const { return heads * head_dim; }
  int64_t channels() const { return values() + 2 * keys(); }
  int64_t features() const { return values() + channels() + heads; }
};

class MambaPhases final : public MixerPhases {
 public:
  // x: the projections to z, value, key, query and step, end to end. out (R, H·P). Of the states the matrices are (places, H,
  // N, P).
  MambaPhases(Arena& arena, const MambaPlan& plan, const float* x, float* out, int64_t rows, const StateFields& states);
  void run(Worker& worker) const override;

 private:
  void mix(int64_t row, int64_t first_head, int64_t end) const;
  void recur(const StateRows& own, int64_t head, int64_t from, int64_t count) const;
  template <int V, int T>
  void advance(int64_t row, int64_t head, int64_t from, int64_t count, float* s, int64_t stride, int64_t ahead) const;
  void normalize(int64_t row, int64_t group) const;

  const MambaPlan& p;
  const float* const x;
  float *const out, *const mixed, *const steps, *const decays;  // mixed (R, channels); the others (R, H)
  const int64_t rows;
  float* const matrices;
  const Convolution convolution;
  const StateStep step;
};

}  // namespace hasten

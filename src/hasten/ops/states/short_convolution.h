// LFM2's short convolution (arXiv 2511.23404) as phases of a team: y = query ⊙ (conv(key ⊙ value) + bias), a channel at a
// time. Compiled once, in short_convolution.cpp.
#pragma once

#include "../fields.h"
#include "../linear/rows.h"
#include "../parallel.h"
#include "../plans.h"
#include "step.h"

namespace hasten {

// conv (channels, K): the factors of the last K tokens, the oldest first. bias (channels,). Both are float32.
struct PlanShortConvolutionCall {
  Tensor conv;
  Maybe bias;
  HASTEN_FIELDS(conv, bias)
};

struct ShortConvolutionPlan {
  static constexpr const char* name = "a short convolution";
  const ShortConvolutionPlan* self;
  int64_t channels, kernel;
  std::vector<float> conv;  // [kernel][channels]
  const float* bias;        // or nullptr
  PlanShortConvolutionCall held;  // what the pointers point to
  int64_t features() const { return 3 * channels; }
};

class ShortConvolutionPhases {
 public:
  // x (R, 3·channels) float32: the projections to key, query and value, end to end; may be written until the phases begin. out
  // (R, channels) float32; padding becomes zeros. inputs (places, K - 1, channels): the states. The others: see StateStep.
  ShortConvolutionPhases(const ShortConvolutionPlan& plan, const float* x, float* out, int64_t rows, const Tensor& inputs,
                         const Tensor& slots, const Maybe& certain, const Tensor& query_start_loc, const Tensor& seq_lens,
                         const Tensor& slot_mapping);
  void run(Worker& worker) const;

 private:
  void advance(const StateRows& own, int64_t from, int64_t count) const;

  const ShortConvolutionPlan& p;
  const float* const x;
  float* const out;
  uint8_t* const inputs;
  const Type input_type;
  const StateStep step;
};

// x (R, 3·channels) -> (R, channels) float32; see ShortConvolutionPhases. plan: of plan_short_convolution.
struct ShortConvolutionCall {
  Tensor plan, x, inputs, slots;
  Maybe certain;
  Tensor query_start_loc, seq_lens, slot_mapping;
  HASTEN_FIELDS(plan, x, inputs, slots, certain, query_start_loc, seq_lens, slot_mapping)
  HASTEN_WRITTEN(inputs)
};

}  // namespace hasten

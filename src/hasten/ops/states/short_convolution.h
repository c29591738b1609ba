// LFM2's short convolution (arXiv 2511.23404) as phases of a team: y = query ⊙ (conv(key ⊙ value) + bias), a channel at a
// time. Compiled once, in short_convolution.cpp.
#pragma once

#include "convolution.h"
#include "mixer.h"

namespace hasten {

// conv (channels, K): the factors of the last K tokens, the oldest first. bias (channels,). Both are float32.
struct PlanShortConvolutionCall {
  Tensor conv;
  Maybe bias;
  HASTEN_FIELDS(conv, bias)
};

struct ShortConvolutionPlan {
  ConvolutionPlan conv;
  PlanShortConvolutionCall held;  // what the pointers point to
  int64_t features() const { return 3 * conv.channels; }
  int64_t values() const { return conv.channels; }
};

class ShortConvolutionPhases final : public MixerPhases {
 public:
  // x: the projections to key, query and value, end to end. out (R, channels).
  ShortConvolutionPhases(Arena& arena, const ShortConvolutionPlan& plan, const float* x, float* out, int64_t rows,
                         const StateFields& states);
  void run(Worker& worker) const override;

 private:
  void advance(const StateRows& own, int64_t from, int64_t count) const;

  const ConvolutionPlan& p;
  const float* const x;
  float* const out;
  uint8_t* const inputs;
  const Type input_type;
  const StateStep step;
};

}  // namespace hasten

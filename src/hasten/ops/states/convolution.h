// The causal convolution of layers that keep its last inputs, with SiLU behind it. Compiled once, in convolution.cpp.
#pragma once

#include "step.h"

namespace hasten {

struct ConvolutionPlan {
  // conv (channels, K): the factors of the last K tokens, the oldest first. bias (channels,), or none; it is not copied. Both
  // are float32.
  explicit ConvolutionPlan(const Tensor& conv, const Maybe& bias = {});
  // The inputs (places, K - 1, channels) of a layer's states.
  uint8_t* inputs_of(const StateFields& states) const;

  int64_t channels, kernel;
  std::vector<float> factors;  // [kernel][channels]
  const float* bias;           // or nullptr
};

class Convolution {
 public:
  // x: of the step's first row, whose rows are `stride` numbers apart.
  Convolution(const ConvolutionPlan& plan, const float* x, int64_t stride, const StateFields& states);
  // SiLU of the convolution of `count` channels from `from` on, for one row.
  void run(const StateRows& own, int64_t row, int64_t from, int64_t count, float* to) const;
  // Writes the last inputs of these channels, for the next step; the older ones are lost.
  void keep(const StateRows& own, int64_t from, int64_t count) const;

 private:
  const ConvolutionPlan& p;
  const float* const x;
  const int64_t stride;
  uint8_t* const inputs;
  const Type input_type;
};

}  // namespace hasten

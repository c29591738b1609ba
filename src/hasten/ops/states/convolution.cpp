#include "convolution.h"

namespace hasten {

ConvolutionPlan::ConvolutionPlan(const Tensor& conv, const Maybe& of_channels) {
  STD_TORCH_CHECK(conv.dim() == 2, "the convolution has a row of factors for each channel");
  channels = conv.size(0);
  kernel = conv.size(1);
  factors.resize(channels * kernel);
  const float* from = floats(conv, channels * kernel, "conv");
  for (int64_t c = 0; c < channels; c++)
    for (int64_t j = 0; j < kernel; j++) factors[j * channels + c] = from[c * kernel + j];
  bias = of_channels ? floats(*of_channels, channels, "bias") : nullptr;
}

uint8_t* ConvolutionPlan::inputs_of(const StateFields& states) const {
  const Tensor& inputs = states.inputs;
  STD_TORCH_CHECK(inputs.is_contiguous() && inputs.numel() == inputs.size(0) * (kernel - 1) * channels,
                  "the inputs in the states do not fit the layer");
  return static_cast<uint8_t*>(inputs.mutable_data_ptr());
}

Convolution::Convolution(const ConvolutionPlan& plan, const float* x, int64_t stride, const StateFields& states)
    : p(plan), x(x), stride(stride), inputs(plan.inputs_of(states)), input_type(type_of(states.inputs)) {}

void Convolution::run(const StateRows& own, int64_t row, int64_t from, int64_t count, float* to) const {
  const int64_t channels = p.channels, before = p.kernel - 1;
  // The first tap that there is a token for, and the first one in this step.
  const int64_t in_step = std::max<int64_t>(0, before - (row - own.row)), first = own.fresh ? in_step : 0;
  const auto state = [&](int64_t tap) { return (own.slot * before + row - own.row + tap) * channels + from; };
  const auto here = [&](int64_t tap) { return x + (row - before + tap) * stride + from; };
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    F32 y = p.bias ? load(p.bias + from + i) : F32{};
    for (int64_t tap = first; tap < p.kernel; tap++) {
      const F32 v = tap < in_step ? load_as(inputs, input_type, state(tap) + i) : as_kept(load(here(tap) + i), input_type);
      accumulate(y, v, load(p.factors.data() + tap * channels + from + i));
    }
    store(to + i, y * logistic(y));
  }
  for (; i < count; i++) {
    float y = p.bias ? p.bias[from + i] : 0;
    for (int64_t tap = first; tap < p.kernel; tap++) {
      const float given = tap < in_step ? load_one(inputs, input_type, state(tap) + i) : here(tap)[i];
      const float v = input_type == Type::f32 ? given : from_bf16(to_bf16(given));
      y += v * p.factors[tap * channels + from + i];
    }
    to[i] = y / (1.0f + std::exp(-y));
  }
}

void Convolution::keep(const StateRows& own, int64_t from, int64_t count) const {
  const int64_t before = p.kernel - 1, channels = p.channels, bytes = input_type == Type::f32 ? 4 : 2;
  for (int64_t j = 0; j < before; j++) {
    const int64_t token = own.kept - before + j, at = (own.slot * before + j) * channels + from;
    if (token >= 0) store_row(inputs, input_type, at, x + (own.row + token) * stride + from, count);
    else if (own.fresh) std::memset(inputs + at * bytes, 0, count * bytes);
    else std::memcpy(inputs + at * bytes, inputs + (at + own.kept * channels) * bytes, count * bytes);
  }
}

}  // namespace hasten

// The short convolution; see short_convolution.h.
#include "short_convolution.h"

#include <cstring>

namespace hasten {

constexpr int64_t PIECE = 4 * LANES;  // channels that a thread takes through all tokens of a sequence

Tensor plan_short_convolution(PlanShortConvolutionCall call) {
  auto plan = std::make_unique<ShortConvolutionPlan>(
      ShortConvolutionPlan{.conv = ConvolutionPlan(call.conv, call.bias), .held = std::move(call)});
  STD_TORCH_CHECK(plan->conv.kernel > 1, "a convolution of one token keeps nothing");
  return as_mixer<ShortConvolutionPhases>(std::move(plan));
}

ShortConvolutionPhases::ShortConvolutionPhases(Arena&, const ShortConvolutionPlan& plan, const float* x, float* out,
                                               int64_t rows, const StateFields& states)
    : p(plan.conv), x(x), out(out), inputs(plan.conv.inputs_of(states)), input_type(type_of(states.inputs)),
      step(rows, states) {}

void ShortConvolutionPhases::run(Worker& worker) const {
  const int64_t pieces = (p.channels + PIECE - 1) / PIECE, rows = int64_t(step.sequence_of.size());
  // A channel needs no other one: pieces of channels go through all tokens of a sequence.
  worker.each(int64_t(step.sequences.size()) * pieces, [&](int64_t item) {
    const int64_t from = item % pieces * PIECE;
    advance(step.sequences[item / pieces], from, std::min(PIECE, p.channels - from));
  });
  if (step.one_each) return;
  worker.each(rows, [&](int64_t row) {
    if (step.sequence_of[row] < 0) std::fill(out + row * p.channels, out + (row + 1) * p.channels, 0.0f);
  });
}

void ShortConvolutionPhases::advance(const StateRows& own, int64_t from, int64_t count) const {
  const int64_t channels = p.channels, kernel = p.kernel, before = kernel - 1, features = 3 * channels;
  float* window = scratch<float, 26>(kernel * LANES);  // the last inputs, number i in place i % kernel
  for (int64_t at = from, width; at < from + count; at += width) {
    width = std::min<int64_t>(LANES, from + count - at);
    const auto state = [&](int64_t j) { return (own.slot * before + j) * channels + at; };
    std::fill(window, window + kernel * LANES, 0.0f);
    for (int64_t j = 0; j < before && !own.fresh; j++)
      for (int64_t i = 0; i < width; i++) window[j * LANES + i] = load_one(inputs, input_type, state(j) + i);
    const F32 bias = p.bias ? some(p.bias + at, width) : F32{};
    for (int64_t t = 0; t < own.tokens; t++) {
      const float *key = x + (own.row + t) * features + at, *query = key + channels, *value = query + channels;
      store(window + (before + t) % kernel * LANES, as_kept(some(key, width) * some(value, width), input_type));
      F32 y = bias;
      for (int64_t tap = 0; tap < kernel; tap++)
        accumulate(y, load(window + (t + tap) % kernel * LANES), some(p.factors.data() + tap * channels + at, width));
      alignas(64) float found[LANES];
      store(found, y * some(query, width));
      std::memcpy(out + (own.row + t) * channels + at, found, width * sizeof(float));
      if (t + 1 == own.kept)
        for (int64_t j = 0; j < before; j++)
          store_row(inputs, input_type, state(j), window + (t + 1 + j) % kernel * LANES, width);
    }
  }
}

}  // namespace hasten

STABLE_TORCH_LIBRARY_FRAGMENT(HASTEN_LIBRARY, m) {
  hasten::define<hasten::plan_short_convolution>(m, "plan_short_convolution");
}
STABLE_TORCH_LIBRARY_IMPL(HASTEN_LIBRARY, CPU, m) {
  hasten::implement<hasten::plan_short_convolution>(m, "plan_short_convolution");
}

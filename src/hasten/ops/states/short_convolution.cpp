// The short convolution as a torch operator, and its phases in the call of all blocks; see short_convolution.h.
#include "short_convolution.h"

#include <cstring>

namespace hasten {

constexpr int64_t PIECE = 4 * LANES;  // channels that a thread takes through all tokens of a sequence

Tensor plan_short_convolution(PlanShortConvolutionCall call) {
  auto plan = std::make_unique<ShortConvolutionPlan>(ShortConvolutionPlan{.conv = by_tap(call.conv)});
  plan->channels = call.conv.size(0);
  plan->kernel = call.conv.size(1);
  STD_TORCH_CHECK(plan->kernel > 1, "a convolution of one token keeps nothing");
  plan->bias = call.bias ? floats(*call.bias, plan->channels, "bias") : nullptr;
  plan->held = std::move(call);
  return as_bytes(std::move(plan));
}

ShortConvolutionPhases::ShortConvolutionPhases(const ShortConvolutionPlan& plan, const float* x, float* out, int64_t rows,
                                               const Tensor& inputs, const Tensor& slots, const Maybe& certain,
                                               const Tensor& query_start_loc, const Tensor& seq_lens,
                                               const Tensor& slot_mapping)
    : p(plan), x(x), out(out), inputs(static_cast<uint8_t*>(inputs.mutable_data_ptr())), input_type(type_of(inputs)),
      step(rows, inputs.size(0), slots, certain, query_start_loc, seq_lens, slot_mapping) {
  STD_TORCH_CHECK(inputs.is_contiguous() && inputs.numel() == inputs.size(0) * (p.kernel - 1) * p.channels,
                  "the inputs in the states do not fit the layer");
}

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

// `count` numbers of a row, at most a vector of them; the others are zero.
static INLINE F32 some(const float* from, int64_t count) {
  if (count == LANES) return load(from);
  alignas(64) float part[LANES] = {};
  std::memcpy(part, from, count * sizeof(float));
  return load(part);
}

void ShortConvolutionPhases::advance(const StateRows& own, int64_t from, int64_t count) const {
  const int64_t channels = p.channels, kernel = p.kernel, before = kernel - 1;
  float* window = scratch<float, 26>(kernel * LANES);  // the last inputs, number i in place i % kernel
  for (int64_t at = from, width; at < from + count; at += width) {
    width = std::min<int64_t>(LANES, from + count - at);
    const auto state = [&](int64_t j) { return (own.slot * before + j) * channels + at; };
    std::fill(window, window + kernel * LANES, 0.0f);
    for (int64_t j = 0; j < before && !own.fresh; j++)
      for (int64_t i = 0; i < width; i++) window[j * LANES + i] = load_one(inputs, input_type, state(j) + i);
    const F32 bias = p.bias ? some(p.bias + at, width) : F32{};
    for (int64_t t = 0; t < own.tokens; t++) {
      const float *key = x + (own.row + t) * p.features() + at, *query = key + channels, *value = query + channels;
      store(window + (before + t) % kernel * LANES, as_kept(some(key, width) * some(value, width), input_type));
      F32 y = bias;
      for (int64_t tap = 0; tap < kernel; tap++)
        accumulate(y, load(window + (t + tap) % kernel * LANES), some(p.conv.data() + tap * channels + at, width));
      alignas(64) float found[LANES];
      store(found, y * some(query, width));
      std::memcpy(out + (own.row + t) * channels + at, found, width * sizeof(float));
      if (t + 1 == own.kept)
        for (int64_t j = 0; j < before; j++)
          store_row(inputs, input_type, state(j), window + (t + 1 + j) % kernel * LANES, width);
    }
  }
}

Tensor short_convolution(ShortConvolutionCall call) {
  const ShortConvolutionPlan& plan = plan_in<ShortConvolutionPlan>(call.plan);
  const int64_t rows = call.x.size(0);
  const float* x = floats(call.x, rows * plan.features(), "x");
  Tensor out = empty({rows, plan.channels}, ScalarType::Float);
  const ShortConvolutionPhases phases(plan, x, static_cast<float*>(out.mutable_data_ptr()), rows, call.inputs, call.slots,
                                      call.certain, call.query_start_loc, call.seq_lens, call.slot_mapping);
  parallel_region([&](Worker& worker) { phases.run(worker); });
  return out;
}

}  // namespace hasten

STABLE_TORCH_LIBRARY_FRAGMENT(HASTEN_LIBRARY, m) {
  hasten::define<hasten::plan_short_convolution>(m, "plan_short_convolution");
  hasten::define<hasten::short_convolution>(m, "short_convolution");
}
STABLE_TORCH_LIBRARY_IMPL(HASTEN_LIBRARY, CPU, m) {
  hasten::implement<hasten::plan_short_convolution>(m, "plan_short_convolution");
  hasten::implement<hasten::short_convolution>(m, "short_convolution");
}

// A layer that keeps a state of each sequence as a torch operator, of whatever kind its plan is; see mixer.h.
#include "mixer.h"

namespace hasten {

Tensor state_mixer(StateMixerCall call) {
  const Mixer& mixer = *plan_in<MixerPlan>(call.plan).mixer;
  const int64_t rows = call.x.size(0);
  const float* x = floats(call.x, rows * mixer.features(), "x");
  Tensor out = empty({rows, mixer.values()}, ScalarType::Float);
  Arena arena;
  const auto phases = mixer.phases(arena, x, static_cast<float*>(out.mutable_data_ptr()), rows, call.states);
  parallel_region([&](Worker& worker) { phases->run(worker); });
  return out;
}

}  // namespace hasten

STABLE_TORCH_LIBRARY_FRAGMENT(HASTEN_LIBRARY, m) {
  hasten::define<hasten::state_mixer>(m, "state_mixer");
}
STABLE_TORCH_LIBRARY_IMPL(HASTEN_LIBRARY, CPU, m) {
  hasten::implement<hasten::state_mixer>(m, "state_mixer");
}

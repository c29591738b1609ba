// What keeps a state of each sequence in the place of a block's attention, whatever its kind: between the products of the
// block's input, which are x here, and the one behind it, which reads out.
#pragma once

#include <memory>

#include "../fields.h"
#include "../plans.h"
#include "step.h"

namespace hasten {

// What a mixer computes of one step.
class MixerPhases {
 public:
  virtual ~MixerPhases() = default;
  virtual void run(Worker& worker) const = 0;
};

class Mixer {
 public:
  virtual ~Mixer() = default;
  virtual int64_t features() const = 0;  // of a row of x: all its projections, end to end
  virtual int64_t values() const = 0;    // of a row of out
  // x (R, features) and out (R, values) float32. x may be written until the phases begin. Padding becomes zeros.
  virtual std::unique_ptr<MixerPhases> phases(Arena& arena, const float* x, float* out, int64_t rows,
                                              const StateFields& states) const = 0;
};

struct MixerPlan {
  static constexpr const char* name = "a mixer";
  const MixerPlan* self;
  std::unique_ptr<const Mixer> mixer;
};

// The plan of a kind, which says features() and values(), as that of a mixer with these phases.
template <class Phases, class Plan>
Tensor as_mixer(std::unique_ptr<Plan> plan) {
  class Kind final : public Mixer {
   public:
    explicit Kind(std::unique_ptr<Plan> plan) : plan_(std::move(plan)) {}
    int64_t features() const override { return plan_->features(); }
    int64_t values() const override { return plan_->values(); }
    std::unique_ptr<MixerPhases> phases(Arena& arena, const float* x, float* out, int64_t rows,
                                        const StateFields& states) const override {
      return std::make_unique<Phases>(arena, *plan_, x, out, rows, states);
    }

   private:
    const std::unique_ptr<const Plan> plan_;
  };
  return as_bytes(std::make_unique<MixerPlan>(MixerPlan{.mixer = std::make_unique<const Kind>(std::move(plan))}));
}

// x (R, features) -> (R, values) float32. plan: of a mixer.
struct StateMixerCall {
  Tensor plan, x;
  StateFields states;
  HASTEN_FIELDS(plan, x, states)
};

}  // namespace hasten

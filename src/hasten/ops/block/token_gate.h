// What a block's tokens bring to it (model/token_features.py).
#pragma once

#include "plan.h"

namespace hasten {

// out = scale·(x + norm(expand(act(reduce x)·features))). x and out (rows, C), features (rows, P) float32.
struct TokenGate {
  TokenGate(Arena& arena, const Plan& p, const float* x, const float* features, float* out, int64_t rows,
            const int64_t* chosen)
      : rows(rows), size(p.reduce.w.n), features(features), act(arena.take<float>(rows * size)),
        reduce(arena, x, Type::f32, rows, act, Norm{}, p.reduce, size, false, p.kind, chosen, p.positive, p.negative),
        expand(arena, act, Type::f32, rows, p.expand, x, out, Type::f32, p.token_norm, chosen, nullptr,
               float(p.residual_scale), float(p.block_scale)) {}

  void run(Worker& worker) const {
    reduce.run(worker);
    worker.each(rows, [&](int64_t r) {
      for (int64_t i = r * size; i < (r + 1) * size; i++) act[i] *= features[i];
    });
    expand.run(worker);
  }

 private:
  const int64_t rows, size;
  const float* const features;
  float* const act;
  const MlpInput reduce;
  const LinearAdd expand;
};

}  // namespace hasten

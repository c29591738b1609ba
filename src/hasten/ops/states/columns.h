// Some columns of a head's matrix, which need no others, through all tokens of a sequence while the first-level cache has them.
#pragma once

#include "../memory.h"
#include "step.h"

namespace hasten {

// The `count` columns at s, of `size` rows that are `stride` apart, in a copy, of WIDTH columns at most. advance(row, tokens,
// copy) takes it through `tokens` rows from `row` on.
template <int64_t WIDTH, class Advance>
void advance_columns(const StateRows& own, float* s, int64_t size, int64_t stride, int64_t count, const Advance& advance) {
  float* block = scratch<float, 24>(size * WIDTH);
  for (int64_t i = 0; i < size; i++) {
    float* to = block + i * WIDTH;
    std::fill(to, to + WIDTH, 0.0f);
    if (!own.fresh) std::memcpy(to, s + i * stride, count * sizeof(float));
  }
  advance(own.row, own.kept, block);
  for (int64_t i = 0; i < size; i++) std::memcpy(s + i * stride, block + i * WIDTH, count * sizeof(float));
  if (own.kept < own.tokens) advance(own.row + own.kept, own.tokens - own.kept, block);  // guesses
}

}  // namespace hasten

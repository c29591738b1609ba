// Which rows of a step belong to which sequences, for layers that keep a state of each. Compiled once, in step.cpp.
#pragma once

#include <vector>

#include "../block/phases.h"

namespace hasten {

// The step's rows of one sequence. kept: the state is kept after these tokens; later ones are guesses, which may be taken
// back. fresh: nothing came before them.
struct StateRows {
  int64_t row, tokens, kept, slot;
  bool fresh;
};

struct StateStep {
  // rows: of the step. places: that the states have; sequence b's is slots[b]. certain (B,): how many tokens of each are no
  // guesses; without it all are. The other tensors are those of AttentionMetadata. Padding, whose slot_mapping is -1, follows
  // the tokens of its sequence.
  StateStep(int64_t rows, int64_t places, const Tensor& slots, const Maybe& certain, const Tensor& query_start_loc,
            const Tensor& seq_lens, const Tensor& slot_mapping);

  std::vector<StateRows> sequences;
  std::vector<int64_t> sequence_of;  // of each row; -1: padding
  bool one_each = true;              // token of every sequence, and no padding
};

// The numbers of a tensor that must have this many, in one piece.
const int64_t* integers(const Tensor& t, int64_t count, const char* name);
const float* floats(const Tensor& t, int64_t count, const char* name);

// A projected value as the states keep it: the convolution of a later step reads the same one.
INLINE F32 as_kept(F32 v, Type type) { return type == Type::f32 ? v : as<F32>(round_bf16(v) & 0xffff0000u); }

// The factors of a convolution, (channels, K) float32, by tap: [K][channels].
std::vector<float> by_tap(const Tensor& conv);

}  // namespace hasten

// Which rows of a step belong to which sequences, for layers that keep a state of each. Compiled once, in step.cpp.
#pragma once

#include <vector>

#include "../block/phases.h"
#include "../fields.h"

namespace hasten {

// The states of a layer, and whose the rows of a step are. inputs (places, K - 1, channels): those of its convolution;
// matrices (places, H, …, …) float32, where it has them. Sequence b's place is slots[b]. certain (B,): how many tokens of each
// are no guesses; without it all are. The other tensors are those of AttentionMetadata.
struct StateFields {
  Tensor inputs;
  Maybe matrices;
  Tensor slots;
  Maybe certain;
  Tensor query_start_loc, seq_lens, slot_mapping;
  HASTEN_FIELDS(inputs, matrices, slots, certain, query_start_loc, seq_lens, slot_mapping)
  HASTEN_WRITTEN(inputs, matrices)

  // The matrices, which must have this many numbers for each place.
  float* matrices_of(int64_t numbers) const;
};

// The step's rows of one sequence. kept: the state is kept after these tokens; later ones are guesses, which may be taken
// back. fresh: nothing came before them.
struct StateRows {
  int64_t row, tokens, kept, slot;
  bool fresh;
};

struct StateStep {
  // rows: of the step. Padding, whose slot_mapping is -1, follows the tokens of its sequence.
  StateStep(int64_t rows, const StateFields& states);

  std::vector<StateRows> sequences;
  std::vector<int64_t> sequence_of;  // of each row; -1: padding
  bool one_each = true;              // token of every sequence, and no padding
};

// The numbers of a tensor that must have this many, in one piece.
const int64_t* integers(const Tensor& t, int64_t count, const char* name);
const float* floats(const Tensor& t, int64_t count, const char* name);

// `count` numbers of a row, at most a vector of them; the others are zero.
INLINE F32 some(const float* from, int64_t count) {
  if (count == LANES) return load(from);
  alignas(64) float part[LANES] = {};
  std::memcpy(part, from, count * sizeof(float));
  return load(part);
}

// A projected value as the states keep it: the convolution of a later step reads the same one.
INLINE F32 as_kept(F32 v, Type type) { return type == Type::f32 ? v : as<F32>(round_bf16(v) & 0xffff0000u); }

}  // namespace hasten

#include "step.h"

#include <algorithm>

namespace hasten {

const int64_t* integers(const Tensor& t, int64_t count, const char* name) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Long && t.is_contiguous() && t.numel() == count, name, " has ", t.numel(),
                  " numbers; it must be ", count, " int64 in one piece");
  return static_cast<const int64_t*>(t.const_data_ptr());
}
const float* floats(const Tensor& t, int64_t count, const char* name) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && t.is_contiguous() && t.numel() == count, name, " has ", t.numel(),
                  " numbers; it must be ", count, " float32 in one piece");
  return static_cast<const float*>(t.const_data_ptr());
}

float* StateFields::matrices_of(int64_t numbers) const {
  STD_TORCH_CHECK(matrices && matrices->scalar_type() == ScalarType::Float && matrices->is_contiguous() &&
                      matrices->numel() == inputs.size(0) * numbers,
                  "the matrices of the states do not fit the layer");
  return static_cast<float*>(matrices->mutable_data_ptr());
}

StateStep::StateStep(int64_t rows, const StateFields& states) : sequence_of(rows, -1) {
  const int64_t count = states.seq_lens.numel(), places = states.inputs.size(0);
  const int64_t *place = integers(states.slots, count, "slots"), *length = integers(states.seq_lens, count, "seq_lens");
  const int64_t* start = integers(states.query_start_loc, count + 1, "query_start_loc");
  const int64_t* written = integers(states.slot_mapping, rows, "slot_mapping");
  const int64_t* sure = states.certain ? integers(*states.certain, count, "certain") : nullptr;
  for (int64_t b = 0; b < count; b++) {
    const int64_t begin = start[b], end = start[b + 1];
    STD_TORCH_CHECK(begin >= 0 && begin <= end && end <= rows, "a sequence has the rows from ", begin, " to ", end, " of ",
                    rows);
    STD_TORCH_CHECK(place[b] >= 0 && place[b] < places, "there is no state ", place[b], " among ", places);
    StateRows own{begin, 0, 0, place[b], length[b] == end - begin};
    for (; begin + own.tokens < end && written[begin + own.tokens] >= 0; own.tokens++)
      sequence_of[begin + own.tokens] = int64_t(sequences.size());
    own.kept = sure ? std::min(sure[b], own.tokens) : own.tokens;
    STD_TORCH_CHECK(own.kept > 0 || !own.tokens, "of a sequence's ", own.tokens, " tokens none is certain");
    one_each = one_each && own.tokens == 1 && end == begin + 1;
    if (own.tokens) sequences.push_back(own);
  }
  one_each = one_each && int64_t(sequences.size()) == rows;
}

}  // namespace hasten

// attention(q, cache) as a torch operator; see native.h for how it is computed.
#include "phases.h"

namespace hasten {

// q (R, H, D) float32 or bf16 -> (R, H, D); see AttentionPhases.
Tensor attention(Tensor q, Tensor k, Tensor v, Tensor starts, Tensor lengths, std::optional<Tensor> first,
                 std::optional<Tensor> table, int64_t block_size, double scale, int64_t window, double softcap) {
  q = as_contiguous(q);
  Tensor out = empty({q.size(0), q.size(1), q.size(2)}, q.scalar_type());
  Memory memory;
  const AttentionPhases phases(memory, q.const_data_ptr(), out.mutable_data_ptr(), type_of(q), q.size(0), q.size(1),
                               q.size(2), k, v, starts, lengths, first, table, block_size, scale, window, softcap);
  together([&](Member& member) { phases.run(member); });
  return out;
}

}  // namespace hasten

STABLE_TORCH_LIBRARY_FRAGMENT(HASTEN_LIBRARY, m) {
  m.def("attention(Tensor q, Tensor k, Tensor v, Tensor starts, Tensor lengths, Tensor? first, Tensor? table, int block_size, float scale, int window, float softcap) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(HASTEN_LIBRARY, CPU, m) { m.impl("attention", TORCH_BOX(&hasten::attention)); }

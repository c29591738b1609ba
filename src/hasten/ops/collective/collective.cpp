// Sums and pieces exchanged between ranks, as torch operators; collective.h implements them.
#include "collective.h"

#include "../plans.h"

namespace hasten {

// segment: uint8, shared by all ranks, zeros at the beginning; peers: a pidfd of each rank.
Tensor plan_ranks(Tensor segment, int64_t rank, int64_t size, std::vector<int64_t> peers) {
  STD_TORCH_CHECK(size > 0 && 0 <= rank && rank < size && int64_t(peers.size()) == size, "rank ", rank, " of ", size,
                  " cannot be");
  STD_TORCH_CHECK(segment.scalar_type() == ScalarType::Byte && segment.is_contiguous() &&
                      segment.numel() >= Ranks::bytes(size) && uintptr_t(segment.const_data_ptr()) % 64 == 0,
                  "the segment of ", size, " ranks has ", Ranks::bytes(size), " bytes");
  return as_bytes(std::make_unique<Ranks>(segment, rank, size, std::move(peers)));
}

int64_t segment_bytes(int64_t size) { return Ranks::bytes(size); }

void sum_of_ranks(Tensor ranks, Tensor x) {
  STD_TORCH_CHECK(x.is_contiguous(), "a sum in place wants a contiguous tensor");
  mutable_plan<Ranks>(ranks).sum(x.mutable_data_ptr(), type_of(x), x.numel());
}

// x (…, sizes[rank]) float32 -> (…, sum of sizes).
Tensor gather_ranks(Tensor ranks, Tensor x, std::vector<int64_t> sizes) {
  Ranks& group = mutable_plan<Ranks>(ranks);
  x = as_contiguous(x);
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float && int64_t(sizes.size()) == group.size, "float32 and a size a rank");
  int64_t all = 0;
  for (int64_t one : sizes) {
    STD_TORCH_CHECK(one > 0, "each rank has a part");
    all += one;
  }
  STD_TORCH_CHECK(x.size(-1) == sizes[group.rank], "x has ", x.size(-1), " columns; rank ", group.rank, " has ",
                  sizes[group.rank]);
  Tensor out = empty_like_with_last(x, all);
  group.gather(static_cast<const float*>(x.const_data_ptr()), static_cast<float*>(out.mutable_data_ptr()),
               x.numel() / x.size(-1), sizes);
  return out;
}

void abandon_ranks(Tensor ranks) { mutable_plan<Ranks>(ranks).abandon(); }

}  // namespace hasten

STABLE_TORCH_LIBRARY_FRAGMENT(HASTEN_LIBRARY, m) {
  m.def("segment_bytes(int size) -> int");
  m.def("plan_ranks(Tensor(a!) segment, int rank, int size, int[] peers) -> Tensor");
  m.def("sum_of_ranks(Tensor ranks, Tensor(a!) x) -> ()");
  m.def("gather_ranks(Tensor ranks, Tensor x, int[] sizes) -> Tensor");
  m.def("abandon_ranks(Tensor ranks) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(HASTEN_LIBRARY, CompositeExplicitAutograd, m) {
  m.impl("segment_bytes", TORCH_BOX(&hasten::segment_bytes));
}
STABLE_TORCH_LIBRARY_IMPL(HASTEN_LIBRARY, CPU, m) {
  m.impl("plan_ranks", TORCH_BOX(&hasten::plan_ranks));
  m.impl("sum_of_ranks", TORCH_BOX(&hasten::sum_of_ranks));
  m.impl("gather_ranks", TORCH_BOX(&hasten::gather_ranks));
  m.impl("abandon_ranks", TORCH_BOX(&hasten::abandon_ranks));
}

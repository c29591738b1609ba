// What stays the same from step to step is laid out once, as a tensor of bytes that owns it: handing over 50 arguments
// takes longer than the sums of a small model, and several times longer still after a layer's weights have swept the caches.
#pragma once

#include <memory>

#include "tensors.h"

namespace hasten {

// `self` is where it lies: a copy of its bytes would not hold what it points to, and is refused.
template <class T>
Tensor as_bytes(std::unique_ptr<T> plan) {
  plan->self = plan.get();
  const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
  return torch::stable::from_blob(plan.release(), {int64_t(sizeof(T))}, {1}, cpu, ScalarType::Byte,
                                  [](void* p) { delete static_cast<T*>(p); });
}
template <class T>
const T& plan_in(const Tensor& bytes) {
  STD_TORCH_CHECK(bytes.scalar_type() == ScalarType::Byte && bytes.numel() == sizeof(T), "that is no plan of ", T::name);
  const T& p = *static_cast<const T*>(bytes.const_data_ptr());
  STD_TORCH_CHECK(p.self == &p, "that is no plan of ", T::name);
  return p;
}
// For what keeps count.
template <class T>
T& mutable_plan(const Tensor& bytes) {
  return const_cast<T&>(plan_in<T>(bytes));
}

}  // namespace hasten

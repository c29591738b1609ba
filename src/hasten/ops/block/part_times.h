// When the parts of a row of blocks ended, in nanoseconds of the steady clock.
#pragma once

#include <atomic>
#include <chrono>
#include <vector>

#include "../tensors.h"

namespace hasten {

// When the parts of a row of blocks ended, each the moment its last worker left it.
class PartTimes {
 public:
  explicit PartTimes(int64_t parts) : began_(now()), ends_(parts) {}
  void ended(int64_t part) {
    const int64_t time = now();
    int64_t latest = ends_[part].load(std::memory_order_relaxed);
    while (latest < time && !ends_[part].compare_exchange_weak(latest, time, std::memory_order_relaxed)) {}
  }
  void store(const Tensor& to) const {
    STD_TORCH_CHECK(to.scalar_type() == ScalarType::Long && to.is_contiguous() && to.numel() == int64_t(ends_.size()) + 1,
                    "times must be int64, one more than there are parts");
    int64_t* out = static_cast<int64_t*>(to.mutable_data_ptr());
    *out++ = began_;
    for (const auto& end : ends_) *out++ = end.load(std::memory_order_relaxed);
  }

 private:
  static int64_t now() {
    return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  const int64_t began_;
  std::vector<std::atomic<int64_t>> ends_;
};

}  // namespace hasten

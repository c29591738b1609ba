// Work shared between torch's own threads, so that two pools never compete for the cores.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <cstdint>
#include <vector>

namespace hasten {

// Calls f(chunk) for every chunk. Threads take the next free chunk, because on a shared machine one core is often
// slower than the other; which thread computes a chunk never changes its result.
template <class F>
void for_chunks(int64_t chunks, const F& f) {
  int64_t threads = torch::stable::get_num_threads();
  if (threads > chunks) threads = chunks;
  if (threads <= 1) {
    for (int64_t c = 0; c < chunks; c++) f(c);
    return;
  }
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
      for (int64_t c; (c = next.fetch_add(1, std::memory_order_relaxed)) < chunks;) f(c);
  });
}

// Memory that a thread keeps from call to call; SLOT tells buffers apart that are alive at the same time.
template <class T, int SLOT>
T* scratch(int64_t count) {
  constexpr int64_t line = 64 / sizeof(T) ? 64 / sizeof(T) : 1;
  thread_local std::vector<T> memory;
  if (int64_t(memory.size()) < count + line) memory.resize(count + line);
  auto address = (reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t(63);
  return reinterpret_cast<T*>(address);
}

}  // namespace hasten

// Work shared between torch's own threads, so that two pools never compete for the cores.
//
// `parallel_region` starts all threads once; what they do then is a row of phases, each begun by all of them at the same
// time: a decode step of a whole block is one such call, because starting and stopping threads five times a layer costs more
// than a tenth of an int4 token. Which thread computes an item never changes its result.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

#include "memory.h"

namespace hasten {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// What the threads of one `parallel_region` share.
class ThreadTeam {
 public:
  explicit ThreadTeam(int64_t size) : size(size), parts(size) {}

 private:
  friend class Worker;
  // A part of the items of a stream: its first item in the upper half, its end in the lower one.
  struct alignas(64) Part {
    std::atomic<uint64_t> left{0};
    int64_t take(bool from_end) {
      uint64_t now = left.load(std::memory_order_relaxed);
      for (;;) {
        const uint64_t first = now >> 32, end = now & 0xffffffffu;
        if (first >= end) return -1;
        if (left.compare_exchange_weak(now, from_end ? now - 1 : now + (1ull << 32), std::memory_order_relaxed))
          return int64_t(from_end ? end - 1 : first);
      }
    }
  };
  void share(int64_t items) {
    next.store(0, std::memory_order_relaxed);
    for (int64_t t = 0; t < size; t++)
      parts[t].left.store(uint64_t(items * t / size) << 32 | uint64_t(items * (t + 1) / size),
                          std::memory_order_relaxed);
  }
  const int64_t size;
  std::vector<Part> parts;
  alignas(64) std::atomic<int64_t> next{0};
  alignas(64) std::atomic<int64_t> arrived{0};
  alignas(64) std::atomic<uint64_t> turn{0};
  std::exception_ptr error;  // of the thread that failed first; to be read once `failed` is set
  std::atomic<bool> failing{false}, failed{false};
};

// One thread of a team. All workers call the same phases in the same order with the same number of items; each phase
// begins when all of them have come, so what the phase before wrote can be read.
class Worker {
 public:
  Worker(ThreadTeam& team, int64_t begin, int64_t end) : team_(team), begin_(begin), end_(end) {}

  // f(item) for every item. Threads take the next free one: on a shared machine one core is often slower.
  template <class F>
  void each(int64_t items, const F& f) {
    if (alone()) return by_torch(items, f);
    barrier(items);
    for (int64_t i; (i = team_.next.fetch_add(1, std::memory_order_relaxed)) < items;) f(i);
  }

  // The same for a stream through memory. Each thread walks through a part of its own from the front, since a core that
  // jumps waits at each jump for what its prefetcher does not foresee: taking turns, two cores reached 65 of 85 GB/s.
  // Who has finished takes items from the end of the others' parts. Each thread calls before() once, when all have come.
  template <class Before, class F>
  void stream(int64_t items, const Before& before, const F& f, Prefetcher prefetcher = {}) {
    if (alone()) {
      before();
      return by_torch(items, f);
    }
    barrier(items, prefetcher);
    before();
    walk(f);
  }

  // The first of the items of a stream that this thread will take.
  int64_t first_of(int64_t items) const { return items * begin_ / team_.size; }

 private:
  bool alone() const { return team_.size == 1; }
  template <class F>
  void walk(const F& f) {
    for (int64_t t = begin_; t < end_; t++)
      for (int64_t i; (i = team_.parts[t].take(false)) >= 0;) f(i);
    for (int64_t other = 1; other < team_.size; other++)
      for (int64_t i; (i = team_.parts[(begin_ + other) % team_.size].take(true)) >= 0;) f(i);
  }
  // Where torch's threads cannot wait for each other, a team is one thread, and torch shares each phase out.
  template <class F>
  static void by_torch(int64_t items, const F& f) {
#if !HASTEN_OPENMP
    const int64_t threads = std::min<int64_t>(torch::stable::get_num_threads(), items);
    if (threads > 1) {
      std::atomic<int64_t> next{0};
      return torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items;) f(i);
      });
    }
#endif
    for (int64_t i = 0; i < items; i++) f(i);
  }
  // A thread that acts for several workers (OpenMP may give fewer threads than requested) counts once for each.
  void barrier(int64_t items, Prefetcher prefetcher = {}) {
    const uint64_t turn = team_.turn.load(std::memory_order_acquire);
    if (team_.arrived.fetch_add(end_ - begin_, std::memory_order_acq_rel) + end_ - begin_ == team_.size) {
      team_.arrived.store(0, std::memory_order_relaxed);
      team_.share(items);
      team_.turn.store(turn + 1, std::memory_order_release);
      return;
    }
    for (int64_t spins = 0; team_.turn.load(std::memory_order_acquire) == turn; spins++) {
      if (team_.failed.load(std::memory_order_acquire)) std::rethrow_exception(team_.error);
      if (prefetcher.at < prefetcher.end) prefetcher.ask(4);
      else if (spins < 20000) pause();
      else std::this_thread::yield();  // somebody else has the core that we wait for
    }
  }
  template <class Body>
  friend void parallel_region(const Body& body);
  // For a thread that will not come any more (memory ran out, a rank is gone): nobody may wait for it, and whichever of
  // the team's errors torch hears of first says why.
  void fail() {
    if (team_.failing.exchange(true)) return;
    team_.error = std::current_exception();
    team_.failed.store(true, std::memory_order_release);
  }
  ThreadTeam& team_;
  const int64_t begin_, end_;
};

// Calls body(worker) on every thread.
template <class Body>
void parallel_region(const Body& body) {
  int64_t threads = 1;
#if HASTEN_OPENMP
  // Only OpenMP promises that all threads of a region run at the same time, without which none may wait for another.
  threads = torch::stable::get_num_threads();
#endif
  ThreadTeam team(threads);
  if (threads == 1) {
    Worker only(team, 0, 1);
    return body(only);
  }
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    Worker worker(team, begin, end);
    try {
      body(worker);
    } catch (...) {
      worker.fail();
      throw;
    }
  });
}

// Calls f(chunk) for every chunk, in parallel.
template <class F>
void for_chunks(int64_t chunks, const F& f) {
  if (chunks == 1) return f(0);
  parallel_region([&](Worker& worker) { worker.each(chunks, f); });
}

}  // namespace hasten

// Memory that kernels ask for ahead of use, keep from call to call, or share in one call.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

namespace hasten {

// Memory that a thread will stream through soon, asked for a few lines at a time where it waits or computes: into the
// second-level cache, which has room for the first of it.
struct Prefetcher {
  const char *at = nullptr, *end = nullptr;
  void ask(int64_t lines) {
    for (; lines > 0 && at < end; lines--, at += 64) __builtin_prefetch(at, 0, 2);
  }
};

// Asks for memory that is read soon, all of it at once: one after the other, its lines take longer to come.
inline void ask_for(const void* memory, size_t bytes) {
  for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(memory) + at, 0, 2);
}

// What a `Prefetcher` does, for rows that lie apart, which are read, or written, next.
template <bool WRITTEN>
struct RowsAhead {
  const char* row = nullptr;
  int64_t bytes = 0, stride = 0, rows = 0, at = 0;
  void ask(int64_t lines) {
    for (; lines > 0 && rows > 0; lines--) {
      __builtin_prefetch(row + at, WRITTEN, 2);
      if ((at += 64) < bytes) continue;
      at = 0, rows--, row += stride;
    }
  }
};

// Memory that a thread keeps from call to call; SLOT tells buffers apart that are alive at the same time.
template <class T, int SLOT>
T* scratch(int64_t count) {
  constexpr int64_t line = 64 / sizeof(T) ? 64 / sizeof(T) : 1;
  thread_local std::vector<T> kept;
  // A line to align with, and one more: kernels may read whole lines.
  if (int64_t(kept.size()) < count + 2 * line) kept.resize(count + 2 * line);
  auto address = (reinterpret_cast<uintptr_t>(kept.data()) + 63) & ~uintptr_t(63);
  return reinterpret_cast<T*>(address);
}

// Memory of one call, for what all its threads share. What a small call takes is kept for the next one.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  ~Arena() {
    auto& kept = blocks();
    size_t total = 0;
    for (auto& block : kept) total += block.size;
    if (kept.size() > 1 || total > KEPT) kept.clear();
    if (kept.empty() && total <= KEPT && total) kept.push_back(Block(total));
    for (auto& block : kept) block.used = 0;
  }
  template <class T>
  T* take(int64_t count) {
    const size_t bytes = (size_t(count) * sizeof(T) + 127) & ~size_t(63);  // a line more: kernels may read whole vectors
    auto& kept = blocks();
    while (at_ < kept.size() && kept[at_].used + bytes > kept[at_].size) at_++;
    if (at_ == kept.size()) kept.push_back(Block(std::max<size_t>(bytes, 1 << 20)));
    Block& block = kept[at_];
    T* found = reinterpret_cast<T*>(block.data.get() + block.used);
    block.used += bytes;
    return found;
  }
  // What was taken since `mark` may be given out again.
  struct Mark {
    size_t block, used;
  };
  Mark mark() const { return {at_, at_ < blocks().size() ? blocks()[at_].used : 0}; }
  void back_to(const Mark& mark) {
    auto& kept = blocks();
    for (size_t i = mark.block; i < kept.size(); i++) kept[i].used = i == mark.block ? mark.used : 0;
    at_ = mark.block;
  }

 private:
  static constexpr size_t KEPT = 32 << 20;
  struct Free { void operator()(char* p) const { std::free(p); } };
  struct Block {
    explicit Block(size_t bytes) : size((bytes + 63) & ~size_t(63)),
                                   data(static_cast<char*>(std::aligned_alloc(64, size))) {
      if (!data) throw std::bad_alloc();
    }
    size_t size, used = 0;
    std::unique_ptr<char, Free> data;
  };
  static std::vector<Block>& blocks() {
    thread_local std::vector<Block> kept;
    return kept;
  }
  size_t at_ = 0;  // the block that is being given out
};

}  // namespace hasten

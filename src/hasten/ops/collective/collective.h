// What the processes of one machine that hold a model together tell each other, through a segment of shared memory.
//
// Each rank has two slots, and a counter of the pieces that it has put there. It writes a piece, counts it, waits until
// everybody has counted that far, and reads the others'. The next piece goes to its other slot; and who writes the one
// after that has seen that all have counted the next, so that nobody reads this one any more.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <vector>

#include "../parallel.h"
#include "../tensors.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

namespace hasten {

constexpr int64_t SLOT = 32768;  // float32 values of a piece: 128 KB, which stay in a core's cache

class Ranks {
 public:
  static constexpr const char* name = "the ranks";
  const Ranks* self;

  static int64_t bytes(int64_t size) { return (size + 1) * sizeof(Line) + 2 * size * SLOT * int64_t(sizeof(float)); }

  // peers: a file descriptor of each other process (pidfd), -1 for our own.
  Ranks(Tensor segment, int64_t rank, int64_t size, std::vector<int64_t> peers)
      : rank(rank), size(size), lines_(static_cast<Line*>(segment.mutable_data_ptr())),
        slots_(reinterpret_cast<float*>(lines_ + size + 1)), peers_(std::move(peers)), held_(segment) {}

  // The sum of everybody's x, in place, in float32 in the order of the ranks: the same bits everywhere.
  void sum(void* x, Type type, int64_t count) {
    for (int64_t first = 0; first < count; first += SLOT) {
      const int64_t n = std::min(SLOT, count - first);
      int64_t i = 0;
      float* own = slot(rank);
      for (; i + LANES <= n; i += LANES) tell(own + i, load_as(x, type, first + i));
      for (; i < n; i++) own[i] = load_one(x, type, first + i);
      meet();
      for (i = 0; i + LANES <= n; i += LANES) {
        F32 v = load(published(0) + i);
        for (int64_t r = 1; r < size; r++) v += load(published(r) + i);
        store_as(x, type, first + i, v);
      }
      for (; i < n; i++) {
        float v = published(0)[i];
        for (int64_t r = 1; r < size; r++) v += published(r)[i];
        store_one(x, type, first + i, v);
      }
    }
  }

  // x (rows, sizes[rank]) of everybody -> out (rows, sum of sizes).
  void gather(const float* x, float* out, int64_t rows, const std::vector<int64_t>& sizes) {
    int64_t most = 0, all = 0;
    for (int64_t one : sizes) most = std::max(most, one), all += one;
    for (int64_t first = 0; first < rows * most; first += SLOT) {
      const int64_t mine = std::min(SLOT, rows * sizes[rank] - first);
      int64_t i = 0;
      for (; i + LANES <= mine; i += LANES) tell(slot(rank) + i, load(x + first + i));
      if (i < mine) std::memcpy(slot(rank) + i, x + first + i, (mine - i) * sizeof(float));
      meet();
      int64_t column = 0;
      for (int64_t r = 0; r < size; column += sizes[r++])
        for (int64_t at = first, end = std::min(first + SLOT, rows * sizes[r]); at < end;) {
          const int64_t n = std::min(end - at, sizes[r] - at % sizes[r]);  // what is left of a row
          std::memcpy(out + at / sizes[r] * all + column + at % sizes[r], published(r) + at - first, n * sizeof(float));
          at += n;
        }
    }
  }

  // This rank will not come any more: nobody may wait for it.
  void abandon() { lines_[size].turn.store(1, std::memory_order_relaxed); }

  const int64_t rank, size;

 private:
  struct alignas(64) Line {
    std::atomic<uint32_t> turn, asleep;  // of the line behind the ranks': whether one has failed
  };
  static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(Line) == 64);

  float* slot(int64_t r) { return slots_ + ((turn_ & 1) * size + r) * SLOT; }
  // What rank r wrote in this turn; to be called after meet().
  const float* published(int64_t r) { return slots_ + ((~turn_ & 1) * size + r) * SLOT; }

  // Into our slot, on a boundary of 64 bytes, past the caches: a line that another core had read, and is to read again,
  // goes back and forth between two caches at 34 ns each way where these are far apart; through memory it takes 10.
  static void tell(float* p, F32 v) {
#if HASTEN_512
    _mm512_stream_ps(p, (__m512)v);
#elif defined(__AVX2__)
    _mm256_stream_ps(p, v.low), _mm256_stream_ps(p + LANES / 2, v.high);
#else
    store(p, v);
#endif
  }

  // Tell that our slot is written, and wait until everybody's is.
  void meet() {
#if defined(__AVX2__)
    _mm_sfence();
#endif
    turn_++;
    Line& own = lines_[rank];
    own.turn.store(turn_, std::memory_order_seq_cst);
    if (own.asleep.load(std::memory_order_seq_cst)) wake(own);
    for (int64_t r = 0; r < size; r++)
      for (int64_t tries = 0; behind(lines_[r]); tries++) {
        if (lines_[size].turn.load(std::memory_order_relaxed)) throw std::runtime_error("a peer has failed");
        if (tries < 2000) pause();  // some 50 µs
        else if (tries < 3000) std::this_thread::yield();
        else sleep(r);
      }
  }
  bool behind(const Line& line) const { return int32_t(line.turn.load(std::memory_order_seq_cst) - turn_) < 0; }

#if defined(__linux__)
  static void wake(Line& line) { syscall(SYS_futex, &line.turn, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0); }
  void sleep(int64_t r) {
    Line& line = lines_[r];
    const timespec patience{0, 50'000'000};
    line.asleep.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = line.turn.load(std::memory_order_seq_cst);
    const bool late = int32_t(seen - turn_) < 0 && syscall(SYS_futex, &line.turn, FUTEX_WAIT, seen, &patience, nullptr, 0);
    line.asleep.fetch_sub(1, std::memory_order_seq_cst);
    pollfd peer{int(peers_[r]), POLLIN, 0};
    if (late && behind(line) && poll(&peer, 1, 0) > 0 && behind(line))
      throw std::runtime_error("peer " + std::to_string(r) + " has ended, and its part of a sum will not come");
  }
#else
  static void wake(Line&) {}
  void sleep(int64_t) { throw std::runtime_error("ranks share memory on Linux only"); }
#endif

  Line* const lines_;
  float* const slots_;
  const std::vector<int64_t> peers_;
  const Tensor held_;
  uint32_t turn_ = 0;
};

}  // namespace hasten

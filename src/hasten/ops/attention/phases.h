// The attention of one call as phases of a team; compiled once, in native.cpp.
#pragma once

#include "native.h"

namespace hasten {

using torch::stable::Tensor;

// One piece of work: `tokens` query tokens of one sequence from `row` on, all heads of one key/value head.
struct Piece {
  int64_t sequence, head, row, tokens, position;  // position: of the first token
};

// The queries of a piece as lines (token, then head of the group): their values, positions, and rows of the pattern.
struct Queries {
  Operand* values;
  uint32_t* pairs;  // see Attended
  int64_t* position;
  const bool** row;
};

inline const Pattern* pattern_in(const std::optional<Tensor>& seen) { return seen ? &plan_in<Pattern>(*seen) : nullptr; }

// Where the sequences of a step are. Rows query_start_loc[b] … query_start_loc[b+1] - 1 are the last ones of sequence b's
// seq_lens[b] positions. Contiguous: first (B,), the slot of each sequence's position 0. Paged: block_table (B, blocks) of
// block numbers.
struct Sequences {
  Sequences(const Tensor& query_start_loc, const Tensor& seq_lens, const std::optional<Tensor>& first,
            const std::optional<Tensor>& block_table, int64_t block_size);

  int64_t count, blocks, block_size;
  const int64_t *start, *length, *first, *block_table;  // first or block_table is null
};

class AttentionPhases {
 public:
  // q (R, H, D) float32 or bf16, may be written until the phases begin; out as q. Where the cache's rows are rotated, q is
  // turned on the way in and out on the way back. pattern: of plan_pattern. sinks (H,) float32: a logit of each head that
  // joins the softmax and has no value.
  AttentionPhases(Arena& arena, const void* q, void* out, Type type, int64_t rows, int64_t heads, int64_t head_dim,
                  const Cache& cache, const Sequences& sequences, bool rotated, double scale, int64_t window, double softcap,
                  const Pattern* pattern, const std::optional<Tensor>& sinks);
  // prefetcher: what this thread will read next.
  void run(Worker& worker, Prefetcher prefetcher = {}) const;

 private:
  int64_t first_key(const Piece& p) const;
  int64_t first_value(const Piece& p, int64_t token) const;
  template <bool WRITTEN>
  RowsAhead<WRITTEN> rows_of(const Piece& p, const void* all) const;
  bool takes_rows(int64_t lines) const;
  Queries gather(const Piece& p) const;
  bool span(const Piece& p, int64_t index, const Queries& queries, const Lines& lines, Coming& coming,
            const Piece& follower) const;
  void whole_piece(const Piece& p, const Piece& follower, Prefetcher& prefetcher) const;
  void finish(const Piece& p, const Lines& lines) const;

  const void* q;
  void* out;
  Type type;
  KeyValues kv;
  Scores how;
  const Pattern* pattern;  // nullptr: all keys up to a query's own
  const float* sinks;      // nullptr: none
  int64_t heads, threads, group, padded, spans = 1, most, size;
  RowFormat held;
  bool rotated, split;
  float* parts = nullptr;
  std::vector<Piece> pieces;
};

}  // namespace hasten

// Which keys of a cache the queries of a sparse pattern see, one tile at a time.
#pragma once

#include <algorithm>

#include "../plans.h"
#include "tiles.h"

namespace hasten {

constexpr uint64_t EVERY_KEY = ~uint64_t(0);

// Blocks of `block` positions: `table` (1 or H, rows, columns) says whether a row of queries sees a column of keys, both
// taken modulo its size, so that a pattern that repeats needs no more than once what repeats. reach: of these the last so
// many positions, 0 for all. Keys after the query are hidden by others.
struct Pattern {
  static constexpr const char* name = "a sparse pattern";
  const Pattern* self;
  const bool* table;
  int64_t heads, rows, columns, block, reach;
  Tensor held;  // what the pointer points to

  const bool* row(int64_t head, int64_t position) const {
    return table + ((heads > 1 ? head : 0) * rows + position / block % rows) * columns;
  }
  // keys[line]: bit j says whether the query of this row sees key begin + j. False where no line sees any.
  bool look(int64_t begin, const bool* const* lines, int64_t count, uint64_t* keys) const {
    struct { int64_t column; uint64_t keys; } parts[TILE_KEYS];  // the blocks in the tile
    int64_t blocks = 0;
    for (int64_t j = 0, run; j < TILE_KEYS; j += run) {
      run = std::min(block - (begin + j) % block, TILE_KEYS - j);
      parts[blocks++] = {(begin + j) / block % columns, EVERY_KEY >> (TILE_KEYS - run) << j};
    }
    uint64_t any = 0;
    for (int64_t i = 0; i < count; any |= keys[i++]) {
      if (i && lines[i] == lines[i - 1]) {
        keys[i] = keys[i - 1];
        continue;
      }
      keys[i] = 0;
      for (int64_t b = 0; b < blocks; b++) keys[i] |= lines[i][parts[b].column] ? parts[b].keys : 0;
    }
    return any;
  }
};

}  // namespace hasten

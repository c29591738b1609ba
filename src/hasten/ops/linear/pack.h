// Values, a byte each, to the words of a panel's lines (gemm.h).
#pragma once

#include "gemm.h"

namespace hasten {

INLINE uint32_t word_at(const uint8_t* p) { uint32_t w; std::memcpy(&w, p, 4); return w; }
INLINE uint32_t nibbles_at(const uint8_t* p) { return (word_at(p) & 0x0f0f0f0fu) | (word_at(p + 4) & 0x0f0f0f0fu) << 4; }

// The fewest values of a row that fill whole words, and how many words that is.
struct Unit { int64_t values, lines; };
constexpr Unit unit_of(int64_t bits) {
  switch (bits) {
    case 8: return {4, 1};
    case 6: return {16, 3};
    case 5: return {32, 5};
    case 4: return {8, 1};
    case 3: return {32, 3};
    default: return {16, 1};
  }
}

// Word `i` of a unit: low bits first, then, of 6, 5 and 3 bits, a word of upper bits.
INLINE uint32_t unit_line(const uint8_t* unit, int64_t i, int64_t bits) {
  if (bits == 8) return word_at(unit);
  const int64_t values = unit_of(bits).values, low = bits >= 4 ? 4 : 2;
  if (i * 32 / low < values) {
    if (low == 4) return nibbles_at(unit + i * 8);
    uint32_t found = 0;
    for (int t = 0; t < 4; t++) found |= (word_at(unit + i * 16 + 4 * t) & 0x03030303u) << (2 * t);
    return found;
  }
  uint32_t upper = 0;
  for (int t = 0; t < values / 4; t++)
    upper |= (word_at(unit + 4 * t) >> low & (bits == 6 ? 0x03030303u : 0x01010101u)) << ((bits - low) * t);
  return upper;
}

}  // namespace hasten

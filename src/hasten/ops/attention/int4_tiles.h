// int4 rows of cached keys and values (cache_rows.h) brought into tiles.
#pragma once

#include "tiles.h"

namespace hasten {

// Rows of int4 as a tile: keys transposed eight values at a time, made wider and multiplied by their scales afterwards,
// which bf16 holds exactly.
inline void pack_int4_tile(TileRows& tile, int64_t padded, bool few, Tile& out) {
  const auto& k = tile.k;
  auto& v = tile.v;
  const int64_t groups = (tile.head_dim + GROUP - 1) / GROUP, bytes = groups * GROUP_BYTES;
  auto* words = reinterpret_cast<uint32_t*>(out.k);
  auto scale_at = [&](const uint8_t* row, int64_t g) {
    uint16_t scale;
    std::memcpy(&scale, row + bytes + 2 * g, 2);
    return from_bf16(scale);
  };
  constexpr int64_t part = 64;  // bytes of a row that are transposed at a time: four groups
  for (int64_t at = 0; at < padded / 2; at += part)
    for (int64_t j = 0; j < TILE_KEYS; j += 16) {
      const uint32_t* rows[16];
      alignas(64) uint8_t tail[16][part];
      alignas(64) uint32_t octets[16][16];  // [eight values][key]
      for (int i = 0; i < 16; i++) {
        if (at + part <= bytes) {
          rows[i] = reinterpret_cast<const uint32_t*>(k[j + i] + at);
        } else {
          std::memset(tail[i], 0, part);
          if (at < bytes) std::memcpy(tail[i], k[j + i] + at, bytes - at);
          rows[i] = reinterpret_cast<const uint32_t*>(tail[i]);
        }
      }
      transpose16(rows, octets[0], 16);
      for (int64_t g = at / GROUP_BYTES; g < std::min((at + part) / GROUP_BYTES, padded / GROUP); g++) {
        alignas(64) float own[16] = {};
        for (int i = 0; g < groups && i < 16; i++) own[i] = scale_at(k[j + i], g);
        const F32 scales = load(own);
        for (int w = 0; w < 4; w++) {  // of eight values four from the lower halves of the bytes, four from the upper
          const I32 octet = as<I32>(load_line(octets[g % 4 * 4 + w]));
          uint32_t* to = words + (g * 16 + w * 2) * TILE_KEYS + j;
          auto pair = [&](I32 a, I32 b) { return pairs_of(to_float(a >> 28) * scales, to_float(b >> 28) * scales); };
          store_line(to, pair(octet << 28, octet << 20));
          store_line(to + TILE_KEYS, pair(octet << 12, octet << 4));
          store_line(to + 8 * TILE_KEYS, pair(octet << 24, octet << 16));
          store_line(to + 9 * TILE_KEYS, pair(octet << 8, octet));
        }
      }
    }
  // The values of a group, lower and upper halves of its bytes.
  auto group = [&](const uint8_t* row, int64_t g, F32* low, F32* high) {
    const I32 both = load_int8(row + g * GROUP_BYTES);
    const float scale = scale_at(row, g);
    *low = to_float(both << 28 >> 28) * scale;
    *high = to_float(both >> 4) * scale;
  };
#if HASTEN_512
  for (int64_t g = 0; g < padded / GROUP; g++)
    for (int64_t j = 0; j < TILE_KEYS; j += 2) {
      F32 low[2] = {}, high[2] = {};
      for (int i = 0; g < groups && i < 2; i++) group(v[j + i], g, low + i, high + i);
      uint16_t* to = out.v + (g / 2 * (TILE_KEYS / 2) * PANEL + j / 2 * PANEL + g % 2 * GROUP) * 2;
      store_line(to, pairs_of(low[0], low[1]));
      store_line(to + 2 * LANES, pairs_of(high[0], high[1]));
    }
#else
  for (int64_t j = 0; j < TILE_KEYS; j++) {
    uint16_t* row = out.v + j * padded;
    for (int64_t g = 0; g < padded / GROUP; g++) {
      F32 low = {}, high = {};
      if (g < groups) group(v[j], g, &low, &high);
      store_u16(row + g * GROUP, as<U32>(low) >> 16);
      store_u16(row + g * GROUP + LANES, as<U32>(high) >> 16);
    }
    v[j] = reinterpret_cast<const uint8_t*>(row);
  }
  out.v_rows = v;
#endif
}

}  // namespace hasten

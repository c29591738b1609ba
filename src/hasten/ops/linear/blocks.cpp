// Weights from the blocks of a GGUF file straight to panels (gemm.h): what `checkpoints/gguf/types.py` and `layouts.py` do
// in two passes, by way of a tensor with a byte for each value. The formats are described in types.py.
#include "../tensors.h"
#include "pack.h"

namespace hasten {

// Splits every WIDTH bytes into parts of BITS bits: first those at the lowest place, then the next; each shifted up by UP.
template <int WIDTH, int BITS, int UP = 0>
INLINE void split(const uint8_t* from, int bytes, uint8_t* to) {
  constexpr int parts = 8 / BITS, mask = (1 << BITS) - 1;
  for (int start = 0; start < bytes; start += WIDTH)
    for (int part = 0; part < parts; part++, to += WIDTH)
      for (int i = 0; i < WIDTH; i++) {
        const uint8_t own = uint8_t((from[start + i] >> (part * BITS) & mask) << UP);
        if constexpr (UP) to[i] |= own;
        else to[i] = own;
      }
}

INLINE uint16_t half_at(const uint8_t* p) { uint16_t h; std::memcpy(&h, p, 2); return h; }

// One block of each type. values: a byte each, as `unit_line` takes them. scales, minima, outer: how many of a block.
struct Block {
  using Scale = uint16_t;
  static constexpr int size = 32, scales = 1, minima = 0, outer = 0, outer_at = 0;
  static void scale(const uint8_t* b, Scale* to) { to[0] = half_at(b); }
};
struct WithMinimum : Block {
  static constexpr int minima = 1;
  static uint16_t minimum(const uint8_t* b) { return half_at(b + 2) ^ 0x8000; }  // it is taken away, GGUF adds it
};
struct Q4_0 : Block {
  static constexpr int bits = 4, bytes = 18;
  static void values(const uint8_t* b, uint8_t* to) { split<16, 4>(b + 2, 16, to); }
};
struct Q4_1 : WithMinimum {
  static constexpr int bits = 4, bytes = 20;
  static void values(const uint8_t* b, uint8_t* to) { split<16, 4>(b + 4, 16, to); }
};
INLINE void add_fifth_bits(const uint8_t* from, uint8_t* to) {
  const uint32_t all = word_at(from);
  for (int i = 0; i < 32; i++) to[i] |= uint8_t((all >> i & 1) << 4);
}
struct Q5_0 : Block {
  static constexpr int bits = 5, bytes = 22;
  static void values(const uint8_t* b, uint8_t* to) {
    split<16, 4>(b + 6, 16, to);
    add_fifth_bits(b + 2, to);
  }
};
struct Q5_1 : WithMinimum {
  static constexpr int bits = 5, bytes = 24;
  static void values(const uint8_t* b, uint8_t* to) {
    split<16, 4>(b + 8, 16, to);
    add_fifth_bits(b + 4, to);
  }
};
struct Q8_0 : Block {
  static constexpr int bits = 8, bytes = 34;
  static void values(const uint8_t* b, uint8_t* to) {
    for (int i = 0; i < 32; i++) to[i] = b[2 + i] ^ 0x80;
  }
};
struct IQ4_NL : Q4_0 {};
struct MXFP4 : Block {
  using Scale = uint8_t;
  static constexpr int bits = 4, bytes = 17;
  static void scale(const uint8_t* b, Scale* to) { to[0] = b[0]; }
  static void values(const uint8_t* b, uint8_t* to) {
    split<16, 4>(b + 1, 16, to);
    for (int i = 0; i < 32; i++) to[i] = to[i] == 8 ? 0 : to[i];  // of two zeros the first
  }
};

struct SuperBlock {
  static constexpr int size = SUPER_BLOCK, minima = 0;
};
struct Q2_K : SuperBlock {
  using Scale = uint8_t;
  static constexpr int bits = 2, bytes = 84, scales = 16, outer = 2, outer_at = 80;
  static void scale(const uint8_t* b, Scale* to) { std::memcpy(to, b, 16); }
  static void values(const uint8_t* b, uint8_t* to) { split<32, 2>(b + 16, 64, to); }
};
struct Q3_K : SuperBlock {
  using Scale = int8_t;
  static constexpr int bits = 3, bytes = 110, scales = 16, outer = 1, outer_at = 108;
  static void scale(const uint8_t* b, Scale* to) {
    uint8_t six[16];
    split<8, 4>(b + 96, 8, six);
    split<4, 2, 4>(b + 104, 4, six);
    for (int i = 0; i < 16; i++) to[i] = int8_t(six[i] - 32);
  }
  static void values(const uint8_t* b, uint8_t* to) {
    split<32, 2>(b + 32, 64, to);
    split<32, 1, 2>(b, 32, to);
  }
};
struct WithWords : SuperBlock {
  using Scale = uint32_t;
  static constexpr int scales = 3, outer = 2, outer_at = 0;
  static void scale(const uint8_t* b, Scale* to) {
    const uint32_t first = word_at(b + 4), second = word_at(b + 8), rest = word_at(b + 12);
    const uint64_t six[2] = {  // eight bytes each: scales, minima
        (first & 0x3f3f3f3fu) | uint64_t((rest & 0x0f0f0f0fu) | (first >> 2 & 0x30303030u)) << 32,
        (second & 0x3f3f3f3fu) | uint64_t((rest >> 4 & 0x0f0f0f0fu) | (second >> 2 & 0x30303030u)) << 32};
    to[2] = 0;
    for (int part = 0; part < 2; part++) {
      to[part] = 0;
      for (int g = 0; g < 8; g++) {
        const uint32_t own = uint32_t(six[part] >> (8 * g)) & 0x3f;
        to[part] |= (own & 15) << (4 * g);
        to[2] |= (own >> 4) << (16 * part + 2 * g);
      }
    }
  }
};
struct Q4_K : WithWords {
  static constexpr int bits = 4, bytes = 144;
  static void values(const uint8_t* b, uint8_t* to) { split<32, 4>(b + 16, 128, to); }
};
struct Q5_K : WithWords {
  static constexpr int bits = 5, bytes = 176;
  static void values(const uint8_t* b, uint8_t* to) {
    split<32, 4>(b + 48, 128, to);
    split<32, 1, 4>(b + 16, 32, to);
  }
};
struct Q6_K : SuperBlock {
  using Scale = int8_t;
  static constexpr int bits = 6, bytes = 210, scales = 16, outer = 1, outer_at = 208;
  static void scale(const uint8_t* b, Scale* to) { std::memcpy(to, b + 192, 16); }
  static void values(const uint8_t* b, uint8_t* to) {
    split<64, 4>(b, 128, to);
    split<32, 2, 4>(b + 128, 64, to);
  }
};
struct IQ4_XS : SuperBlock {
  using Scale = int8_t;
  static constexpr int bits = 4, bytes = 136, scales = 8, outer = 1, outer_at = 0;
  static void scale(const uint8_t* b, Scale* to) {
    uint8_t six[8];
    split<1, 4>(b + 4, 4, six);
    split<1, 2, 4>(b + 2, 2, six);
    for (int i = 0; i < 8; i++) to[i] = int8_t(six[i] - 32);
  }
  static void values(const uint8_t* b, uint8_t* to) { split<16, 4>(b + 8, 128, to); }
};

// Where the parts of a packed weight go, and the blocks that they come from.
struct PackedBlocks {
  const uint8_t* from;
  int64_t rows, blocks;  // blocks of a row
  void *data, *scales;
  uint16_t *minima, *outer;
};

template <class B>
static void pack_panel(const PackedBlocks& all, int64_t panel) {
  constexpr Unit unit = unit_of(B::bits);
  constexpr int64_t words = B::size / unit.values * unit.lines;  // of a block
  const int64_t first = panel * PANEL, rows = std::min<int64_t>(PANEL, all.rows - first);
  auto* data = static_cast<uint32_t*>(all.data) + panel * all.blocks * words * PANEL;
  auto* scales = static_cast<typename B::Scale*>(all.scales) + panel * all.blocks * B::scales * PANEL;
  uint16_t* minima = all.minima + panel * all.blocks * B::minima * PANEL;
  uint16_t* outer = all.outer + panel * all.blocks * B::outer * PANEL;
  for (int64_t n = 0; n < all.blocks; n++)
    for (int64_t r = 0; r < PANEL; r++) {
      uint32_t* to = data + n * words * PANEL + r;
      alignas(64) uint8_t values[B::size] = {};
      typename B::Scale own[B::scales] = {};
      const uint8_t* block = all.from + ((first + r) * all.blocks + n) * B::bytes;
      if (r < rows) {
        B::values(block, values);
        B::scale(block, own);
      } else if (B::bits == 8 || B::bits == 4) {
        std::memset(values, 1 << (B::bits - 1), B::size);  // as the other packers fill up
      }
      for (int64_t i = 0; i < words; i++)
        to[i * PANEL] = unit_line(values + i / unit.lines * unit.values, i % unit.lines, B::bits);
      for (int64_t i = 0; i < B::scales; i++) scales[(n * B::scales + i) * PANEL + r] = own[i];
      if constexpr (B::minima > 0) minima[n * PANEL + r] = r < rows ? B::minimum(block) : 0;
      for (int64_t i = 0; i < B::outer; i++)
        outer[(n * B::outer + i) * PANEL + r] = r < rows ? half_at(block + B::outer_at + 2 * i) : 0;
    }
}

template <class B>
static void pack(PackedBlocks all, const Tensor& rows, const Tensor& data, const Tensor& scales,
                 const std::optional<Tensor>& minima, const std::optional<Tensor>& outer) {
  STD_TORCH_CHECK(rows.size(1) % B::bytes == 0, "a row of ", rows.size(1), " bytes is not made of blocks of ", B::bytes);
  all.blocks = rows.size(1) / B::bytes;
  const int64_t panels = (all.rows + PANEL - 1) / PANEL, lines = panels * all.blocks * PANEL;
  auto fits = [&](const Tensor& t, int64_t bytes) { return t.is_contiguous() && t.numel() * t.element_size() == bytes; };
  STD_TORCH_CHECK(fits(data, lines * B::size * B::bits / 8) && fits(scales, lines * B::scales * int64_t(sizeof(typename B::Scale))),
                  "the packed tensors are of other sizes than the blocks");
  STD_TORCH_CHECK(minima.has_value() == (B::minima > 0) && outer.has_value() == (B::outer > 0),
                  "minima and scales of scales belong to some types only");
  STD_TORCH_CHECK(!minima || fits(*minima, lines * 2), "the minima are of another size than the blocks");
  STD_TORCH_CHECK(!outer || fits(*outer, lines * B::outer * 2), "the scales of scales are of another size than the blocks");
  for_chunks(panels, [&](int64_t panel) { pack_panel<B>(all, panel); });
}

// rows (N, bytes of a row) uint8, blocks of a ggml type (by its number) -> the packed tensors, which are allocated already.
void pack_blocks(Tensor rows, int64_t type, Tensor data, Tensor scales, std::optional<Tensor> minima,
                 std::optional<Tensor> outer) {
  STD_TORCH_CHECK(rows.dim() == 2 && rows.scalar_type() == ScalarType::Byte, "blocks are uint8 (N, bytes of a row)");
  rows = as_contiguous(rows);
  PackedBlocks all{};
  all.from = static_cast<const uint8_t*>(rows.const_data_ptr());
  all.rows = rows.size(0);
  all.data = data.mutable_data_ptr();
  all.scales = scales.mutable_data_ptr();
  if (minima) all.minima = static_cast<uint16_t*>(minima->mutable_data_ptr());
  if (outer) all.outer = static_cast<uint16_t*>(outer->mutable_data_ptr());
  switch (type) {
    case 2: return pack<Q4_0>(all, rows, data, scales, minima, outer);
    case 3: return pack<Q4_1>(all, rows, data, scales, minima, outer);
    case 6: return pack<Q5_0>(all, rows, data, scales, minima, outer);
    case 7: return pack<Q5_1>(all, rows, data, scales, minima, outer);
    case 8: return pack<Q8_0>(all, rows, data, scales, minima, outer);
    case 10: return pack<Q2_K>(all, rows, data, scales, minima, outer);
    case 11: return pack<Q3_K>(all, rows, data, scales, minima, outer);
    case 12: return pack<Q4_K>(all, rows, data, scales, minima, outer);
    case 13: return pack<Q5_K>(all, rows, data, scales, minima, outer);
    case 14: return pack<Q6_K>(all, rows, data, scales, minima, outer);
    case 20: return pack<IQ4_NL>(all, rows, data, scales, minima, outer);
    case 23: return pack<IQ4_XS>(all, rows, data, scales, minima, outer);
    case 39: return pack<MXFP4>(all, rows, data, scales, minima, outer);
    default: STD_TORCH_CHECK(false, "blocks of ggml type ", type, " have no panels");
  }
}

}  // namespace hasten

STABLE_TORCH_LIBRARY_FRAGMENT(HASTEN_LIBRARY, m) {
  m.def("pack_blocks(Tensor rows, int type, Tensor(a!) data, Tensor(b!) scales, Tensor(c!)? minima, Tensor(d!)? outer) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(HASTEN_LIBRARY, CPU, m) { m.impl("pack_blocks", TORCH_BOX(&hasten::pack_blocks)); }

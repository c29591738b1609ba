// attention(q, cache) as a torch operator; see native.h for how it is computed.
#include "native.h"

namespace hasten {

using torch::stable::Tensor;

// One piece of work: `tokens` query tokens of one sequence from `row` on, all heads of one key/value head.
struct Piece {
  int64_t sequence, head, row, tokens, position;  // position: of the first token
};

static Lines lines_in(float* memory, int64_t count, int64_t padded) {
  return {memory, memory + round_up(count, LANES), memory + 2 * round_up(count, LANES), count, padded, count};
}
static int64_t lines_size(int64_t count, int64_t padded) { return 2 * round_up(count, LANES) + count * padded; }

struct Call {
  const void* q;
  void* out;
  Type type;
  KeyValues kv;
  Scores how;
  int64_t heads, group, padded;

  // The queries of a piece as bf16 lines (token, then head of the group), and the position of each.
  void gather(const Piece& p, uint16_t* lines, int64_t* position) const {
    const int64_t d = kv.head_dim;
    for (int64_t t = 0; t < p.tokens; t++)
      for (int64_t g = 0; g < group; g++) {
        const int64_t from = ((p.row + t) * heads + p.head * group + g) * d, line = t * group + g;
        uint16_t* to = lines + line * padded;
        for (int64_t i = 0; i < padded; i++) to[i] = i < d ? to_bf16(load_one(q, type, from + i)) : 0;
        position[line] = p.position + t;
      }
  }
  // First key that any query of the piece sees, at a tile's border.
  int64_t first_key(const Piece& p) const {
    const int64_t first = how.window ? std::max<int64_t>(0, p.position - how.window + 1) : 0;
    return first / TILE_KEYS * TILE_KEYS;
  }
  void span(const Piece& p, int64_t index, const uint16_t* lines_q, const int64_t* position, const Lines& lines) const {
    uint16_t* k_panel = scratch<uint16_t, 8>(padded * TILE_KEYS);
    uint16_t* v_panels = scratch<uint16_t, 9>(padded * TILE_KEYS);
    const int64_t last = p.position + p.tokens;
    clear(lines);
    const int64_t from = std::max(index * SPAN_KEYS, first_key(p)), to = std::min((index + 1) * SPAN_KEYS, last);
    for (int64_t begin = from; begin < to; begin += TILE_KEYS) {
      pack_tile(kv, p.sequence, p.head, begin, std::min(last, kv.room(p.sequence)), padded, k_panel, v_panels);
      // Queries before this tile see nothing of it; lines keep standing together in sixes.
      const int64_t skip = std::max<int64_t>(0, begin - p.position) * group / 6 * 6;
      attend_tile(lines.from(skip), lines_q + skip * padded, position + skip, begin, k_panel, v_panels, how);
    }
  }
  void finish(const Piece& p, const Lines& lines) const {
    const int64_t d = kv.head_dim;
    for (int64_t line = 0; line < lines.count; line++) {
      const float share = 1.0f / lines.sum[line];
      const int64_t to = ((p.row + line / group) * heads + p.head * group + line % group) * d;
      for (int64_t i = 0; i < d; i++)
        store_one(out, type, to + i, lines.value(i / PANEL, line)[i % PANEL] * share);
    }
  }
};

// q (R, H, D) float32 or bf16 -> (R, H, D). Rows starts[b] … starts[b+1] - 1 are the last ones of sequence b's
// lengths[b] positions. k, v (slots, Hkv, D) bf16. Contiguous: first (B,), the slot of each sequence's position 0.
// Paged: table (B, blocks) of block numbers.
Tensor attention(Tensor q, Tensor k, Tensor v, Tensor starts, Tensor lengths, std::optional<Tensor> first,
                 std::optional<Tensor> table, int64_t block_size, double scale, int64_t window, double softcap) {
  q = as_contiguous(q);
  STD_TORCH_CHECK(k.scalar_type() == ScalarType::BFloat16 && v.scalar_type() == ScalarType::BFloat16,
                  "the native attention reads a bfloat16 cache");
  STD_TORCH_CHECK(k.is_contiguous() && v.is_contiguous() && starts.is_contiguous() && lengths.is_contiguous(),
                  "the cache, starts and lengths must be contiguous");
  STD_TORCH_CHECK(first.has_value() != table.has_value(), "give either first slots or a block table");
  Tensor out = empty({q.size(0), q.size(1), q.size(2)}, q.scalar_type());
  Call call;
  call.q = q.const_data_ptr();
  call.out = out.mutable_data_ptr();
  call.type = type_of(q);
  call.heads = q.size(1);
  call.kv = {static_cast<const uint16_t*>(k.const_data_ptr()), static_cast<const uint16_t*>(v.const_data_ptr()),
             first ? static_cast<const int64_t*>(first->const_data_ptr()) : nullptr,
             table ? static_cast<const int64_t*>(table->const_data_ptr()) : nullptr,
             table ? table->size(1) : 0, block_size, k.size(1), q.size(2), k.size(0)};
  call.how = {float(scale), float(softcap), window};
  call.group = call.heads / call.kv.kv_heads;
  call.padded = round_up(call.kv.head_dim, PANEL);
  STD_TORCH_CHECK(call.padded <= 256, "head sizes up to 256");
  const int64_t* start = static_cast<const int64_t*>(starts.const_data_ptr());
  const int64_t* length = static_cast<const int64_t*>(lengths.const_data_ptr());

  const int64_t tokens = std::max<int64_t>(1, LINES / call.group);
  std::vector<Piece> pieces;
  int64_t spans = 1;
  for (int64_t b = 0; b < lengths.size(0); b++) {
    const int64_t rows = start[b + 1] - start[b], before = length[b] - rows;
    // The last tokens see most keys: begun first, they do not keep the others waiting at the end.
    for (int64_t t = (rows - 1) / tokens * tokens; rows > 0 && t >= 0; t -= tokens)
      for (int64_t h = 0; h < call.kv.kv_heads; h++) {
        pieces.push_back({b, h, start[b] + t, std::min(tokens, rows - t), before + t});
        spans = std::max(spans, (before + t + pieces.back().tokens + SPAN_KEYS - 1) / SPAN_KEYS);
      }
  }
  const int64_t threads = torch::stable::get_num_threads(), count = int64_t(pieces.size());
  const int64_t most = std::min<int64_t>(tokens, q.size(0)) * call.group, size = lines_size(most, call.padded);
  auto spans_of = [&](const Piece& p) { return (p.position + p.tokens + SPAN_KEYS - 1) / SPAN_KEYS; };
  if (spans == 1 || count >= 4 * threads) {
    for_chunks(count, [&](int64_t c) {
      const Piece& p = pieces[c];
      uint16_t* lines_q = scratch<uint16_t, 10>(most * call.padded);
      int64_t* position = scratch<int64_t, 11>(most);
      float* memory = scratch<float, 12>(2 * size + 32);
      call.gather(p, lines_q, position);
      Lines whole = lines_in(memory, p.tokens * call.group, call.padded);
      Lines next = lines_in(memory + round_up(size, LANES), p.tokens * call.group, call.padded);
      const int64_t begin = call.first_key(p) / SPAN_KEYS;
      for (int64_t s = begin; s < spans_of(p); s++) {
        call.span(p, s, lines_q, position, s == begin ? whole : next);
        if (s != begin) merge(whole, next);
      }
      call.finish(p, whole);
    });
    return out;
  }
  // Few sequences and heads, long contexts: the spans are work of their own, merged afterwards in the same order.
  float* memory = scratch<float, 13>(count * spans * round_up(size, LANES));
  auto part = [&](int64_t c, int64_t s) {
    return lines_in(memory + (c * spans + s) * round_up(size, LANES), pieces[c].tokens * call.group, call.padded);
  };
  for_chunks(count * spans, [&](int64_t chunk) {
    const int64_t c = chunk / spans, s = chunk % spans;
    const Piece& p = pieces[c];
    if (s < call.first_key(p) / SPAN_KEYS || s >= spans_of(p)) return;
    uint16_t* lines_q = scratch<uint16_t, 10>(most * call.padded);
    int64_t* position = scratch<int64_t, 11>(most);
    call.gather(p, lines_q, position);
    call.span(p, s, lines_q, position, part(c, s));
  });
  for_chunks(count, [&](int64_t c) {
    const Piece& p = pieces[c];
    const int64_t begin = call.first_key(p) / SPAN_KEYS;
    Lines whole = part(c, begin);
    for (int64_t s = begin + 1; s < spans_of(p); s++) merge(whole, part(c, s));
    call.finish(p, whole);
  });
  return out;
}

}  // namespace hasten

STABLE_TORCH_LIBRARY_FRAGMENT(HASTEN_LIBRARY, m) {
  m.def("attention(Tensor q, Tensor k, Tensor v, Tensor starts, Tensor lengths, Tensor? first, Tensor? table, int block_size, float scale, int window, float softcap) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(HASTEN_LIBRARY, CPU, m) { m.impl("attention", TORCH_BOX(&hasten::attention)); }

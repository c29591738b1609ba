// attention(q, cache) as a torch operator; see native.h for how it is computed.
#include "phases.h"

namespace hasten {

static int64_t spans_of(const Piece& p) { return (p.position + p.tokens + SPAN_KEYS - 1) / SPAN_KEYS; }

static Lines lines_in(float* arena, int64_t count, int64_t padded) {
  const int64_t tops = round_up(count, LANES);
  return {arena, arena + tops, arena + tops + count * LANES, count, padded, count};
}
static int64_t lines_size(int64_t count, int64_t padded) {
  return round_up(count, LANES) + count * (LANES + padded);
}

Sequences::Sequences(const Tensor& query_start_loc, const Tensor& seq_lens, const std::optional<Tensor>& first,
                     const std::optional<Tensor>& block_table, int64_t block_size)
    : count(seq_lens.numel()), blocks(block_table ? block_table->size(1) : 0), block_size(block_size) {
  STD_TORCH_CHECK(query_start_loc.is_contiguous() && seq_lens.is_contiguous(),
                  "query_start_loc and seq_lens must be contiguous");
  STD_TORCH_CHECK(first.has_value() != block_table.has_value(), "give either first slots or a block table");
  const auto in = [](const Tensor& t) { return static_cast<const int64_t*>(t.const_data_ptr()); };
  start = in(query_start_loc), length = in(seq_lens);
  this->first = first ? in(*first) : nullptr, this->block_table = block_table ? in(*block_table) : nullptr;
}

AttentionPhases::AttentionPhases(Arena& arena, const void* q, void* out, Type type, int64_t rows, int64_t heads,
                                 int64_t head_dim, const Cache& cache, const Sequences& sequences, bool rotated,
                                 double scale, int64_t window, double softcap, const Pattern* pattern,
                                 const std::optional<Tensor>& sinks)
    : q(q), out(out), type(type), pattern(pattern),
      sinks(sinks ? static_cast<const float*>(sinks->const_data_ptr()) : nullptr), heads(heads),
      threads(torch::stable::get_num_threads()),
      held(cache.rows), rotated(rotated) {
  cache.check(head_dim);
  STD_TORCH_CHECK(!sinks || (sinks->scalar_type() == ScalarType::Float && sinks->is_contiguous() && sinks->numel() == heads),
                  "there must be one sink for each head, float32");
  kv = {cache.k, cache.v, sequences.first, sequences.block_table, sequences.blocks, sequences.block_size, cache.heads,
        head_dim, cache.bytes, cache.slots, cache.slot_bytes, cache.head_bytes};
  how = {float(scale), float(softcap), window};
  if (pattern && pattern->reach) how.window = window ? std::min(window, pattern->reach) : pattern->reach;
  STD_TORCH_CHECK(!pattern || pattern->heads == 1 || pattern->heads == heads, "the pattern is not of ", heads, " heads");
  group = heads / kv.kv_heads;
  padded = round_up(head_dim, PANEL);
  STD_TORCH_CHECK(padded <= LARGEST_ROW, "head sizes up to ", LARGEST_ROW);
  const int64_t *start = sequences.start, *length = sequences.length;
  int64_t together = LINES;  // half of them where threads would have too few pieces
  if (LINES > 256 && rows * heads < 4 * threads * LINES) together /= 2;
  const int64_t tokens = std::max<int64_t>(1, together / group);
  pieces.reserve(sequences.count * kv.kv_heads);
  for (int64_t b = 0; b < sequences.count; b++) {
    const int64_t own = start[b + 1] - start[b], before = length[b] - own;
    // The last tokens see most keys: begun first, they do not keep the others waiting at the end.
    for (int64_t t = (own - 1) / tokens * tokens; own > 0 && t >= 0; t -= tokens)
      for (int64_t h = 0; h < kv.kv_heads; h++) {
        pieces.push_back({b, h, start[b] + t, std::min(tokens, own - t), before + t});
        spans = std::max(spans, spans_of(pieces.back()));
      }
  }
  most = std::min<int64_t>(tokens, rows) * group;
  size = round_up(lines_size(most, padded), LANES);
  // Few sequences and heads, long contexts: the spans are work of their own, merged afterwards in the same order.
  split = spans > 1 && int64_t(pieces.size()) < 4 * threads;
  if (split) parts = arena.take<float>(int64_t(pieces.size()) * spans * size);
}

void AttentionPhases::run(Worker& worker, Prefetcher prefetcher) const {
  const int64_t count = int64_t(pieces.size());
  if (!split) {
    return worker.each(count, [&](int64_t c) {
      whole_piece(pieces[c], pieces[std::min(c + threads, count - 1)], prefetcher);
    });
  }
  auto part = [&](int64_t c, int64_t s) {
    return lines_in(parts + (c * spans + s) * size, pieces[c].tokens * group, padded);
  };
  // Each thread takes spans that follow each other: the last tile of one asks for the first of the next.
  worker.stream(count * spans, [] {}, [&](int64_t chunk) {
    const int64_t c = chunk / spans, s = chunk % spans;
    const Piece& p = pieces[c];
    if (s < first_key(p) / SPAN_KEYS || s >= spans_of(p)) return;
    Coming coming{prefetcher};
    const Lines own = part(c, s);
    if (!span(p, s, gather(p), own, coming, pieces[std::min(c + 1, count - 1)])) clear(own, own.count);
  });
  worker.each(count, [&](int64_t c) {
    const Piece& p = pieces[c];
    const int64_t begin = first_key(p) / SPAN_KEYS;
    Lines whole = part(c, begin);
    for (int64_t s = begin + 1; s < spans_of(p); s++) merge(whole, part(c, s));
    finish(p, whole);
  });
}

// follower: the piece that this thread will most likely take next.
void AttentionPhases::whole_piece(const Piece& p, const Piece& follower, Prefetcher& prefetcher) const {
  Coming coming{prefetcher};
  float* arena = scratch<float, 12>(2 * size);
  const Queries queries = gather(p);
  Lines whole = lines_in(arena, p.tokens * group, padded), next = lines_in(arena + size, p.tokens * group, padded);
  bool begun = false;
  for (int64_t s = first_key(p) / SPAN_KEYS; s < spans_of(p); s++) {
    if (s == spans_of(p) - 1 && p.tokens > 1) coming.out = rows_of<true>(p, out), coming.q = rows_of<false>(follower, q);
    if (!span(p, s, queries, begun ? next : whole, coming, follower)) continue;
    if (begun) merge(whole, next);
    begun = true;
  }
  finish(p, whole);
}

// Whether a piece of `lines` lines takes keys and values as they lie. They are then multiplied together, from the first on.
bool AttentionPhases::takes_rows(int64_t lines) const {
  return lines <= FEW_LINES && held != RowFormat::int4 && kv.head_dim == padded;
}

Queries AttentionPhases::gather(const Piece& p) const {
  Queries queries{scratch<Operand, 10>(most * padded), nullptr, scratch<int64_t, 11>(most),
                        pattern ? scratch<const bool*, 20>(most) : nullptr};
  const int64_t d = kv.head_dim;
  Operand* lines = queries.values;
  for (int64_t t = 0, line = 0; t < p.tokens; t++) {
    int64_t from = first_value(p, t);
    for (int64_t g = 0; g < group; g++, line++, from += d, lines += padded) {
      int64_t i = 0;
      if (rotated) {
        alignas(64) float x[LARGEST_ROW];
        for (; i + LANES <= d; i += LANES) store(x + i, load_as(q, type, from + i));
        for (; i < d; i++) x[i] = load_one(q, type, from + i);
        turn(x, d);
        for (i = 0; i < padded; i++) lines[i] = i < d ? to_operand(x[i]) : 0;
      }
      if (type == Type::bf16 && sizeof(Operand) == 2)
        for (; i + 2 * LANES <= d; i += 2 * LANES) std::memcpy(lines + i, static_cast<const uint16_t*>(q) + from + i, 64);
      for (; i + LANES <= d; i += LANES) store_operand(lines + i, load_as(q, type, from + i));
      for (; i < padded; i++) lines[i] = i < d ? to_operand(load_one(q, type, from + i)) : 0;
      queries.position[line] = p.position + t;
      if (pattern) queries.row[line] = pattern->row(p.head * group + g, p.position + t);
    }
  }
#if defined(__AMX_TILE__)
  if (const int64_t count = p.tokens * group; takes_rows(count)) {
    alignas(64) static const uint32_t zeros[LARGEST_ROW / 2] = {};
    queries.pairs = scratch<uint32_t, 28>(padded / 2 * LANES);
    for (int64_t d = 0; d < padded / 2; d += LANES) {
      const uint32_t* rows[LANES];
      for (int i = 0; i < LANES; i++)
        rows[i] = (i < count ? reinterpret_cast<const uint32_t*>(queries.values + i * padded) : zeros) + d;
      transpose16(rows, queries.pairs + d * LANES, LANES);
    }
  }
#endif
  return queries;
}

// Offset of a piece's token in q and out; the values of its heads follow each other.
int64_t AttentionPhases::first_value(const Piece& p, int64_t token) const {
  return ((p.row + token) * heads + p.head * group) * kv.head_dim;
}

// A piece's rows of q or out: a prompt's come from further away than the second-level cache.
template <bool WRITTEN>
RowsAhead<WRITTEN> AttentionPhases::rows_of(const Piece& p, const void* all) const {
  const int64_t width = type == Type::f32 ? 4 : 2, row = kv.head_dim * width;
  return {static_cast<const char*>(all) + first_value(p, 0) * width, group * row, heads * row, p.tokens};
}

// First key that any query of the piece sees, at a tile's border.
int64_t AttentionPhases::first_key(const Piece& p) const {
  const int64_t first = how.window ? std::max<int64_t>(0, p.position - how.window + 1) : 0;
  return first / TILE_KEYS * TILE_KEYS;
}

// False, and nothing written, where the pattern hides all of the span. follower: whose keys are asked for behind the last.
bool AttentionPhases::span(const Piece& p, int64_t index, const Queries& queries, const Lines& lines, Coming& coming,
                           const Piece& follower) const {
  constexpr int64_t MOST = SPAN_KEYS / TILE_KEYS;
  const int64_t together = lines.count > 2 * TOGETHER ? TILES : 1, size = padded * TILE_KEYS;
  float* scales = scratch<float, 13>(2 * together * TILE_KEYS);
  uint16_t* packed = scratch<uint16_t, 8>(2 * together * size);
  const int64_t last = p.position + p.tokens;
  const int64_t from = std::max(index * SPAN_KEYS, first_key(p)), to = std::min((index + 1) * SPAN_KEYS, last);
  const int64_t end = std::min(last, kv.room(p.sequence));
  // Queries before a tile see nothing of it; lines keep standing together.
  auto unseen = [&](int64_t begin) { return std::max<int64_t>(0, begin - p.position) * group / TOGETHER * TOGETHER; };
  struct { int64_t begin; const uint64_t* keys; } seen[MOST + 1];  // the tiles that are not hidden from all lines
  uint64_t* bits = pattern ? scratch<uint64_t, 21>(MOST * lines.count) : nullptr;
  int64_t all = 0;
  for (int64_t begin = from; begin < to; begin += TILE_KEYS) {
    uint64_t* keys = pattern ? bits + all * lines.count : nullptr;
    if (pattern && !pattern->look(begin, queries.row, lines.count, keys)) continue;
    const bool whole = !keys || std::all_of(keys, keys + lines.count, [](uint64_t own) { return own == EVERY_KEY; });
    seen[all++] = {begin, whole ? nullptr : keys};
  }
  if (!all) return false;
  seen[all].begin = to;
  // All that see nothing of the span: those that are left standing beside others are not written either.
  clear(lines, std::max<int64_t>(0, seen[0].begin - p.position) * group);
  Tile tiles[TILES];
  const bool as_they_lie = takes_rows(lines.count);
  const int64_t parts = as_they_lie ? parts_of_rows(padded, held == RowFormat::int8) : parts_of(lines.count, padded);
  TileRows rows[2];
  rows[0].find(kv, p.sequence, p.head, seen[0].begin, end);
  for (int64_t at = 0, now = 0; at < all;) {
    const int64_t first = at, skip = unseen(seen[first].begin);
    int64_t count = 0;
    for (; count < together && at < all; count++, at++, now = 1 - now) {
      tiles[count] = {packed + 2 * count * size, packed + (2 * count + 1) * size, scales + 2 * count * TILE_KEYS,
                      scales + (2 * count + 1) * TILE_KEYS, seen[at].begin, seen[at].keys ? seen[at].keys + skip : nullptr};
      const bool ends = at + 1 == all && to == last;
      const Piece& then = ends ? follower : p;
      const int64_t then_end = std::min(then.position + then.tokens, kv.room(then.sequence));
      rows[1 - now].find(kv, then.sequence, then.head, ends ? first_key(then) : seen[at + 1].begin, then_end);
      coming.tile = {rows[1 - now], together > 1 ? 1 : parts};
      if (together > 1) coming.tile.ask();  // packed before anything is multiplied
      if (as_they_lie) {
        tiles[count].k_rows = rows[now].k, tiles[count].v_rows = rows[now].v;
        if (held == RowFormat::int8) take_row_scales(rows[now], tiles[count]);
        continue;
      }
      auto pack = held == RowFormat::int4 ? pack_int4_tile : held == RowFormat::int8 ? pack_int8_tile : pack_tile;
      pack(rows[now], padded, lines.count <= 2 * TOGETHER, tiles[count]);
    }
    const Attended what{queries.values + skip * padded, queries.pairs, queries.position + skip, first == 0, tiles, count, how};
    (held == RowFormat::int8 ? attend_tiles<true> : attend_tiles<false>)(what, lines.from(skip), coming);
  }
  return true;
}

void AttentionPhases::finish(const Piece& p, const Lines& lines) const {
  const int64_t d = kv.head_dim;
  for (int64_t t = 0, line = 0; t < p.tokens; t++) {
    int64_t to = first_value(p, t);
    for (int64_t g = 0; g < group; g++, line++, to += d) {
      float sum = sum_lanes(load(lines.sum + line * LANES));
      // Held below 2^127: of keys that weigh nothing beside the sink, and of none, nothing is left.
      if (sinks) sum += exp2(splat(std::min(sinks[p.head * group + g] * LOG2E - lines.top[line], 126.0f)))[0];
      const float share = 1.0f / sum;
      alignas(64) float row[LARGEST_ROW];
      for (int64_t begin = 0; begin < d; begin += PANEL) {
        alignas(64) float ordered[PANEL];
        const float* own = in_order(lines.value(begin / PANEL, line), ordered);
        for (int i = 0; i < PANEL; i += LANES) store(row + begin + i, load(own + i) * share);
      }
      if (rotated) turn(row, d);
      store_row(out, type, to, row, d);
    }
  }
}

// table bool (1 or H, rows, columns); see Pattern.
Tensor plan_pattern(Tensor table, int64_t block, int64_t reach) {
  STD_TORCH_CHECK(table.dim() == 3 && table.numel() && table.is_contiguous() && table.scalar_type() == ScalarType::Bool &&
                      block > 0 && reach >= 0,
                  "the table of a pattern is bool (1 or H, rows, columns), of blocks of one position or more");
  return as_bytes(std::make_unique<Pattern>(Pattern{
      .table = static_cast<const bool*>(table.const_data_ptr()), .heads = table.size(0), .rows = table.size(1),
      .columns = table.size(2), .block = block, .reach = reach, .held = table}));
}

// q (R, H, D) float32 or bf16 -> (R, H, D); see AttentionPhases.
Tensor attention(Tensor q, Tensor k, Tensor v, Tensor query_start_loc, Tensor seq_lens, std::optional<Tensor> first,
                 std::optional<Tensor> block_table, int64_t block_size, bool rotated, double scale, int64_t window,
                 double softcap, std::optional<Tensor> seen, std::optional<Tensor> sinks) {
  q = as_contiguous(q);
  Tensor out = empty({q.size(0), q.size(1), q.size(2)}, q.scalar_type());
  Arena arena;
  const AttentionPhases phases(arena, q.const_data_ptr(), out.mutable_data_ptr(), type_of(q), q.size(0), q.size(1),
                               q.size(2), Cache(k, v), Sequences(query_start_loc, seq_lens, first, block_table, block_size),
                               rotated, scale, window, softcap, pattern_in(seen), sinks);
  parallel_region([&](Worker& worker) { phases.run(worker); });
  return out;
}

}  // namespace hasten

STABLE_TORCH_LIBRARY_FRAGMENT(HASTEN_LIBRARY, m) {
  m.def("attention(Tensor q, Tensor k, Tensor v, Tensor query_start_loc, Tensor seq_lens, Tensor? first, Tensor? block_table, int block_size, bool rotated, float scale, int window, float softcap, Tensor? seen=None, Tensor? sinks=None) -> Tensor");
  m.def("plan_pattern(Tensor table, int block, int reach) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(HASTEN_LIBRARY, CPU, m) {
  m.impl("attention", TORCH_BOX(&hasten::attention));
  m.impl("plan_pattern", TORCH_BOX(&hasten::plan_pattern));
}

// Attention for training: exact softmax attention, forward and backward, in tiles of 64 queries × 64 keys
// (FlashAttention-2, arXiv 2307.08691). Tiles that no query sees (above the diagonal, outside a window, absent from a
// block layout) are skipped, not masked. The forward keeps the output and the log-sum-exp of each row; the backward
// computes the probabilities again from them. Every sum runs in an order given by the shapes alone, so results do not
// depend on the number of threads.
//
// bf16: products of bf16 with float32 sums; probabilities and score gradients are rounded to bf16 for the products
// that take them, as FlashAttention does. float32: the same in float32 throughout.
#include <memory>
#include <tuple>

#include "train.h"

namespace hasten {

using torch::stable::Tensor;

constexpr float LN2 = 0.693147180559945309f;
constexpr float HIDDEN = -1e30f;   // the score of a hidden key; below START, so that it weighs nothing in any case
constexpr float START = -1e29f;    // the maximum of no scores
constexpr int64_t RUN = 8;         // query tiles of a chunk of work: they share packed keys
constexpr int64_t ITEMS = 8;       // pieces of work that a backward pass has at least

struct Problem {
  View q, k, v;
  MaskSpec mask;
  Dropout dropout;
  int64_t batch, heads, kv_heads, size;
  float scale;
  int64_t padded() const { return round_up(size, 32); }
  int64_t rows() const { return round_up(size, 2); }  // of a product whose rows are elements of a head
  int64_t group() const { return heads / kv_heads; }
  int64_t tile_words() const { return SIDE * padded(); }  // enough for a tile in any order, in either dtype
};

// Key tiles of one key/value head, packed when they are first wanted, one after the other in memory.
template <class T>
struct Keys {
  const Problem& p;
  int64_t batch, head;
  bool backward;
  Word* memory;    // [tiles][2 or 3][SIDE · padded / PAIR]
  int32_t* place;  // of each tile in memory, from 1 on; 0: not packed yet
  int32_t packed = 0;
  Keys(const Problem& p, int64_t batch, int64_t head, bool backward, Word* memory)
      : p(p), batch(batch), head(head), backward(backward), memory(memory),
        place(scratch<int32_t, 41>(p.mask.tiles())) {
    std::memset(place, 0, p.mask.tiles() * sizeof(int32_t));
  }
  int64_t part() const { return SIDE * p.padded() / PAIR<T>; }
  int64_t parts() const { return backward ? 3 : 2; }
  void ask(int64_t index) const {
    if (place[index]) return;
    prefetch<T>(p.k, batch, head, index * SIDE, p.mask.keys, p.size);
    prefetch<T>(p.v, batch, head, index * SIDE, p.mask.keys, p.size);
  }
  // Forward: K as rows, V turned. Backward: K and V as panels, K as pairs.
  const Word* tile(int64_t index, Word* spare, Word* spare2) {
    if (place[index]) return memory + (place[index] - 1) * parts() * part();
    Word* at = memory + packed * parts() * part();
    place[index] = ++packed;
    const int64_t padded = p.padded(), words = padded / PAIR<T>, first = index * SIDE, count = p.mask.keys;
    if (!backward) {
      gather<T>(p.k, batch, head, first, count, p.size, padded, at);
      gather<T>(p.v, batch, head, first, count, p.size, padded, spare);
      pair_rows<T>(spare, padded, spare2);
      turn(spare2, SIDE / PAIR<T>, padded, at + part());
    } else {
      gather<T>(p.k, batch, head, first, count, p.size, padded, spare);
      turn(spare, SIDE, words, at);
      pair_rows<T>(spare, padded, at + 2 * part());
      gather<T>(p.v, batch, head, first, count, p.size, padded, spare);
      turn(spare, SIDE, words, at + part());
    }
    return at;
  }
};

INLINE I32 hides(const Queries& q, int64_t key, int v) {  // lanes 16·v … of the queries that do not see the key
  return (load(q.low + v * LANES) > int32_t(key)) | (load(q.high + v * LANES) < int32_t(key));
}
INLINE bool cell(int32_t cells, int64_t query, int64_t key) { return cells >> (key / CELL * 4 + query / CELL) & 1; }

// Query tiles [first, last) of all heads that share one key/value head.
template <class T>
void forward(const Problem& p, int64_t b, int64_t kv_head, int64_t first, int64_t last, T* out, float* lse) {
  const int64_t padded = p.padded(), words = padded / PAIR<T>, tiles = p.mask.tiles(), queries = p.mask.queries;
  const int64_t half = p.tile_words();
  ThreadScratch pool{scratch<Word, 40>(tiles * 2 * SIDE * words + 4 * half + 3 * SIDE * SIDE + 512)};
  Keys<T> keys(p, b, kv_head, false, pool.words(tiles * 2 * SIDE * words));
  VisibleTile* seen = scratch<VisibleTile, 44>(tiles);
  Word *spare = pool.words(half), *spare2 = pool.words(half), *panel = pool.words(half);
  float *sums = pool.floats(half), *scores = pool.floats(SIDE * SIDE);  // sums [padded][64], scores [keys][64]
  Word *weights = pool.words(SIDE * SIDE), *hashes = pool.words(2 * SIDE);
  const Dropout dropout = p.dropout;
  const float factor = p.scale * LOG2E;
  for (int64_t g = 0; g < p.group(); g++)
    for (int64_t t = first; t < last; t++) {
      const int64_t head = kv_head * p.group() + g;
      const Queries q(p.mask, b, t);
      gather<T>(p.q, b, head, q.row, queries, p.size, padded, spare);
      turn(spare, SIDE, words, panel);
      std::memset(sums, 0, padded * SIDE * 4);
      if (dropout.threshold) dropout.rows(b * p.heads + head, q.row, hashes, hashes + SIDE);
      F32 top[VECTORS], total[VECTORS] = {};
      for (int v = 0; v < VECTORS; v++) top[v] = splat(START);
      const int64_t count = q.list(p.mask, head, seen);
      for (int64_t i = 0; i < count; i++) {
        const auto [k, cells, whole] = seen[i];
        if (i + 1 < count) keys.ask(seen[i + 1].tile);
        else prefetch<T>(p.q, b, head, q.row + SIDE, queries, p.size);
        const Word *rows = keys.tile(k, spare, spare2), *values = rows + keys.part();
        product<T>(panel, SIDE, VECTORS, rows, words, SIDE, words,
                   [scores, factor](int64_t key, int64_t v, F32 s) { store(scores + key * SIDE + v * LANES, s * factor); });
        if (!whole)
          for (int64_t key = 0; key < SIDE; key++)
            for (int v = 0; v < VECTORS; v++) {
              float* s = scores + key * SIDE + v * LANES;
              const I32 hidden = cell(cells, v * LANES, key) ? hides(q, k * SIDE + key, v) : splat(-1);
              store(s, select(hidden, splat(HIDDEN), load(s)));
            }
        bool grown = false;
        F32 shrink[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
          F32 most = load(scores + v * LANES);
          for (int64_t key = 1; key < SIDE; key++) most = larger(most, load(scores + key * SIDE + v * LANES));
          const F32 next = select(most > top[v] + SLACK, most, top[v]);
          grown |= any_above(most, top[v] + SLACK);
          shrink[v] = exp2(top[v] - next);
          F32 even = {}, odd = {};
          for (int64_t key = 0; key < SIDE; key += 2) {
            F32 a = exp2(load(scores + key * SIDE + v * LANES) - next);
            F32 c = exp2(load(scores + (key + 1) * SIDE + v * LANES) - next);
            even += a, odd += c;
            if (dropout.threshold) {
              const U32 one = load_line(hashes + v * LANES), two = load_line(hashes + SIDE + v * LANES);
              const uint32_t at = uint32_t(k * SIDE + key);
              a = select(dropout.drops(one, two, at), F32{}, a), c = select(dropout.drops(one, two, at + 1), F32{}, c);
            }
            Word* to = weights + key / PAIR<T> * SIDE + v * LANES;
            if constexpr (PAIR<T> == 2) {
              store_line(to, pair_bf16(a, c));
            } else {
              store_line(to, as<U32>(a));
              store_line(to + SIDE, as<U32>(c));
            }
          }
          total[v] = total[v] * shrink[v] + (even + odd);
          top[v] = next;
        }
        if (grown)
          for (int64_t d = 0; d < p.rows(); d++)
            for (int v = 0; v < VECTORS; v++) {
              float* s = sums + d * SIDE + v * LANES;
              store(s, load(s) * shrink[v]);
            }
        product<T>(weights, SIDE, VECTORS, values, SIDE / PAIR<T>, p.rows(), SIDE / PAIR<T>,
                   [sums](int64_t d, int64_t v, F32 s) {
                     float* to = sums + d * SIDE + v * LANES;
                     store(to, load(to) + s);
                   });
      }
      turn(reinterpret_cast<Word*>(sums), padded, SIDE, spare);
      for (int64_t i = q.from; i < q.to; i++) {
        const float sum = total[i / LANES][i % LANES];
        const int64_t row = q.row + i;
        put_row<T>(reinterpret_cast<float*>(spare) + i * padded, sum == 0 ? 0 : dropout.kept / sum, p.size,
                   out + ((b * queries + row) * p.heads + head) * p.size);
        lse[(b * p.heads + head) * queries + row] = top[i / LANES][i % LANES] * LN2 + std::log(sum);  // -inf: sees nothing
      }
    }
}

struct Gradients {
  View out, dout;
  const float *lse, *dlse;  // dlse: the gradient of lse, or null
  void *dq, *dk, *dv;
};

// The query tiles part, part + parts, … of all heads of one key/value head: dq, and the sums of dk and dv
// [tiles][2][padded][64].
template <class T>
void backward(const Problem& p, const Gradients& g, int64_t b, int64_t kv_head, int64_t part, int64_t parts, float* sums) {
  const int64_t padded = p.padded(), words = padded / PAIR<T>, tiles = p.mask.tiles(), queries = p.mask.queries;
  const int64_t half = p.tile_words(), deep = SIDE / PAIR<T>;
  ThreadScratch pool{scratch<Word, 40>(tiles * 3 * SIDE * words + 7 * half + 5 * SIDE * SIDE + 1024)};
  Keys<T> keys(p, b, kv_head, true, pool.words(tiles * 3 * SIDE * words));
  VisibleTile* seen = scratch<VisibleTile, 44>(tiles);
  uint8_t* touched = scratch<uint8_t, 45>(tiles);
  std::memset(touched, 0, tiles);
  Word *spare = pool.words(half), *q_rows = pool.words(half), *q_turned = pool.words(half);
  Word *d_rows = pool.words(half), *d_turned = pool.words(half);
  float *dq = pool.floats(half), *weights = pool.floats(SIDE * SIDE), *slopes = pool.floats(SIDE * SIDE);
  Word *weight_words = pool.words(SIDE * SIDE), *slope_words = pool.words(SIDE * SIDE);
  Word* slope_rows = pool.words(SIDE * SIDE);
  float *lse = pool.floats(SIDE), *delta = pool.floats(SIDE);
  Word* hashes = pool.words(2 * SIDE);
  const Dropout dropout = p.dropout;
  const float factor = p.scale * LOG2E;
  for (int64_t h = 0; h < p.group(); h++)
    for (int64_t t = p.mask.first_tile() + part; t <= p.mask.last_tile(); t += parts) {
      const int64_t head = kv_head * p.group() + h;
      const Queries q(p.mask, b, t);
      for (auto [view, rows, turned] : {std::tuple{&p.q, q_rows, q_turned}, std::tuple{&g.dout, d_rows, d_turned}}) {
        gather<T>(*view, b, head, q.row, queries, p.size, padded, rows);
        pair_rows<T>(rows, padded, spare);
        turn(spare, deep, padded, turned);
      }
      for (int64_t i = 0; i < SIDE; i++) {
        lse[i] = -HIDDEN, delta[i] = 0;  // a query that is not there, or sees nothing: its weights are 0
        if (i < q.from || i >= q.to) continue;
        const int64_t at = (b * p.heads + head) * queries + q.row + i;
        const float own = g.lse[at] * LOG2E;
        if (own > HIDDEN || own != own) lse[i] = own;
        const T *o = g.out.at<T>(b, q.row + i, head), *d = g.dout.at<T>(b, q.row + i, head);
        constexpr Type type = PAIR<T> == 1 ? Type::f32 : Type::bf16;
        F32 total = {};
        int64_t e = 0;
        for (; e + LANES <= p.size; e += LANES) total += load_as(o, type, e) * load_as(d, type, e);
        delta[i] = sum_lanes(total);
        for (; e < p.size; e++) delta[i] += load_one(o, type, e) * load_one(d, type, e);
        if (g.dlse) delta[i] -= g.dlse[at];
      }
      std::memset(dq, 0, SIDE * padded * 4);
      if (dropout.threshold) dropout.rows(b * p.heads + head, q.row, hashes, hashes + SIDE);
      const int64_t count = q.list(p.mask, head, seen);
      for (int64_t n = 0; n < count; n++) {
        const int64_t k = seen[n].tile;
        const int32_t cells = seen[n].cells;
        const bool whole = seen[n].whole;
        if (n + 1 < count) keys.ask(seen[n + 1].tile);
        const Word *k_panel = keys.tile(k, spare, nullptr), *v_panel = k_panel + keys.part(), *k_pairs = v_panel + keys.part();
        const I32 lanes = lane_numbers();
        product<T>(k_panel, SIDE, VECTORS, q_rows, words, SIDE, words, [&](int64_t i, int64_t v, F32 s) {
          F32 w = exp2(s * factor - lse[i]);  // a weight, at most 1 but for rounding
          if (!whole) {
            const I32 key = lanes + int32_t(k * SIDE + v * LANES);
            I32 hidden = (key < q.low[i]) | (key > q.high[i]);
            if (!cell(cells, i, v * LANES)) hidden = splat(-1);
            w = select(hidden, F32{}, w);
          }
          store(weights + i * SIDE + v * LANES, w);
        });
        product<T>(v_panel, SIDE, VECTORS, d_rows, words, SIDE, words, [&](int64_t i, int64_t v, F32 s) {
          float* at = weights + i * SIDE + v * LANES;
          const F32 w = load(at);
          if (dropout.threshold) {
            const U32 key = as<U32>(lanes + int32_t(k * SIDE + v * LANES)), one = splat(hashes[i]);
            const I32 gone = dropout.drops(one, splat(hashes[SIDE + i]), key);
            s = select(gone, F32{}, s * dropout.kept);
            store(at, select(gone, F32{}, w * dropout.kept));
          }
          store(slopes + i * SIDE + v * LANES, w * (s - delta[i]));
        });
        const Word *w = reinterpret_cast<Word*>(weights), *ds = reinterpret_cast<Word*>(slopes), *ds_rows = ds;
        if constexpr (PAIR<T> == 2) {
          for (int64_t i = 0; i < SIDE; i += 2)
            for (int64_t at = i * SIDE; at < (i + 1) * SIDE; at += LANES) {
              const F32 a = load(slopes + at), c = load(slopes + at + SIDE);
              const int64_t to = i / 2 * SIDE + at % SIDE;
              store_line(weight_words + to, pair_bf16(load(weights + at), load(weights + at + SIDE)));
              store_line(slope_words + to, pair_bf16(a, c));
              store_bf16(reinterpret_cast<uint16_t*>(slope_rows) + at, a);
              store_bf16(reinterpret_cast<uint16_t*>(slope_rows) + at + SIDE, c);
            }
          w = weight_words, ds = slope_words, ds_rows = slope_rows;
        }
        float *dk = sums + k * 2 * half, *dv = dk + half;
        if (!touched[k]) std::memset(dk, 0, 2 * half * 4);
        touched[k] = 1;
        product<T>(w, SIDE, VECTORS, d_turned, deep, p.rows(), deep, [&](int64_t d, int64_t v, F32 s) {
          float* to = dv + d * SIDE + v * LANES;
          store(to, load(to) + s);
        });
        product<T>(ds, SIDE, VECTORS, q_turned, deep, p.rows(), deep, [&](int64_t d, int64_t v, F32 s) {
          float* to = dk + d * SIDE + v * LANES;
          store(to, load(to) + s);
        });
        product<T>(k_pairs, padded, padded / LANES, ds_rows, deep, SIDE, deep, [&](int64_t i, int64_t v, F32 s) {
          float* to = dq + i * padded + v * LANES;
          store(to, load(to) + s);
        });
      }
      for (int64_t i = q.from; i < q.to; i++)
        put_row<T>(dq + i * padded, p.scale, p.size,
                   static_cast<T*>(g.dq) + ((b * queries + q.row + i) * p.heads + head) * p.size);
    }
  for (int64_t k = 0; k < tiles; k++)
    if (!touched[k]) std::memset(sums + k * 2 * half, 0, 2 * half * 4);
}

// dk and dv of one key tile: the parts' sums [parts][…][2][padded][64], added in order.
template <class T>
void finish(const Problem& p, const Gradients& g, int64_t b, int64_t kv_head, int64_t k, const float* sums, int64_t parts,
            int64_t stride) {
  const int64_t padded = p.padded(), half = p.tile_words(), keys = p.mask.keys;
  float* turned = scratch<float, 42>(2 * half);
  float* whole = turned + half;
  for (int which = 0; which < 2; which++) {
    std::memcpy(whole, sums + which * half, half * 4);
    for (int64_t part = 1; part < parts; part++)
      for (int64_t i = 0; i < half; i += LANES)
        store(whole + i, load(whole + i) + load(sums + part * stride + which * half + i));
    turn(reinterpret_cast<Word*>(whole), padded, SIDE, reinterpret_cast<Word*>(turned));
    T* to = static_cast<T*>(which ? g.dv : g.dk);
    for (int64_t i = 0; i < std::min(SIDE, keys - k * SIDE); i++)
      put_row<T>(turned + i * padded, which ? 1 : p.scale, p.size,
                 to + ((b * keys + k * SIDE + i) * p.kv_heads + kv_head) * p.size);
  }
}

template <class T>
void all_backward(const Problem& p, const Gradients& g) {
  const int64_t items = p.batch * p.kv_heads, tiles = p.mask.tiles(), each = tiles * 2 * p.tile_words();
  const int64_t query_tiles = p.mask.last_tile() - p.mask.first_tile() + 1;
  // Few heads: the query tiles are divided too, by the shape and not by the threads, and the parts' sums are added.
  const int64_t parts = std::min((ITEMS + items - 1) / items, query_tiles);
  if (parts == 1) {
    for_chunks(items, [&](int64_t c) {
      float* sums = scratch<float, 43>(each);
      backward<T>(p, g, c / p.kv_heads, c % p.kv_heads, 0, 1, sums);
      for (int64_t k = 0; k < tiles; k++)
        finish<T>(p, g, c / p.kv_heads, c % p.kv_heads, k, sums + k * 2 * p.tile_words(), 1, 0);
    });
    return;
  }
  const std::unique_ptr<float[]> memory(new float[items * parts * each]);
  float* sums = memory.get();
  for_chunks(items * parts, [&](int64_t c) {
    const int64_t item = c / parts;
    backward<T>(p, g, item / p.kv_heads, item % p.kv_heads, c % parts, parts, sums + c * each);
  });
  for_chunks(items * tiles, [&](int64_t c) {
    const int64_t item = c / tiles, k = c % tiles;
    finish<T>(p, g, item / p.kv_heads, item % p.kv_heads, k, sums + item * parts * each + k * 2 * p.tile_words(), parts, each);
  });
}

using MaybeTensor = std::optional<Tensor>;

static Tensor rows_of(const Tensor& t) { return t.stride(3) == 1 || t.size(3) == 1 ? t : torch::stable::contiguous(t); }
static View view(const Tensor& t) { return {t.const_data_ptr(), t.stride(0), t.stride(1), t.stride(2)}; }
static const int32_t* integers(const MaybeTensor& t, int64_t count, const char* what) {
  if (!t) return nullptr;
  STD_TORCH_CHECK(t->scalar_type() == ScalarType::Int && t->is_contiguous() && t->numel() == count, what);
  return static_cast<const int32_t*>(t->const_data_ptr());
}

static Problem problem(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& low, const MaybeTensor& high,
                       const MaybeTensor& starts, const MaybeTensor& columns, const MaybeTensor& cells, bool causal,
                       int64_t window, double scale, double dropout, const MaybeTensor& seed) {
  type_of(q);
  STD_TORCH_CHECK(dropout >= 0 && dropout < 1, "dropout must be at least 0 and below 1");
  STD_TORCH_CHECK(dropout == 0 || (seed && seed->scalar_type() == ScalarType::Long && seed->numel() == 1),
                  "dropout wants a seed: one int64");
  STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "q, k and v must be (B, T, H, D)");
  STD_TORCH_CHECK(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(), "q, k, v: one dtype");
  for (int i = 0; i < 4; i++) STD_TORCH_CHECK(k.size(i) == v.size(i), "k and v must be of one shape");
  STD_TORCH_CHECK(k.size(0) == q.size(0) && k.size(3) == q.size(3) && k.size(2) > 0 && q.size(2) % k.size(2) == 0,
                  "q and k do not fit");
  STD_TORCH_CHECK(q.size(3) > 0 && q.size(3) <= LARGEST_ROW, "head sizes from 1 to ", LARGEST_ROW);
  STD_TORCH_CHECK(k.size(1) >= q.size(1) || (!causal && !window && !starts), "more queries than keys");
  Dropout dropped;
  if (dropout > 0)
    dropped = {uint32_t(std::min(dropout * 4294967296.0, 4294967295.0)), float(1 / (1 - dropout)),
               uint64_t(*static_cast<const int64_t*>(seed->const_data_ptr()))};
  Problem p{view(q), view(k), view(v), {}, dropped, q.size(0), q.size(2), k.size(2), q.size(3), float(scale)};
  const int64_t count = q.size(0) * q.size(1);
  p.mask = {causal, window, integers(low, count, "low must be int32 (B, T)"), integers(high, count, "high must be int32 (B, T)"),
             nullptr, nullptr, nullptr, 1, q.size(1), k.size(1)};
  if (!starts) return p;
  const int64_t each = p.mask.tiles() + 1, present = columns ? columns->numel() : 0;
  p.mask.layouts = starts->numel() / each;
  STD_TORCH_CHECK(p.mask.layouts == 1 || p.mask.layouts == p.heads, "a layout for all heads, or one for each");
  p.mask.starts = integers(starts, p.mask.layouts * each, "starts must be int32 (layouts, tiles + 1)");
  p.mask.columns = integers(columns, present, "columns must be int32");
  p.mask.cells = integers(cells, present, "cells must be int32, as many as columns");
  STD_TORCH_CHECK(p.mask.columns && p.mask.cells, "a layout has starts, columns and cells");
  for (int64_t i = 0; i < p.mask.layouts * each; i++) {
    const bool rising = i % each == 0 || p.mask.starts[i] >= p.mask.starts[i - 1];
    STD_TORCH_CHECK(rising && p.mask.starts[i] >= 0 && p.mask.starts[i] <= present, "starts must rise within columns");
  }
  for (int64_t i = 0; i < present; i++)
    STD_TORCH_CHECK(p.mask.columns[i] >= 0 && p.mask.columns[i] < each - 1, "a column is outside the keys");
  return p;
}

// q (B, T, H, D), k, v (B, S, Hkv, D), all float32 or all bf16 -> out (B, T, H, D) and log-sum-exp (B, H, T) float32.
std::tuple<Tensor, Tensor> train_attention(Tensor q, Tensor k, Tensor v, MaybeTensor low, MaybeTensor high,
                                           MaybeTensor starts, MaybeTensor columns, MaybeTensor cells, bool causal,
                                           int64_t window, double scale, double dropout, MaybeTensor seed) {
  q = rows_of(q), k = rows_of(k), v = rows_of(v);
  const Problem p = problem(q, k, v, low, high, starts, columns, cells, causal, window, scale, dropout, seed);
  Tensor out = empty({q.size(0), q.size(1), q.size(2), q.size(3)}, q.scalar_type());
  Tensor lse = empty({q.size(0), q.size(2), q.size(1)}, ScalarType::Float);
  if (!out.numel()) return {out, lse};
  const int64_t begin = p.mask.first_tile(), end = p.mask.last_tile() + 1, items = p.batch * p.kv_heads;
  const int64_t runs = (end - begin + RUN - 1) / RUN;
  auto* sums = static_cast<float*>(lse.mutable_data_ptr());
  auto all = [&]<class T>(T* to) {
    for_chunks(runs * items, [&](int64_t c) {
      // The last queries see most keys: begun first, they do not keep the others waiting at the end.
      const int64_t first = begin + (runs - 1 - c / items) * RUN, item = c % items;
      forward<T>(p, item / p.kv_heads, item % p.kv_heads, first, std::min(end, first + RUN), to, sums);
    });
  };
  if (type_of(q) == Type::f32) all(static_cast<float*>(out.mutable_data_ptr()));
  else all(static_cast<uint16_t*>(out.mutable_data_ptr()));
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor> train_attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out,
                                                            Tensor lse, MaybeTensor dlse, MaybeTensor low,
                                                            MaybeTensor high, MaybeTensor starts, MaybeTensor columns, MaybeTensor cells,
                                                            bool causal, int64_t window, double scale,
                                                            double dropout, MaybeTensor seed) {
  q = rows_of(q), k = rows_of(k), v = rows_of(v), dout = rows_of(dout), out = rows_of(out);
  const Problem p = problem(q, k, v, low, high, starts, columns, cells, causal, window, scale, dropout, seed);
  for (const Tensor* t : {&dout, &out}) {
    STD_TORCH_CHECK(t->scalar_type() == q.scalar_type() && t->dim() == 4, "out and its gradient: as q");
    for (int i = 0; i < 4; i++) STD_TORCH_CHECK(t->size(i) == q.size(i), "out and its gradient: as q");
  }
  STD_TORCH_CHECK(lse.scalar_type() == ScalarType::Float && lse.is_contiguous() && lse.numel() * p.size == q.numel(),
                  "lse must be float32 (B, H, T)");
  STD_TORCH_CHECK(!dlse || (dlse->scalar_type() == ScalarType::Float && dlse->is_contiguous() &&
                            dlse->numel() == lse.numel()), "the gradient of lse: as lse");
  auto like = [](const Tensor& t) { return empty({t.size(0), t.size(1), t.size(2), t.size(3)}, t.scalar_type()); };
  Tensor dq = like(q), dk = like(k), dv = like(v);
  if (!q.numel()) return {dq, torch::stable::zero_(dk), torch::stable::zero_(dv)};
  const Gradients g{view(out), view(dout), static_cast<const float*>(lse.const_data_ptr()),
                    dlse ? static_cast<const float*>(dlse->const_data_ptr()) : nullptr, dq.mutable_data_ptr(), dk.mutable_data_ptr(), dv.mutable_data_ptr()};
  if (type_of(q) == Type::f32) all_backward<float>(p, g);
  else all_backward<uint16_t>(p, g);
  return {dq, dk, dv};
}

}  // namespace hasten

STABLE_TORCH_LIBRARY_FRAGMENT(HASTEN_LIBRARY, m) {
  m.def("train_attention(Tensor q, Tensor k, Tensor v, Tensor? low, Tensor? high, Tensor? starts, Tensor? columns, Tensor? cells, bool causal, int window, float scale, float dropout=0., Tensor? seed=None) -> (Tensor, Tensor)");
  m.def("train_attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, Tensor? low, Tensor? high, Tensor? starts, Tensor? columns, Tensor? cells, bool causal, int window, float scale, float dropout=0., Tensor? seed=None) -> (Tensor, Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(HASTEN_LIBRARY, CPU, m) {
  m.impl("train_attention", TORCH_BOX(&hasten::train_attention));
  m.impl("train_attention_backward", TORCH_BOX(&hasten::train_attention_backward));
}

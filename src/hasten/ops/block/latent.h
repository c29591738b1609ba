// Latent attention (MLA, arXiv 2405.04434) over a cache as phases of a team, before and behind its attention: the absorbed
// form of model/latent.py. H: heads. Of a query N features are not turned and R are; V: of a value; L: of the latent.
#pragma once

#include "attention_input.h"
#include "calls.h"

namespace hasten {

// keys, values: plans of the weights (H·L', N) and (H·V', L) that each head's queries and results are multiplied by, L' and V'
// rounded up to whole panels. up: that of a weight (H·(N + R), Lq) behind the latent of the queries and its norm, q_norm;
// without it queries have none. norm: of the latent. rank: L; value_dim: V; turned: R.
struct PlanLatentCall {
  Tensor keys, values;
  Maybe up, q_norm;
  NormFields norm;
  int64_t heads = 0, rank = 0, value_dim = 0, turned = 0;
  HASTEN_FIELDS(keys, values, up, q_norm, norm, heads, rank, value_dim, turned)
};

struct LatentPlan {
  static constexpr const char* name = "latent attention";
  const LatentPlan* self;
  PackedWeight keys, values, up;
  Norm q_norm, norm;
  int64_t heads, rank, value_dim, turned;
  PlanLatentCall held;  // what the pointers point to
  int64_t key_dim() const { return keys.k; }
  int64_t query_dim() const { return key_dim() + turned; }
  int64_t kept() const { return rank + turned; }
  int64_t queries() const { return heads * query_dim(); }
  int64_t narrow() const { return up.k ? up.k : queries(); }  // what the block's input becomes for them
};

// A product of each head with rows of its own: x [H][rows][K] float32, the weight's rows of a head begin at a panel.
struct HeadProducts {
  HeadProducts(Arena& arena, const PackedWeight& weight, int64_t heads, int64_t rows)
      : x(arena.take<float>(heads * rows * weight.k)), rows(rows), k(weight.k), heads(heads), w(weight.w),
        prepared(arena, w, x, Type::f32, heads * rows, k, Norm{}) {}
  // Where a head reads its row.
  float* row(int64_t head, int64_t r) const { return x + (head * rows + r) * k; }
  // out: row r of a head's n results begins at out + (r · H + head) · stride.
  void run(Worker& worker, int64_t n, float* out, int64_t stride) const {
    const int64_t panels = (n + PANEL - 1) / PANEL, block = row_block(w);
    Few<Rows> ready;
    prepared.share_out(worker);
    worker.stream(heads * panels, [&] { ready = prepared.ready(); }, [&](int64_t item) {
      const int64_t head = item / panels, n0 = item % panels * PANEL, count = std::min<int64_t>(PANEL, n - n0);
      float* values = scratch<float, 2>(2 * ROW_BLOCK * PANEL);
      for (int64_t m0 = head * rows, end = m0 + rows; m0 < end; m0 += block) {
        const int64_t m1 = std::min(end, m0 + block);
        panel_product(w, ready[0], item, m0, m1, values);
        for (int64_t m = m0; m < m1; m++)
          std::memcpy(out + ((m - head * rows) * heads + head) * stride + n0, values + (m - m0) * PANEL,
                      count * sizeof(float));
      }
    });
  }

  float* const x;
  const int64_t rows, k, heads;
  const Weight w;
  const Preparation prepared;
};

// norm + products of the block's input; the latent's norm, the turned key, the cache's row; queries in the space of latents:
// x (R, C), cos and sin (R, dim/2) -> q (R, H, L + R). weights: of the queries' latent, or of the queries, and of what is kept.
struct LatentInput {
  LatentInput(Arena& arena, const LatentPlan& p, const float* x, int64_t rows, float* q, const Norm& norm,
              const Few<PackedWeight>& weights, const Rotary& rotary, const Cache& cache, const int64_t* slot, bool rotated,
              const int64_t* chosen, bool pairs)
      : p(p), rows(rows), down(arena, x, Type::f32, rows, norm, weights, chosen),
        narrow(arena.take<float>(rows * p.narrow())), latents(arena.take<float>(rows * p.kept())),
        wide(p.up.k ? arena.take<float>(rows * p.queries()) : narrow), q(q), inner(arena, p.keys, p.heads, rows),
        rotary(rotary), cache(cache), slot(slot), pairs(pairs), rotated(rotated) {
    if (p.up.k) up.emplace(arena, narrow, Type::f32, rows, p.q_norm, p.up, chosen);
    STD_TORCH_CHECK(cache.heads == 1, "a cache of latents has one row for all heads");
    cache.check(p.kept());
    rotary.check(rows, p.turned);
    STD_TORCH_CHECK(!rotary || 2 * rotary.half == p.turned, "cos has ", rotary.half, " angles for a latent's key, of which ",
                    p.turned, " values turn");
  }

  void run(Worker& worker) const {
    down.run(worker, [&](int64_t part, int64_t panel, int64_t m0, int64_t m1, const float* values) {
      const PackedWeight& own = down.parts[part];
      const int64_t n0 = panel * PANEL, count = std::min<int64_t>(PANEL, own.w.n - n0);
      for (int64_t m = m0; m < m1; m++, values += PANEL) {
        float* row = (part ? latents : narrow) + m * own.w.n + n0;
        for (int64_t i = 0; i < count; i++)
          row[i] = values[i] + (own.bias ? load_one(own.bias, own.bias_type, n0 + i) : 0.0f);
      }
    });
    if (up) up->run_into(worker, wide);
    // The heads of few rows are shared out too; of many, whole rows. The last item of a row is what is kept of it.
    const int64_t all = p.heads + 1, step = rows <= 4 ? 1 : all;
    worker.each(rows * (all / step), [&](int64_t item) {
      const int64_t r = item / (all / step), from = item % (all / step) * step;
      for (int64_t h = from; h < from + step; h++) h < p.heads ? query(r, h) : keep(r);
    });
    inner.run(worker, p.rank, q, p.kept());
  }

 private:
  void query(int64_t r, int64_t h) const {
    float* x = wide + r * p.queries() + h * p.query_dim();
    rotary.turn(x + p.key_dim(), r, pairs);
    rotary.scale(x, r, p.query_dim());
    std::memcpy(inner.row(h, r), x, p.key_dim() * sizeof(float));
    std::memcpy(q + (r * p.heads + h) * p.kept() + p.rank, x + p.key_dim(), p.turned * sizeof(float));
  }
  void keep(int64_t r) const {
    float* x = latents + r * p.kept();
    normalize_head(x, p.rank, p.norm);
    rotary.turn(x + p.rank, r, pairs);
    store_cached(cache.rows, rotated, x, p.kept(), cache.k + (slot[r] < 0 ? cache.slots - 1 : slot[r]) * cache.slot_bytes);
  }

  const LatentPlan& p;
  const int64_t rows;
  const Linear down;
  float *const narrow, *const latents, *const wide, *const q;
  const HeadProducts inner;
  std::optional<Linear> up;
  const Rotary rotary;
  const Cache cache;
  const int64_t* const slot;
  const bool pairs, rotated;
};

// What attention found in the space of latents (R, H, L + R), whose first L features are the latent's -> out (R, H·V).
struct LatentOutput {
  LatentOutput(Arena& arena, const LatentPlan& p, const float* found, float* out, int64_t rows)
      : p(p), found(found), out(out), values(arena, p.values, p.heads, rows) {}
  void run(Worker& worker) const {
    const int64_t rows = values.rows;
    worker.each(rows, [&](int64_t r) {
      for (int64_t h = 0; h < p.heads; h++)
        std::memcpy(values.row(h, r), found + (r * p.heads + h) * p.kept(), p.rank * sizeof(float));
    });
    values.run(worker, p.value_dim, out, p.value_dim);
  }

  const LatentPlan& p;
  const float* const found;
  float* const out;
  const HeadProducts values;
};

}  // namespace hasten

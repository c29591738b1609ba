// Gated DeltaNet; see phases.h.
#include "phases.h"

#include "../states/columns.h"

namespace hasten {

#if HASTEN_512
constexpr int COLUMN_VECTORS = 2;  // of S that go through a sequence together: with 128 rows, 16 KB
constexpr int LINE_VECTORS = 8;    // of S that take a single token together: what follows each other in memory
#else
constexpr int COLUMN_VECTORS = 1;  // and their sums in registers
constexpr int LINE_VECTORS = 2;
#endif
constexpr int64_t COLUMNS = COLUMN_VECTORS * LANES;
constexpr float UNIT_EPS = 1e-6f;  // added to the squared length of a query or key

Tensor plan_delta(PlanDeltaCall call) {
  const int64_t heads = call.rate.numel(), groups = call.key_heads;
  STD_TORCH_CHECK(groups > 0 && heads > 0 && heads % groups == 0 && call.key_dim > 0 && call.value_dim > 0,
                  heads, " value heads cannot share ", groups, " key heads");
  auto plan = std::make_unique<DeltaPlan>(DeltaPlan{
      .key_heads = groups, .heads = heads, .key_dim = call.key_dim, .value_dim = call.value_dim,
      .conv = ConvolutionPlan(call.conv),
      .rate = floats(call.rate, heads, "rate"), .rate_bias = floats(call.rate_bias, heads, "rate_bias"),
      .norm = call.norm.norm()});
  STD_TORCH_CHECK(plan->conv.channels == plan->channels(), "conv has ", plan->conv.channels, " channels; the layer has ",
                  plan->channels());
  STD_TORCH_CHECK(plan->norm.weight && call.norm.norm_weight->numel() == plan->value_dim, "the norm is that of a head");
  plan->held = std::move(call);
  return as_mixer<DeltaPhases>(std::move(plan));
}

DeltaPhases::DeltaPhases(Arena& arena, const DeltaPlan& plan, const float* x, float* out, int64_t rows,
                         const StateFields& states)
    : p(plan), x(x), out(out), mixed(arena.take<float>(rows * plan.channels() + COLUMNS)),  // whole vectors are read
      decays(arena.take<float>(rows * plan.heads)), strengths(arena.take<float>(rows * plan.heads)), rows(rows),
      matrices(states.matrices_of(plan.heads * plan.key_dim * plan.value_dim)),
      convolution(plan.conv, x, plan.features(), states), step(rows, states) {}

void DeltaPhases::run(Worker& worker) const {
  const int64_t groups = p.key_heads, shared = p.shared(), values = p.value_dim;
  const std::vector<StateRows>& sequences = step.sequences;
  const std::vector<int64_t>& sequence_of = step.sequence_of;
  const auto keep_all = [&](const StateRows& own, int64_t group) {
    for (int64_t part = 0; part < 2; part++) convolution.keep(own, part * p.keys() + group * p.key_dim, p.key_dim);
    convolution.keep(own, 2 * p.keys() + group * shared * values, shared * values);
  };
  if (step.one_each)  // all of a key head and its value heads at once; a thread walks through a part of the states
    return worker.stream(rows * groups, [] {}, [&](int64_t item) {
      const StateRows& own = sequences[item / groups];
      const int64_t group = item % groups;
      mix(own, own.row, group);
      for (int64_t head = group * shared; head < (group + 1) * shared; head++) {
        const int64_t most = own.fresh || values % LANES ? COLUMNS : LINE_VECTORS * LANES;
        for (int64_t from = 0; from < values; from += most) recur(own, head, from, std::min(most, values - from));
        finish(own.row, head);
      }
      keep_all(own, group);
    });
  const int64_t parts = rows <= 16 ? groups : 1;  // of few rows the heads are shared out too
  worker.each(rows * parts, [&](int64_t item) {
    const int64_t r = item / parts, first = item % parts * (groups / parts);
    if (sequence_of[r] >= 0)
      for (int64_t group = first; group < first + groups / parts; group++) mix(sequences[sequence_of[r]], r, group);
  });
  const int64_t pieces = (values + COLUMNS - 1) / COLUMNS, each = p.heads * pieces;
  worker.each(int64_t(sequences.size()) * each, [&](int64_t item) {
    const int64_t from = item % pieces * COLUMNS;
    recur(sequences[item / each], item % each / pieces, from, std::min(COLUMNS, values - from));
  });
  worker.each(rows + int64_t(sequences.size()), [&](int64_t item) {
    if (item >= rows) {
      for (int64_t group = 0; group < groups; group++) keep_all(sequences[item - rows], group);
    } else if (sequence_of[item] < 0) {
      std::fill(out + item * p.values(), out + (item + 1) * p.values(), 0.0f);
    } else {
      for (int64_t head = 0; head < p.heads; head++) finish(item, head);
    }
  });
}

// x of length `scale`.
static void to_length(float* x, int64_t count, float scale) {
  F32 squares = {};
  float rest = 0;
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) squares += load(x + i) * load(x + i);
  for (; i < count; i++) rest += x[i] * x[i];
  const float factor = scale / std::sqrt(sum_lanes(squares) + rest + UNIT_EPS);
  for (i = 0; i + LANES <= count; i += LANES) store(x + i, load(x + i) * factor);
  for (; i < count; i++) x[i] *= factor;
}

// One row of a key head: its query, its key, and the values, decays and strengths of its value heads.
void DeltaPhases::mix(const StateRows& own, int64_t row, int64_t key_head) const {
  const int64_t size = p.key_dim, shared = p.shared(), channels = p.channels();
  for (int64_t part = 0; part < 2; part++) {
    const int64_t from = part * p.keys() + key_head * size;
    convolution.run(own, row, from, size, mixed + row * channels + from);
    to_length(mixed + row * channels + from, size, part ? 1.0f : 1.0f / std::sqrt(float(size)));
  }
  const int64_t values = 2 * p.keys() + key_head * shared * p.value_dim;
  convolution.run(own, row, values, shared * p.value_dim, mixed + row * channels + values);
  const float* beside = x + row * p.features() + channels + p.values();
  for (int64_t head = key_head * shared; head < (key_head + 1) * shared; head++) {
    const float a = beside[p.heads + head] + p.rate_bias[head];
    const float softplus = a > 20 ? a : std::log1p(std::exp(a));  // where they are the same number
    decays[row * p.heads + head] = std::exp(-p.rate[head] * softplus);
    strengths[row * p.heads + head] = 1.0f / (1.0f + std::exp(-beside[head]));
  }
}

// Some columns of a head's S through all tokens of a sequence.
void DeltaPhases::recur(const StateRows& own, int64_t head, int64_t from, int64_t count) const {
  const int64_t stride = p.value_dim, size = p.key_dim;
  if (own.tokens == 1 && !own.fresh && stride % LANES == 0)
    return with_count<LINE_VECTORS>(count / LANES, [&](auto vectors) { take_one<vectors>(own, head, from); });
  float* s = matrices + (own.slot * p.heads + head) * size * stride + from;
  advance_columns<COLUMNS>(own, s, size, stride, count, [&](int64_t row, int64_t tokens, float* block) {
    if (count > LANES) advance<COLUMN_VECTORS>(row, tokens, head, from, count, block);
    else advance<1>(row, tokens, head, from, count, block);
  });
}

// The only token of a sequence takes V vectors of columns of a head's S further, where they lie. They come from memory once:
// the second pass finds them in the second-level cache, and each pass asks for half of the next head's.
template <int V>
void DeltaPhases::take_one(const StateRows& own, int64_t head, int64_t from) const {
  const int64_t stride = p.value_dim, size = p.key_dim, next_head = size * stride, at = own.row * p.heads + head;
  const float* q = mixed + own.row * p.channels() + head / p.shared() * size;
  const float *k = q + p.keys(), *value = mixed + own.row * p.channels() + 2 * p.keys() + head * stride + from;
  float* s = matrices + (own.slot * p.heads + head) * next_head + from;
  F32 read[V] = {}, change[V], sum[V] = {};
  for (int64_t i = 0; i < size; i++) {
    const F32 key = splat(k[i]);
    const float* line = s + i * stride;
    EACH(v, V,
         if constexpr (2 * v < V) __builtin_prefetch(line + next_head + v * LANES, 0, 2);
         accumulate(read[v], load(line + v * LANES), key));
  }
  const F32 decay = splat(decays[at]);
  EACH(v, V, change[v] = (load(value + v * LANES) - decay * read[v]) * strengths[at]);
  for (int64_t i = 0; i < size; i++) {
    const F32 key = splat(k[i]), query = splat(q[i]);
    float* line = s + i * stride;
    EACH(v, V,
         if constexpr (2 * v >= V) __builtin_prefetch(line + next_head + v * LANES, 0, 2);
         F32 now = load(line + v * LANES) * decay;
         accumulate(now, change[v], key);
         store(line + v * LANES, now);
         accumulate(sum[v], now, query));
  }
  float* to = out + own.row * p.values() + head * stride + from;
  EACH(v, V, store(to + v * LANES, sum[v]));
}

// `tokens` rows from `row` on take V vectors of columns at s further, whose rows are COLUMNS apart. Sᵀk of a token is summed
// while the token before it is written.
template <int V>
void DeltaPhases::advance(int64_t row, int64_t tokens, int64_t head, int64_t from, int64_t count, float* s) const {
  const int64_t channels = p.channels(), size = p.key_dim, value = 2 * p.keys() + head * p.value_dim + from;
  const float* q = mixed + row * channels + head / p.shared() * size;
  F32 read[V] = {};
  for (int64_t i = 0; i < size; i++) {
    const F32 k = splat(q[p.keys() + i]);
    EACH(v, V, accumulate(read[v], load(s + i * COLUMNS + v * LANES), k));
  }
  for (int64_t r = row; r < row + tokens; r++, q += channels) {
    const int64_t at = r * p.heads + head;
    const float *k = q + p.keys(), *following = r + 1 < row + tokens ? k + channels : k;
    const float *new_value = mixed + r * channels + value;
    const F32 decay = splat(decays[at]);
    F32 change[V], sum[V] = {}, next[V] = {};
    EACH(v, V, change[v] = (load(new_value + v * LANES) - decay * read[v]) * strengths[at]);
    for (int64_t i = 0; i < size; i++) {
      const F32 key = splat(k[i]), query = splat(q[i]), key_after = splat(following[i]);
      float* line = s + i * COLUMNS;
      EACH(v, V,
           F32 now = load(line + v * LANES) * decay;
           accumulate(now, change[v], key);
           store(line + v * LANES, now);
           accumulate(sum[v], now, query);
           accumulate(next[v], now, key_after));
    }
    float* to = out + r * p.values() + head * p.value_dim + from;
    if (count == V * LANES) {
      EACH(v, V, store(to + v * LANES, sum[v]));
    } else {
      alignas(64) float some[V * LANES];
      EACH(v, V, store(some + v * LANES, sum[v]));
      std::memcpy(to, some, count * sizeof(float));
    }
    EACH(v, V, read[v] = next[v]);
  }
}

// The norm of a head's output, and its gate SiLU(z).
void DeltaPhases::finish(int64_t row, int64_t head) const {
  const int64_t size = p.value_dim;
  float* y = out + row * p.values() + head * size;
  const float* z = x + row * p.features() + p.channels() + head * size;
  widen(y, Type::f32, 0, size, size, p.norm, y);
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) store(y + i, load(y + i) * (load(z + i) * logistic(load(z + i))));
  for (; i < size; i++) y[i] *= z[i] / (1.0f + std::exp(-z[i]));
}

}  // namespace hasten

STABLE_TORCH_LIBRARY_FRAGMENT(HASTEN_LIBRARY, m) {
  hasten::define<hasten::plan_delta>(m, "plan_delta");
}
STABLE_TORCH_LIBRARY_IMPL(HASTEN_LIBRARY, CPU, m) {
  hasten::implement<hasten::plan_delta>(m, "plan_delta");
}

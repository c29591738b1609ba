// Mamba-2; see phases.h.
#include "phases.h"

#include "../states/columns.h"

namespace hasten {

// Vectors of S that go through a token together where they lie in memory; and, where they lie in the first-level cache
// (16 KB with 128 rows and AVX-512), through how many tokens at once. They, their values and their sums are in registers.
#if HASTEN_512
constexpr int WIDEST = 4, COLUMN_VECTORS = 2, TOKENS = 4;
#elif defined(__AVX2__)
constexpr int WIDEST = 2, COLUMN_VECTORS = 1, TOKENS = 2;
#elif defined(__aarch64__)
constexpr int WIDEST = 1, COLUMN_VECTORS = 1, TOKENS = 2;
#else
constexpr int WIDEST = 1, COLUMN_VECTORS = 1, TOKENS = 1;
#endif
constexpr int64_t COLUMNS = COLUMN_VECTORS * LANES;
constexpr int64_t CHANNELS = 256;  // that a thread convolves, where there are few rows
constexpr int64_t LINES_AHEAD = 64;  // of a state in memory, that are asked for

Tensor plan_mamba(PlanMambaCall call) {
  const int64_t heads = call.rate.numel(), groups = call.groups;
  STD_TORCH_CHECK(groups > 0 && heads > 0 && heads % groups == 0 && call.state_dim > 0 && call.head_dim > 0, heads,
                  " heads cannot share ", groups, " groups of keys and queries");
  auto plan = std::make_unique<MambaPlan>(MambaPlan{
      .heads = heads, .groups = groups, .state_dim = call.state_dim, .head_dim = call.head_dim,
      .conv = ConvolutionPlan(call.conv, call.bias),
      .rate = floats(call.rate, heads, "rate"), .step_bias = floats(call.step_bias, heads, "step_bias"),
      .skip = floats(call.skip, heads, "skip"), .norm = call.norm.norm()});
  STD_TORCH_CHECK(plan->conv.channels == plan->channels(), "conv has ", plan->conv.channels, " channels; the layer has ",
                  plan->channels());
  STD_TORCH_CHECK(plan->norm.weight && call.norm.norm_weight->numel() == plan->values(), "the norm is that of all ",
                  plan->values(), " values");
  STD_TORCH_CHECK(!plan->norm.bias && !call.norm.centred, "the norm has a bias or subtracts the mean");
  plan->held = std::move(call);
  return as_mixer<MambaPhases>(std::move(plan));
}

MambaPhases::MambaPhases(Arena& arena, const MambaPlan& plan, const float* x, float* out, int64_t rows,
                         const StateFields& states)
    : p(plan), x(x), out(out), mixed(arena.take<float>(rows * plan.channels() + WIDEST * LANES)),  // whole vectors are read
      steps(arena.take<float>(rows * plan.heads)), decays(arena.take<float>(rows * plan.heads)), rows(rows),
      matrices(states.matrices_of(plan.heads * plan.state_dim * plan.head_dim)),
      convolution(plan.conv, x + plan.values(), plan.features(), states), step(rows, states) {}

void MambaPhases::run(Worker& worker) const {
  const std::vector<StateRows>& sequences = step.sequences;
  const int64_t heads = p.heads, channels = p.channels(), count = int64_t(sequences.size());
  const int64_t parts = rows <= 16 ? (channels + CHANNELS - 1) / CHANNELS : 1, each = parts > 1 ? CHANNELS : channels;
  worker.each(rows * parts, [&](int64_t item) {
    const int64_t row = item / parts, part = item % parts, from = part * each;
    if (step.sequence_of[row] < 0) return;
    const StateRows& own = sequences[step.sequence_of[row]];
    convolution.run(own, row, from, std::min(each, channels - from), mixed + row * channels + from);
    mix(row, heads * part / parts, heads * (part + 1) / parts);
  });
  if (step.one_each) {  // a thread walks through a part of the states
    worker.stream(rows * heads, [] {}, [&](int64_t item) {
      const StateRows& own = sequences[item / heads];
      const int64_t width = own.fresh || p.head_dim % LANES ? COLUMNS : WIDEST * LANES;
      for (int64_t from = 0; from < p.head_dim; from += width)
        recur(own, item % heads, from, std::min(width, p.head_dim - from));
    });
  } else {
    const int64_t pieces = (p.head_dim + COLUMNS - 1) / COLUMNS, all = heads * pieces;
    worker.each(count * all, [&](int64_t item) {
      const int64_t from = item % pieces * COLUMNS;
      recur(sequences[item / all], item % all / pieces, from, std::min(COLUMNS, p.head_dim - from));
    });
  }
  worker.each(rows + count, [&](int64_t item) {
    if (item >= rows) return convolution.keep(sequences[item - rows], 0, channels);
    if (step.sequence_of[item] < 0) std::fill(out + item * p.values(), out + (item + 1) * p.values(), 0.0f);
    else for (int64_t group = 0; group < p.groups; group++) normalize(item, group);
  });
}

// The steps and the decays of some heads, of one row.
void MambaPhases::mix(int64_t row, int64_t first_head, int64_t end) const {
  const float* given = x + row * p.features() + p.values() + p.channels();
  for (int64_t head = first_head; head < end; head++) {
    const float a = given[head] + p.step_bias[head];
    const float size = a > 20 ? a : std::log1p(std::exp(a));  // where they are the same number
    steps[row * p.heads + head] = size;
    decays[row * p.heads + head] = std::exp(-p.rate[head] * size);
  }
}

// Some columns of a head's S through all tokens of a sequence.
void MambaPhases::recur(const StateRows& own, int64_t head, int64_t from, int64_t count) const {
  const int64_t stride = p.head_dim, size = p.state_dim, vectors = (count + LANES - 1) / LANES;
  float* s = matrices + (own.slot * p.heads + head) * size * stride + from;
  if (own.tokens == 1 && !own.fresh && count % LANES == 0)  // where they lie
    return with_count<WIDEST>(vectors, [&](auto v) { advance<v.value, 1>(own.row, head, from, count, s, stride, LINES_AHEAD); });
  advance_columns<COLUMNS>(own, s, size, stride, count, [&](int64_t row, int64_t tokens, float* block) {
    with_count<COLUMN_VECTORS>(vectors, [&](auto v) {
      for (int64_t r = row; r < row + tokens; r += TOKENS)
        with_count<TOKENS>(std::min<int64_t>(TOKENS, row + tokens - r),
                           [&](auto t) { advance<v.value, t.value>(r, head, from, count, block, COLUMNS, 0); });
    });
  });
}

// T rows from `row` on take V vectors of columns at s further, whose rows are `stride` apart. ahead: how many lines of memory
// further on is asked for, 0 for nothing.
template <int V, int T>
void MambaPhases::advance(int64_t row, int64_t head, int64_t from, int64_t count, float* s, int64_t stride,
                          int64_t ahead) const {
  const int64_t channels = p.channels(), size = p.state_dim, at = head * p.head_dim + from;
  const float* k = mixed + row * channels + p.values() + head / (p.heads / p.groups) * size;
  const float* q = k + p.keys();
  F32 value[T][V], sum[T][V] = {}, decay[T];
  EACH(t, T, {
    const int64_t r = row + t;
    decay[t] = splat(decays[r * p.heads + head]);
    EACH(v, V, value[t][v] = load(mixed + r * channels + at + v * LANES) * steps[r * p.heads + head]);
  });
  for (int64_t i = 0; i < size; i++) {
    float* line = s + i * stride;
    F32 now[V];
    EACH(v, V, if (ahead) __builtin_prefetch(line + (ahead + v) * LANES, 1, 2); now[v] = load(line + v * LANES));
    EACH(t, T, {
      const F32 key = splat(k[t * channels + i]), query = splat(q[t * channels + i]);
      EACH(v, V,
           now[v] = now[v] * decay[t];
           accumulate(now[v], value[t][v], key);
           accumulate(sum[t][v], now[v], query));
    });
    EACH(v, V, store(line + v * LANES, now[v]));
  }
  EACH(t, T, EACH(v, V, {
    const int64_t r = row + t, column = at + v * LANES, width = count - v * LANES;
    const F32 z = some(x + r * p.features() + column, std::min<int64_t>(LANES, width));
    accumulate(sum[t][v], load(mixed + r * channels + column), splat(p.skip[head]));
    alignas(64) float gated[LANES];
    store(gated, sum[t][v] * (z * logistic(z)));
    std::memcpy(out + r * p.values() + column, gated, std::min<int64_t>(LANES, width) * sizeof(float));
  }));
}

// The norm of a group's output.
void MambaPhases::normalize(int64_t row, int64_t group) const {
  const int64_t size = p.values() / p.groups, from = group * size;
  float* y = out + row * p.values() + from;
  Norm own = p.norm;
  own.weight = static_cast<const uint8_t*>(own.weight) + from * (own.type == Type::f32 ? 4 : 2);
  widen(y, Type::f32, 0, size, size, own, y);
}

}  // namespace hasten

STABLE_TORCH_LIBRARY_FRAGMENT(HASTEN_LIBRARY, m) {
  hasten::define<hasten::plan_mamba>(m, "plan_mamba");
}
STABLE_TORCH_LIBRARY_IMPL(HASTEN_LIBRARY, CPU, m) {
  hasten::implement<hasten::plan_mamba>(m, "plan_mamba");
}

// The steps of a decoder block as torch operators: one by one, and all of a row of dense blocks in one call.
#include "phases.h"

#include <chrono>

#include "../attention/phases.h"
#include "../plans.h"

namespace hasten {

#define HASTEN_NORM_ARGUMENTS norm_weight, norm_bias, eps, offset, centred
#define HASTEN_WEIGHT_ARGUMENTS data, scales, zeros, outer, bias, group_size, planes

struct WeightPlan {
  static constexpr const char* name = "a weight";
  const WeightPlan* self;
  PackedWeight weight;
  std::vector<Tensor> held;  // what the pointers point to
};

// lora_a (adapters, K, rank) and lora_b (adapters, panels, rank, 64) float32: see Adapters.
Tensor plan_weight(int64_t n, int64_t k, HASTEN_WEIGHT, Maybe lora_a, Maybe lora_b) {
  STD_TORCH_CHECK(n > 0 && k > 0 && (!bias || bias->numel() >= n), "a weight ", n, "×", k, " has no such size, or bias");
  auto plan = std::make_unique<WeightPlan>(WeightPlan{.weight = {n, k, HASTEN_WEIGHT_ARGUMENTS}, .held = {data}});
  for (const Maybe& one : {scales, zeros, outer, bias, lora_a, lora_b})
    if (one) plan->held.push_back(*one);
  if (lora_a) {
    const int64_t count = lora_a->size(0), rank = lora_a->size(2);
    for (const Maybe& one : {lora_a, lora_b})
      STD_TORCH_CHECK(one && one->is_contiguous() && one->scalar_type() == ScalarType::Float, "adapters are in float32");
    STD_TORCH_CHECK(rank % LANES == 0 && lora_a->numel() == count * k * rank &&
                        lora_b->numel() == count * plan->weight.w.panels() * rank * PANEL,
                    "the adapters do not fit a weight ", n, "×", k);
    plan->weight.adapters = {static_cast<const float*>(lora_a->const_data_ptr()),
                             static_cast<const float*>(lora_b->const_data_ptr()), count, rank};
  }
  return as_bytes(std::move(plan));
}

// The weights of plans, of a product's parts.
static Few<PackedWeight> parts_of(const std::vector<Tensor>& plans, int64_t k) {
  Few<PackedWeight> found;
  STD_TORCH_CHECK(!plans.empty(), "a product needs its weight");
  for (const Tensor& plan : plans) {
    found.add(plan_in<WeightPlan>(plan).weight);
    STD_TORCH_CHECK(found[found.count - 1].k == k, "a weight has ", found[found.count - 1].k, " input features; x has ", k);
  }
  return found;
}

// In all of them the leading shape of x is free: R rows, whatever they are called.

// x (…, C) -> q (R, H, D); see AttentionInput.
Tensor attention_input(Tensor x, HASTEN_NORM, std::vector<Tensor> weights, int64_t heads, int64_t head_dim,
                       Maybe q_norm, Maybe k_norm, Maybe cos, Maybe sin, Tensor k_cache, Tensor v_cache, Tensor slot_mapping,
                       bool rotated) {
  x = as_contiguous(x);
  cos = as_contiguous(cos);
  sin = as_contiguous(sin);
  const int64_t c = x.size(-1), rows = x.numel() / c;
  Tensor q = empty({rows, heads, head_dim}, x.scalar_type());
  Arena arena;
  const AttentionInput step(arena, x.const_data_ptr(), type_of(x), rows, q.mutable_data_ptr(),
                            norm_of(HASTEN_NORM_ARGUMENTS), parts_of(weights, c), heads, head_dim,
                            norm_of(q_norm, std::nullopt, eps, offset, centred),
                            norm_of(k_norm, std::nullopt, eps, offset, centred), cos, sin, k_cache, v_cache,
                            slot_mapping, rotated);
  parallel_region([&](Worker& worker) { step.run(worker); });
  return q;
}

// x (R, K), residual (…, N) -> the residual's shape and dtype; see LinearAdd.
Tensor linear_add(Tensor x, HASTEN_WEIGHT, Tensor residual, HASTEN_NORM) {
  x = as_contiguous(x);
  residual = as_contiguous(residual);
  const int64_t n = residual.size(-1), rows = residual.numel() / n, k = rows ? x.numel() / rows : 0;
  Tensor out = empty_like_with_last(residual, n);
  Arena arena;
  const LinearAdd step(arena, x.const_data_ptr(), type_of(x), rows, PackedWeight(n, k, HASTEN_WEIGHT_ARGUMENTS),
                       residual.const_data_ptr(), out.mutable_data_ptr(), type_of(residual),
                       norm_of(HASTEN_NORM_ARGUMENTS));
  parallel_region([&](Worker& worker) { step.run(worker); });
  return out;
}

// x (…, C) -> (…, I) in x's dtype; see MlpInput.
Tensor mlp_input(Tensor x, HASTEN_NORM, std::vector<Tensor> weights, int64_t inner, bool gated, int64_t activation) {
  x = as_contiguous(x);
  const int64_t c = x.size(-1), rows = x.numel() / c;
  Tensor out = empty_like_with_last(x, inner);
  Arena arena;
  const MlpInput step(arena, x.const_data_ptr(), type_of(x), rows, out.mutable_data_ptr(),
                      norm_of(HASTEN_NORM_ARGUMENTS), MlpInput::checked(parts_of(weights, c), inner, gated), inner, gated,
                      Activation(activation));
  parallel_region([&](Worker& worker) { step.run(worker); });
  return out;
}

// norm(x)·Wᵀ + b in float32, x (…, C) -> (…, N).
Tensor norm_linear(Tensor x, HASTEN_NORM, HASTEN_WEIGHT, int64_t n) {
  x = as_contiguous(x);
  const int64_t c = x.size(-1), rows = x.numel() / c;
  Tensor out = empty_like_with_last(x, n, ScalarType::Float);
  Arena arena;
  const Linear step(arena, x.const_data_ptr(), type_of(x), rows, norm_of(HASTEN_NORM_ARGUMENTS),
                    PackedWeight(n, c, HASTEN_WEIGHT_ARGUMENTS));
  float* to = static_cast<float*>(out.mutable_data_ptr());
  parallel_region([&](Worker& worker) { step.run_into(worker, to); });
  return out;
}

struct Plan {
  static constexpr const char* name = "a block";
  const Plan* self;
  int64_t c, heads, head_dim, window, inner;
  double scale, softcap;
  bool gated;
  Activation kind;
  Norm attention_norm, q_norm, k_norm, output_norm, mlp_norm, down_norm;
  Few<PackedWeight> qkv, mlp;
  PackedWeight output, down;
  Ranks* ranks;              // with which the sums of output and down are shared, or nullptr
  std::vector<Tensor> held;  // what the pointers point to
};

// A dense block of weights from plan_weight: those of q, k and v, that of gate and up or both. All its norms are of one kind.
Tensor plan_block(int64_t kv_heads, HASTEN_NORM, std::vector<Tensor> qkv, int64_t heads, int64_t head_dim, Maybe q_norm,
                  Maybe k_norm, double scale, int64_t window, double softcap,  //
                  Tensor output, Maybe o_norm_weight, Maybe o_norm_bias,  //
                  Maybe m_norm_weight, Maybe m_norm_bias, std::vector<Tensor> mlp, int64_t inner, bool gated,
                  int64_t activation,  //
                  Tensor down, Maybe d_norm_weight, Maybe d_norm_bias, Maybe ranks) {
  auto norm = [&](const Maybe& weight, const Maybe& bias) { return norm_of(weight, bias, eps, offset, centred); };
  STD_TORCH_CHECK(!qkv.empty(), "a block needs the weights of q, k and v");
  const int64_t c = plan_in<WeightPlan>(qkv[0]).weight.k;
  auto weights = [](const std::vector<Tensor>& plans, int64_t n, int64_t k) {
    const Few<PackedWeight> found = parts_of(plans, k);
    int64_t rows = 0;
    for (const PackedWeight& one : found) rows += one.w.n;
    STD_TORCH_CHECK(rows == n, "the weights have ", rows, " rows; the block has ", n);
    return found;
  };
  auto plan = std::make_unique<Plan>(Plan{
      .c = c, .heads = heads, .head_dim = head_dim, .window = window, .inner = inner, .scale = scale,
      .softcap = softcap, .gated = gated, .kind = Activation(activation),
      .attention_norm = norm(norm_weight, norm_bias), .q_norm = norm(q_norm, std::nullopt),
      .k_norm = norm(k_norm, std::nullopt), .output_norm = norm(o_norm_weight, o_norm_bias),
      .mlp_norm = norm(m_norm_weight, m_norm_bias), .down_norm = norm(d_norm_weight, d_norm_bias),
      .qkv = weights(qkv, (heads + 2 * kv_heads) * head_dim, c),
      .mlp = MlpInput::checked(parts_of(mlp, c), inner, gated),
      .output = weights({output}, c, heads * head_dim)[0],
      .down = weights({down}, c, inner)[0],
      .ranks = ranks ? &mutable_plan<Ranks>(*ranks) : nullptr,
      .held = {output, down}});
  for (const auto* plans : {&qkv, &mlp}) plan->held.insert(plan->held.end(), plans->begin(), plans->end());
  for (const Maybe& one : {norm_weight, norm_bias, q_norm, k_norm, o_norm_weight, o_norm_bias, m_norm_weight, m_norm_bias,
                           d_norm_weight, d_norm_bias, ranks})
    if (one) plan->held.push_back(*one);
  return as_bytes(std::move(plan));
}

// One dense block of a stack: attention_input, attention, linear_add, mlp_input and linear_add after each other.
struct BlockPhases {
  // x and out (rows, C) float32.
  BlockPhases(Arena& arena, const Plan& p, const float* x, float* out, int64_t rows, const Maybe& cos, const Maybe& sin,
              const Tensor& k_cache, const Tensor& v_cache, const Tensor& slot_mapping, const Tensor& query_start_loc,
              const Tensor& seq_lens, const Maybe& first, const Maybe& block_table, int64_t block_size,
              bool rotated, const int64_t* chosen, const Pattern* pattern)
      : q(arena.take<float>(rows * p.heads * p.head_dim)), attended(arena.take<float>(rows * p.heads * p.head_dim)),
        middle(arena.take<float>(rows * p.c)), act(arena.take<float>(rows * p.inner)),
        input(arena, x, Type::f32, rows, q, p.attention_norm, p.qkv, p.heads, p.head_dim, p.q_norm, p.k_norm, cos, sin,
              k_cache, v_cache, slot_mapping, rotated, chosen),
        attention(arena, q, attended, Type::f32, rows, p.heads, p.head_dim, k_cache, v_cache, query_start_loc, seq_lens,
                  first, block_table, block_size, rotated, p.scale, p.window, p.softcap, pattern),
        output(arena, attended, Type::f32, rows, p.output, x, middle, Type::f32, p.output_norm, chosen, p.ranks),
        mlp(arena, middle, Type::f32, rows, act, p.mlp_norm, p.mlp, p.inner, p.gated, p.kind, chosen),
        down(arena, act, Type::f32, rows, p.down, middle, out, Type::f32, p.down_norm, chosen, p.ranks) {}

  // ended(part): called by each worker when it has done its share of a part.
  static constexpr int64_t PARTS = 5;
  template <class Ended>
  void run(Worker& worker, const Ended& ended) const {
    input.run(worker);
    ended(0);
    attention.run(worker, output.beginning(worker));
    ended(1);
    output.run(worker);
    ended(2);
    mlp.run(worker);
    ended(3);
    down.run(worker);
    ended(4);
  }

  float *q, *attended, *middle, *act;
  AttentionInput input;
  AttentionPhases attention;
  LinearAdd output;
  MlpInput mlp;
  LinearAdd down;
};

// When the parts of a row of blocks ended, each the moment its last worker left it.
class PartTimes {
 public:
  explicit PartTimes(int64_t parts) : began_(now()), ends_(parts) {}
  void ended(int64_t part) {
    const int64_t time = now();
    int64_t latest = ends_[part].load(std::memory_order_relaxed);
    while (latest < time && !ends_[part].compare_exchange_weak(latest, time, std::memory_order_relaxed)) {}
  }
  void store(const Tensor& to) const {
    STD_TORCH_CHECK(to.scalar_type() == ScalarType::Long && to.is_contiguous() && to.numel() == int64_t(ends_.size()) + 1,
                    "times must be int64, one more than there are parts");
    int64_t* out = static_cast<int64_t*>(to.mutable_data_ptr());
    *out++ = began_;
    for (const auto& end : ends_) *out++ = end.load(std::memory_order_relaxed);
  }

 private:
  static int64_t now() {
    return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  const int64_t began_;
  std::vector<std::atomic<int64_t>> ends_;
};

// Dense blocks after each other, x (…, C) float32 -> the same, the threads started once. rope_index[i]: which of the
// tables of cosines and sines block i takes, -1 for none. All caches have the same slots. chosen int64 (rows,): the adapter
// that each row takes, -1 for none. times int64 (1 + 5·blocks,): where somebody wants to know, when the blocks began and when
// each part of each ended, in nanoseconds of the steady clock. seen: what each sees, of plan_pattern; empty: all.
Tensor blocks(Tensor x, std::vector<Tensor> cos, std::vector<Tensor> sin, std::vector<int64_t> rope_index,
              std::vector<Tensor> k_caches, std::vector<Tensor> v_caches, Tensor slot_mapping, Tensor query_start_loc,
              Tensor seq_lens, Maybe first, Maybe block_table, int64_t block_size, bool rotated,
              std::vector<Tensor> plans, Maybe chosen, Maybe times, std::vector<Tensor> seen) {
  x = as_contiguous(x);
  const int64_t count = int64_t(plans.size()), c = x.size(-1), rows = x.numel() / c;
  STD_TORCH_CHECK(count && int64_t(rope_index.size()) == count && int64_t(k_caches.size()) == count &&
                      int64_t(v_caches.size()) == count && cos.size() == sin.size() &&
                      (seen.empty() || int64_t(seen.size()) == count),
                  "each block needs its plan, its cache, its rope_index, and its pattern if there are any");
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float, "the blocks want x in float32");
  STD_TORCH_CHECK(!chosen || (chosen->scalar_type() == ScalarType::Long && chosen->is_contiguous() && chosen->numel() == rows),
                  "each row needs its adapter, int64");
  const int64_t* own = chosen ? static_cast<const int64_t*>(chosen->const_data_ptr()) : nullptr;
  for (auto* tables : {&cos, &sin})
    for (Tensor& one : *tables) one = as_contiguous(one);
  Tensor out = empty_like_with_last(x, c);
  Arena arena;
  float* between[] = {arena.take<float>(rows * c), arena.take<float>(rows * c)};
  const float* from = static_cast<const float*>(x.const_data_ptr());
  const Arena::Mark mark = arena.mark();
  std::vector<BlockPhases> phases;
  phases.reserve(count);
  for (int64_t i = 0; i < count; i++) {
    const Plan& p = plan_in<Plan>(plans[i]);
    STD_TORCH_CHECK(p.c == c, "a block of size ", p.c, " cannot take x (…, ", c, ")");
    if (own)
      for (const Few<PackedWeight>& parts : {p.qkv, Few<PackedWeight>(p.output), p.mlp, Few<PackedWeight>(p.down)})
        for (const PackedWeight& weight : parts)
          for (int64_t r = 0; weight.adapters.a && r < rows; r++)
            STD_TORCH_CHECK(own[r] < weight.adapters.count, "there is no adapter ", own[r]);
    STD_TORCH_CHECK(rope_index[i] < int64_t(cos.size()), "there is no rotary table ", rope_index[i]);
    float* to = i + 1 < count ? between[i % 2] : static_cast<float*>(out.mutable_data_ptr());
    const bool turned = rope_index[i] >= 0;
    arena.back_to(mark);  // a block begins when the one before it has ended: they share their memory
    phases.emplace_back(arena, p, from, to, rows, turned ? Maybe(cos[rope_index[i]]) : Maybe(),
                        turned ? Maybe(sin[rope_index[i]]) : Maybe(), k_caches[i], v_caches[i], slot_mapping,
                        query_start_loc, seq_lens, first, block_table, block_size, rotated, own,
                        seen.empty() ? nullptr : &plan_in<Pattern>(seen[i]));
    from = to;
  }
  const auto run = [&](const auto& ended) {
    parallel_region([&](Worker& worker) {
      for (int64_t i = 0; i < count; i++)
        phases[i].run(worker, [&](int64_t part) { ended(BlockPhases::PARTS * i + part); });
    });
  };
  if (times) {
    PartTimes parts(BlockPhases::PARTS * count);
    run([&](int64_t part) { parts.ended(part); });
    parts.store(*times);
  } else {
    run([](int64_t) {});
  }
  return out;
}

}  // namespace hasten

STABLE_TORCH_LIBRARY_FRAGMENT(HASTEN_LIBRARY, m) {
  m.def("attention_input(Tensor x, Tensor? norm_weight, Tensor? norm_bias, float eps, float offset, bool centred, Tensor[] weights, int heads, int head_dim, Tensor? q_norm, Tensor? k_norm, Tensor? cos, Tensor? sin, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, bool rotated) -> Tensor");
  m.def("plan_weight(int n, int k, Tensor data, Tensor? scales, Tensor? zeros, Tensor? outer, Tensor? bias, int group_size, int planes, Tensor? lora_a, Tensor? lora_b) -> Tensor");
  m.def("plan_block(int kv_heads, Tensor? norm_weight, Tensor? norm_bias, float eps, float offset, bool centred, Tensor[] qkv, int heads, int head_dim, Tensor? q_norm, Tensor? k_norm, float scale, int window, float softcap, Tensor output, Tensor? o_norm_weight, Tensor? o_norm_bias, Tensor? m_norm_weight, Tensor? m_norm_bias, Tensor[] mlp, int inner, bool gated, int activation, Tensor down, Tensor? d_norm_weight, Tensor? d_norm_bias, Tensor? ranks) -> Tensor");
  m.def("blocks(Tensor x, Tensor[] cos, Tensor[] sin, int[] rope_index, Tensor(a!)[] k_caches, Tensor(b!)[] v_caches, Tensor slot_mapping, Tensor query_start_loc, Tensor seq_lens, Tensor? first, Tensor? block_table, int block_size, bool rotated, Tensor[] plans, Tensor? chosen, Tensor(c!)? times, Tensor[] seen) -> Tensor");
  m.def("linear_add(Tensor x, Tensor data, Tensor? scales, Tensor? zeros, Tensor? outer, Tensor? bias, int group_size, int planes, Tensor residual, Tensor? norm_weight, Tensor? norm_bias, float eps, float offset, bool centred) -> Tensor");
  m.def("norm_linear(Tensor x, Tensor? norm_weight, Tensor? norm_bias, float eps, float offset, bool centred, Tensor data, Tensor? scales, Tensor? zeros, Tensor? outer, Tensor? bias, int group_size, int planes, int out_features) -> Tensor");
  m.def("mlp_input(Tensor x, Tensor? norm_weight, Tensor? norm_bias, float eps, float offset, bool centred, Tensor[] weights, int inner, bool gated, int activation) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(HASTEN_LIBRARY, CPU, m) {
  m.impl("attention_input", TORCH_BOX(&hasten::attention_input));
  m.impl("plan_weight", TORCH_BOX(&hasten::plan_weight));
  m.impl("plan_block", TORCH_BOX(&hasten::plan_block));
  m.impl("blocks", TORCH_BOX(&hasten::blocks));
  m.impl("linear_add", TORCH_BOX(&hasten::linear_add));
  m.impl("norm_linear", TORCH_BOX(&hasten::norm_linear));
  m.impl("mlp_input", TORCH_BOX(&hasten::mlp_input));
}

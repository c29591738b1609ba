// The steps of a decoder block as torch operators: one by one, and all of a row of blocks in one call.
#include "../attention/phases.h"
#include "attention_input.h"
#include "part_times.h"
#include "routed.h"
#include "token_gate.h"

namespace hasten {

// In all of them the leading shape of x is free: R rows, whatever they are called.

Tensor attention_input(AttentionInputCall call) {
  const Tensor x = as_contiguous(call.x);
  const Maybe cos = as_contiguous(call.cos), sin = as_contiguous(call.sin);
  const int64_t c = x.size(-1), rows = x.numel() / c;
  STD_TORCH_CHECK(cos.has_value() == sin.has_value(), "cos and sin must be float32, with one row for each row of x");
  const Rotary rotary = cos ? Rotary(*cos, *sin, {}) : Rotary();
  Tensor q = empty({rows, call.heads, call.head_dim}, x.scalar_type());
  Arena arena;
  const AttentionInput step(arena, x.const_data_ptr(), type_of(x), rows, q.mutable_data_ptr(), call.norm.norm(),
                            parts_of(call.weights, c), call.heads, call.head_dim, call.norm.like(call.q_norm),
                            call.norm.like(call.k_norm), rotary, Cache(call.k, call.v), slots_of(call.slot_mapping, rows),
                            call.rotated);
  parallel_region([&](Worker& worker) { step.run(worker); });
  return q;
}

Tensor linear_add(LinearAddCall call) {
  const Tensor x = as_contiguous(call.x), residual = as_contiguous(call.residual);
  const int64_t n = residual.size(-1), rows = residual.numel() / n, k = rows ? x.numel() / rows : 0;
  Tensor out = empty_like_with_last(residual, n);
  Arena arena;
  const LinearAdd step(arena, x.const_data_ptr(), type_of(x), rows, call.weight.packed(n, k), residual.const_data_ptr(),
                       out.mutable_data_ptr(), type_of(residual), call.norm.norm());
  parallel_region([&](Worker& worker) { step.run(worker); });
  return out;
}

Tensor mlp_input(MlpInputCall call) {
  const Tensor x = as_contiguous(call.x);
  const int64_t c = x.size(-1), rows = x.numel() / c;
  Tensor out = empty_like_with_last(x, call.inner_size);
  Arena arena;
  const MlpInput step(arena, x.const_data_ptr(), type_of(x), rows, out.mutable_data_ptr(), call.norm.norm(),
                      MlpInput::checked(parts_of(call.weights, c), call.inner_size, call.gated), call.inner_size,
                      call.gated, Activation(call.activation));
  parallel_region([&](Worker& worker) { step.run(worker); });
  return out;
}

Tensor norm_linear(NormLinearCall call) {
  const Tensor x = as_contiguous(call.x);
  const int64_t n = call.out_features, c = x.size(-1), rows = x.numel() / c;
  Tensor out = empty_like_with_last(x, n, ScalarType::Float);
  Arena arena;
  const Linear step(arena, x.const_data_ptr(), type_of(x), rows, call.norm.norm(), call.weight.packed(n, c));
  float* to = static_cast<float*>(out.mutable_data_ptr());
  parallel_region([&](Worker& worker) { step.run_into(worker, to); });
  return out;
}

// What all blocks read alike of a step.
struct Step {
  Step(const BlocksCall& call, int64_t rows, const int64_t* chosen)
      : call(call), cache(plan_in<CachePlan>(call.cache)), rows(rows), chosen(chosen), slots(slots_of(call.slot_mapping, rows)),
        sequences(call.query_start_loc, call.seq_lens, call.first_slots, call.block_table, call.block_size) {
    STD_TORCH_CHECK(call.cos.size() == call.sin.size() &&
                        (call.query_factors.empty() || call.query_factors.size() == call.cos.size()),
                    "each rotary table needs cos and sin, and its factors if any");
    const Maybe& of = call.rope_rows;
    STD_TORCH_CHECK(!of || (of->scalar_type() == ScalarType::Long && of->is_contiguous() && of->numel() == rows),
                    "there must be one row of the rotary tables for each row of x, int64");
    for (size_t i = 0; i < call.cos.size(); i++) {
      const Maybe factors = call.query_factors.empty() ? Maybe() : Maybe(call.query_factors[i]);
      Rotary& one = rotary.emplace_back(call.cos[i], call.sin[i], factors);
      if (!of) continue;
      one.rows = static_cast<const int64_t*>(of->const_data_ptr());
      for (int64_t r = 0; r < rows; r++)
        STD_TORCH_CHECK(one.rows[r] >= 0 && one.rows[r] < one.count, "there is no row ", one.rows[r], " of ", one.count,
                        " in a rotary table");
    }
  }
  StateFields states(size_t place) const {
    const PlanCacheCall& held = cache.held;
    return {held.inputs[place], held.matrices.empty() ? Maybe() : Maybe(held.matrices[place]), *call.state_slots, call.certain,
            call.query_start_loc, call.seq_lens, call.slot_mapping};
  }
  // What the rows bring to the token gate of block i.
  const float* features(int64_t i, int64_t size) const {
    const Maybe& all = call.features;
    STD_TORCH_CHECK(all && all->scalar_type() == ScalarType::Float && all->is_contiguous() && all->dim() == 3 &&
                        all->size(0) > i && all->size(1) == rows && all->size(2) == size,
                    "the token gate of block ", i, " wants features float32 (blocks, ", rows, ", ", size, ")");
    return static_cast<const float*>(all->const_data_ptr()) + i * rows * size;
  }

  const BlocksCall& call;
  const CachePlan& cache;
  const int64_t rows;
  const int64_t* const chosen;  // the adapter of each row, or nullptr
  const int64_t* const slots;
  const Sequences sequences;
  std::vector<Rotary> rotary;
};

// One block of a stack: attention_input and attention, or a mixer behind its product; linear_add; and mlp_input and
// linear_add, or experts; and a token gate, if it has one.
struct BlockPhases {
  // Block i of a step, whose cache or state is the one in `place` and whose rotary table is `rope`. x and out (rows, C)
  // float32.
  BlockPhases(Arena& arena, const Step& step, int64_t i, size_t place, int64_t rope, const Plan& p, const float* x, float* out)
      : gated(p.attention_gate), mixed(arena.take<float>(step.rows * p.mixed())), middle(arena.take<float>(step.rows * p.c)),
        act(arena.take<float>(p.experts ? 0 : step.rows * p.inner)),
        output(arena, mixed, Type::f32, step.rows, p.output, x, p.ends_early() ? out : middle, Type::f32, p.output_norm,
               step.chosen, p.ranks, float(p.residual_scale)) {
    const int64_t rows = step.rows, *chosen = step.chosen;
    if (p.mixer) {
      inputs = std::make_unique<Linear>(arena, x, Type::f32, rows, p.attention_norm, p.qkv, chosen);
      projected = arena.take<float>(rows * p.mixer->features());
      mixer = p.mixer->phases(arena, projected, mixed, rows, step.states(place));
    } else {
      attend(arena, step, place, rope < 0 ? Rotary() : step.rotary[rope], p, x);
    }
    if (p.ends_early()) return;
    if (p.experts) {
      routed = std::make_unique<RoutedPhases>(arena, p, middle, out, rows);
      return;
    }
    float* behind = p.reduce.k ? arena.take<float>(rows * p.c) : out;
    mlp.emplace(arena, p.parallel ? x : middle, Type::f32, rows, act, p.mlp_norm, p.mlp, p.inner, p.gated, p.kind, chosen,
                p.positive, p.negative);
    down.emplace(arena, act, Type::f32, rows, p.down, middle, behind, Type::f32, p.down_norm, chosen, p.ranks,
                 float(p.residual_scale), p.reduce.k ? 1 : float(p.block_scale));
    if (p.reduce.k)
      token_gate = std::make_unique<TokenGate>(arena, p, behind, step.features(i, p.reduce.w.n), out, rows, chosen);
  }

  void attend(Arena& arena, const Step& step, size_t place, const Rotary& rotary, const Plan& p, const float* x) {
    const int64_t rows = step.rows, *chosen = step.chosen;
    float* q = arena.take<float>(rows * p.heads * p.head_dim);
    const Cache& cache = step.cache.rows[place];
    const bool rotated = step.call.rotated;
    float* found = mixed;
    if (p.latent) {
      latent_input = std::make_unique<LatentInput>(arena, *p.latent, x, rows, q, p.attention_norm, p.qkv, rotary, cache,
                                                   step.slots, rotated, chosen, p.rope_pairs);
      found = arena.take<float>(rows * p.heads * p.head_dim);
      latent_output = std::make_unique<LatentOutput>(arena, *p.latent, found, mixed, rows);
    } else {
      input.emplace(arena, x, Type::f32, rows, q, p.attention_norm, p.qkv, p.heads, p.head_dim, p.q_norm, p.k_norm, rotary,
                    cache, step.slots, rotated, chosen, p.head_norm, p.rope_pairs, gated, p.v_norm, p.written);
    }
    attention.emplace(arena, q, found, Type::f32, rows, p.heads, p.head_dim, cache, step.sequences, rotated, p.scale, p.window,
                      p.softcap, step.cache.seen[place], p.held.sinks);
  }

  // ended(part): called by each worker when it has done its share of a part.
  static constexpr int64_t PARTS = 5;
  template <class Ended>
  void run(Worker& worker, const Ended& ended) const {
    inputs ? inputs->run_into(worker, projected) : latent_input ? latent_input->run(worker) : input->run(worker);
    ended(0);
    if (mixer) mixer->run(worker);
    else attention->run(worker, output.beginning(worker));
    if (latent_output) latent_output->run(worker);
    if (gated) input->multiply_gates(worker, mixed);
    ended(1);
    output.run(worker);
    ended(2);
    if (routed) routed->choose(worker);
    if (mlp) mlp->run(worker);
    ended(3);
    if (routed) routed->run(worker);
    if (down) down->run(worker);
    if (token_gate) token_gate->run(worker);
    ended(4);
  }

  const bool gated;
  float *mixed, *middle, *act, *projected = nullptr;
  LinearAdd output;
  std::optional<AttentionInput> input;
  std::optional<AttentionPhases> attention;
  std::optional<MlpInput> mlp;
  std::optional<LinearAdd> down;
  // In memory of their own, so that what most blocks have lies close together.
  std::unique_ptr<LatentInput> latent_input;
  std::unique_ptr<LatentOutput> latent_output;
  std::unique_ptr<Linear> inputs;
  std::unique_ptr<MixerPhases> mixer;
  std::unique_ptr<RoutedPhases> routed;
  std::unique_ptr<TokenGate> token_gate;
};

Tensor blocks(BlocksCall call) {
  const Tensor x = as_contiguous(call.x);
  const StackPlan& stack = plan_in<StackPlan>(call.stack);
  const int64_t count = int64_t(stack.blocks.size()), c = x.size(-1), rows = x.numel() / c;
  for (auto* tables : {&call.cos, &call.sin, &call.query_factors})
    for (Tensor& one : *tables) one = as_contiguous(one);
  const Maybe& adapters = call.adapters;
  STD_TORCH_CHECK(!adapters || (adapters->scalar_type() == ScalarType::Long && adapters->is_contiguous() &&
                                adapters->numel() == rows),
                  "each row needs its adapter, int64");
  const int64_t* own = adapters ? static_cast<const int64_t*>(adapters->const_data_ptr()) : nullptr;
  const Step step(call, rows, own);
  const size_t cached = step.cache.rows.size(), states = step.cache.held.inputs.size();
  STD_TORCH_CHECK(int64_t(cached + states) == count && (!states || call.state_slots), "each block needs its cache or state: ",
                  "there are ", count, " blocks, ", cached, " caches, ", states, " states");
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float, "the blocks want x in float32");
  Tensor out = empty_like_with_last(x, c);
  Arena arena;
  float* between[] = {arena.take<float>(rows * c), arena.take<float>(rows * c)};
  const float* from = static_cast<const float*>(x.const_data_ptr());
  const Arena::Mark mark = arena.mark();
  std::vector<BlockPhases> phases;
  phases.reserve(count);
  for (const Plan* plan : stack.blocks) ask_for(plan, sizeof(Plan));  // the weights of the last step evicted them
  size_t places[2] = {};  // of the next cache and the next state
  for (int64_t i = 0; i < count; i++) {
    const Plan& p = *stack.blocks[i];
    STD_TORCH_CHECK(p.c == c, "a block of size ", p.c, " cannot take x (…, ", c, ")");
    if (own)
      for (const Few<PackedWeight>& parts : {p.qkv, p.mlp, Few<PackedWeight>(p.output), Few<PackedWeight>(p.down),
                                             Few<PackedWeight>(p.reduce), Few<PackedWeight>(p.expand),
                                             Few<PackedWeight>(p.latent ? p.latent->up : PackedWeight{})})
        for (const PackedWeight& weight : parts)
          for (int64_t r = 0; weight.adapters.a && r < rows; r++)
            STD_TORCH_CHECK(own[r] < weight.adapters.count, "there is no adapter ", own[r]);
    const int64_t rope = stack.held.rope_index[i];
    STD_TORCH_CHECK(rope < int64_t(step.rotary.size()), "there is no rotary table ", rope);
    float* to = i + 1 < count ? between[i % 2] : static_cast<float*>(out.mutable_data_ptr());
    size_t& place = places[p.mixer != nullptr];
    STD_TORCH_CHECK(place < (p.mixer ? states : cached), "a block has no ", p.mixer ? "state" : "cache");
    arena.back_to(mark);  // a block begins when the one before it has ended: they share their memory
    phases.emplace_back(arena, step, i, place++, rope, p, from, to);
    from = to;
  }
  const auto run = [&](const auto& ended) {
    parallel_region([&](Worker& worker) {
      for (int64_t i = 0; i < count; i++)
        phases[i].run(worker, [&](int64_t part) { ended(BlockPhases::PARTS * i + part); });
    });
  };
  if (call.times) {
    PartTimes parts(BlockPhases::PARTS * count);
    run([&](int64_t part) { parts.ended(part); });
    parts.store(*call.times);
  } else {
    run([](int64_t) {});
  }
  return out;
}

}  // namespace hasten

STABLE_TORCH_LIBRARY_FRAGMENT(HASTEN_LIBRARY, m) {
  hasten::define<hasten::attention_input>(m, "attention_input");
  hasten::define<hasten::blocks>(m, "blocks");
  hasten::define<hasten::linear_add>(m, "linear_add");
  hasten::define<hasten::norm_linear>(m, "norm_linear");
  hasten::define<hasten::mlp_input>(m, "mlp_input");
}
STABLE_TORCH_LIBRARY_IMPL(HASTEN_LIBRARY, CPU, m) {
  hasten::implement<hasten::attention_input>(m, "attention_input");
  hasten::implement<hasten::blocks>(m, "blocks");
  hasten::implement<hasten::linear_add>(m, "linear_add");
  hasten::implement<hasten::norm_linear>(m, "norm_linear");
  hasten::implement<hasten::mlp_input>(m, "mlp_input");
}

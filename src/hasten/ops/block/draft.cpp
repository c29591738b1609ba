// Several tokens of B sequences after each other, each drawn from the logits after the one before it: what a model that
// drafts does, without a return to Python between them, which takes longer than a small model's step.
#include <algorithm>
#include <bit>

#include "calls.h"

namespace hasten {

// linear/unpacked.cpp and draw/draw.cpp
Tensor unpacked_rows(Tensor ids, Tensor data, Maybe scales, Maybe zeros, Maybe outer, int64_t out_features,
                     int64_t in_features, int64_t group_size);
Tensor draw(Tensor scores, Tensor seeds, Tensor steps);

// tokens (N,) int64: of each of B sequences its `counts` ones that are not in the cache yet, end to end; the first goes to
// position `starts`. The first of `most` steps takes those, each other one more of every sequence. block_table (B, blocks)
// int64. frequencies: of each rotary table (dim/2,) float32; its cosines and sines are multiplied with `factors`.
// stack, cache: as in BlocksCall. table (V, C) bf16: the embedding, where it is not the head's weight. norm: before
// the head, whose weight has out_features rows. Step i draws for row b with seeds[b], steps[b] + i and temperatures[b]
// float32, 0 for the likeliest. It ends early when for no row the chance that all its tokens are accepted, likely[b] times
// that of each token's kind, reaches `floor`; a token's kind is how many of `thresholds` its share of probability reaches.
struct DraftCall {
  Tensor tokens;
  std::vector<int64_t> counts, starts;
  int64_t most = 0;
  Tensor block_table;
  int64_t block_size = 0;
  std::vector<Tensor> frequencies;
  std::vector<double> factors;
  Tensor stack, cache;
  Maybe table;
  double embedding_scale = 1;
  int64_t hidden_size = 0;
  NormFields norm;
  WeightFields head;
  int64_t out_features = 0, vocab_size = 0;
  double softcap = 0;
  Tensor seeds, steps, temperatures;
  std::vector<double> thresholds, chances, likely;
  double floor = 0;
  HASTEN_FIELDS(tokens, counts, starts, most, block_table, block_size, frequencies, factors, stack, cache, table,
                embedding_scale, hidden_size, norm, head, out_features, vocab_size, softcap, seeds, steps, temperatures,
                thresholds, chances, likely, floor)
};

// Rows of the embedding in bf16, times `factor`, in bf16 again.
static void scale_rows(float* x, int64_t count, float factor) {
  auto rounded = [](F32 v) { return as<F32>(round_bf16(v) & 0xffff0000u); };
  const F32 by = rounded(splat(factor));
  alignas(64) float part[LANES];
  for (int64_t i = 0; i < count; i += LANES) {
    const int64_t n = std::min<int64_t>(LANES, count - i);
    std::copy(x + i, x + i + n, part);
    F32 value = rounded(load(part));
    if (factor != 1.0f) value = rounded(value * by);
    store(part, value);
    std::copy(part, part + n, x + i);
  }
}

// Positions and slots of a step's tokens: those of the first step, or one further in every row.
struct Places {
  Places(int64_t step, const DraftCall& call)
      : query_start_loc(empty({int64_t(call.counts.size()) + 1}, ScalarType::Long)),
        seq_lens(empty({int64_t(call.counts.size())}, ScalarType::Long)) {
    const std::vector<int64_t>& counts = call.counts;
    const std::vector<Tensor>& frequencies = call.frequencies;
    const int64_t rows = int64_t(counts.size()), blocks_of_a_row = call.block_table.size(1), block_size = call.block_size;
    auto* loc = static_cast<int64_t*>(query_start_loc.mutable_data_ptr());
    auto* lengths = static_cast<int64_t*>(seq_lens.mutable_data_ptr());
    loc[0] = 0;
    for (int64_t b = 0; b < rows; b++) {
      loc[b + 1] = loc[b] + (step ? 1 : counts[b]);
      lengths[b] = call.starts[b] + counts[b] + step;
    }
    slot_mapping = empty({loc[rows]}, ScalarType::Long);
    auto* slots = static_cast<int64_t*>(slot_mapping.mutable_data_ptr());
    const auto* tables = static_cast<const int64_t*>(call.block_table.const_data_ptr());
    std::vector<int64_t> positions(loc[rows]);
    for (int64_t b = 0; b < rows; b++)
      for (int64_t i = loc[b]; i < loc[b + 1]; i++) {
        const int64_t position = lengths[b] - loc[b + 1] + i;
        positions[i] = position;
        slots[i] = tables[b * blocks_of_a_row + position / block_size] * block_size + position % block_size;
      }
    for (size_t t = 0; t < frequencies.size(); t++) {
      const int64_t half = frequencies[t].numel();
      const auto* frequency = static_cast<const float*>(frequencies[t].const_data_ptr());
      cos.push_back(empty({loc[rows], half}, ScalarType::Float));
      sin.push_back(empty({loc[rows], half}, ScalarType::Float));
      auto* c = static_cast<float*>(cos.back().mutable_data_ptr());
      auto* s = static_cast<float*>(sin.back().mutable_data_ptr());
      for (int64_t i = 0; i < loc[rows] * half; i++) {
        const float angle = float(positions[i / half]) * frequency[i % half];
        c[i] = std::cos(angle) * float(call.factors[t]);
        s[i] = std::sin(angle) * float(call.factors[t]);
      }
    }
  }
  Tensor query_start_loc, seq_lens, slot_mapping;
  std::vector<Tensor> cos, sin;
};

struct Best {
  int64_t token;
  float score;
};

// The largest score, the first of equals.
static Best largest_score(const float* scores, int64_t count) {
  F32 most = splat(-INFINITY);
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) most = larger(load(scores + i), most);
  float best = max_lanes(most);
  for (; i < count; i++) best = std::max(best, scores[i]);
  const int64_t at = std::find(scores, scores + count, best) - scores;
  return {at < count ? at : 0, best};  // of numbers that are none the first
}

// The sum of e^(score - most).
static float sum_of_exp(const float* scores, int64_t count, float most) {
  F32 sum{};
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) sum += exp(load(scores + i) - splat(most));
  float all = sum_lanes(sum);
  for (; i < count; i++) all += std::exp(scores[i] - most);
  return all;
}

// Returns (steps that were made, B, 2) float64: token and share of probability.
Tensor draft_in_one_call(DraftCall call) {
  const Tensor &tokens = call.tokens, &block_table = call.block_table, &temperatures = call.temperatures;
  const std::vector<int64_t>&counts = call.counts, &starts = call.starts;
  const std::vector<double>& thresholds = call.thresholds;
  const Maybe& table = call.table;
  const WeightFields& head = call.head;
  const int64_t rows = int64_t(counts.size()), most = call.most, c = call.hidden_size, n = call.out_features;
  const int64_t vocabulary = call.vocab_size, block_size = call.block_size;
  for (const Tensor& each : {tokens, block_table, call.seeds, call.steps})
    STD_TORCH_CHECK(each.is_contiguous() && each.scalar_type() == ScalarType::Long,
                    "tokens, block_table, seeds and steps are int64");
  STD_TORCH_CHECK(rows && int64_t(starts.size()) == rows && block_table.dim() == 2 && block_table.size(0) == rows &&
                      call.seeds.numel() == rows && call.steps.numel() == rows,
                  "each row needs its tokens, its blocks, its seed and its step");
  STD_TORCH_CHECK(call.frequencies.size() == call.factors.size(), "each rotary table needs its factor");
  const int64_t blocks_of_a_row = block_table.size(1);
  int64_t given_tokens = 0;
  for (int64_t b = 0; b < rows; b++) {
    STD_TORCH_CHECK(counts[b] > 0 && starts[b] >= 0 && starts[b] + counts[b] + most - 1 <= blocks_of_a_row * block_size,
                    "row ", b, " has no room for ", counts[b], " tokens from ", starts[b], " on and ", most - 1, " more");
    given_tokens += counts[b];
  }
  STD_TORCH_CHECK(tokens.numel() == given_tokens, "there are ", tokens.numel(), " tokens, not ", given_tokens);
  STD_TORCH_CHECK(temperatures.numel() == rows && temperatures.is_contiguous() &&
                      temperatures.scalar_type() == ScalarType::Float && int64_t(call.likely.size()) == rows,
                  "each row needs its temperature, float32, and its chance");
  STD_TORCH_CHECK(call.chances.size() == thresholds.size() + 1, "there is one kind more than there are thresholds");
  STD_TORCH_CHECK(vocabulary > 0 && vocabulary <= n, "there are ", n, " logits, fewer than ", vocabulary);
  STD_TORCH_CHECK(!table || (table->scalar_type() == ScalarType::BFloat16 && table->is_contiguous() && table->dim() == 2 &&
                             table->size(0) >= vocabulary && table->size(1) == c),
                  "the embedding is bfloat16 (V, ", c, ")");
  const auto* first = static_cast<const int64_t*>(call.steps.const_data_ptr());
  const auto* temperature = static_cast<const float*>(temperatures.const_data_ptr());
  const bool draws = std::any_of(temperature, temperature + rows, [](float t) { return t > 0; });
  Tensor drafted = empty({rows}, ScalarType::Long), places = empty({rows}, ScalarType::Long);
  auto* id = static_cast<int64_t*>(drafted.mutable_data_ptr());
  auto* place = static_cast<int64_t*>(places.mutable_data_ptr());
  std::vector<double> found;
  for (int64_t step = 0; step < most; step++) {
    const Tensor& ids = step ? drafted : tokens;
    const Places at(step, call);
    const auto* given = static_cast<const int64_t*>(ids.const_data_ptr());
    Tensor x = table ? empty({ids.numel(), c}, ScalarType::Float)
                     : unpacked_rows(ids, head.data, head.scales, head.zeros, head.outer, vocabulary, c, head.group_size);
    float* state = static_cast<float*>(x.mutable_data_ptr());
    for (int64_t i = 0; table && i < ids.numel(); i++) {
      STD_TORCH_CHECK(given[i] >= 0 && given[i] < vocabulary, "there is no row ", given[i], " of ", vocabulary);
      const auto* from = static_cast<const uint16_t*>(table->const_data_ptr()) + given[i] * c;
      for (int64_t k = 0; k < c; k++) state[i * c + k] = std::bit_cast<float>(uint32_t(from[k]) << 16);
    }
    scale_rows(state, ids.numel() * c, float(call.embedding_scale));
    x = blocks({.x = x, .stack = call.stack, .cache = call.cache, .cos = at.cos, .sin = at.sin,
                .slot_mapping = at.slot_mapping, .query_start_loc = at.query_start_loc, .seq_lens = at.seq_lens,
                .block_table = block_table, .block_size = block_size});
    if (!step) {  // each sequence's last token is scored
      const auto* from = static_cast<const float*>(x.const_data_ptr());
      Tensor last = empty({rows, c}, ScalarType::Float);
      for (int64_t b = 0, end = 0; b < rows; b++) {
        end += counts[b];
        std::copy_n(from + (end - 1) * c, c, static_cast<float*>(last.mutable_data_ptr()) + b * c);
      }
      x = last;
    }
    Tensor logits = norm_linear({.x = x, .norm = call.norm, .weight = head, .out_features = n});
    float* all = static_cast<float*>(logits.mutable_data_ptr());
    Tensor scores = empty({rows, draws ? vocabulary : 0}, ScalarType::Float);
    float* score = static_cast<float*>(scores.mutable_data_ptr());
    std::vector<Best> best(rows);
    std::vector<float> sums(rows);
    for_chunks(rows, [&](int64_t b) {
      float* own = all + b * n;
      if (const float cap = float(call.softcap); cap > 0)
        for (int64_t i = 0; i < vocabulary; i++) own[i] = cap * std::tanh(own[i] / cap);
      best[b] = largest_score(own, vocabulary);
      sums[b] = sum_of_exp(own, vocabulary, best[b].score);
      place[b] = first[b] + step;
      const float by = temperature[b] > 0 ? temperature[b] : 1.0f;
      for (int64_t i = 0; draws && i < vocabulary; i++) score[b * vocabulary + i] = (own[i] - best[b].score) / by;
    });
    const Tensor drawn = draws ? draw(scores, call.seeds, places) : drafted;
    const auto* token = static_cast<const int64_t*>(drawn.const_data_ptr());
    double best_chance = 0;
    for (int64_t b = 0; b < rows; b++) {
      // Where the draw is too near to tell, a guess is good enough.
      id[b] = temperature[b] > 0 && token[b] >= 0 ? token[b] : best[b].token;
      const double share = std::exp(all[b * n + id[b]] - best[b].score) / sums[b];
      const auto kind = std::count_if(thresholds.begin(), thresholds.end(), [&](double least) { return share >= least; });
      call.likely[b] *= call.chances[kind];
      best_chance = std::max(best_chance, call.likely[b]);
      found.push_back(double(id[b]));
      found.push_back(share);
    }
    if (best_chance < call.floor) break;
  }
  Tensor out = empty({rows ? int64_t(found.size()) / (2 * rows) : 0, rows, 2}, ScalarType::Double);
  std::copy(found.begin(), found.end(), static_cast<double*>(out.mutable_data_ptr()));
  return out;
}

}  // namespace hasten

STABLE_TORCH_LIBRARY_FRAGMENT(HASTEN_LIBRARY, m) {
  hasten::define<hasten::draft_in_one_call>(m, "draft_in_one_call");
}
STABLE_TORCH_LIBRARY_IMPL(HASTEN_LIBRARY, CPU, m) {
  hasten::implement<hasten::draft_in_one_call>(m, "draft_in_one_call");
}

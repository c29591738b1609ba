// The draw of a token: argmax of score - log E with E ~ Exp(1) from SplitMix64, as operator.py defines it.
//
// Logarithms are taken of few tokens only. With the noise's uniform number u, E is at least u, and log2 u is at least what
// exponent and mantissa of u say as one fixed-point number. So an integer, a conversion and a multiplication bound what a
// token can have, and seldom is that as much as the best one so far has.
#include <bit>
#include <cmath>

#include "../tensors.h"

namespace hasten {

constexpr int64_t BLOCK = 256;          // tokens whose noise is made at a time
constexpr int64_t SEGMENT = 1 << 15;    // tokens of a row that one thread takes
constexpr float MOST_NOISE = 37.5f;     // -log of the least E, 2^-54
constexpr int64_t UNDECIDED = -1;
constexpr uint64_t GOLDEN = 0x9e3779b97f4a7c15;

INLINE uint64_t mixed(uint64_t z) {
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  return z ^ z >> 31;
}

// The two best tokens of a segment, in nearly exact arithmetic.
struct Found {
  double best = -INFINITY, second = -INFINITY;
  int64_t token = 0;
  bool strange = false;  // a score is NaN or +infinity
  void take(double score, int64_t id) {
    if (score > best) second = best, best = score, token = id;
    else second = std::max(second, score);
  }
  void take(float score, uint64_t bits, int64_t id) {
    if (score == -INFINITY) return;
    strange |= !(score < INFINITY);
    const double u = std::clamp(float(int64_t(bits >> 11)) * 0x1p-53f, 0x1p-54f, 1 - 0x1p-24f);
    take(score - std::log(-std::log1p(-u)), id);
  }
  // The reference rounds to float32 three times on the way, which may decide between scores that are nearer than this.
  int64_t decided() const {
    if (best == -INFINITY) return strange ? UNDECIDED : 0;
    return strange || second > best - (2e-5 + 5e-7 * std::abs(best)) ? UNDECIDED : token;
  }
};

// Tokens first … end of one row.
static Found best_of(const float* scores, int64_t first, int64_t end, uint64_t key) {
  constexpr float ln2 = 0.693147181f;
  Found found;
  // What a bound has to reach, with room for its own rounding.
  auto least = [&] { return float(found.best - (0.01 + 1e-6 * std::abs(found.best))); };
  alignas(64) uint32_t upper[BLOCK];
  alignas(64) float bounds[BLOCK], last[BLOCK];
  for (int64_t start = first; start < end; start += BLOCK) {
    const int64_t count = std::min(BLOCK, end - start);
    const float* block = scores + start;
    if (count < BLOCK) {
      std::fill(std::copy(block, block + count, last), last + BLOCK, -INFINITY);
      block = last;
    }
    const F32 wanted = splat(least());
    bool far = true;
    for (int64_t i = 0; i < BLOCK; i += LANES) far &= all_below(load(block + i), wanted - MOST_NOISE);
    if (far) continue;
    const uint64_t states = key + uint64_t(start + 1) * GOLDEN;
    uint64_t state = states;
    for (int64_t i = 0; i < BLOCK; i++, state += GOLDEN) upper[i] = uint32_t(mixed(state) >> 40);
    far = true;
    for (int64_t i = 0; i < BLOCK; i += LANES) {
      // u is at least upper·2^-24. The bits of a float32 are 2^23 times 127 and its logarithm, or a little less.
      const F32 log2 = to_float(as<I32>(to_float(as<I32>(load_line(upper + i))))) * 0x1p-23f - 151.0f;
      const F32 bound = multiply_add(log2, splat(-ln2), load(block + i));
      far &= all_below(bound, wanted);
      store(bounds + i, bound);
    }
    if (far) continue;
    for (int64_t i = 0; i < count; i++)
      if (!(bounds[i] < least())) found.take(block[i], mixed(states + uint64_t(i) * GOLDEN), start + i);
  }
  return found;
}

// scores (B, V) float32, seeds and steps (B,) -> tokens (B,) int64; -1 where the best two are too near, or a score is no
// number: the reference decides then.
Tensor draw(Tensor scores, Tensor seeds, Tensor steps) {
  STD_TORCH_CHECK(scores.dim() == 2 && scores.scalar_type() == ScalarType::Float, "scores are float32 (B, V)");
  const int64_t rows = scores.size(0), vocabulary = scores.size(1);
  for (const Tensor& each : {seeds, steps})
    STD_TORCH_CHECK(each.numel() == rows && each.is_contiguous() && each.scalar_type() == ScalarType::Long,
                    "seeds and steps are int64, one a row");
  scores = as_contiguous(scores);
  const float* from = static_cast<const float*>(scores.const_data_ptr());
  const auto* seed = static_cast<const int64_t*>(seeds.const_data_ptr());
  const auto* step = static_cast<const int64_t*>(steps.const_data_ptr());
  const int64_t segments = std::max<int64_t>(1, (vocabulary + SEGMENT - 1) / SEGMENT);
  std::vector<Found> found(rows * segments);
  for_chunks(rows * segments, [&](int64_t chunk) {
    const int64_t row = chunk / segments, first = chunk % segments * SEGMENT;
    const uint64_t key = mixed(mixed(uint64_t(seed[row])) + uint64_t(step[row]) * GOLDEN);
    found[chunk] = best_of(from + row * vocabulary, first, std::min(vocabulary, first + SEGMENT), key);
  });
  Tensor tokens = empty({rows}, ScalarType::Long);
  auto* out = static_cast<int64_t*>(tokens.mutable_data_ptr());
  for (int64_t row = 0; row < rows; row++) {
    Found all;
    for (int64_t s = 0; s < segments; s++) {
      const Found& part = found[row * segments + s];
      all.take(part.best, part.token);
      all.second = std::max(all.second, part.second);
      all.strange |= part.strange;
    }
    out[row] = all.decided();
  }
  return tokens;
}

// The `count` largest numbers of one row, descending, padded with -infinity if there are fewer.
static void largest_of(const float* scores, int64_t length, int64_t count, float* out) {
  const int64_t room = 4 * count + LANES;
  float* kept = scratch<float, 50>(room);
  int64_t size = 0;
  float limit = -INFINITY;  // `count` numbers are above it, so a number below it is not among the largest
  auto cut = [&] {
    if (size <= count) return;
    std::nth_element(kept, kept + count - 1, kept + size, std::greater<>());
    size = count, limit = kept[count - 1];
  };
  auto take = [&](float score) { kept[size] = score, size += score > limit; };
  int64_t i = 0;
  for (; i + LANES <= length; i += LANES) {
    if (!any_above(load(scores + i), splat(limit))) continue;
    for (int64_t j = 0; j < LANES; j++) take(scores[i + j]);
    if (size + LANES > room) cut();
  }
  for (; i < length; i++) take(scores[i]);
  cut();
  std::sort(kept, kept + size, std::greater<>());
  std::fill(std::copy(kept, kept + size, out), out + count, -INFINITY);
}

// scores (B, V) float32 -> (B, count): the largest of each row, descending.
Tensor largest(Tensor scores, int64_t count) {
  STD_TORCH_CHECK(scores.dim() == 2 && scores.scalar_type() == ScalarType::Float, "scores are float32 (B, V)");
  const int64_t rows = scores.size(0), vocabulary = scores.size(1);
  STD_TORCH_CHECK(count > 0 && count <= vocabulary, "there are ", vocabulary, " scores in a row, not ", count);
  scores = as_contiguous(scores);
  Tensor out = empty({rows, count}, ScalarType::Float);
  const float* from = static_cast<const float*>(scores.const_data_ptr());
  float* to = static_cast<float*>(out.mutable_data_ptr());
  for_chunks(rows, [&](int64_t row) { largest_of(from + row * vocabulary, vocabulary, count, to + row * count); });
  return out;
}

// The place of a row's largest number, the first of equals; if some are no numbers the first of those.
static int64_t likeliest_of(const float* scores, int64_t length) {
  F32 most = splat(-INFINITY);
  I32 magnitude = {};  // read as integers, magnitudes order like the numbers, with NaN above all of them
  int64_t i = 0;
  for (; i + LANES <= length; i += LANES) {
    const F32 own = load(scores + i);
    most = larger(own, most);
    const I32 bits = as<I32>(abs(own));
    magnitude = select(bits > magnitude, bits, magnitude);
  }
  float best = max_lanes(most);
  bool strange = max_lanes(magnitude) > std::bit_cast<int32_t>(INFINITY);
  for (; i < length; i++) {
    best = std::max(best, scores[i]);
    strange |= std::isnan(scores[i]);
  }
  if (strange) return std::find_if(scores, scores + length, [](float own) { return std::isnan(own); }) - scores;
  for (i = 0; i + LANES <= length && all_below(load(scores + i), splat(best));) i += LANES;
  return std::find(scores + i, scores + length, best) - scores;
}

// scores (B, V) float32 -> (B,) int64: where the largest of each row is.
Tensor likeliest(Tensor scores) {
  STD_TORCH_CHECK(scores.dim() == 2 && scores.size(1) && scores.scalar_type() == ScalarType::Float,
                  "scores are float32 (B, V)");
  if (scores.stride(1) != 1) scores = as_contiguous(scores);
  const int64_t rows = scores.size(0), vocabulary = scores.size(1), stride = scores.stride(0);
  Tensor out = empty({rows}, ScalarType::Long);
  const float* from = static_cast<const float*>(scores.const_data_ptr());
  auto* to = static_cast<int64_t*>(out.mutable_data_ptr());
  for_chunks(rows, [&](int64_t row) { to[row] = likeliest_of(from + row * stride, vocabulary); });
  return out;
}

}  // namespace hasten

STABLE_TORCH_LIBRARY_FRAGMENT(HASTEN_LIBRARY, m) {
  m.def("draw(Tensor scores, Tensor seeds, Tensor steps) -> Tensor");
  m.def("largest(Tensor scores, int count) -> Tensor");
  m.def("likeliest(Tensor scores) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(HASTEN_LIBRARY, CPU, m) {
  m.impl("draw", TORCH_BOX(&hasten::draw));
  m.impl("largest", TORCH_BOX(&hasten::largest));
  m.impl("likeliest", TORCH_BOX(&hasten::likeliest));
}

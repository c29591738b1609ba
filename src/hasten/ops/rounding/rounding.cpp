// Weights rounded to integers: the search of a group's scale, rounding to nearest, and GPTQ's columns.
//
// hasten/quantization/rounding.py and gptq.py are the reference and explain the method. Here 16 rows of the weight are
// the lanes of a vector, so each row has its own sums, whatever rows are beside it. A call is one thread's: Python gives
// each thread slices of the rows (hasten/quantization/blocks.py).
// The arithmetic is the reference's; only sums are in another order. Numbers that are not finite are left to the
// reference, which raises the error.
#include "../tensors.h"

namespace hasten {

constexpr int64_t TILE_ROWS = 64;  // rows of a weight that are rounded together
constexpr int STRIPS = TILE_ROWS / LANES;
constexpr int64_t SPAN = 128;    // errors whose sum is computed before it is subtracted from a column
constexpr int64_t COLUMNS = 32;  // columns that are brought up to date together
constexpr int AT_ONCE = 4;       // columns of one tile of that product

// A format's integers, where its scales are stored, and the factors by which the search shrinks a group's range.
struct IntegerGrid {
  float lowest, highest, middle, steps;  // steps: of half the range of a symmetric group
  bool symmetric;
  ScalarType type;  // of the scales
  std::vector<double> factors;

  IntegerGrid(const Tensor& values, const Tensor& scales, bool symmetric, int64_t bits, std::vector<double> factors)
      : symmetric(symmetric), type(scales.scalar_type()), factors(std::move(factors)) {
    const bool bytes = values.scalar_type() == ScalarType::Char;
    STD_TORCH_CHECK(bytes ? symmetric && bits == 8 : values.scalar_type() == ScalarType::Byte && bits > 1 && bits < 7,
                    "no integers of ", bits, " bits are rounded to");
    STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half,
                    "scales are float32, bfloat16 or float16");
    middle = bytes ? 0.0f : float(1 << (bits - 1));
    lowest = bytes ? -127.0f : 0.0f;
    highest = bytes ? 127.0f : float((1 << bits) - 1);
    steps = bytes ? 127.0f : middle - 0.5f;
  }
};

struct GroupScale {
  F32 scale, zero;
};

static INLINE F32 square_root(F32 v) {
#if HASTEN_512
  return (F32)_mm512_sqrt_ps((__m512)v);
#else
  return each_part<F32>(v, [](auto part) {
#if defined(__AVX2__)
    return (Native<float>::type)_mm256_sqrt_ps((__m256)part);
#elif defined(__SSE2__)
    return (Native<float>::type)_mm_sqrt_ps((__m128)part);
#elif defined(__aarch64__)
    return (Native<float>::type)vsqrtq_f32((float32x4_t)part);
#else
    for (int i = 0; i < NATIVE; i++) part[i] = std::sqrt(part[i]);
    return part;
#endif
  });
#endif
}

// The nearest whole number, ties to even, of values up to 2^22.
static INLINE F32 whole(F32 v) { return v + 12582912.0f - 12582912.0f; }
static INLINE F32 clamp(F32 v, F32 low, F32 high) { return min(max(v, low), high); }

// A product that is not fused with what follows: its last bit may decide whether a scale is rounded up.
static INLINE F32 rounded(F32 product) {
  alignas(64) float own[LANES];
  store(own, product);
  asm volatile("" : : "r"(own) : "memory");
  return load(own);
}

// A positive scale as its dtype holds it, rounded up; never zero, and infinite where it is too large.
static INLINE F32 stored(F32 scale, ScalarType type) {
  if (type == ScalarType::Half) {
    scale = max(scale, splat(0x1p-24f));
    const F32 normal = as<F32>((as<U32>(scale) + 0x1fffu) & 0xffffe000u);
    const F32 units = scale * 0x1p24f, down = whole(units);  // subnormal numbers are multiples of 2^-24
    const F32 subnormal = select(down < units, down + 1.0f, down) * 0x1p-24f;
    return select(scale < splat(0x1p-14f), subnormal, select(normal > splat(65504.0f), splat(INFINITY), normal));
  }
  scale = max(scale, splat(0x1p-126f));
  return type == ScalarType::Float ? scale : as<F32>((as<U32>(scale) + 0xffffu) & 0xffff0000u);
}

// Chooses the scale and the zero of a group in 16 rows. value(k), weight(k): its numbers, and the factors of their
// errors. `poison` becomes NaN in the lanes that hold numbers which are not finite.
template <class Value, class Weight>
static INLINE GroupScale choose(const IntegerGrid& grid, int64_t count, const Value& value, const Weight& weight,
                                F32& poison) {
  F32 low{}, high{};
  for (int64_t k = 0; k < count; k++) {
    const F32 v = value(k);
    low = min(v, low), high = max(v, high);
    poison += v * 0.0f;
  }
  auto range = [&](F32 low, F32 high) -> GroupScale {
    if (grid.symmetric) return {stored(max(-low, high) / grid.steps, grid.type), splat(grid.middle)};
    const F32 scale = stored((high - low) / grid.highest, grid.type);
    return {scale, clamp(whole(-low / scale), F32{}, splat(grid.highest))};
  };
  auto error = [&](const GroupScale& now) {  // the root of the sum of squares
    const F32 inverse = 1.0f / now.scale, lowest = -now.zero, highest = grid.highest - now.zero;
    F32 sum{};
    for (int64_t k = 0; k < count; k++) {
      const F32 exact = value(k) * inverse;
      const F32 wrong = (exact - whole(clamp(exact, lowest, highest))) * weight(k);
      sum = multiply_add(wrong, wrong, sum);
    }
    return square_root(sum) * abs(now.scale);
  };
  GroupScale best = range(low, high);
  poison += best.scale * 0.0f;
  if (grid.factors.empty()) return best;
  F32 least = error(best);
  for (const double factor : grid.factors) {
    GroupScale now;
    if (grid.symmetric) {  // the lowest integer is the group's extreme value
      const F32 scale = stored(max(-low, high) * float(factor / grid.middle), grid.type);
      now = {select(high > -low, -scale, scale), splat(grid.middle)};
    } else {
      now = range(rounded(low * float(factor)), rounded(high * float(factor)));
    }
    const F32 found = error(now);
    const auto better = found < least;
    least = select(better, found, least);
    best = {select(better, now.scale, best.scale), select(better, now.zero, best.zero)};
  }
  return best;
}

// The nearest integer to v in steps of the scale from the zero, as far as there are integers.
static INLINE F32 steps_of(const IntegerGrid& grid, F32 v, const GroupScale& own) {
  return whole(clamp(v / own.scale, grid.lowest - own.zero, grid.highest - own.zero));
}

// Where the integers, scales and zeros of rows go.
struct Rounded {
  const IntegerGrid& grid;
  int64_t k, groups;
  uint8_t* values;
  void* scales;
  uint8_t* zeros;

  Rounded(const IntegerGrid& grid, Tensor& values, Tensor& scales, std::optional<Tensor>& zeros, int64_t rows,
          int64_t k, int64_t groups)
      : grid(grid), k(k), groups(groups), values(static_cast<uint8_t*>(values.mutable_data_ptr())),
        scales(scales.mutable_data_ptr()),
        zeros(zeros ? static_cast<uint8_t*>(zeros->mutable_data_ptr()) : nullptr) {
    STD_TORCH_CHECK(values.is_contiguous() && values.numel() == rows * k, "the integers do not fit the weight");
    STD_TORCH_CHECK(scales.is_contiguous() && scales.numel() == rows * groups, "the scales do not fit the groups");
    STD_TORCH_CHECK(!zeros || (zeros->is_contiguous() && zeros->numel() == rows * groups &&
                               zeros->scalar_type() == ScalarType::Byte),
                    "the zeros do not fit the groups");
  }

  // The scale and zero of `count` rows from `row` on.
  void put_scale(int64_t row, int64_t count, int64_t group, const GroupScale& own) const {
    for (int i = 0; i < count; i++) {
      const int64_t at = (row + i) * groups + group;
      const float scale = own.scale[i];
      uint32_t bits;
      std::memcpy(&bits, &scale, 4);
      if (grid.type == ScalarType::Float) static_cast<float*>(scales)[at] = scale;
      else static_cast<uint16_t*>(scales)[at] = grid.type == ScalarType::Half ? half_of(scale) : uint16_t(bits >> 16);
      if (zeros) zeros[at] = uint8_t(own.zero[i]);
    }
  }

  // The integers of `count` rows in one column.
  void put(int64_t row, int64_t count, int64_t column, F32 integers) const {
    alignas(64) int8_t bytes[LANES];
    store_int8(bytes, to_int(integers));
    for (int i = 0; i < count; i++) values[(row + i) * k + column] = uint8_t(bytes[i]);
  }

  // The bits of a number that float16 holds exactly.
  static uint16_t half_of(float exact) {
    uint32_t bits;
    std::memcpy(&bits, &exact, 4);
    const float size = std::fabs(exact);
    const uint32_t rest = size < 0x1p-14f ? uint32_t(size * 0x1p24f) : ((bits & 0x7fffffffu) >> 13) - (112u << 10);
    return uint16_t((bits >> 16 & 0x8000u) | rest);
  }
};

static bool finite(F32 poison) { return all_below(poison, splat(1.0f)); }

// Rounds w (R, K) float32 to nearest, in groups of `group_size` columns; writes values (R, K), scales and zeros
// (R, groups). by_size: errors in the search count by rms + |w| (round_weight). Returns whether all numbers are finite.
bool round_groups(Tensor w, int64_t group_size, bool by_size, int64_t bits, std::vector<double> factors, Tensor values,
                  Tensor scales, std::optional<Tensor> zeros) {
  STD_TORCH_CHECK(w.dim() == 2 && w.scalar_type() == ScalarType::Float, "the weight is float32 (R, K)");
  STD_TORCH_CHECK(group_size > 0, "groups of ", group_size, " columns");
  w = as_contiguous(w);
  const int64_t rows = w.size(0), k = w.size(1), groups = (k + group_size - 1) / group_size;
  const IntegerGrid grid(values, scales, !zeros, bits, std::move(factors));
  const Rounded target(grid, values, scales, zeros, rows, k, groups);
  const float* from = static_cast<const float*>(w.const_data_ptr());
  float* own = scratch<float, 60>(group_size * LANES);
  float* weights = scratch<float, 61>(group_size * LANES);
  F32 poison{};
  for (int64_t row = 0; row < rows; row += LANES) {
    const int64_t count = std::min<int64_t>(LANES, rows - row);
    for (int64_t group = 0; group < groups; group++) {
      const int64_t first = group * group_size, size = std::min(group_size, k - first);
      if (size < group_size || count < LANES) std::fill(own, own + group_size * LANES, 0.0f);
      for (int64_t i = 0; i < count; i++)
        for (int64_t j = 0; j < size; j++) own[j * LANES + i] = from[(row + i) * k + first + j];
      auto value = [&](int64_t j) { return load(own + j * LANES); };
      if (by_size) {
        F32 squares{};
        for (int64_t j = 0; j < size; j++) squares = multiply_add(value(j), value(j), squares);
        const F32 rms = square_root(squares / float(group_size));
        for (int64_t j = 0; j < size; j++) store(weights + j * LANES, square_root(rms + abs(value(j))));
      }
      auto weight = [&](int64_t j) { return load(weights + j * LANES); };
      auto alike = [](int64_t) { return splat(1.0f); };
      const GroupScale found =
          by_size ? choose(grid, size, value, weight, poison) : choose(grid, size, value, alike, poison);
      target.put_scale(row, count, group, found);
      for (int64_t j = 0; j < size; j++)
        target.put(row, count, first + j, steps_of(grid, value(j), found) + found.zero);
    }
  }
  return finite(poison);
}

// The columns in the order they are rounded in: U's transpose (K, K), their places, and the columns of each group.
struct OrderedColumns {
  const float* lower;
  const int64_t* order;
  int64_t k, group_size;
  std::vector<std::vector<int64_t>> members;  // by group, in their order
  std::vector<float> remaining;               // 1/U[i, i]: what remains of an error in column i

  OrderedColumns(const float* lower, const int64_t* order, int64_t k, int64_t group_size)
      : lower(lower), order(order), k(k), group_size(group_size), members((k + group_size - 1) / group_size) {
    for (int64_t i = 0; i < k; i++) {
      STD_TORCH_CHECK(order[i] >= 0 && order[i] < k, "the order has no column ", order[i]);
      members[order[i] / group_size].push_back(i);
      remaining.push_back(1.0f / diagonal(i));
    }
  }
  float diagonal(int64_t i) const { return lower[i * (k + 1)]; }
};

// Up to TILE_ROWS rows: w[i] are the numbers of column i, and once it is rounded its errors.
class RowTile {
 public:
  RowTile(const OrderedColumns& columns, const float* from, int64_t stride, int64_t rows)
      : columns_(columns), w_(scratch<float, 62>(columns.k * TILE_ROWS)), current_(columns.k) {
    for (int64_t i = 0; i < columns.k; i++) {
      float* to = w_ + i * TILE_ROWS;
      std::fill(std::copy(from + i * stride, from + i * stride + rows, to), to + TILE_ROWS, 0.0f);
    }
  }

  F32 at(int64_t i, int strip) const { return load(w_ + i * TILE_ROWS + strip * LANES); }
  void put(int64_t i, int strip, F32 v) { store(w_ + i * TILE_ROWS + strip * LANES, v); }

  // Makes `count` columns as they are once the errors of all columns before `end` are spread: column(0), column(1), …
  template <class Column>
  void update(int64_t count, const Column& column, int64_t end) {
    for (int64_t i = 0; i < count;) {
      int64_t same = 1;
      while (same < AT_ONCE && i + same < count && current_[column(i + same)] == current_[column(i)]) same++;
      int64_t which[AT_ONCE];
      for (int64_t c = 0; c < same; c++) which[c] = column(i + c);
      if (same == AT_ONCE) {
        // With 32 registers all strips at once, with 16 one by one.
        constexpr int strips = HASTEN_512 ? STRIPS : 1;
        for (int s = 0; s < STRIPS; s += strips) subtract<AT_ONCE, strips>(which, s, end);
      } else {
        for (int64_t c = 0; c < same; c++) subtract<1, STRIPS>(which + c, 0, end);
      }
      for (int64_t c = 0; c < same; c++) current_[which[c]] = end;
      i += same;
    }
  }

 private:
  template <int N, int S>
  void subtract(const int64_t* which, int strip, int64_t end) {
    float* column[N];
    const float* factors[N];
    for (int c = 0; c < N; c++) {
      column[c] = w_ + which[c] * TILE_ROWS + strip * LANES;
      factors[c] = columns_.lower + which[c] * columns_.k;
    }
    for (int64_t first = current_[which[0]]; first < end; first += SPAN) {
      const int64_t last = std::min(end, first + SPAN);
      F32 sums[N][S];
      EACH(c, N, EACH(s, S, sums[c][s] = F32{}));
      for (int64_t j = first; j < last; j++) {
        const float* errors = w_ + j * TILE_ROWS + strip * LANES;
        F32 own[S];
        EACH(s, S, own[s] = load(errors + s * LANES));
        EACH(c, N, const F32 factor = splat(factors[c][j]); EACH(s, S, accumulate(sums[c][s], factor, own[s])));
      }
      EACH(c, N, EACH(s, S, store(column[c] + s * LANES, load(column[c] + s * LANES) - sums[c][s])));
    }
  }

  const OrderedColumns& columns_;
  float* w_;
  std::vector<int64_t> current_;  // by column: the errors of columns before this one are spread to it
};

// Rounds `count` rows from `row` on, column by column. Returns whether all numbers are finite.
static bool round_tile(const OrderedColumns& columns, const Rounded& target, RowTile& tile, int64_t row,
                       int64_t count) {
  const IntegerGrid& grid = target.grid;
  std::vector<GroupScale> scales(columns.members.size() * STRIPS);
  std::vector<bool> chosen(columns.members.size());
  F32 poison{};
  const int strips = int((count + LANES - 1) / LANES);
  auto rows_of = [&](int strip) { return std::min<int64_t>(LANES, count - strip * LANES); };
  for (int64_t start = 0; start < columns.k; start += COLUMNS) {
    const int64_t stop = std::min(columns.k, start + COLUMNS);
    tile.update(stop - start, [&](int64_t c) { return start + c; }, start);
    for (int64_t i = start; i < stop; i++) {
      const int64_t place = columns.order[i], group = place / columns.group_size;
      GroupScale* own = scales.data() + group * STRIPS;
      if (!chosen[group]) {
        chosen[group] = true;
        const auto& members = columns.members[group];
        const int64_t size = int64_t(members.size());
        tile.update(size, [&](int64_t c) { return members[c]; }, i);
        for (int s = 0; s < strips; s++) {
          auto value = [&](int64_t c) { return tile.at(members[c], s); };
          auto remaining = [&](int64_t c) { return splat(columns.remaining[members[c]]); };
          own[s] = choose(grid, size, value, remaining, poison);
          target.put_scale(row + s * LANES, rows_of(s), group, own[s]);
        }
      }
      tile.update(1, [&](int64_t) { return i; }, i);
      for (int s = 0; s < strips; s++) {
        const F32 v = tile.at(i, s), integer = steps_of(grid, v, own[s]);
        target.put(row + s * LANES, rows_of(s), place, integer + own[s].zero);
        tile.put(i, s, (v - integer * own[s].scale) / columns.diagonal(i));
      }
    }
  }
  return finite(poison);
}

// Rounds w (K, R) float32 by GPTQ, its columns in the order they are rounded in. lower (K, K): U's transpose in that
// order. order (K,) int64: the columns' places. Writes values (R, K), scales and zeros (R, groups). Returns whether all
// numbers are finite.
bool round_columns(Tensor w, Tensor lower, Tensor order, int64_t group_size, int64_t bits, std::vector<double> factors,
                   Tensor values, Tensor scales, std::optional<Tensor> zeros) {
  STD_TORCH_CHECK(w.dim() == 2 && w.scalar_type() == ScalarType::Float, "the weight is float32 (K, R)");
  const int64_t k = w.size(0), rows = w.size(1);
  STD_TORCH_CHECK(lower.numel() == k * k && lower.scalar_type() == ScalarType::Float && lower.is_contiguous() &&
                      order.numel() == k && order.scalar_type() == ScalarType::Long && order.is_contiguous(),
                  "the factor is float32 (K, K), the order int64 (K,)");
  STD_TORCH_CHECK(group_size > 0, "groups of ", group_size, " columns");
  w = as_contiguous(w);
  const OrderedColumns columns(static_cast<const float*>(lower.const_data_ptr()),
                               static_cast<const int64_t*>(order.const_data_ptr()), k, group_size);
  const IntegerGrid grid(values, scales, !zeros, bits, std::move(factors));
  const Rounded target(grid, values, scales, zeros, rows, k, int64_t(columns.members.size()));
  const float* from = static_cast<const float*>(w.const_data_ptr());
  for (int64_t row = 0; row < rows; row += TILE_ROWS) {
    const int64_t count = std::min(TILE_ROWS, rows - row);
    RowTile tile(columns, from + row, rows, count);
    if (!round_tile(columns, target, tile, row, count)) return false;
  }
  return true;
}

}  // namespace hasten

STABLE_TORCH_LIBRARY_FRAGMENT(HASTEN_LIBRARY, m) {
  m.def("round_groups(Tensor w, int group_size, bool by_size, int bits, float[] factors, Tensor(a!) values, Tensor(b!) scales, Tensor(c!)? zeros) -> bool");
  m.def("round_columns(Tensor w, Tensor lower, Tensor order, int group_size, int bits, float[] factors, Tensor(a!) values, Tensor(b!) scales, Tensor(c!)? zeros) -> bool");
}
STABLE_TORCH_LIBRARY_IMPL(HASTEN_LIBRARY, CPU, m) {
  m.impl("round_groups", TORCH_BOX(&hasten::round_groups));
  m.impl("round_columns", TORCH_BOX(&hasten::round_columns));
}

// Multiplies a packed weight with rows of x by the kernels alone, without torch: what test_neon.py runs under qemu.
//
//   neon_products < problem > sums     float32, of each row all outputs
//   neon_products --features           AT_HWCAP and AT_HWCAP2
#include <sys/auxv.h>

#include <cstdio>
#include <vector>

#include "linear/gemm.h"

using namespace hasten;

template <class T>
static std::vector<T> take(int64_t count) {
  std::vector<T> values(count + 64);  // kernels may read whole lines
  if (int64_t(fread(values.data(), sizeof(T), count, stdin)) != count) exit(2);
  return values;
}

int main(int count, char**) {
  if (count > 1) return printf("%lu %lu\n", getauxval(AT_HWCAP), getauxval(AT_HWCAP2)), 0;
  enum { FORMAT, SCALE_TYPE, N, K, GROUP, ROWS, DATA, SCALES, ZEROS, MINIMA, OUTER, FIELDS };
  const auto field = take<int64_t>(FIELDS);
  auto blob = [&](int which) { return field[which] ? take<uint8_t>(field[which]) : std::vector<uint8_t>(); };
  auto data = blob(DATA), scales = blob(SCALES), zeros = blob(ZEROS), minima = blob(MINIMA), outer = blob(OUTER);
  auto or_null = [](auto& bytes) { return bytes.empty() ? nullptr : bytes.data(); };
  const int64_t rows = field[ROWS];
  Weight w{};
  w.format = Format(field[FORMAT]);
  w.scale_type = ScaleType(field[SCALE_TYPE]);
  w.data = data.data();
  w.scales = or_null(scales);
  w.zeros = reinterpret_cast<const int8_t*>(or_null(zeros));
  w.minima = reinterpret_cast<const uint16_t*>(or_null(minima));
  w.outer = reinterpret_cast<const uint16_t*>(or_null(outer));
  w.n = field[N], w.k = field[K], w.group = field[GROUP];

  Rows x;
  x.rows = rows, x.groups = w.groups(), x.stride = w.k;
  std::vector<float> wide;
  std::vector<Operand> plain;
  std::vector<int8_t> bytes;
  std::vector<float> x_scales;
  std::vector<int32_t> x_sums;
  if (w.integers()) {  // rows of int8, their scales and sums [groups][rows]
    bytes = take<int8_t>(rows * w.k);
    x_scales = take<float>(rows * x.groups);
    x_sums = take<int32_t>(rows * x.groups);
    x.bytes = x.q = bytes.data(), x.scales = x_scales.data(), x.sums = x_sums.data();
  } else {
    wide = take<float>(rows * w.k);
    for (float value : wide) plain.push_back(to_operand(value));
    x.wide = wide.data(), x.plain = plain.data();
  }
  std::vector<float> sums(rows * PANEL), out(rows * w.panels() * PANEL);
  for (int64_t panel = 0; panel < w.panels(); panel++) {
    panel_product(w, x, panel, 0, rows, sums.data());
    for (int64_t m = 0; m < rows; m++)
      for (int64_t i = 0; i < PANEL; i++) out[(m * w.panels() + panel) * PANEL + i] = sums[m * PANEL + i];
  }
  fwrite(out.data(), sizeof(float), out.size(), stdout);
}

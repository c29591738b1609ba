"""GPTQ against plain versions of itself, least squares, and rounding to nearest."""

from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hasten.errors import ConfigError
from hasten.ops.linear.weights import INT8, QuantizedWeight, int4_format
from hasten.quantization import GPTQ, gptq
from hasten.quantization.blocks import TILE
from hasten.quantization.gptq import InputStatistics, Solver, _invert_lower, column_order, output_error
from hasten.quantization.rounding import Grid, round_weight
from hasten.quantization.walk import stages


def inputs_and_weight(n, k, tokens, seed=0, spread=1.0):
    """Correlated inputs, as a model's are, and a weight."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(k, k, generator=generator, dtype=torch.float64) * 0.5 + torch.eye(k)
    sizes = torch.exp(spread * torch.randn(k, generator=generator, dtype=torch.float64))
    x = (torch.randn(tokens, k, generator=generator, dtype=torch.float64) @ mix) * sizes
    return x, torch.randn(n, k, generator=generator, dtype=torch.float64)


def gptq_round(weight, inputs, grid, settings):
    return Solver(inputs, settings, grid.format.group_size).round(weight, grid)


def statistics(x, before=None):
    found = InputStatistics(x.shape[1], drift=before is not None, dtype=torch.float64)
    found.add(x, before)
    found.finish()
    return found


def inverse_of(gram, columns):
    return torch.linalg.inv(gram[columns][:, columns])


def plain_gptq(weight, x, grid, order, damping, group_size):
    """Column by column with H⁻¹ itself, of which a row and a column are removed at each step; no blocks, no factor."""
    n, k = weight.shape
    gram = x.T @ x
    gram = gram + damping * gram.diagonal().mean() * torch.eye(k, dtype=gram.dtype)
    columns = column_order((x.T @ x).diagonal(), order, group_size).tolist()
    w, values = weight.clone(), torch.zeros(n, k)
    groups, left = {}, list(columns)
    remaining = {column: inverse_of(gram, columns[i:])[0, 0].rsqrt() for i, column in enumerate(columns)}
    for column in columns:
        inverse = inverse_of(gram, left)
        group = column // group_size
        if group not in groups:
            own = [c for c in columns if c // group_size == group]
            weights = torch.stack([remaining[c] for c in own]).float().unsqueeze(0)
            groups[group] = grid.choose(w[:, own].unsqueeze(1).float(), weights)
        scale, zero = (part.view(-1).double() if isinstance(part, torch.Tensor) else part for part in groups[group])
        q = grid.round(w[:, column], scale, zero)
        values[:, column] = q.float()
        error = (w[:, column] - (q - zero) * scale) / inverse[0, 0]
        w[:, left] -= torch.outer(error, inverse[0])
        left = left[1:]
    return values


CASES = [
    (int4_format(32), 40, 100, "columns"),
    (int4_format(32), 24, 256, "groups"),
    (int4_format(64, symmetric=False), 33, 200, "activation"),
    (int4_format(128, bits=3), 16, 256, "activation"),
    (int4_format(32, bits=2), 16, 96, "groups"),
    (INT8, 20, 130, "columns"),
    (INT8, 20, 130, "activation"),
    (int4_format(0), 64, 256, "activation"),
    (int4_format(32), 256, 256, "groups"),
    (int4_format(32, bits=3), 256, 256, "columns"),
]


@pytest.mark.parametrize(("format", "n", "k", "order"), CASES, ids=str)
def test_in_float64_the_codes_are_those_of_the_plain_version(format, n, k, order):
    x, weight = inputs_and_weight(n, k, 600)
    grid, size = Grid(format), format.group_size or k
    found = gptq_round(weight, statistics(x), grid, GPTQ(order=order))
    assert torch.equal(found.values.float(), plain_gptq(weight, x, grid, order, 0.01, size))


class NoGrid(Grid):
    """Rounds the first `fixed` columns of the order to whole numbers, and leaves the others as they are."""

    def __init__(self, fixed):
        super().__init__(INT8)
        self.fixed = fixed
        self.seen = []

    def choose(self, groups, weights):
        return torch.ones(groups.shape[0], groups.shape[1], 1), 0.0

    def round(self, w, scale, zero):
        self.seen.append(w.clone())
        return w.round() if len(self.seen) <= self.fixed else w


@pytest.mark.parametrize("fixed", [1, 7, 40])
def test_after_k_fixed_columns_the_others_are_the_least_squares_minimiser(fixed):
    x, weight = inputs_and_weight(6, 64, 300)
    grid = NoGrid(fixed)
    solver = Solver(statistics(x), GPTQ(order="columns", damping=0.0), 0)
    solver.round(weight, grid)
    found = torch.stack(grid.seen, dim=1)
    rounded = found[:, :fixed].round()
    target = x @ weight.T - x[:, :fixed] @ rounded.T
    best = torch.linalg.lstsq(x[:, fixed:], target).solution.T
    assert torch.allclose(found[:, fixed:], best, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("order", ["columns", "activation"])
def test_unrounded_gptaq_is_the_least_squares_solution(order):
    x_before, weight = inputs_and_weight(6, 48, 300)
    x = x_before + 0.1 * torch.randn(x_before.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    grid = NoGrid(0)
    solver = Solver(statistics(x, x_before), GPTQ(order=order, damping=0.0, gptaq=True), 0)
    solver.round(weight, grid)
    found = torch.empty_like(weight)
    found[:, solver.order] = torch.stack(grid.seen, dim=1)
    expected = weight @ x_before.T @ x @ torch.linalg.inv(x.T @ x)
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-8)


@settings(max_examples=25)
@given(
    n=st.integers(1, 40),
    k=st.integers(1, 200),
    tokens=st.integers(1, 80),
    order=st.sampled_from(["columns", "activation", "groups"]),
    symmetric=st.booleans(),
    bits=st.sampled_from([4, 3, 2]),
    seed=st.integers(0, 1000),
)
def test_any_shape_and_fewer_tokens_than_features(n, k, tokens, order, symmetric, bits, seed):
    """A statistics matrix of low rank is damped until it can be factorised; the weight is never worse than nothing."""
    x, weight = inputs_and_weight(n, k, tokens, seed)
    x[:, torch.rand(k, generator=torch.Generator().manual_seed(seed)) < 0.1] = 0
    found = InputStatistics(k)
    found.add(x)
    found.finish()
    format = int4_format(32, symmetric=symmetric, bits=bits)
    rounded = gptq_round(weight.float(), found, Grid(format), GPTQ(order=order))
    assert torch.isfinite(rounded.dequantize()).all()
    assert rounded.values.max() <= 2**bits - 1
    assert output_error(weight.float(), rounded, found.gram) < 1.0
    unseen = found.gram.diagonal() == 0
    assert not rounded.dequantize()[:, unseen].any()


def test_scales_are_chosen_by_what_remains_of_an_error(monkeypatch):
    """On other inputs of the same kind too, less is left than where all weights of a group count the same."""
    x, weight = inputs_and_weight(64, 256, 4000)
    seen, unseen = (statistics(part).gram for part in x.split(2000))

    def found():
        rounded = gptq_round(weight, statistics(x[:2000]), Grid(int4_format(32)), GPTQ())
        return [output_error(weight, rounded, gram) for gram in (seen, unseen)]

    weighted, choose = found(), Grid.choose
    monkeypatch.setattr(Grid, "choose", lambda self, w, weights: choose(self, w, torch.ones_like(weights)))
    alike = found()
    assert all(less < 0.98 * more for less, more in zip(weighted, alike, strict=True))


@pytest.mark.parametrize("bits", [4, 3, 2])
@pytest.mark.parametrize("order", ["columns", "activation", "groups"])
def test_outputs_err_less_than_rounding_to_nearest(bits, order):
    x, weight = inputs_and_weight(64, 256, 2000)
    found = statistics(x)
    format = int4_format(64, bits=bits)
    rounded = gptq_round(weight, found, Grid(format), GPTQ(order=order))
    nearest = round_weight(weight, format)
    assert output_error(weight, rounded, found.gram) < 0.95 * output_error(weight, nearest, found.gram)


def test_the_error_is_that_of_the_outputs():
    x, weight = inputs_and_weight(30, 64, 500)
    rounded = round_weight(weight, int4_format(32))
    expected = torch.linalg.norm(x @ (weight - rounded.dequantize(torch.float64)).T) / torch.linalg.norm(x @ weight.T)
    assert output_error(weight, rounded, statistics(x).gram) == pytest.approx(float(expected), rel=1e-9)


def test_the_bits_do_not_depend_on_the_number_of_threads():
    x, weight = inputs_and_weight(1100, 640, 700)
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found = InputStatistics(640)
            for part in x.float().split(256):
                found.add(part)
            found.finish()
            results.append(gptq_round(weight.float(), found, Grid(int4_format(128)), GPTQ()))
    finally:
        torch.set_num_threads(threads)
    for one in results[1:]:
        assert torch.equal(one.values, results[0].values)
        assert torch.equal(one.scales, results[0].scales)


def test_damping_grows_until_the_matrix_can_be_factorised(monkeypatch):
    """Float32 sums of inputs in one direction are no longer positive definite, whatever mathematics says."""
    x = torch.randn(4, 1) @ torch.randn(1, 300) * 1e3
    found = InputStatistics(300)
    found.add(x)
    found.finish()
    solver = Solver(found, GPTQ(damping=0.0), 128)
    assert solver.damping > 0
    monkeypatch.setattr(gptq, "ATTEMPTS", 1)
    with pytest.raises(ConfigError, match="cannot be factorised"):
        Solver(found, GPTQ(damping=0.0), 128)


def test_bad_settings_and_numbers_are_refused():
    with pytest.raises(ConfigError, match="order must be one of"):
        GPTQ(order="size")
    with pytest.raises(ConfigError, match="damping must be from 0 to 1"):
        GPTQ(damping=2.0)
    found = InputStatistics(32)
    found.add(torch.full((4, 32), torch.inf))
    found.finish()
    with pytest.raises(ConfigError, match="NaN or infinite inputs"):
        Solver(found, GPTQ(), 32)


@pytest.mark.parametrize("order", ["columns", "activation", "groups"])
def test_everything_is_made_on_the_inputs_device(order):
    """The meta device stands for any that is not the processor: it mixes with no other."""
    inputs = InputStatistics(64, drift=True, device=torch.device("meta"))
    x = torch.empty(10, 64, device="meta")
    inputs.add(x, x)
    inputs.finish()
    assert inputs.gram.device == inputs.drift.device == x.device
    assert column_order(inputs.gram.diagonal(), order, 32).device == x.device
    lower = torch.empty(300, 300, device="meta")
    _invert_lower(lower, torch.empty_like(lower))


def test_finding_the_layers_does_not_run_the_last_one():
    """A head's logits of a whole pass would be more memory than all else: 0.5 GB for 262,144 words."""

    class Head(nn.Linear):
        def forward(self, x):
            raise AssertionError("the logits are computed")

    module = nn.Sequential(OrderedDict(norm=nn.LayerNorm(8), head=Head(8, 1 << 20, device="meta")))
    assert stages(module, ["head"], lambda watched: watched(torch.zeros(2, 8))) == [["head"]]


@pytest.mark.parametrize("features", [1, 64, TILE, TILE + 3])
def test_statistics_are_the_sums_of_products(features):
    generator = torch.Generator().manual_seed(0)
    x, before = (torch.randn(20, features, generator=generator, dtype=torch.float64) for _ in range(2))
    found = InputStatistics(features, drift=True, dtype=torch.float64)
    for part, part_before in zip(x.split(7), before.split(7), strict=True):
        found.add(part, part_before)
    found.finish()
    torch.testing.assert_close(found.gram, x.T @ x)
    torch.testing.assert_close(found.drift, (before - x).T @ x)


@pytest.mark.parametrize("size", [1, 2, 255, 256, 257, 600])
def test_the_inverse_of_a_lower_triangular_matrix(size):
    generator = torch.Generator().manual_seed(0)
    lower = torch.randn(size, size, generator=generator, dtype=torch.float64).tril() * size**-0.5
    lower += 2 * torch.eye(size)
    inverse = torch.full_like(lower, torch.nan).tril()  # which is overwritten
    _invert_lower(lower, inverse)
    torch.testing.assert_close(inverse, torch.linalg.inv(lower))


def test_of_many_outputs_some_are_compared(monkeypatch):
    monkeypatch.setattr(gptq, "ERROR_ROWS", 10)
    x, weight = inputs_and_weight(25, 64, 100)
    gram = statistics(x).gram
    rounded = round_weight(weight, int4_format(32, bits=2))
    every = slice(None, None, 3)
    wrong = (weight - rounded.dequantize(torch.float64))[every]
    expected = torch.linalg.norm(x @ wrong.T) / torch.linalg.norm(x @ weight[every].T)
    assert output_error(weight, rounded, gram) == pytest.approx(float(expected), rel=1e-9)


def test_damping_grows_tenfold_from_what_is_given(monkeypatch):
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found, factor = statistics(x), gptq._factor
    assert Solver(found, GPTQ(damping=0.03), 32).damping == 0.03
    for begun, refused, damping in ((0.02, 2, 2.0), (0.0, 1, 1e-3), (0.0, 3, 0.1)):
        left = iter(range(refused))
        monkeypatch.setattr(gptq, "_factor", lambda gram, left=left: None if next(left, 9) != 9 else factor(gram))
        assert Solver(found, GPTQ(damping=begun), 32).damping == pytest.approx(damping)


def test_settings_at_their_bounds_are_taken():
    assert (GPTQ(damping=0).damping, GPTQ(damping=1).damping) == (0, 1)
    assert GPTQ() == GPTQ(order="groups", damping=0.01, gptaq=False)


def test_an_error_that_rounding_makes_negative_is_none():
    """Of sums of float32 products the matrix may have a negative direction, here that of (1, 1)."""
    gram = torch.tensor([[1.0, -1.0], [-1.0, 1.0 - 2**-20]])
    values = torch.tensor([[3, 3], [5, 0]]).to(torch.int8)
    rounded = QuantizedWeight(format=INT8, values=values, scales=torch.ones(2, 1))
    assert output_error(torch.tensor([[3.5, 3.5], [5.0, 0.0]]), rounded, gram) == 0


@pytest.mark.parametrize("damping", [0.0, 0.3])
@pytest.mark.parametrize("order", ["columns", "groups"])
def test_an_input_that_is_always_zero_counts_as_one(order, damping):
    x, _ = inputs_and_weight(1, 64, 100)
    x /= x.norm(dim=0).mean()  # the other inputs' sums of squares are about one too
    x[:, ::3] = 0
    solver = Solver(statistics(x), GPTQ(order=order, damping=damping), 32)
    gram = x.T @ x
    gram += torch.diag((gram.diagonal() == 0).double())
    gram += damping * gram.diagonal().mean() * torch.eye(64)
    upper = solver.lower.T
    torch.testing.assert_close(upper.T @ upper, inverse_of(gram, solver.order))
    assert torch.equal(upper, upper.triu())


def test_columns_are_rounded_largest_first_where_that_is_asked_for():
    diagonal = torch.tensor([1.0, 4.0, 0.0, 2.0, 4.0, 9.0])
    assert column_order(diagonal, "columns", 2).tolist() == [0, 1, 2, 3, 4, 5]
    assert column_order(diagonal, "activation", 2).tolist() == [5, 1, 4, 3, 0, 2], "of equal ones the first"
    assert column_order(diagonal, "groups", 2).tolist() == [5, 4, 1, 0, 3, 2]

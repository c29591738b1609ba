"""The native operators that round weights, under every instruction set, against the PyTorch code beside them."""

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hasten.errors import ConfigError
from hasten.ops.linear.weights import INT8, int4_format
from hasten.ops.native import library
from hasten.quantization import GPTQ, gptq, rounding
from hasten.quantization.gptq import InputStatistics, Solver
from hasten.quantization.rounding import Grid, round_weight
from instruction_sets import ISAS, needs_native

pytestmark = needs_native
isas = pytest.mark.parametrize("isa", ISAS)
FLOATS = [torch.float16, torch.bfloat16]


@contextmanager
def rounding_by(isa):
    """Round with the operators of an instruction set; None: with the reference."""
    ops = None if isa is None else library(isa).ops
    with patch.object(rounding, "native_rounding", lambda _: ops), patch.object(gptq, "native_rounding", lambda _: ops):
        yield


@st.composite
def formats(draw):
    group = draw(st.sampled_from([32, 64, 128, 0]))
    options = {"symmetric": draw(st.booleans()), "bits": draw(st.sampled_from([4, 4, 3, 2]))}
    grouped = int4_format(group, scale_dtype=draw(st.sampled_from(FLOATS)), **options)
    return draw(st.sampled_from([grouped, grouped, grouped, INT8]))


@st.composite
def weights(draw, rows, columns):
    """Any spread and dtype, some rows zero, some values far out."""
    n, k = draw(st.integers(1, rows)), draw(st.integers(1, columns))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    weight = torch.randn(n, k, generator=generator) * 10.0 ** draw(st.integers(-7, 2))
    weight[torch.rand(n, generator=generator) < 0.1] = 0
    weight[torch.rand(n, k, generator=generator) < 0.02] *= 20
    if draw(st.booleans()):  # the lowest and the highest of many groups are equally far from 0
        weight.clamp_(-float(weight.abs().mean()), float(weight.abs().mean()))
    return weight.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))


def group_errors(weight, rounded):
    """Squared errors of each group in float64, as the search counts them."""
    grid, k = Grid(rounded.format), weight.shape[1]
    size = rounded.format.group_size or k

    def groups(x):
        return torch.nn.functional.pad(x.double(), (0, -k % size)).unflatten(1, (-1, size))

    exact = groups(weight)
    counts = exact.abs() + exact.square().mean(-1, keepdim=True).sqrt() if grid.by_size else 1.0
    return ((groups(rounded.dequantize()) - exact).square() * counts).sum(-1)


PLAIN = torch.randn(40, 300, generator=torch.Generator().manual_seed(0))


@isas
@settings(max_examples=40)
@example(weight=PLAIN, format=int4_format(32), search="mse")
@example(weight=PLAIN.clamp(-1, 1), format=int4_format(32), search="mse")
@given(weight=weights(40, 300), format=formats(), search=st.sampled_from(["mse", "mse", "minmax"]))
def test_rounding_to_nearest_is_the_references(isa, weight, format, search):
    """All bits are, except where two scales err alike: the sums that decide are in another order."""
    with rounding_by(None):
        expected = round_weight(weight, format, search=search)
    with rounding_by(isa):
        found = round_weight(weight, format, search=search)
    same = found.scales == expected.scales
    if expected.zeros is not None:
        same &= found.zeros == expected.zeros
    size, k = format.group_size or weight.shape[1], weight.shape[1]
    columns = same.repeat_interleave(size, dim=1)[:, :k]
    assert torch.equal(found.values[columns], expected.values[columns])
    if search == "minmax" or format == INT8:
        assert same.all()
    errors, least = group_errors(weight, found), group_errors(weight, expected)
    torch.testing.assert_close(errors[~same], least[~same], rtol=1e-5, atol=0.0)


def replayed(solver, weight, rounded, search):
    """Follow GPTQ in float64 with the integers that were chosen.

    Returns how far a column's number is beyond half a step from its integer at most, in steps, and how much larger the
    error of a group's scale is than that of the best one, as a share of it.
    """
    format, k = rounded.format, weight.shape[1]
    grid, size = Grid(format, search), format.group_size or k
    lower, chosen = solver.lower.double(), rounded.dequantize(torch.float64)[:, solver.order]
    scales, middle = rounded.scales.double(), float(format.middle)
    zeros = torch.full_like(scales, middle) if rounded.zeros is None else rounded.zeros.double()
    w = torch.where(solver.dead, 0, weight.double())[:, solver.order]
    if solver.drift is not None:
        w = w + w @ solver.drift.double() @ lower @ lower.T
    beyond, worse, seen = 0.0, 0.0, set()
    for i, place in enumerate(solver.order.tolist()):
        group = place // size
        scale, zero = scales[:, group], zeros[:, group]
        if group not in seen:
            seen.add(group)
            columns = (solver.order // size == group).nonzero().squeeze(1)
            now, factors = w[:, columns], 1 / lower.diagonal()[columns]

            def error(scale, zero, now=now, factors=factors):
                scale, zero = scale.double().view(-1, 1), zero.double().view(-1, 1)
                steps = (now / scale).round().clamp(grid.lowest - zero, grid.highest - zero)
                return ((now - steps * scale) * factors).square().sum(1)

            best, best_zero = grid.choose(now.unsqueeze(1).float(), factors.float().unsqueeze(0))
            least = error(best.flatten(), torch.as_tensor(best_zero).expand_as(best).flatten())
            if search == "mse" and format != INT8:
                worse = max(worse, float(((error(scale, zero) - least) / least.clamp(min=1e-300)).max()))
            else:
                assert torch.allclose(scale, best.flatten().double(), rtol=2**-7 if format != INT8 else 1e-5)
        column, step = w[:, i], scale.abs()
        steps = (column / scale).clamp(grid.lowest - zero, grid.highest - zero)
        beyond = max(beyond, float((steps - (chosen[:, i] / scale)).abs().max()) - 0.5)
        w[:, i:] -= torch.outer((column - chosen[:, i]) / lower[i, i], lower[i:, i])
        assert torch.isfinite(step).all()
    return beyond, worse


@isas
@settings(max_examples=20, deadline=None)
@given(
    weight=weights(150, 300),
    format=formats(),
    order=st.sampled_from(["columns", "activation", "groups"]),
    search=st.sampled_from(["mse", "mse", "minmax"]),
    gptaq=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_every_column_of_gptq_is_rounded_as_float64_says(isa, weight, format, order, search, gptaq, seed):
    """An integer that is not the nearest one, and a scale that is not the best, err at most twice as much as PyTorch's.

    Integers of the two differ where a number is between two of them, and then so do all columns after it: each is
    compared with what follows from its own.
    """
    generator = torch.Generator().manual_seed(seed)
    k = weight.shape[1]
    x = torch.randn(2 * k + 50, k, generator=generator) @ (torch.randn(k, k, generator=generator) * 0.3 + torch.eye(k))
    x[:, torch.rand(k, generator=generator) < 0.05] = 0
    inputs = InputStatistics(k, drift=gptaq)
    inputs.add(x, x + 0.1 * torch.randn(x.shape, generator=generator) if gptaq else None)
    inputs.finish()
    solver, grid = Solver(inputs, GPTQ(order=order, gptaq=gptaq), format.group_size), Grid(format, search)
    found = {}
    for name in (None, isa):
        with rounding_by(name):
            found[name] = solver.round(weight.float(), grid)
    beyond, worse = (max(0.0, one) for one in replayed(solver, weight, found[isa], search))
    reference_beyond, reference_worse = replayed(solver, weight, found[None], search)
    assert beyond <= max(2 * reference_beyond, 1e-4)
    assert worse <= max(2 * reference_worse, 1e-4)


@isas
def test_rows_have_the_same_bits_beside_any_others(isa):
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(150, 200, generator=generator), torch.randn(400, 200, generator=generator)
    inputs = InputStatistics(200)
    inputs.add(x)
    inputs.finish()
    solver, grid = Solver(inputs, GPTQ(), 32), Grid(int4_format(32))
    with rounding_by(isa):
        whole, part = solver.round(weight, grid), solver.round(weight[37:101].contiguous(), grid)
        nearest, near = round_weight(weight, grid.format), round_weight(weight[37:101], grid.format)
    for all_rows, own in ((whole, part), (nearest, near)):
        assert torch.equal(all_rows.values[37:101], own.values)
        assert torch.equal(all_rows.scales[37:101], own.scales)


@isas
def test_what_cannot_be_rounded_is_left_to_the_reference(isa):
    inputs = InputStatistics(64)
    inputs.add(torch.randn(200, 64))
    inputs.finish()
    weight, huge = torch.randn(70, 64), torch.full((70, 64), 1e8)
    weight[69, 63] = torch.nan
    for format in (int4_format(32, scale_dtype=torch.float16), int4_format(32, symmetric=False, bits=2), INT8):
        solver = Solver(inputs, GPTQ(), format.group_size)
        with rounding_by(isa), pytest.raises(ConfigError, match="NaN or infinite"):
            solver.round(weight, Grid(format))
        with rounding_by(isa), pytest.raises(ConfigError, match="NaN or infinite"):
            round_weight(weight, format)
    with rounding_by(isa), pytest.raises(ConfigError, match="largest float16"):
        Solver(inputs, GPTQ(), 32).round(huge, Grid(int4_format(32, scale_dtype=torch.float16)))
    ops, arguments = library(isa).ops, Grid(INT8).native_arguments(round_weight(huge, INT8))
    with pytest.raises(RuntimeError, match="float32"):
        ops.round_groups(huge.double(), 64, False, *arguments)
    with pytest.raises(RuntimeError, match="do not fit"):
        ops.round_groups(huge[:5], 64, False, *arguments)

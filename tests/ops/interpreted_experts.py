"""Triton's kernels of experts in its interpreter; run by test_triton_experts.py in a process of its own."""

import copy
import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_cases import FORMATS, PLAIN, ExpertCase
from hasten.engine.compiled import compile_blocks
from hasten.errors import HastenWarning
from hasten.model.context import TrainingContext
from hasten.model.experts import Experts
from hasten.model.families import read_config
from hasten.model.initialize import initialize
from hasten.ops.experts.triton_experts import ExpertsCut, TritonExperts, launch, operator
from hasten.ops.experts.triton_kernels import sort_pairs
from hasten.ops.linear import PackedLinear
from linear_cases import make_weight
from references import values_of

ALONE, TILES = ExpertsCut(0, 16, k=128), ExpertsCut(16, 16, k=32)


def cut_as(case, cut, x, shares, chosen):
    made = TritonExperts(case.weights)
    return launch(x, shares, chosen, made.addresses, made.inner, *made.forms, made.activation, cut=cut)


@settings(max_examples=30, derandomize=True, deadline=None)
@given(rows=st.integers(1, 90), count=st.integers(1, 9), tile=st.sampled_from([1, 2, 16]), data=st.data())
def test_pairs_are_sorted_and_every_one_is_in_one_tile(rows, count, tile, data):
    top = data.draw(st.integers(1, count))
    generator = torch.Generator().manual_seed(rows)
    chosen = torch.rand(rows, count, generator=generator).topk(top, -1).indices
    order = torch.full((rows * top,), -1, dtype=torch.int32)
    tiles = torch.full((rows * top // tile + count, 3), -1, dtype=torch.int32)
    sort_pairs[(count,)](chosen, order, tiles, len(order), M=tile, BLOCK=64)
    assert torch.equal(order.long(), chosen.flatten().argsort(stable=True))
    seen = []
    for expert, begin, end in tiles.tolist():
        assert 0 <= end - begin <= tile
        assert (chosen.flatten()[order[begin:end].long()] == expert).all()
        seen += range(begin, end)
    assert sorted(seen) == list(range(rows * top))


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("cut", [ALONE, TILES], ids=["alone", "tiles"])
def test_every_format(format, cut):
    dtype = torch.float16 if format[1] == 128 else torch.bfloat16
    case = ExpertCase(format, count=3, hidden=264, inner=40, dtype=dtype, device="cpu")
    given = case.rows(2, 2)
    case.check(cut_as(case, cut, *given), *given)


@pytest.mark.parametrize("cut", [ALONE, TILES], ids=["alone", "tiles"])
def test_rows_shorter_than_a_group(cut):
    for format, size in ((("int8", 128, True), 64), (("int4", 256, True), 128)):
        case = ExpertCase(format, count=2, hidden=size, inner=16, dtype=torch.float16, device="cpu")
        given = case.rows(2, 1)
        case.check(cut_as(case, cut, *given), *given)


@settings(max_examples=10, derandomize=True, deadline=None)
@given(
    format=st.sampled_from(FORMATS),
    down_format=st.sampled_from(FORMATS),
    cut=st.sampled_from([ALONE, TILES]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    activation=st.sampled_from(["silu", "gelu", "gelu_tanh", "relu"]),
    rows=st.integers(1, 4),
    count=st.integers(1, 4),
    hidden=st.integers(1, 9),
    inner=st.integers(1, 9),
    data=st.data(),
)
def test_any_sizes(format, down_format, cut, dtype, activation, rows, count, hidden, inner, data):
    sizes = {"count": count, "hidden": 8 * hidden, "inner": 8 * inner}
    case = ExpertCase(format, down_format=down_format, activation=activation, dtype=dtype, device="cpu", **sizes)
    given = case.rows(rows, data.draw(st.integers(1, count)))
    case.check(cut_as(case, cut, *given), *given)


@pytest.mark.parametrize("format", [PLAIN, ("int8", 0, True), ("int4", 32, True)], ids=str)
def test_as_the_operator_cuts_them(format):
    """One row, and so many that their pairs are sorted."""
    case = ExpertCase(format, count=4, hidden=128, inner=64, dtype=torch.bfloat16, device="cpu")
    for rows in (1, 9):
        given = case.rows(rows, 2)
        case.check(TritonExperts(case.weights)(*given), *given)
    none = case.rows(0, 2)
    assert TritonExperts(case.weights)(*none).shape == (0, 128)


@pytest.mark.parametrize("format", [PLAIN, ("int4", 32, False)], ids=str)
@pytest.mark.parametrize("cut", [ALONE, TILES], ids=["alone", "tiles"])
def test_rows_do_not_depend_on_each_other(format, cut):
    case = ExpertCase(format, count=3, hidden=136, inner=24, dtype=torch.bfloat16, device="cpu")
    x, shares, chosen = case.rows(6 if cut.m == 0 else 20, 2)
    together = cut_as(case, cut, x, shares, chosen)
    for some in (slice(0, 1), slice(2, 5)):
        assert torch.equal(cut_as(case, cut, x[some], shares[some], chosen[some]), together[some])


def test_the_operator_is_described_to_compilers():
    case = ExpertCase(PLAIN, count=3, hidden=64, inner=32, dtype=torch.bfloat16, device="cpu")
    made = TritonExperts(case.weights)
    arguments = (*case.rows(5, 2), made.addresses, made.inner, *made.forms[0], *made.forms[1], made.activation)
    torch.library.opcheck(operator.dispatched, arguments, test_utils=("test_schema", "test_faketensor"))


def layer(family="mixtral"):
    config = read_config(values_of(family))
    model = initialize(config, seed=1).to(torch.bfloat16)
    return next(block.mlp for block in model.blocks if isinstance(block.mlp, Experts)), config


@torch.no_grad()
def test_a_layer_takes_them_until_somebody_watches_its_experts():
    experts, config = layer()
    x = torch.randn(2, 6, config.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows = x.flatten(0, 1)
    routing = experts.route(rows)
    plain, found = experts.one_by_one(rows, *routing), experts(x).flatten(0, 1)
    assert experts.bound().run is not None
    torch.testing.assert_close(found, plain, rtol=0.05, atol=0.02 * plain.abs().max().item())
    called = []
    handle = experts.experts[int(routing[1][0, 0])].register_forward_pre_hook(lambda *_: called.append(1))
    assert torch.equal(experts(x).flatten(0, 1), plain)
    assert called
    assert experts.why_one_by_one() == "its experts have a hook, or a forward of their own"
    handle.remove()
    assert torch.equal(experts(x).flatten(0, 1), found)


@torch.no_grad()
def test_a_replaced_weight_is_the_one_that_is_multiplied():
    experts, config = layer()
    x = torch.randn(1, 3, config.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    before = experts(x)
    for one in experts.experts:
        one.down = torch.nn.Linear(one.down.in_features, one.down.out_features, bias=False).to(torch.bfloat16)
        one.down.weight.zero_()
    assert not experts(x).any()
    for one in experts.experts:
        one.down.weight = torch.nn.Parameter(torch.ones_like(one.down.weight))
    assert experts(x).any()
    assert not torch.equal(experts(x), before)


def other_experts(experts):
    for i, one in enumerate(experts.experts):
        experts.experts[i] = copy.deepcopy(one)


def other_storage(experts):
    for one in experts.experts:
        one.down.weight.data = one.down.weight.detach().clone()


def own_forward(experts):
    for one in experts.experts:
        one.down.forward = lambda x, weight=one.down.weight: x @ weight.t()


@torch.no_grad()
@pytest.mark.parametrize("change", [other_experts, other_storage, own_forward])
def test_what_is_replaced_is_noticed(change):
    """The first kernel's weights stay as they are, so an output of zeros comes from the new ones."""
    experts, config = layer()
    x = torch.randn(1, 3, config.hidden_size).bfloat16()
    assert experts(x).any()
    change(experts)
    for one in experts.experts:
        one.down.weight.zero_()
    assert not experts(x).any()


@torch.no_grad()
@pytest.mark.parametrize("name", ["data", "scales", "zeros"])
def test_replaced_parts_of_a_packed_weight_are_noticed(name):
    experts, _ = layer()
    for one in experts.experts:
        weight = make_weight(64, 96, format="int4", group_size=32, symmetric=False)
        one.down = PackedLinear.from_weight(weight, activations="float")
    first = experts.bound()
    assert first.run is not None
    assert experts.bound() is first
    down = experts.experts[1].down
    setattr(down, name, getattr(down, name).clone())
    assert experts.bound() is not first


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_go_through_the_readable_experts(frozen):
    """Also where x, the router and the first expert have none."""
    experts, config = layer()
    x = torch.randn(1, 2, config.hidden_size).bfloat16().requires_grad_(not frozen)
    expected = set(experts.route(x[0])[1].flatten().tolist())
    if frozen:
        experts.router.requires_grad_(False)
        experts.experts[0].requires_grad_(False)
        expected -= {0}
    experts(x).float().square().sum().backward()
    found = {i for i, one in enumerate(experts.experts) if one.up.weight.grad is not None}
    assert found == expected
    assert frozen or x.grad.any()


@torch.no_grad()
@pytest.mark.parametrize("called_before", [False, True])
def test_a_compiled_layer_has_no_graph_break(called_before):
    """Also if it was not called before, or has other weights since."""
    torch.compiler.reset()
    experts, config = layer()
    x = torch.randn(1, 9, config.hidden_size).bfloat16()
    if called_before:
        experts(x)
    for one in experts.experts:
        one.down.weight = torch.nn.Parameter(2 * one.down.weight)
    compiled = torch.compile(experts, fullgraph=True, dynamic=False, backend="aot_eager")
    found = compiled(x)
    torch.testing.assert_close(found, copy.deepcopy(experts)(x))


@torch.no_grad()
def test_compiled_blocks_take_replaced_weights(monkeypatch):
    """One graph serves all blocks, each with its own weights."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr("hasten.engine.compiled.swap_kinds", lambda *_: None)  # the linear layers of a CPU
    torch.compiler.reset()
    config = read_config(values_of("mixtral"))
    model = initialize(replace(config, layers=config.layers[:2]), seed=1).to(torch.bfloat16)
    other = copy.deepcopy(model)
    without_output(other)
    context = TrainingContext([layer.window for layer in model.config.layers])
    place = torch.zeros(1, 1, dtype=torch.int64)
    for one in (model, other):
        compile_blocks(one)
    with torch._dynamo.config.patch(error_on_recompile=True):
        before, expected = (one(place + 5, place, context) for one in (model, other))
        assert not torch.equal(before, expected)
        assert all(block.mlp.bound().run is not None for block in model.blocks)
        without_output(model)
        assert torch.equal(model(place + 5, place, context), expected)


@torch.no_grad()
def test_a_layer_that_its_user_compiled_takes_replaced_weights_once_it_is_bound():
    """As docs/in-depth/gpu-kernels.md says: its graph has the table of the latest binding, and looks at no weight."""
    torch.compiler.reset()
    experts, config = layer()
    x = torch.randn(1, 9, config.hidden_size).bfloat16()
    compiled = torch.compile(experts, fullgraph=True, dynamic=False, backend="aot_eager")
    before = compiled(x)
    for one in experts.experts:
        one.down.weight = torch.nn.Parameter(2 * one.down.weight)
    assert torch.equal(compiled(x), before)
    with torch._dynamo.config.patch(error_on_recompile=True):
        experts.bound()
        found = compiled(x)
    torch.testing.assert_close(found, copy.deepcopy(experts)(x))
    assert not torch.equal(found, before)


def without_output(model):
    for block in model.blocks:
        for one in block.mlp.experts:
            one.down.weight = torch.nn.Parameter(torch.zeros_like(one.down.weight))


@torch.no_grad()
def test_what_triton_cannot_compile_is_not_called_again_on_its_device(monkeypatch):
    monkeypatch.setattr(Experts, "failed", {})
    experts, config = layer()
    x = torch.randn(1, 9, config.hidden_size).bfloat16()
    rows = x.flatten(0, 1)
    expected = experts.one_by_one(rows, *experts.route(rows)).view_as(x)

    def fail(*given):
        raise RuntimeError("a caller's mistake")

    monkeypatch.setattr(experts.bound(), "run", fail)
    with pytest.raises(RuntimeError, match="a caller's mistake"):
        experts(x)
    assert not Experts.failed

    monkeypatch.setattr(experts.bound(), "run", lambda *given: sort_pairs[(1,)]("of no use"))
    with pytest.warns(HastenWarning, match="experts are called one by one"):
        assert torch.equal(experts(x), expected)
    assert torch.equal(experts(x), expected)  # without a warning
    assert "it failed in an earlier call" in experts.why_one_by_one()
    assert list(Experts.failed) == [x.device]

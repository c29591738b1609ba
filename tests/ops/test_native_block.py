"""The fused steps on every instruction set, against the readable pieces of the model, at sizes that fit nothing."""

from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.model.fused_linear import interleave_gate_up, weight_fields
from hasten.model.rope import rotate
from hasten.ops import calls, native
from hasten.ops.build import INSTRUCTION_SETS
from hasten.ops.cache_plan import CachePlan
from hasten.ops.linear.modules import PackedLinear
from hasten.ops.native import library, meta_kernels
from instruction_sets import ISAS
from linear_cases import layer_of, make_weight, random_weight

pytestmark = pytest.mark.skipif(library() is None, reason="the native kernels cannot be built here (no C++ compiler)")


def linear(n, k, *, bias, generator):
    layer = torch.nn.Linear(k, n, bias=bias).bfloat16()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return layer


def fields(layer):
    return weight_fields(PackedLinear.from_linear(layer))


def plan(*layers, isa):
    """The weights of a product's parts, each its own."""
    packed = [one if isinstance(one, PackedLinear) else PackedLinear.from_linear(one) for one in layers]
    return [plan_weight(one, isa) for one in packed]


def plan_weight(layer, isa=None):
    size = {"out_features": layer.out_features, "in_features": layer.in_features}
    return library(isa).ops.plan_weight(**size, **weight_fields(layer), lora_a=None, lora_b=None)


def product(x, layer, isa):
    """In float64, of x as the kernel multiplies it: rounded to bfloat16 where there are instructions for that."""
    bias = None if layer.bias is None else layer.bias.double()
    x = x.bfloat16() if "avx512_bf16" in INSTRUCTION_SETS[isa].here().needs else x
    return F.linear(x.double(), layer.weight.double(), bias)


def rms(x, weight, eps, offset):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (weight.double() + offset)


def norm_of(x, kind, weight, bias):
    if kind == "none":
        return x
    if kind == "layer":
        return F.layer_norm(x, x.shape[-1:], weight.double(), bias.double(), 1e-5)
    return rms(x, weight, 1e-5, 1.0)


NONE = {"norm_weight": None, "norm_bias": None, "eps": 0.0, "offset": 0.0, "centred": False}


def norm_fields(kind, weight, bias):
    if kind == "none":
        return NONE
    own = {"norm_weight": weight, "eps": 1e-5}
    return NONE | own | ({"norm_bias": bias, "centred": True} if kind == "layer" else {"offset": 1.0})


def input_fields(weights, heads, size, caches, slots, **others):
    """Of attention_input, beside x and a norm."""
    none = dict.fromkeys(("q_norm", "k_norm", "cos", "sin"))
    own = {"weights": weights, "heads": heads, "head_dim": size, "k": caches[0], "v": caches[1]}
    return none | own | {"slot_mapping": slots, "rotated": False} | others


KINDS = st.sampled_from(["none", "rms", "layer"])


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=15)
@given(st.integers(0, 99), st.sampled_from([1, 3, 17]), st.integers(1, 150), st.integers(1, 150), st.booleans(), KINDS)
def test_linear_add(isa, seed, rows, n, k, bias, kind):
    g = torch.Generator().manual_seed(seed)
    layer = linear(n, k, bias=bias, generator=g)
    x, residual = torch.randn(rows, k, generator=g), torch.randn(rows, n, generator=g)
    weight, shift = torch.randn(n, generator=g), torch.randn(n, generator=g)
    found = library(isa).ops.linear_add(x=x, residual=residual, **fields(layer), **norm_fields(kind, weight, shift))
    y = product(x, layer, isa)
    if kind != "none" and y.var(-1, correction=0).min() < 1e-3:
        return  # a norm of (almost) equal values amplifies rounding without bound
    expected = residual.double() + norm_of(y, kind, weight, shift)
    torch.testing.assert_close(found.double(), expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=20)
@given(
    st.integers(0, 99),
    st.sampled_from([1, 2, 19]),
    st.integers(1, 150),
    st.integers(2, 100),
    st.booleans(),
    st.sampled_from(["up", "interleaved", "two weights"]),
    st.sampled_from(["silu", "gelu", "gelu_tanh", "relu"]),
)
def test_mlp_input(isa, seed, rows, inner, k, bias, weights, activation):
    from hasten.model.activations import ACTIVATIONS
    from hasten.model.fused_linear import ACTIVATION_ORDER

    g = torch.Generator().manual_seed(seed)
    up, gate = (linear(inner, k, bias=bias, generator=g) for _ in range(2))
    gated = weights != "up"
    if weights == "interleaved":
        own = plan(interleave_gate_up(gate, up), isa=isa)
    else:
        own = plan(gate, up, isa=isa) if gated else plan(up, isa=isa)
    x = torch.randn(rows, k, generator=g)
    kind = ACTIVATION_ORDER.index(activation)
    found = library(isa).ops.mlp_input(x=x, **NONE, weights=own, inner_size=inner, gated=gated, activation=kind)
    act = ACTIVATIONS[activation]
    expected = act(product(x, gate, isa)) * product(x, up, isa) if gated else act(product(x, up, isa))
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("size", "half"), [(16, 8), (20, 4), (64, 32), (128, 0)])
@pytest.mark.parametrize("head_norms", [False, True])
def test_attention_input(isa, size, half, head_norms):
    g = torch.Generator().manual_seed(size)
    heads, kv_heads, rows, k = 4, 2, 7, 50
    layers = [linear(n * size, k, bias=n > 2, generator=g) for n in (heads, kv_heads, kv_heads)]
    x = torch.randn(rows, k, generator=g)
    weight = torch.rand(k, generator=g) + 0.5
    q_norm, k_norm = (torch.rand(size, generator=g) + 0.5 for _ in range(2)) if head_norms else (None, None)
    angles = torch.randn(rows, half, generator=g)
    cos, sin = (angles.cos(), angles.sin()) if half else (None, None)
    caches = [torch.zeros(12, kv_heads, size, dtype=torch.bfloat16) for _ in range(2)]
    slots = torch.tensor([3, 0, -1, 5, 7, -1, 9])
    head_norms = {"q_norm": q_norm, "k_norm": k_norm, "cos": cos, "sin": sin}
    own = input_fields(plan(*layers, isa=isa), heads, size, caches, slots, **head_norms)
    q = library(isa).ops.attention_input(x=x, **NONE | {"norm_weight": weight, "eps": 1e-5}, **own)
    normed = rms(x.double(), weight, 1e-5, 0.0)
    parts = [product(normed, layer, isa).unflatten(-1, (-1, size)) for layer in layers]  # (R, H or Hkv, D)
    for part, norm in ((0, q_norm), (1, k_norm)):
        if norm is not None:
            parts[part] = rms(parts[part], norm, 1e-5, 0.0)
        if half:
            parts[part] = rotate(parts[part].float(), cos, sin).double()
    torch.testing.assert_close(q.double(), parts[0], atol=0.03, rtol=0.01)  # x is rounded after the norm: 2^-9
    for cache, part in zip(caches, parts[1:], strict=True):
        kept = slots >= 0
        torch.testing.assert_close(cache[slots[kept]].double(), part[kept], atol=0.05, rtol=0.02)
        untouched = [i for i in range(11) if i not in slots.tolist()]
        assert not cache[untouched].any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 3, 21])
def test_the_parts_of_a_product_are_what_each_would_be_alone(isa, rows):
    """Of formats that take x alike and of others."""
    k, size = 256, 32
    weights = [random_weight("Q4_K", 3 * size, k), random_weight("Q6_K", size, k)]
    weights.append(make_weight(size, k, format="bfloat16"))
    g = torch.Generator().manual_seed(rows)
    x, ops = torch.randn(rows, k, generator=g), library(isa).ops
    for order in ((0, 1, 2), (0, 1, 1), (0, 2, 2), (0, 2, 1)):
        parts = [layer_of(weights[i], isa=isa) for i in order]
        caches = [torch.zeros(rows + 1, 1, size, dtype=torch.bfloat16) for _ in range(2)]
        own, slots = plan(*parts, isa=isa), torch.arange(rows)
        q = ops.attention_input(x=x, **NONE, **input_fields(own, 3, size, caches, slots))
        alone = [ops.norm_linear(x=x, **NONE, **weight_fields(one), out_features=one.out_features) for one in parts]
        assert torch.equal(q.flatten(1), alone[0])
        for cache, values in zip(caches, alone[1:], strict=True):
            assert torch.equal(cache[:rows].flatten(1), values.bfloat16())


def test_opcheck():
    ops, g = library().ops, torch.Generator().manual_seed(0)
    layer = linear(24, 16, bias=True, generator=g)
    x = torch.randn(2, 16)
    caches = [torch.zeros(5, 1, 8, dtype=torch.bfloat16) for _ in range(2)]
    checks = ("test_schema", "test_faketensor")
    own = {"x": x, **NONE, **fields(layer)}
    torch.library.opcheck(ops.linear_add.default, (), own | {"residual": torch.randn(2, 24)}, test_utils=checks)
    torch.library.opcheck(ops.norm_linear.default, (), own | {"out_features": 24}, test_utils=checks)
    # Those that take plans, of which a copy is none.
    weights = plan(layer, isa=None)
    own = {"x": x, **NONE, "weights": weights, "inner_size": 24, "gated": False, "activation": 0}
    assert meta_kernels()["mlp_input"](**own).shape == ops.mlp_input(**own).shape
    own = {"x": x, **NONE, **input_fields(weights, 1, 8, caches, torch.tensor([0, 1]))}
    assert meta_kernels()["attention_input"](**own).shape == ops.attention_input(**own).shape


@pytest.mark.parametrize("fields", [("sin", "cos"), ("cos", "turned")])
def test_a_call_with_other_fields_than_its_operator_is_an_error_when_the_library_loads(fields, monkeypatch):
    ops = library().ops
    calls.check(ops)
    renamed = dict(zip(("cos", "sin"), fields, strict=True))
    other = namedtuple("BlocksCall", [renamed.get(name, name) for name in calls.BlocksCall._fields])
    monkeypatch.setitem(calls.CALLS, "blocks", other)
    with pytest.raises(AssertionError, match="the native operator blocks takes"):
        calls.check(ops)


def test_fields_are_torchs_arguments_with_what_is_written_marked():
    schema = str(library().ops.blocks.default._schema).partition("(")[2]
    assert schema.startswith("Tensor x, Tensor stack, Tensor cache, Tensor[] cos, Tensor[] sin, Tensor? rope_rows, ")
    assert schema.endswith("Tensor? times, Tensor? state_slots, Tensor? certain, Tensor? features) -> Tensor")
    written = str(library().ops.attention_input.default._schema).partition("(")[2]
    assert "Tensor(a!) k, Tensor(b!) v, Tensor slot_mapping, " in written
    assert "SymInt block_size, bool rotated" in schema or "int block_size, bool rotated" in schema


def test_meta_kernels_must_name_arguments_that_the_operator_has(monkeypatch):
    with pytest.raises(TypeError, match="rows"):
        native._register_meta_kernel(library().ops.mlp_input.default, lambda x, rows, **rest: x)


def test_a_plan_is_the_tensor_that_was_made_and_no_other():
    from hasten.model.fused import fuse
    from references import tiny_llama

    model = fuse(tiny_llama().to(torch.bfloat16))
    ops, plan, size = library().ops, model.blocks[0]._bound.plan, model.config.head_dim
    caches = [torch.zeros(3, model.config.kv_heads, size, dtype=torch.bfloat16) for _ in range(2)]
    angles = [torch.zeros(2, size // 2)] * 2
    numbers = [torch.tensor(values) for values in ([0, 1], [0, 2], [2], [0])]

    def call(plans, angles=angles, numbers=numbers, turns=(0,), rows=None, caches=caches, stack=None, cache=None):
        x = torch.randn(1, 2, model.config.hidden_size)
        places = dict(zip(("slot_mapping", "query_start_loc", "seq_lens", "first_slots"), numbers, strict=True))
        stack = ops.plan_stack(plans, turns) if stack is None else stack
        own = {"x": x, "stack": stack, "cache": held(caches) if cache is None else cache}
        own |= {"cos": angles[:1], "sin": angles[1:], "rope_rows": rows, "query_factors": []}
        return ops.blocks(*calls.BlocksCall(**own, **places, block_table=None, block_size=0, rotated=False))

    def held(caches):
        return CachePlan(caches[:1], caches[1:]).whole()

    assert call([plan]).shape == (1, 2, model.config.hidden_size)
    for other in (plan.clone(), torch.zeros_like(plan), plan[8:], plan.view(torch.int64), torch.empty(0)):
        with pytest.raises(RuntimeError, match="no plan"):
            call([other])
    for other in (plan, held(caches).clone(), ops.plan_stack([plan], [0]).clone()):
        with pytest.raises(RuntimeError, match="no plan of a stack"):
            call([plan], stack=other)
        with pytest.raises(RuntimeError, match="no plan of a cache"):
            call([plan], cache=other)
    with pytest.raises(RuntimeError, match="cos and sin"):
        call([plan], angles=[a[:1] for a in angles])
    with pytest.raises(RuntimeError, match="slot"):
        call([plan], numbers=[numbers[0][:1], *numbers[1:]])
    for turns, plans in (([1], [plan]), ([0, 0], [plan]), ([], [plan])):
        with pytest.raises(RuntimeError, match=r"no rotary table|each block needs"):
            call(plans, turns=turns)
    with pytest.raises(RuntimeError, match="each block needs its cache"):
        call([plan], cache=CachePlan(caches[:1] * 2, caches[1:] * 2).whole())
    with pytest.raises(RuntimeError, match="keys and values"):
        call([plan], caches=[caches[0]])
    table = [torch.randn(9, size // 2) for _ in angles]
    at, end = torch.tensor([[7, 3]]), torch.tensor([[0, 9]])
    torch.manual_seed(0)
    by_rows = call([plan], angles=[one[at[0]] for one in table])
    torch.manual_seed(0)
    assert torch.equal(call([plan], angles=table, rows=at), by_rows)
    for rows, reason in ((at[:, :1], "one row of the rotary tables"), (end, "no row 9 of 9"), (-end, "no row -9 of 9")):
        with pytest.raises(RuntimeError, match=reason):
            call([plan], angles=table, rows=rows)

"""Mixture of experts: routing against a plain formula, and the bias that chooses kept in float32."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hasten
from hasten.model.config import LayerConfig
from hasten.model.context import TrainingContext
from hasten.model.experts import Experts, route
from hasten.model.families import read_config
from hasten.model.initialize import initialize
from parity import PROMPTS, reference_greedy
from references import make_reference, values_of

ROUTED = ["dots1", "glm4_moe", "ernie4_5_moe", "minimax_m2"]  # families with a bias that chooses
SHARED = ["qwen2_moe", "dots1", "glm4_moe", "ernie4_5_moe"]  # families with an MLP beside the experts


def routed_by_hand(logits, config, bias):
    """The chosen experts of one token and the weight of each, in plain numbers."""
    if config.expert_scores == "sigmoid":
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    else:
        total = sum(math.exp(logit) for logit in logits)
        scores = [math.exp(logit) / total for logit in logits]
    choice = [score + own for score, own in zip(scores, bias, strict=True)]
    size = len(logits) // config.expert_groups
    groups = [choice[start : start + size] for start in range(0, len(logits), size)]
    best = sorted(range(len(groups)), key=lambda group: -sum(sorted(groups[group])[-2:]))
    kept = set(best[: config.expert_top_groups])
    allowed = [expert for expert in range(len(logits)) if expert // size in kept or len(groups) == 1]
    chosen = sorted(allowed, key=lambda expert: -choice[expert])[: config.experts_per_token]
    weights = {expert: scores[expert] for expert in chosen}
    if config.normalize_experts:
        total = max(sum(weights.values()), config.expert_sum_floor)
        weights = {expert: weight / total for expert, weight in weights.items()}
    return {expert: weight * config.expert_weight_scale for expert, weight in weights.items()}


@st.composite
def routings(draw):
    """A config of routing, logits (N, E) and a bias (E,), of which no two experts are near ties."""
    groups = draw(st.sampled_from([1, 2, 4]))
    experts = groups * draw(st.integers(2, 4))
    kept = draw(st.integers(1, groups))
    config = replace(
        read_config(values_of("dots1")),
        experts=experts,
        experts_per_token=draw(st.integers(1, kept * experts // groups)),
        expert_scores=draw(st.sampled_from(["softmax", "sigmoid"])),
        expert_groups=groups,
        expert_top_groups=kept,
        normalize_experts=draw(st.booleans()),
        expert_sum_floor=draw(st.sampled_from([1e-20, 0.7])),
        expert_weight_scale=draw(st.sampled_from([1.0, 2.5])),
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    logits = torch.randn(draw(st.integers(1, 5)), experts, generator=generator) * 3
    bias = torch.randn(experts, generator=generator) * draw(st.sampled_from([0.0, 1.0]))
    return config, logits, bias


@given(routings())
def test_routing_is_the_formula(routing):
    config, logits, bias = routing
    weights, chosen = route(logits, config, bias)
    assert weights.dtype == torch.float32
    for row, own, experts in zip(logits.tolist(), weights.tolist(), chosen.tolist(), strict=True):
        expected = routed_by_hand(row, config, bias.tolist())
        found = dict(zip(experts, own, strict=True))
        assert found.keys() == expected.keys()
        for expert, weight in found.items():
            assert weight == pytest.approx(expected[expert], rel=1e-4, abs=1e-30)


@given(st.integers(0, 1 << 30), st.integers(2, 9), st.data())
def test_normalised_softmax_scores_are_the_softmax_of_the_chosen_logits(seed, experts, data):
    """gpt-oss chooses by the logits and applies the softmax to those that are chosen."""
    config = replace(read_config(values_of("gpt_oss")), experts=experts)
    config = replace(config, experts_per_token=data.draw(st.integers(1, experts)))
    logits = torch.randn(5, experts, generator=torch.Generator().manual_seed(seed)) * 10
    weights, chosen = route(logits, config)
    best = logits.topk(config.experts_per_token, dim=-1)
    assert torch.equal(chosen, best.indices)
    torch.testing.assert_close(weights, best.values.softmax(-1))


def test_without_a_bias_the_scores_choose():
    config = replace(read_config(values_of("dots1")), expert_groups=1)
    logits = torch.randn(7, config.experts, generator=torch.Generator().manual_seed(0))
    plain, biased = route(logits, config), route(logits, config, torch.zeros(config.experts))
    assert all(torch.equal(one, other) for one, other in zip(plain, biased, strict=True))


@pytest.mark.parametrize("family", ROUTED)
def test_the_bias_that_chooses_stays_in_float32(family, tmp_path):
    reference = make_reference(family)
    exact = {n: p.clone() for n, p in hasten.load(reference).named_parameters() if n.endswith("choice_bias")}
    assert exact
    assert any(not torch.equal(one, one.bfloat16().float()) for one in exact.values())
    reference.save_pretrained(tmp_path / "plain")
    narrow = hasten.load(tmp_path / "plain", dtype="bfloat16")
    hasten.save(narrow, tmp_path / "narrow")
    again = hasten.load(tmp_path / "narrow", dtype="stored")
    for model in (narrow, again, hasten.load(tmp_path / "plain").to(torch.bfloat16), hasten.load(reference).half()):
        assert model.dtype in (torch.bfloat16, torch.float16)
        found = {name: one for name, one in model.named_parameters() if name.endswith("choice_bias")}
        assert found.keys() == exact.keys()
        assert all(torch.equal(one, exact[name]) for name, one in found.items())


@pytest.mark.parametrize("family", ROUTED)
def test_a_new_model_begins_without_a_bias_and_trains_everything_else(family):
    config = read_config(values_of(family))
    model = initialize(config, seed=1)
    biases = [one for name, one in model.named_parameters() if name.endswith("choice_bias")]
    assert biases
    assert all(torch.count_nonzero(one) == 0 for one in biases)
    block = next(block.mlp for block in model.blocks if isinstance(block.mlp, Experts))
    block(torch.randn(64, config.hidden_size)).square().sum().backward()
    without = [name for name, one in block.named_parameters() if one.grad is None]
    assert without == ["choice_bias"]


def test_an_mlp_beside_the_experts_is_added_through_its_gate():
    config = replace(read_config(values_of("qwen2_moe")), layers=(LayerConfig(experts=True),))
    gated = initialize(config, seed=2).blocks[0].mlp
    x = torch.randn(3, config.hidden_size)
    with torch.no_grad():
        whole, beside = gated(x), gated.shared(x)
        gated.shared_gate.weight.fill_(0.0)
        halved = gated(x)
        gated.shared = None
        alone = gated(x)
    torch.testing.assert_close(halved, alone + beside / 2)
    assert not torch.allclose(whole, halved)


@pytest.mark.parametrize("family", ["olmoe", "granitemoe", *SHARED, "minimax_m2", "gpt_oss"])
def test_served_together_each_text_is_that_of_transformers(family):
    reference = make_reference(family)
    llm = hasten.LLM(hasten.load(reference, dtype="float32"), block_size=4)
    params = hasten.SamplingParams(temperature=0, max_new_tokens=32, min_new_tokens=32)
    answers = [answer.tokens for answer in llm.generate(PROMPTS * 2, params)]
    llm.close()
    expected = [reference_greedy(reference, tokens, 32) for tokens in PROMPTS]
    assert answers == expected * 2


def test_sinks_and_the_biases_of_routers_and_experts_are_trained():
    model = initialize(read_config(values_of("gpt_oss")), seed=1)
    tokens = torch.randint(3, 100, (4, 40), generator=torch.Generator().manual_seed(0))
    context = TrainingContext([layer.window for layer in model.config.layers])
    model(tokens, torch.arange(40).expand(4, -1), context, targets=tokens).backward()
    without = [name for name, one in model.named_parameters() if one.grad is None or not one.grad.any()]
    assert not without


@pytest.mark.parametrize("family", ["nemotron_h", "dots1"])
def test_a_sum_of_experts_is_rounded_once(family):
    """Against float64: no farther than the experts' own rounded outputs, added up exactly."""
    config = replace(read_config(values_of(family)), experts=16, experts_per_token=12, expert_groups=1)
    layer = next(layer for layer in config.layers if layer.experts)
    block = initialize(replace(config, layers=(layer,)), seed=0, dtype=torch.bfloat16).blocks[0].mlp
    rows = torch.randn(64, config.expert_width, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        shares, chosen = block.route(rows)
        found = block.one_by_one(rows, shares, chosen)
        each = torch.stack([expert(rows) for expert in block.experts], dim=1).double()  # (N, E, C)
    chosen_ones = each.gather(1, chosen[..., None].expand(-1, -1, each.shape[-1]))
    exact = (chosen_ones * shares.double()[..., None]).sum(dim=1)
    assert found.dtype == torch.bfloat16
    assert (found.double() - exact).abs().max() <= 2 * (exact.bfloat16().double() - exact).abs().max()

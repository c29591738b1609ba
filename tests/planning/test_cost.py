from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hasten.model.config import ModelConfig
from hasten.model.families import read_config
from hasten.model.transformer import Transformer
from hasten.planning.cost import (
    decode_bytes_per_token,
    forward_flops_per_token,
    kv_bytes_per_token,
    muon_flops,
    parameters,
    state_bytes,
    training_flops_per_token,
)
from hasten.training.muon import Muon

DENSE = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
EXPERTS = DENSE | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
GATED = DENSE | {"model_type": "qwen2_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GATED |= {"shared_expert_intermediate_size": 24}
SHARED = DENSE | {"model_type": "dots1", "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED |= {"n_shared_experts": 2, "first_k_dense_replace": 1}
STATES = DENSE | {"model_type": "qwen3_5_text", "num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 2}
STATES |= {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12}
CONVOLVED = DENSE | {"model_type": "lfm2", "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
CONVOLVED |= {"conv_bias": True}
MAMBA = DENSE | {"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 8}
MAMBA |= {"num_local_experts": 0, "shared_intermediate_size": 64, "mamba_d_state": 12, "mamba_n_groups": 2}
HALVES = DENSE | {"model_type": "nemotron_h", "hybrid_override_pattern": "-ME*MM", "mamba_num_heads": 8, "head_dim": 16}
HALVES |= {"ssm_state_size": 12, "n_groups": 2, "mamba_head_dim": 8, "moe_intermediate_size": 16}
HALVES |= {"moe_shared_expert_intermediate_size": 24, "num_hidden_layers": 6}
NARROW = HALVES | {"moe_latent_size": 20}
LENT = DENSE | {"model_type": "gemma4_text", "num_hidden_layers": 8, "num_kv_shared_layers": 2, "head_dim": 8}
LENT |= {"global_head_dim": 16, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 12}
LENT |= {"vocab_size_per_layer_input": 100}


def config(values: dict) -> ModelConfig:
    return read_config(values, "test")


def bytes_read(model: ModelConfig, *, batch: int, context: int = 0) -> float:
    return decode_bytes_per_token(model, weight_bytes=2, kv_bytes=2, context=context, batch=batch)


WIDE = DENSE | {"num_attention_heads": 8, "head_dim": 8}


@pytest.mark.parametrize(
    "values", [DENSE, EXPERTS, GATED, SHARED, STATES, CONVOLVED, MAMBA, HALVES, NARROW, WIDE, LENT]
)
def test_muons_own_products_are_those_of_a_step(values) -> None:
    model = Transformer(config(values))
    optimizer = Muon([parameter for parameter in model.blocks.parameters() if parameter.ndim == 2], lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    with FlopCounterMode(display=False) as counted:
        optimizer.step()
    assert muon_flops(model.config) == counted.get_total_flops()


def test_a_step_reads_dense_weights_once_and_every_cache() -> None:
    model = config(DENSE)
    assert bytes_read(model, batch=1) == 2 * parameters(model).active
    for batch in (1, 8):
        weights = 2 * parameters(model).active / batch
        assert bytes_read(model, batch=batch, context=50) == weights + 50 * kv_bytes_per_token(model, 2)


def test_layers_with_states_read_and_write_them_whatever_the_length() -> None:
    model = config(STATES)
    assert kv_bytes_per_token(model, 2) == 2 * 2 * 16 * 2  # of the one layer with attention
    assert state_bytes(model, 2) == 3 * (4 * 4 * 8 * 12 + 2 * 3 * (2 * 2 * 8 + 4 * 12))
    weights, states = 2 * parameters(model).active, 2 * state_bytes(model, 2)
    for length in (0, 50):
        found = bytes_read(model, batch=4, context=length)
        assert found == weights / 4 + states + length * kv_bytes_per_token(model, 2)


def test_short_convolutions_keep_their_last_inputs() -> None:
    model = config(CONVOLVED)
    hidden, heads = model.hidden_size, model.heads * model.head_dim
    assert kv_bytes_per_token(model, 2) == 2 * model.kv_heads * model.head_dim * 2
    assert state_bytes(model, 2) == 2 * 2 * 2 * hidden
    products = 2 * 4 * hidden**2 + 2 * hidden * (heads + model.kv_heads * model.head_dim)
    products += 3 * 3 * hidden * model.intermediate_size + model.padded_vocab_size * hidden
    vectors = 2 * hidden * (3 + 1 + 4) + 2 * model.head_dim + 6 * hidden  # taps, biases; norms of heads and stream
    assert parameters(model).active == products + vectors
    seen = 4 * heads * (10 + 1) / 2
    assert forward_flops_per_token(model, 10) == 2 * (products + vectors) + seen


def test_mamba_keeps_a_matrix_for_each_head() -> None:
    model = config(MAMBA)
    values, channels = 64, 64 + 2 * 2 * 12
    assert state_bytes(model, 2) == 2 * (4 * 8 * 12 * 8 + 2 * 3 * channels)
    hidden, heads = model.hidden_size, model.heads * model.head_dim
    products = 2 * hidden * (values + channels + 8 + values) + 2 * hidden * (heads + model.kv_heads * model.head_dim)
    products += 3 * 3 * hidden * 64 + model.padded_vocab_size * hidden
    vectors = 2 * (5 * channels + 3 * 8 + values) + 6 * hidden  # taps and bias, decay, step and skip; norms
    assert parameters(model).active == products + vectors
    attended, scanned = 4 * heads * (10 + 1) / 2, 2 * 4 * 8 * 12 * 8
    assert forward_flops_per_token(model, 10) == 2 * (products + vectors) + attended + scanned


def test_a_layer_of_one_half_counts_that_half_alone() -> None:
    model = config(HALVES)
    values, channels, hidden = 64, 64 + 2 * 2 * 12, model.hidden_size
    assert kv_bytes_per_token(model, 2) == 2 * 2 * 16 * 2  # of the one layer with attention
    assert state_bytes(model, 2) == 3 * (4 * 8 * 12 * 8 + 2 * 3 * channels)
    products = 3 * hidden * (values + channels + 8 + values) + 2 * hidden * (4 + 2) * 16
    products += 2 * hidden * (model.intermediate_size + 8 + 24 + 2 * 16) - 8 * hidden  # the router is one matrix
    products += model.padded_vocab_size * hidden
    vectors = 3 * (5 * channels + 3 * 8 + values) + 6 * hidden + 8  # one norm a layer; biases of the choice
    assert parameters(model).active == products + vectors
    attended, scanned = 4 * 4 * 16 * (10 + 1) / 2, 3 * 4 * 8 * 12 * 8
    assert forward_flops_per_token(model, 10) == 2 * (products + vectors) + attended + scanned
    assert bytes_read(model, batch=1) == pytest.approx(2 * parameters(model).active + 2 * state_bytes(model, 2))


def test_layers_that_use_the_keys_of_others_read_them_too() -> None:
    model = config(LENT)
    assert kv_bytes_per_token(model, 2) == 2 * 2 * 2 * (5 * 8 + 16)
    assert bytes_read(model, batch=1, context=50) == 2 * parameters(model).active + 50 * 2 * 2 * 2 * (6 * 8 + 2 * 16)


def test_several_tokens_choose_more_experts_than_one_but_not_all() -> None:
    model = config(EXPERTS)
    own, all_experts = parameters(model).active, replace(model, experts_per_token=model.experts)
    one_expert = 3 * model.hidden_size * model.expert_size
    assert bytes_read(model, batch=1) == pytest.approx(2 * own)
    step = bytes_read(model, batch=2) * 2  # of 8 experts the second token finds 2 · 2/8 already chosen
    assert step == pytest.approx(2 * (own + 3 * 1.5 * one_expert))
    assert bytes_read(model, batch=1000) * 1000 == pytest.approx(2 * parameters(all_experts).active)
    assert bytes_read(all_experts, batch=4) * 4 == pytest.approx(2 * parameters(all_experts).active)


@pytest.mark.parametrize(("values", "beside", "dense"), [(GATED, 3 * 24 + 1, 0), (SHARED, 3 * 32, 1)])
def test_what_every_token_passes_beside_the_experts_is_active(values, beside, dense) -> None:
    model = config(values)
    hidden, sparse = model.hidden_size, 3 - dense
    attention, one_expert = 2 * hidden * 32 + 2 * hidden * 16, 3 * hidden * 16
    around = 3 * attention + dense * 3 * hidden * 64 + sparse * hidden * (8 + beside)
    vectors = 3 * 2 * hidden + (3 * 2 * model.head_dim + sparse * 8 if values is SHARED else 3 * (32 + 2 * 16))
    counted = parameters(model)
    assert counted.active == around + vectors + sparse * 2 * one_expert + counted.embedding
    assert counted.total == counted.active + sparse * 6 * one_expert + counted.head + hidden
    assert bytes_read(model, batch=1) == pytest.approx(2 * counted.active)
    step = bytes_read(model, batch=2) * 2
    assert step == pytest.approx(2 * (counted.active + sparse * 1.5 * one_expert))


def test_a_prompt_pays_for_the_head_once_and_training_for_every_token() -> None:
    model, length = config(DENSE), 10
    blocks = 3 * (32 * (2 * 32 + 2 * 16) + 3 * 32 * 64 + 2 * 32)
    head = model.padded_vocab_size * 32
    attention = 4 * 32 * 3 * (length + 1) / 2
    prompt = length * (2 * blocks + attention) + 2 * head
    assert length * forward_flops_per_token(model, length, scored=1) == pytest.approx(prompt)
    assert forward_flops_per_token(model, length) == pytest.approx(2 * (blocks + head) + attention)
    assert training_flops_per_token(model, length) == 3 * forward_flops_per_token(model, length)

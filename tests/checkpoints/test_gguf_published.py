"""The metadata and names of tensors that llama.cpp's converters write of published models, at about their sizes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hasten.checkpoints.gguf.config import config_values
from hasten.checkpoints.gguf.header import GGUFFile, GGUFTensor
from hasten.checkpoints.gguf.names import place_of, places_by_head
from hasten.checkpoints.gguf.types import TYPES
from hasten.model.families import read_config
from hasten.model.families.family import parameter_names

GRANITE = {"context_length": 131_072, "attention.layer_norm_rms_epsilon": 1e-5, "vocab_size": 100_352}
GRANITE |= {"attention.scale": 0.015625, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 10.0}
GRANITE |= {"ssm.conv_kernel": 4, "ssm.group_count": 1, "ssm.state_size": 128}
MICRO = {"embedding_length": 2560, "block_count": 40, "feed_forward_length": 8192, "expert_count": 0}
MICRO |= {"attention.head_count": 40, "attention.head_count_kv": [8] * 40, "rope.scaling.finetuned": True}
MICRO |= {"rope.freq_base": 1e7, "rope.dimension_count": 64, "expert_shared_feed_forward_length": 8192}
MICRO |= {"ssm.inner_size": 5120, "ssm.time_step_rank": 64}
ATTENDING = [4 * (i in (5, 15, 25, 35)) for i in range(40)]
H_TINY = {"embedding_length": 1536, "block_count": 40, "feed_forward_length": 512, "expert_count": 64}
H_TINY |= {"expert_used_count": 6, "expert_shared_feed_forward_length": 1024, "attention.head_count": 12}
H_TINY |= {"attention.head_count_kv": ATTENDING, "rope.scaling.finetuned": False, "rope.dimension_count": 128}
H_TINY |= {"ssm.inner_size": 3072, "ssm.time_step_rank": 48}
H_MICRO = {"embedding_length": 2048, "block_count": 40, "feed_forward_length": 8192, "expert_count": 0}
H_MICRO |= {"expert_used_count": 0, "expert_shared_feed_forward_length": 8192, "attention.head_count": 32}
H_MICRO |= {"attention.head_count_kv": [2 * heads for heads in ATTENDING], "rope.scaling.finetuned": False}
H_MICRO |= {"ssm.inner_size": 4096, "ssm.time_step_rank": 64, "rope.dimension_count": 64}

LATENT = {"attention.layer_norm_rms_epsilon": 1e-6, "attention.kv_lora_rank": 512, "rope.dimension_count": 64}
OLDER = LATENT | {"attention.key_length": 192, "attention.value_length": 128}
NEWER = LATENT | {"attention.head_count_kv": 1, "attention.key_length": 576, "attention.value_length": 512}
NEWER |= {"attention.key_length_mla": 192, "attention.value_length_mla": 128}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 40.0, "rope.scaling.original_context_length": 4096}
YARN |= {"rope.scaling.yarn_log_multiplier": 0.1}
LITE = OLDER | YARN | {"context_length": 163_840, "block_count": 27, "embedding_length": 2048, "vocab_size": 102_400}
LITE |= {"feed_forward_length": 10_944, "attention.head_count": 16, "attention.head_count_kv": 16}
LITE |= {"expert_count": 64, "expert_used_count": 6, "expert_shared_count": 2, "expert_feed_forward_length": 1408}
LITE |= {"expert_weights_scale": 1.0, "leading_dense_block_count": 1, "rope.scaling.yarn_log_multiplier": 0.0707}
R1 = OLDER | YARN | {"context_length": 163_840, "block_count": 61, "embedding_length": 7168, "vocab_size": 129_280}
R1 |= {"feed_forward_length": 18_432, "attention.head_count": 128, "attention.head_count_kv": 128}
R1 |= {"attention.q_lora_rank": 1536, "expert_count": 256, "expert_used_count": 8, "expert_shared_count": 1}
R1 |= {"expert_feed_forward_length": 2048, "expert_weights_scale": 2.5, "expert_weights_norm": True}
R1 |= {"expert_gating_func": 2, "leading_dense_block_count": 3}
K2 = (
    R1 | NEWER | {"attention.head_count": 64, "vocab_size": 163_840, "expert_count": 384, "expert_weights_scale": 2.827}
)
K2 |= {"leading_dense_block_count": 1, "context_length": 131_072, "rope.scaling.factor": 32.0}
K2 |= {"expert_group_count": 1, "expert_group_used_count": 1, "rope.freq_base": 5e4}
FLASH = NEWER | {"context_length": 202_752, "block_count": 47, "embedding_length": 2048, "vocab_size": 154_880}
FLASH |= {"feed_forward_length": 10_240, "attention.head_count": 20, "attention.q_lora_rank": 768}
FLASH |= {"attention.key_length_mla": 256, "attention.value_length_mla": 256, "expert_count": 64}
FLASH |= {"expert_used_count": 4, "expert_shared_count": 1, "expert_feed_forward_length": 1536}
FLASH |= {"expert_weights_scale": 1.8, "expert_weights_norm": True, "leading_dense_block_count": 1}
FLASH |= {"rope.freq_base": 1e6, "expert_group_count": 1, "expert_group_used_count": 1}
LARGE = K2 | {"attention.head_count": 128, "vocab_size": 131_072, "expert_count": 128, "expert_used_count": 4}
LARGE |= {"expert_gating_func": 1, "leading_dense_block_count": 3, "expert_weights_scale": 1.0}
LARGE |= {"attention.temperature_scale": 0.1, "attention.temperature_length": 8192}

ATTENTION = {"attn_norm", "attn_q", "attn_k", "attn_v", "attn_output"}
MLP = {"ffn_norm", "ffn_gate", "ffn_up", "ffn_down"}
MAMBA = {"attn_norm", "ssm_in", "ssm_conv1d", "ssm_conv1d.bias", "ssm_dt.bias", "ssm_a", "ssm_d", "ssm_norm", "ssm_out"}
EXPERTS = {"ffn_norm", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"}
SHARED = {"ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"}
LATENT_OLDER = {"attn_norm", "attn_kv_a_mqa", "attn_kv_a_norm", "attn_kv_b", "attn_output"}
LATENT_NEWER = LATENT_OLDER - {"attn_kv_b"} | {"attn_k_b", "attn_v_b"}
NARROW = {"attn_q_a", "attn_q_a_norm", "attn_q_b"}
BIASED = EXPERTS | SHARED | {"exp_probs_b.bias"}
# name -> architecture, metadata, family, tensors of the first layer, and of the last.
PUBLISHED = {
    "Granite-4.0-micro": ("granite", GRANITE | MICRO, "granite", ATTENTION | MLP, ATTENTION | MLP),
    "Granite-4.0-H-Tiny": (
        "granitehybrid",
        GRANITE | H_TINY,
        "granitemoehybrid",
        MAMBA | EXPERTS | SHARED,
        MAMBA | EXPERTS | SHARED,
    ),
    "Granite-4.0-H-Micro": ("granitehybrid", GRANITE | H_MICRO, "granitemoehybrid", MAMBA | MLP, MAMBA | MLP),
    "DeepSeek-V2-Lite, 2024": (
        "deepseek2",
        LITE,
        "deepseek_v2",
        LATENT_OLDER | {"attn_q"} | MLP,
        LATENT_OLDER | {"attn_q"} | EXPERTS | SHARED,
    ),
    "DeepSeek-R1, January 2025": (
        "deepseek2",
        R1,
        "deepseek_v3",
        LATENT_OLDER | NARROW | MLP,
        LATENT_OLDER | NARROW | BIASED,
    ),
    "Kimi-K2": ("deepseek2", K2, "deepseek_v3", LATENT_NEWER | NARROW | MLP, LATENT_NEWER | NARROW | BIASED),
    "GLM-4.7-Flash": ("deepseek2", FLASH, "deepseek_v3", LATENT_NEWER | NARROW | MLP, LATENT_NEWER | NARROW | BIASED),
    "Mistral-Large-3": (
        "deepseek2",
        LARGE,
        "mistral4",
        LATENT_NEWER | NARROW | MLP,
        LATENT_NEWER | NARROW | EXPERTS | SHARED,
    ),
}


def whole(names, layer):
    return {
        f"blk.{layer}.{name}" if name.endswith(".bias") or name in ("ssm_a", "ssm_d") else f"blk.{layer}.{name}.weight"
        for name in names
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_converters_write_is_read(name):
    architecture, own, family, first, last = PUBLISHED[name]
    layers = own["block_count"]
    embedding = GGUFTensor("token_embd.weight", TYPES["F32"], (own["vocab_size"], own["embedding_length"]))
    names = whole(first, 0) | whole(last, layers - 1)
    tensors = {one: replace(embedding, name=one) for one in names} | {embedding.name: embedding}
    entries = {f"{architecture}.{key}": value for key, value in own.items()} | {"general.architecture": architecture}
    config = read_config(config_values(GGUFFile(Path("x.gguf"), entries, tensors, (torch.empty(0),))))
    assert (config.family, len(config.layers)) == (family, layers)
    assert config.expert_groups == 1
    newer = "blk.0.attn_k_b.weight" in names
    wanted, ends = set(), ("blocks.0.", f"blocks.{layers - 1}.")
    # (Of the layers between, and of the other experts, the names differ by their numbers alone.)
    small = replace(config, experts=min(config.experts, 1), experts_per_token=min(config.experts, 1))
    for ours in parameter_names(small):
        if ours.startswith(ends):
            places = (places_by_head(ours, config) if newer else []) or [place_of(ours, config, joined=False)]
            wanted |= {place.name for place in places}
    assert wanted == names

"""Tiny random transformers models of every family, the reference that ours is compared with."""

import pytest
import torch

import hasten
from tiny_model import tiny_llama as tiny_llama

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT = {
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "vocab_size": 101,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 16,
}

ALPHA = {"rope_type": "dynamic", "alpha": 10.0, "factor": 1.0, "rope_theta": 1e4}
WINDOWED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

# name -> (config class, model class, config values)
CASES = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT),
    "gpt2-scaled": ("GPT2Config", "GPT2LMHeadModel", GPT | {"scale_attn_by_inverse_layer_idx": True, "n_inner": 80}),
    "gpt_bigcode": ("GPTBigCodeConfig", "GPTBigCodeForCausalLM", GPT),
    "gpt_bigcode-mha": ("GPTBigCodeConfig", "GPTBigCodeForCausalLM", GPT | {"multi_query": False}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", BASE),
    "llama-mha": ("LlamaConfig", "LlamaForCausalLM", BASE | {"num_key_value_heads": 4}),
    "llama-mqa": ("LlamaConfig", "LlamaForCausalLM", BASE | {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-biases": ("LlamaConfig", "LlamaForCausalLM", BASE | {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": (
        "LlamaConfig",
        "LlamaForCausalLM",
        BASE | {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}},
    ),
    "llama-llama3": ("LlamaConfig", "LlamaForCausalLM", BASE | {"rope_parameters": LLAMA3, "head_dim": 32}),
    "llama-yarn": ("LlamaConfig", "LlamaForCausalLM", BASE | {"rope_parameters": YARN}),
    "mistral": ("MistralConfig", "MistralForCausalLM", BASE | {"sliding_window": 7}),
    "mistral-plain": ("MistralConfig", "MistralForCausalLM", BASE | {"sliding_window": None, "head_dim": 24}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", BASE),
    "qwen2-window": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        BASE | {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", BASE | {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", BASE | {"head_dim": 32, "sliding_window": 6}),
    "gemma3_text": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        BASE | {"head_dim": 32, "sliding_window": 6, "sliding_window_pattern": 2, "query_pre_attn_scalar": 32},
    ),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", BASE),
    "phi3-longrope": (
        "Phi3Config",
        "Phi3ForCausalLM",
        BASE | {"rope_parameters": LONG, "original_max_position_embeddings": 16, "max_position_embeddings": 64},
    ),
    "phi3-window": ("Phi3Config", "Phi3ForCausalLM", BASE | {"sliding_window": 5}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", BASE | {"num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        BASE
        | {
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
        },
    ),
}

CASES |= {
    "gemma": ("GemmaConfig", "GemmaForCausalLM", BASE | {"head_dim": 32}),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", BASE | {"sliding_window": 6}),
    "starcoder2-plain": ("Starcoder2Config", "Starcoder2ForCausalLM", BASE | {"use_bias": False}),
    "ministral": (
        "MinistralConfig",
        "MinistralForCausalLM",
        BASE | {"head_dim": 32, "sliding_window": 6, "layer_types": WINDOWED},
    ),
    "seed_oss": ("SeedOssConfig", "SeedOssForCausalLM", BASE | {"head_dim": 32}),
    "arcee": ("ArceeConfig", "ArceeForCausalLM", BASE),
    "ministral3": (
        "Ministral3Config",
        "Ministral3ForCausalLM",
        BASE
        | {
            "head_dim": 32,
            "rope_parameters": YARN | {"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.3},
        },
    ),
    "nemotron": ("NemotronConfig", "NemotronForCausalLM", BASE),
    "nemotron-biases": (
        "NemotronConfig",
        "NemotronForCausalLM",
        BASE | {"attention_bias": True, "mlp_bias": True, "head_dim": 32},
    ),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM", BASE | {"sliding_window": 6, "logit_scale": 0.5}),
    "granite": (
        "GraniteConfig",
        "GraniteForCausalLM",
        BASE
        | {
            "embedding_multiplier": 3.0,
            "logits_scaling": 1.5,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.3,
        },
    ),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", BASE | {"no_rope_layer_interval": 2}),
    "smollm3-window": (
        "SmolLM3Config",
        "SmolLM3ForCausalLM",
        BASE | {"use_sliding_window": True, "sliding_window": 6, "no_rope_layers": [1, 0, 0, 1]},
    ),
    "hunyuan_v1_dense": (
        "HunYuanDenseV1Config",
        "HunYuanDenseV1ForCausalLM",
        BASE | {"head_dim": 32, "rope_parameters": ALPHA},
    ),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", BASE),
    "olmo3": (
        "Olmo3Config",
        "Olmo3ForCausalLM",
        BASE
        | {
            "sliding_window": 6,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            },
        },
    ),
    "exaone4": (
        "Exaone4Config",
        "Exaone4ForCausalLM",
        BASE | {"head_dim": 32, "sliding_window": 6, "sliding_window_pattern": 2},
    ),
    "glm": ("GlmConfig", "GlmForCausalLM", BASE | {"head_dim": 32}),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", BASE | {"head_dim": 32}),
    "ernie4_5": ("Ernie4_5Config", "Ernie4_5ForCausalLM", BASE | {"head_dim": 16}),
    "ernie4_5-biases": ("Ernie4_5Config", "Ernie4_5ForCausalLM", BASE | {"head_dim": 32, "use_bias": True}),
    "apertus": ("ApertusConfig", "ApertusForCausalLM", BASE),
    "apertus-biases": (
        "ApertusConfig",
        "ApertusForCausalLM",
        BASE | {"attention_bias": True, "rope_parameters": LLAMA3, "num_key_value_heads": 4},
    ),
    "nanochat": ("NanoChatConfig", "NanoChatForCausalLM", BASE),
    "nanochat-biases": (
        "NanoChatConfig",
        "NanoChatForCausalLM",
        BASE | {"attention_bias": True, "final_logit_softcapping": None, "rope_parameters": YARN},
    ),
}

EXPERTS = BASE | {"head_dim": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
CASES |= {
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", BASE | {"num_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        EXPERTS
        | {"num_experts": 4, "shared_expert_intermediate_size": 96, "mlp_only_layers": [1]}
        | {"moe_intermediate_size": 32},
    ),
    "qwen2_moe-window": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        EXPERTS
        | {
            "num_experts": 6,
            "shared_expert_intermediate_size": 40,
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 3,
        },
    ),
    "granitemoe": (
        "GraniteMoeConfig",
        "GraniteMoeForCausalLM",
        CASES["granite"][2] | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "dots1": (
        "Dots1Config",
        "Dots1ForCausalLM",
        EXPERTS
        | {"n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5}
        | {"n_group": 4, "topk_group": 2, "sliding_window": 6, "max_window_layers": 2},
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        EXPERTS
        | {"n_routed_experts": 6, "attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 1.5}
        | {"head_dim": 32},
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        "Ernie4_5_MoeForCausalLM",
        EXPERTS | {"moe_num_experts": 5, "moe_k": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 2},
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        "MiniMaxM2ForCausalLM",
        EXPERTS | {"num_local_experts": 6, "head_dim": 32, "rotary_dim": 8},
    ),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        BASE
        | {"head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 6, "swiglu_limit": 0.7}
        | {"rope_parameters": YARN | {"truncate": False}},
    ),
    "gpt_oss-plain": (
        "GptOssConfig",
        "GptOssForCausalLM",
        BASE
        | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 1.5, "sliding_window": 5}
        | {"layer_types": WINDOWED[::-1], "attention_bias": False},
    ),
}

# Random heads return next to nothing now and then, of which their norm makes noise: eps bounds it.
DELTA = EXPERTS | {
    "head_dim": 32,
    "rms_norm_eps": 1e-2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "num_experts": 4,
    "shared_expert_intermediate_size": 40,
}
DENSE_DELTA = {name: value for name, value in DELTA.items() if "expert" not in name and "moe" not in name}
CASES |= {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", DELTA | {"mlp_only_layers": [1]}),
    "qwen3_5_text": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", DENSE_DELTA),
    "qwen3_5_text-kinds": (
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        DENSE_DELTA
        | {"attention_bias": True, "tie_word_embeddings": True, "linear_conv_kernel_dim": 3}
        | {"layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention"]},
    ),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        {name: value for name, value in DELTA.items() if name != "intermediate_size"},
    ),
}

LFM2 = BASE | {"norm_eps": 1e-3, "block_multiple_of": 16, "layer_types": ["conv", "conv", "full_attention", "conv"]}
LFM2_MOE = {name: value for name, value in LFM2.items() if name != "block_multiple_of"}
CASES |= {
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM", LFM2),
    # As older files name their layers.
    "lfm2-biases": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        LFM2
        | {"layer_types": None, "full_attn_idxs": [0, 3], "conv_bias": True, "conv_L_cache": 4}
        | {"block_auto_adjust_ff_dim": False, "tie_word_embeddings": False},
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        "Lfm2MoeForCausalLM",
        LFM2_MOE
        | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "num_dense_layers": 1}
        | {"routed_scaling_factor": 1.5},
    ),
}

# The random state adds next to nothing now and then, too: eps bounds what its norm makes of that.
MAMBA = CASES["granite"][2] | {
    "rms_norm_eps": 1e-2,
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 20,
    "mamba_d_head": 16,
    "shared_intermediate_size": 40,
    "num_local_experts": 4,
}
CASES |= {
    "granitemoehybrid": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", MAMBA),
    # As Granite 4 of 350M and 1B, which have attention alone.
    "granitemoehybrid-attention": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        MAMBA | {"layer_types": ["attention"] * 4, "num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    # As the dense ones, with what no published model has.
    "granitemoehybrid-dense": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        MAMBA
        | {"num_local_experts": 0, "position_embedding_type": "rope", "mamba_n_groups": 1, "mamba_proj_bias": True}
        | {
            "mamba_d_state": 12,
            "mamba_conv_bias": False,
            "mamba_d_conv": 3,
            "tie_word_embeddings": True,
            "attention_bias": True,
        },
    ),
}


# Layers of one half, in orders that no pairs of both make up. transformers raises Mamba-2's steps to time_step_min in
# prompts and not for single tokens: here it raises none.
NEMOTRON_H = BASE | {
    "head_dim": 32,
    "time_step_min": 1e-30,
    "layer_norm_epsilon": 1e-2,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 20,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 40,
}
CASES |= {
    "nemotron_h": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        NEMOTRON_H
        | {"hybrid_override_pattern": "MEM*EE-M", "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
        | {"routed_scaling_factor": 2.5},
    ),
    # As Nemotron 3 Super: experts that read a narrower stream.
    "nemotron_h-latent": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        NEMOTRON_H | {"hybrid_override_pattern": "ME*E", "n_routed_experts": 6, "moe_latent_size": 32},
    ),
    # Without experts, and with what no published model has.
    "nemotron_h-dense": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        NEMOTRON_H
        | {"hybrid_override_pattern": "-MM-*--M", "ssm_state_size": 12, "conv_kernel": 3, "use_conv_bias": False}
        | {"use_bias": True, "mlp_bias": True, "mlp_hidden_act": "gelu"},
    ),
}


GEMMA4 = BASE | {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 6,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
}
CASES |= {
    # As the 31B: values of global layers that are their keys, of fewer heads.
    "gemma4_text": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        GEMMA4
        | {"num_hidden_layers": 7, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
        | {"attention_bias": True},
    ),
    # As the E2B: per-layer embeddings, and layers that use the keys of others, with wider MLPs.
    "gemma4_text-shared": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        GEMMA4
        | {"num_hidden_layers": 8, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
        | {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 103},
    ),
    # As the 26B-A4B: experts beside the MLP of each layer.
    "gemma4_text-experts": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        GEMMA4
        | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48}
        | {"layer_types": WINDOWED, "global_head_dim": 16, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
}


# Latent attention: sizes of heads that differ, with rotary tables of several kinds.
LATENT = BASE | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 40,
}
OF_LATENTS = LATENT | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
CASES |= {
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        OF_LATENTS
        | {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "attention_bias": True}
        | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}},
    ),
    "deepseek_v3-plain": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        OF_LATENTS | {"q_lora_rank": None, "rope_interleave": False, "n_group": 1, "topk_group": 1, "v_head_dim": 12},
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        OF_LATENTS
        | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 3.0}
        | {"first_k_dense_replace": 1, "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    # As the Lite: queries without a latent of their own, and the best of all experts.
    "deepseek_v2-lite": ("DeepseekV2Config", "DeepseekV2ForCausalLM", OF_LATENTS | {"q_lora_rank": None}),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        "Glm4MoeLiteForCausalLM",
        OF_LATENTS | {"v_head_dim": 24, "mlp_layer_types": ["dense", "sparse", "dense", "sparse"]},
    ),
    "mistral4": (
        "Mistral4Config",
        "Mistral4ForCausalLM",
        OF_LATENTS
        | {"first_k_dense_replace": 2}
        | {
            "rope_parameters": YARN
            | {"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.3, "mscale_all_dim": 1.0, "mscale": 1.0}
        },
    ),
    # (Tied, transformers itself does not load it again.)
    "youtu": ("YoutuConfig", "YoutuForCausalLM", LATENT | {"tie_word_embeddings": False}),
}


# name -> what is changed of a case for a GGUF file to state it, and llama.cpp to load it.
STATED = {
    "gemma2": {"query_pre_attn_scalar": 32},
    "qwen3_moe": {"mlp_only_layers": []},
    "starcoder2": {"sliding_window": None},
    "smollm3": {"no_rope_layer_interval": 4},
    "exaone4": {"head_dim": 16, "sliding_window": None, "layer_types": ["full_attention"] * 4},
    "exaone4-64": {"head_dim": 16, "num_hidden_layers": 64},
    "olmo3": {
        "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
    },
    "olmoe": {"num_key_value_heads": 4},
    "nemotron-biases": {"head_dim": 16},
    "hunyuan_v1_dense": {"rope_parameters": {"rope_type": "default", "rope_theta": 3e4}},
    "qwen2_moe": {"mlp_only_layers": []},
    "dots1": {"num_key_value_heads": 4, "sliding_window": None},
    "ernie4_5_moe": {"moe_layer_end_index": -1},
    # The limits of this yarn are whole frequencies, as llama.cpp rounds them.
    "gpt_oss": {"swiglu_limit": 7.0, "rope_parameters": YARN | {"truncate": False, "rope_theta": 10766.0}},
    "gemma4_text": {"attention_bias": False},
    "lfm2_moe": {"routed_scaling_factor": 1.0},
    "granitemoehybrid-dense": {"mamba_proj_bias": False, "mamba_conv_bias": True},
    "deepseek_v3": {"attention_bias": False, "rope_parameters": YARN | {"mscale": 0.9, "mscale_all_dim": 0.9}},
    "deepseek_v3-plain": {"rope_interleave": True},
    "deepseek_v2": {"topk_method": "greedy", "n_group": 1, "topk_group": 1},
    "glm4_moe_lite": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
} | {
    # llama.cpp has one size of the keys and values of Gated DeltaNet, and one eps for their lengths and for norms.
    name: {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "rms_norm_eps": 2e-3} | changes
    for name, changes in {"qwen3_next": {"mlp_only_layers": []}, "qwen3_5_text": {}, "qwen3_5_moe_text": {}}.items()
}


# The cases of which GGUF files are written, at least one of each architecture.
IN_GGUF = ["llama", "llama-mqa", "llama-biases", "llama-linear", "llama-yarn", "mistral-plain", "mixtral", "ministral3"]
IN_GGUF += ["qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "phi3", "phi3-longrope", "phi3-window", "gemma", "gemma2"]
IN_GGUF += ["gemma3_text", "granite", "starcoder2", "smollm3", "arcee", "nemotron", "nemotron-biases", "seed_oss"]
IN_GGUF += ["hunyuan_v1_dense", "olmo2", "olmo3", "olmoe", "exaone4", "exaone4-64", "glm4", "glm4_moe", "ernie4_5"]
IN_GGUF += ["ernie4_5_moe", "cohere2", "dots1", "minimax_m2", "gpt_oss", "apertus"]
IN_GGUF += ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "lfm2_moe"]
IN_GGUF += ["gemma4_text", "gemma4_text-shared", "gemma4_text-experts", "granitemoe", "granitemoehybrid"]
IN_GGUF += ["granitemoehybrid-attention", "granitemoehybrid-dense", "deepseek_v3", "deepseek_v3-plain", "deepseek_v2"]
IN_GGUF += ["deepseek_v2-lite", "glm4_moe_lite", "mistral4", "youtu"]


def state(name: str, monkeypatch, **changes) -> str:
    """Change a case to what a GGUF file can state; returns the name of the case."""
    own = name.removesuffix("-64")
    values = CASES[own][2] | STATED.get(name, {}) | changes
    if "vocab_size_per_layer_input" in values:  # of which llama.cpp has one for both tables
        values["vocab_size_per_layer_input"] = values["vocab_size"]
    monkeypatch.setitem(CASES, own, (*CASES[own][:2], values))
    return own


def stated(name: str, monkeypatch, **changes):
    """Our model of a case that a GGUF file can state."""
    return hasten.load(make_reference(state(name, monkeypatch, **changes)))


def values_of(name: str) -> dict:
    """The config.json of a case, every field written out."""
    config_class, _, values = CASES[name]
    return getattr(transformers, config_class)(**values).to_dict()


def make_reference(name: str, seed: int = 0):
    """A random float32 transformers model whose logits are of order 1, with norms and biases that are not trivial."""
    config_class, model_class, values = CASES[name]
    torch.manual_seed(seed)
    config = getattr(transformers, config_class)(**values)
    return randomize(getattr(transformers, model_class)(config).eval())


def decided(model):
    """A model of ours whose routers decide nothing by near ties: else any rounding takes another expert."""
    for name, parameter in model.named_parameters():
        if name.endswith("router.weight") and not model.config.expert_choice_bias:
            parameter.data *= 8
        if name.endswith("choice_bias"):
            parameter.data *= 200
    return model


def randomize(model):
    """Give a model weights with which its logits are of order 1."""
    with torch.no_grad():
        for bias_name, bias in model.named_buffers():
            if bias_name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar")):
                bias.add_(torch.randn_like(bias) * 0.1)
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif parameter_name.endswith("embed_tokens_per_layer.weight"):
                parameter.normal_(0, 0.5)
            else:  # tied embeddings score with the same matrix, so it cannot be left at 0.02
                embedding = "embed" in parameter_name or "wte" in parameter_name
                parameter.normal_(0, 0.3 if embedding else 1.2 / parameter.shape[-1] ** 0.5)
    return model

"""config.json is read as transformers reads it: the same defaults, the same old fields, and clear errors."""

import pytest
import torch
import transformers

from hasten.errors import CheckpointError
from hasten.model.config import Fields
from hasten.model.families import FAMILIES, read_config
from hasten.model.families.family import parameter_names
from hasten.model.transformer import Transformer
from hasten.planning.cost import parameters
from references import CASES

# Sizes that every published config names: left out, a guess would only move the error to the weights.
REQUIRED = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
REQUIRED |= {"n_embd", "n_layer", "n_head"}
NEEDED = {  # no number there by default
    "dots1": {"n_routed_experts", "n_shared_experts", "num_experts_per_tok"},
    "deepseek_v2": {"num_experts_per_tok"},
}
NEEDED |= {name: {"layer_types"} for name in ("lfm2_moe", "granitemoehybrid")}
NEEDED["nemotron_h"] = {"layers_block_type"}
WHOLE = ("gemma3_text", "gemma4_text")  # published files leave out even their sizes
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def config_class(name):
    return getattr(transformers, CASES[name][0])


def full_values(name):
    return config_class(name)(**CASES[name][2]).to_dict()


def required(full):
    experts = {"num_experts", "top_k_experts", "moe_intermediate_size"} if full.get("enable_moe_block") else set()
    return (set() if full["model_type"] in WHOLE else REQUIRED) | NEEDED.get(full["model_type"], experts)


def as_transformers_reads(name, values):
    """What we read from the config that transformers makes of these values, every field written out."""
    return read_config(config_class(name).from_dict(values).to_dict())


def test_every_family_has_a_case():
    assert {full_values(name)["model_type"] for name in CASES} == set(FAMILIES)


def test_the_names_of_the_parameters_are_those_of_the_model(case):
    config = read_config(full_values(case))
    with torch.device("meta"):
        model = Transformer(config)
    assert sorted(parameter_names(config)) == sorted(n for n, _ in model.named_parameters(remove_duplicate=False))


def test_the_parameters_are_counted_from_the_config(case):
    config = read_config(full_values(case))
    with torch.device("meta"):
        model = Transformer(config)
    assert parameters(config).total == sum(parameter.numel() for parameter in model.parameters())


def test_any_field_left_out_takes_the_same_default(case):
    full = full_values(case)
    if "num_attention_heads" in full:  # a multiple of every family's default key/value heads
        full |= {"num_attention_heads": 32, "hidden_size": 32 * 16}
    if "mamba_n_heads" in full:  # the default of these, which makes a head of 8
        full |= {"mamba_n_heads": 128, "mamba_d_head": 8}
    full |= {name: 16 for name in EXPERT_COUNTS if name in full}  # at least every family's default of chosen ones
    checked = 0
    for gone in sorted(set(full) - {"model_type"}):
        values = {name: value for name, value in full.items() if name != gone}
        if gone in required(full):
            with pytest.raises(CheckpointError, match=f"config.json lacks '{gone}'"):
                read_config(values)
            continue
        if gone in REQUIRED:  # a default size beside tiny ones need not be a whole model for transformers either
            continue
        assert read_config(values) == as_transformers_reads(case, values), gone
        checked += 1
    assert checked > 10


def test_all_optional_fields_left_out(case):
    full = full_values(case)
    values = {name: full[name] for name in full if name in required(full) | {"model_type"}}
    if "num_attention_heads" in full:
        values |= {"num_attention_heads": 32, "hidden_size": 32 * 16}
    assert read_config(values) == as_transformers_reads(case, values)


@pytest.mark.parametrize("name", WHOLE)
def test_a_config_with_nothing_but_its_type(name):
    values = {"model_type": name}
    assert read_config(values) == as_transformers_reads(name, values)


def test_heads_of_gemma_4s_global_layers_as_published_files_name_them():
    values = {name: value for name, value in full_values("gemma4_text").items() if name != "per_layer_config"}
    for merged in (True, False):
        values |= {"global_head_dim": 48, "num_global_key_value_heads": 4, "attention_k_eq_v": merged}
        config = read_config(values)
        assert config == as_transformers_reads("gemma4_text", values)
        assert [(layer.head_dim, layer.kv_heads) for layer in config.layers[4:]] == [
            (None, None),
            *[(48, 4 if merged else None)] * 2,
        ]


LLAMA3_OLD = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN_OLD = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "attention_factor": 1.2}
HUNYUAN_OLD = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0}
GPT_OSS_OLD = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
GPT_OSS_OLD["original_max_position_embeddings"] = 4096
DEEPSEEK_OLD = {"rope_theta": 10000, "num_nextn_predict_layers": 1}
DEEPSEEK_OLD["rope_scaling"] = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 64, "mscale": 0.7}
DEEPSEEK_OLD["rope_scaling"] |= {"mscale_all_dim": 0.9, "beta_fast": 32, "beta_slow": 1}
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0, 3, 4, 5, 6, 7, 8, 9]}

LFM2_KINDS = ["conv", "full_attention", "conv", "full_attention"]
MAMBA_KINDS = ["mamba", "attention", "attention", "mamba"]
MAMBA_LAYERS = {"layer_types": MAMBA_KINDS, "mamba_n_groups": 1}

# As transformers 4 wrote them: rope_theta beside rope_scaling, torch_dtype, fields that are there and null.
OLD = [
    ("llama", {"rope_theta": 500000.0, "rope_scaling": None, "pretraining_tp": 1, "torch_dtype": "bfloat16"}),
    ("llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA3_OLD | {"rope_type": "llama3"}}),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    ("llama", {"num_key_value_heads": None, "head_dim": None}),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}),
    ("qwen2", {"rope_theta": 1000000.0, "use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 2}),
    ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": None}),
    ("qwen3", {"rope_scaling": None, "head_dim": 128, "rope_theta": 1000000, "max_window_layers": 36}),
    ("qwen3_moe", {"rope_theta": 1e6, "mlp_only_layers": [], "decoder_sparse_step": 2, "output_router_logits": False}),
    ("mistral", {"rope_theta": 10000.0, "sliding_window": 4096}),
    ("mistral", {"rope_theta": 1000000.0, "sliding_window": None, "head_dim": 128}),
    ("mixtral", {"rope_theta": 1e6, "sliding_window": None, "router_aux_loss_coef": 0.02}),
    ("gemma2", {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh", "cache_implementation": "hybrid"}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": None}),
    ("gemma3_text", {"rope_local_base_freq": 20000.0, "rope_theta": 2000000.0, "sliding_window_pattern": 3}),
    ("gemma3_text", {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "rope_theta": 1000000.0}),
    ("gemma3_text", {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}, "rope_theta": 3e6}),
    ("phi3", {"rope_scaling": FACTORS | {"type": "longrope"}, "original_max_position_embeddings": 16}),
    ("phi3", {"rope_scaling": FACTORS | {"type": "yarn"}, "original_max_position_embeddings": 16}),
    ("phi3", {"rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047, "embd_pdrop": 0.0}),
    ("phi3", {"partial_rotary_factor": 0.75, "rope_theta": 10000.0, "hidden_size": 128, "num_attention_heads": 4}),
    ("gemma", {"hidden_act": "gelu", "hidden_activation": None, "rope_theta": 10000.0, "head_dim": 64}),
    ("starcoder2", {"rope_theta": 1e6, "norm_type": "layer_norm", "mlp_type": "default", "sliding_window": None}),
    ("seed_oss", {"rope_theta": 1e7, "rope_scaling": {"rope_type": "default"}}),
    ("arcee", {"rope_theta": 5e5, "rope_scaling": YARN_OLD}),
    ("nemotron", {"rope_theta": 10000, "partial_rotary_factor": 0.25, "head_dim": 32}),
    ("granite", {"rope_theta": 1e7, "rope_scaling": None, "logits_scaling": 8.0}),
    ("deepseek_v3", DEEPSEEK_OLD | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}),
    ("deepseek_v2", DEEPSEEK_OLD | {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1}),
    ("deepseek_v2", DEEPSEEK_OLD | {"scoring_func": "softmax", "norm_topk_prob": False, "seq_aux": True}),
    ("glm4_moe_lite", {"rope_theta": 1e6, "partial_rotary_factor": 1.0, "first_k_dense_replace": 1, "n_group": 1}),
    ("mistral4", {"rope_parameters": None}),
    ("mistral4", {"rope_parameters": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}}),
    ("smollm3", {"rope_theta": 5e6, "no_rope_layers": [1, 1, 1, 0], "rope_scaling": None}),
    ("hunyuan_v1_dense", {"rope_scaling": HUNYUAN_OLD, "use_cla": False, "use_qk_norm": True, "num_experts": 1}),
    ("olmo2", {"rope_theta": 500000, "rope_scaling": None}),
    ("olmo3", {"rope_theta": 500000, "rope_scaling": YARN_OLD}),
    ("exaone4", {"rope_theta": 1e6, "rope_scaling": LLAMA3_OLD | {"rope_type": "llama3"}}),
    ("glm", {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}),
    ("glm4", {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}),
    ("ernie4_5", {"rope_theta": 500000.0, "rope_scaling": None, "compression_ratio": 1.0}),
    ("olmoe", {"rope_theta": 10000.0, "rope_scaling": None, "clip_qkv": None, "norm_topk_prob": False}),
    ("qwen2_moe", {"rope_theta": 1e6, "decoder_sparse_step": 2, "use_sliding_window": False, "sliding_window": 32768}),
    ("qwen2_moe-window", {"rope_theta": 1e6, "max_window_layers": 2, "qkv_bias": False}),
    ("granitemoe", {"rope_theta": 1e4, "rope_scaling": None, "logits_scaling": 6.0, "router_aux_loss_coef": 0.0}),
    ("dots1", {"rope_theta": 1e7, "scoring_func": "noaux_tc", "topk_method": "noaux_tc", "moe_layer_freq": 1}),
    ("dots1", {"sliding_window": None, "rope_scaling": None}),
    ("glm4_moe", {"rope_theta": 1e6, "partial_rotary_factor": 0.25, "num_nextn_predict_layers": 1}),
    ("ernie4_5_moe", {"rope_theta": 5e5, "moe_layer_end_index": -1, "moe_layer_interval": 2}),
    ("ernie4_5_moe", {"moe_num_shared_experts": 0, "moe_norm_min": 0.1}),
    ("gpt_oss", {"rope_theta": 150000, "rope_scaling": GPT_OSS_OLD, "initial_context_length": 4096}),
    ("gpt_oss", {"rope_parameters": None, "layer_types": None, "experts_per_token": 2, "attention_dropout": 0.0}),
    ("minimax_m2", {"rope_theta": 5e6, "rotary_dim": 4, "scoring_func": "sigmoid", "use_routing_bias": True}),
    ("minimax_m2", {"rope_theta": 5e6, "use_qk_norm": True, "qk_norm_type": "per_layer", "attn_type_list": [1] * 4}),
    ("qwen3_next", {"rope_theta": 1e7, "rope_scaling": None, "decoder_sparse_step": 2, "full_attention_interval": 2}),
    ("qwen3_next", {"partial_rotary_factor": 0.5, "head_dim": 64, "norm_topk_prob": False}),
    ("qwen3_5_text", {"rope_theta": 1e7, "full_attention_interval": 3, "attn_output_gate": True}),
    ("qwen3_5_moe_text", {"rope_theta": 1e7, "mlp_only_layers": [], "mamba_ssm_dtype": "float32"}),
    ("lfm2", {"rope_theta": 1e6, "full_attn_idxs": [1, 2], "block_ff_dim": 128, "tie_embedding": False}),
    ("lfm2", {"block_ffn_dim_multiplier": 1.3, "block_multiple_of": 8, "block_norm_eps": 1e-5, "use_pos_enc": True}),
    ("lfm2", {"block_auto_adjust_ff_dim": False, "block_use_swiglu": True}),
    ("lfm2_moe", {"rope_theta": 1e6, "layer_types": LFM2_KINDS, "norm_topk_prob": False, "use_expert_bias": False}),
    ("granitemoehybrid", {"rope_theta": 1e4, "layer_types": MAMBA_KINDS, "position_embedding_type": "nope"}),
    ("granitemoehybrid", {"layer_types": MAMBA_KINDS, "position_embedding_type": "rope", "num_local_experts": 0}),
    ("granitemoehybrid", {"layer_types": MAMBA_KINDS, "mamba_d_head": "auto", "init_method": "mup"}),
    ("nemotron_h", {"layers_block_type": ["mamba", "moe", "attention", "mlp"], "time_step_limit": [0.0, float("inf")]}),
    ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "M-M*E", "num_hidden_layers": 5}),
    ("nemotron_h-dense", {"layers_block_type": ["mamba", "attention"], "norm_topk_prob": False, "moe_latent_size": 8}),
    ("apertus", {"rope_theta": 12e6, "rope_scaling": LLAMA3_OLD | {"rope_type": "llama3"}}),
    ("apertus", {"rope_theta": 5e5, "rope_scaling": None, "mlp_bias": False, "post_norm": False, "qk_norm": True}),
    ("apertus", {"hidden_act": "relu2"}),
    ("nanochat", {"rope_theta": 5e4, "rope_scaling": None, "final_logit_softcapping": 20.0}),
    ("cohere2", {"rope_theta": 50000.0, "sliding_window_pattern": 2, "use_parallel_block": True}),
    ("ministral", {"rope_theta": 1e8, "sliding_window": 32768}),
    ("gemma4_text", {"attention_k_eq_v": False, "sliding_window": 512}),
    ("gemma4_text-shared", {"use_bidirectional_attention": "vision", "num_kv_shared_layers": 1}),
    ("gpt2", {"n_ctx": 128, "task_specific_params": {}, "n_inner": None, "reorder_and_upcast_attn": False}),
    ("gpt2", {"scale_attn_weights": False}),
    ("gpt_bigcode", {"inference_runner": 0, "n_inner": 256, "attn_pdrop": 0.1}),
]


@pytest.mark.parametrize(("name", "changes"), OLD)
def test_old_configs_are_read_as_transformers_reads_them(name, changes):
    values = {k: v for k, v in full_values(name).items() if k not in ("rope_parameters", "layer_types", "dtype")}
    values |= changes
    if "head_dim" in changes:
        values["head_dim"] = changes["head_dim"]
    elif values.get("model_type") == "phi3":
        values.pop("head_dim", None)
    assert read_config(values) == as_transformers_reads(name, values)


def test_su_is_an_early_name_of_longrope():
    # transformers 5.23 renames it too late and then fails, so it cannot be asked.
    values = {k: v for k, v in full_values("phi3").items() if k != "rope_parameters"}
    values["original_max_position_embeddings"] = 16
    su, longrope = (read_config(values | {"rope_scaling": FACTORS | {"type": kind}}) for kind in ("su", "longrope"))
    assert su == longrope
    assert su.ropes[0].scaling == "longrope"


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"hidden_size": 64.0}, ["hidden_size", "integer from 1 to", "64.0"]),
        ("llama", {"hidden_act": "mish"}, ["hidden_act", "silu", "gelu_new", "'mish'"]),
        ("llama", {"rms_norm_eps": -1e-6}, ["rms_norm_eps", "from 0 to 1", "-1e-06"]),
        ("llama", {"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "true or false", "'yes'"]),
        ("llama", {"num_key_value_heads": 3}, ["num_attention_heads (4)", "num_key_value_heads (3)"]),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["rope_scaling", "yarn", "'dynamic'"]),
        ("llama", {"rope_scaling": {"type": "linear"}}, ["rope_scaling", "factor"]),
        ("llama", {"rope_scaling": [1]}, ["rope_scaling", "an object", "[1]"]),
        ("llama", {"rope_scaling": LLAMA3_OLD | {"rope_type": "llama3", "low_freq_factor": 4.0}}, ["high_freq_factor"]),
        ("llama", {"head_dim": 15}, ["even", "15"]),
        ("qwen2", {"layer_types": ["full_attention"]}, ["layer_types", "a list of 4", "sliding_attention"]),
        ("qwen3_moe", {"mlp_only_layers": ["a"]}, ["mlp_only_layers", "layer numbers"]),
        ("qwen3_moe", {"num_experts_per_tok": 9}, ["num_experts_per_tok", "at most the 4 experts", "9"]),
        (
            "phi3",
            {"rope_scaling": {"type": "su", "short_factor": [1]}},
            ["short_factor", "a list of 8 positive numbers"],
        ),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, ["longrope", "'linear'"]),
        ("gemma2", {"attn_logit_softcapping": 0}, ["attn_logit_softcapping"]),
        ("gemma3_text", {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ("gemma", {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ("hunyuan_v1_dense", {"use_cla": True}, ["use_cla", "False or absent", "True"]),
        ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["rope_scaling", "'dynamic'"]),
        ("cohere2", {"use_parallel_block": False}, ["use_parallel_block", "True or absent", "False"]),
        ("starcoder2", {"norm_type": "rms_norm"}, ["norm_type", "'layer_norm' or absent", "'rms_norm'"]),
        ("ernie4_5", {"compression_ratio": 2.0}, ["compression_ratio", "1.0 or absent", "2.0"]),
        ("smollm3", {"no_rope_layers": [1, 0]}, ["no_rope_layers", "a list of 4 of 0 and 1", "[1, 0]"]),
        ("exaone4", {"sliding_window_pattern": "LGLL"}, ["sliding_window_pattern", "LLLG", "'LGLL'"]),
        ("granite", {"logits_scaling": 0}, ["logits_scaling"]),
        ("olmoe", {"clip_qkv": 8.0}, ["clip_qkv", "None or absent", "8.0"]),
        ("dots1", {"scoring_func": "softmax"}, ["scoring_func", "sigmoid", "'softmax'"]),
        ("dots1", {"topk_method": "greedy"}, ["topk_method", "'noaux_tc' or absent", "'greedy'"]),
        ("dots1", {"n_group": 3}, ["n_group", "equal groups", "8 experts", "3"]),
        ("dots1", {"n_group": 8}, ["n_group", "at least 2", "8 experts", "8"]),
        ("dots1", {"topk_group": 5}, ["topk_group", "at most the 4 groups", "5"]),
        ("dots1", {"topk_group": 1, "num_experts_per_tok": 3}, ["topk_group", "at least 3 experts", "1"]),
        ("dots1", {"n_shared_experts": 0}, ["n_shared_experts", "from 1 to", "0"]),
        ("glm4_moe", {"scoring_func": "softmax"}, ["scoring_func", "'sigmoid' or absent", "'softmax'"]),
        ("ernie4_5_moe", {"use_bias": True}, ["use_bias", "False or absent", "True"]),
        ("ernie4_5_moe", {"moe_k": 6}, ["moe_k", "at most the 5 experts of moe_num_experts", "6"]),
        ("minimax_m2", {"scoring_func": "softmax"}, ["scoring_func", "'sigmoid' or absent"]),
        ("minimax_m2", {"shared_intermediate_size": 64}, ["shared_intermediate_size", "0 or absent", "64"]),
        ("minimax_m2", {"attn_type_list": [1, 0, 1, 1]}, ["attn_type_list", "[1, 1, 1, 1] or absent"]),
        ("minimax_m2", {"layernorm_mlp_beta": 3.5}, ["layernorm_mlp_beta", "1.0 or absent", "3.5"]),
        ("minimax_m2", {"rotary_dim": 33}, ["rotary_dim", "from 1 to 32", "33"]),
        ("gpt_oss", {"swiglu_alpha": 1.0}, ["swiglu_alpha", "1.702 or absent", "1.0"]),
        ("gpt_oss", {"swiglu_limit": 0}, ["swiglu_limit", "from 0.001", "0"]),
        ("qwen3_next", {"linear_num_value_heads": 6}, ["linear_num_value_heads", "a multiple of", "(4)", "6"]),
        ("qwen3_5_text", {"attn_output_gate": False}, ["attn_output_gate", "True or absent", "False"]),
        ("qwen3_5_text", {"hidden_act": "gelu"}, ["hidden_act", "'silu' or absent", "'gelu'"]),
        ("qwen3_5_text", {"layer_types": ["sliding_attention"] * 4}, ["layer_types", "linear_attention, full"]),
        ("qwen3_5_text", {"full_attention_interval": 5}, ["none of the 4 layers is full_attention"]),
        ("lfm2", {"full_attn_idxs": []}, ["none of the 4 layers is full_attention"]),
        ("lfm2", {"full_attn_idxs": 2}, ["full_attn_idxs", "a list of layer numbers", "2"]),
        ("lfm2", {"conv_L_cache": 1}, ["conv_L_cache", "from 2 to 256", "1"]),
        ("lfm2", {"block_use_swiglu": False}, ["block_use_swiglu", "True or absent", "False"]),
        ("lfm2", {"layer_types": ["linear_attention"] * 4}, ["layer_types", "a list of 4 of conv, full_attention"]),
        ("lfm2_moe", {}, ["lacks 'layer_types', which a lfm2_moe needs"]),
        ("lfm2_moe", {"layer_types": LFM2_KINDS, "num_experts_per_tok": 7}, ["num_experts_per_tok", "6 experts", "7"]),
        ("nemotron_h", {"layers_block_type": None}, ["lacks 'layers_block_type', which a nemotron_h needs"]),
        ("nemotron_h", {"layers_block_type": ["mlp", "conv"]}, ["1 to 1024 of linear_attention, full", "'conv'"]),
        ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "MX"}, ["1 to 1024 of M, *, -, E", "MX"]),
        ("nemotron_h", {"layers_block_type": ["mlp", "mamba"]}, ["none of the 2 layers is full_attention"]),
        ("nemotron_h", {"layers_block_type": ["attention"]}, ["none of the 1 layers is linear_attention"]),
        ("nemotron_h", {"num_hidden_layers": 9}, ["num_hidden_layers", "8, the number of layers in layers_block", "9"]),
        ("nemotron_h", {"n_groups": 3}, ["n_groups", "a divisor of mamba_num_heads (8)", "3"]),
        ("nemotron_h", {"n_shared_experts": 2}, ["n_shared_experts", "1 or absent", "2"]),
        ("nemotron_h", {"mlp_bias": True}, ["mlp_bias", "False or absent", "True"]),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, ["mamba_hidden_act", "'silu' or absent", "'gelu'"]),
        ("nemotron_h", {"time_step_limit": [0.0, 1.0]}, ["time_step_limit", "Infinity", "1.0"]),
        ("granitemoehybrid", {}, ["lacks 'layer_types', which a granitemoehybrid needs"]),
        ("granitemoehybrid", {"layer_types": ["mamba"] * 4}, ["none of the 4 layers is full_attention"]),
        ("granitemoehybrid", MAMBA_LAYERS | {"mamba_n_groups": 3}, ["mamba_n_groups", "a divisor", "(8)", "3"]),
        ("granitemoehybrid", MAMBA_LAYERS | {"mamba_n_heads": 7}, ["mamba_n_heads", "a divisor of the 128", "7"]),
        ("granitemoehybrid", MAMBA_LAYERS | {"mamba_d_head": 8}, ["mamba_d_head", "16, for 8 heads of 128", "8"]),
        ("granitemoehybrid", MAMBA_LAYERS | {"hidden_act": "gelu"}, ["hidden_act", "'silu' or absent", "'gelu'"]),
        ("granitemoehybrid", MAMBA_LAYERS | {"time_step_limit": [0.0, 1.0]}, ["time_step_limit", "Infinity", "1.0"]),
        ("granitemoehybrid", MAMBA_LAYERS | {"time_step_limit": 5}, ["time_step_limit", "Infinity", "5"]),
        ("granitemoehybrid", MAMBA_LAYERS | {"position_embedding_type": "alibi"}, ["'rope' or absent", "'alibi'"]),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, ["use_bidirectional_attention", "'vision'", "'all'"]),
        ("gemma4_text", {"num_kv_shared_layers": 7}, ["num_kv_shared_layers", "from 0 to 6", "7"]),
        ("gemma4_text", {"num_kv_shared_layers": 3}, ["num_kv_shared_layers", "a full_attention layer comes", "3"]),
        ("gemma4_text", {"per_layer_config": {"9": {}}}, ["per_layer_config", "layers from 0 to 6", "'9'"]),
        ("gemma4_text", {"per_layer_config": {"1": {"hidden_size": 8}}}, ["layer_config: 1", "head_dim", "8"]),
        (
            "gemma4_text",
            {"per_layer_config": {"1": {"head_dim": 8}}},
            ["sliding_attention", "several sizes", "[8, 16]"],
        ),
        ("gemma4_text", {"per_layer_config": {"1": {"num_key_value_heads": 3}}}, ["3 key and value", "layer 1"]),
        ("gemma4_text-shared", {"vocab_size_per_layer_input": 90}, ["vocab_size_per_layer_input", "from 101", "90"]),
        ("gemma4_text-experts", {"top_k_experts": 5}, ["top_k_experts", "at most the 4 experts", "5"]),
        ("gpt2", {"n_head": 5}, ["n_embd (64)", "n_head (5)"]),
    ],
)
def test_an_error_names_file_field_found_and_allowed(family, changes, words):
    values = {k: v for k, v in full_values(family).items() if k not in ("rope_parameters", "layer_types")}
    with pytest.raises(CheckpointError) as caught:
        read_config(values | changes, "here/config.json")
    for word in ["here/config.json", *words]:
        assert word in str(caught.value)


def test_a_null_field_takes_the_callers_default_and_a_missing_one_the_familys():
    fields = Fields({"null": None, "given": 3}, "f.json", {"null": 7, "missing": 8, "given": 9})
    assert fields.integer("given", default=1) == 3
    assert fields.integer("null", default=1) == 1
    assert fields.integer("missing", default=1) == 8
    assert fields.integer("other", "given") == 3
    assert fields.integer("nowhere", default=None) is None
    assert "null" not in fields
    assert "missing" in fields
    with pytest.raises(CheckpointError, match=r"f\.json lacks 'nowhere'"):
        fields.integer("nowhere")

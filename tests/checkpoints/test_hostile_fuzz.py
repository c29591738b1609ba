"""Any damage of a checkpoint loads or is refused by our own error."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hasten
from checkpoint_folders import CONFIG, write_folder
from hasten.errors import HastenError

# -- anything at all --------------------------------------------------------------------------------------------------


def load_or_refuse(folder: Path) -> None:
    """Loading works, or raises our own error: never another."""
    try:
        hasten.load(folder)
    except HastenError as error:
        message = str(error)
        assert message


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("fuzz"))
    return folder, (folder / "model.safetensors").read_bytes(), (folder / "config.json").read_bytes()


FUZZ = settings(max_examples=150, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])


def changes(places: int, values: int, most: int) -> st.SearchStrategy:
    """Some bytes of a file and what they become."""
    return st.lists(st.tuples(st.integers(0, places), st.integers(0, values)), min_size=1, max_size=most)


@pytest.mark.parametrize("damaged", ["model.safetensors", "config.json"])
@FUZZ
@given(data=st.data())
@pytest.mark.filterwarnings("ignore::hasten.errors.HastenWarning")
def test_any_change_of_bytes_loads_or_is_refused(sound, damaged, data):
    folder, weights, config = sound
    files = {"model.safetensors": bytearray(weights), "config.json": bytearray(config)}
    limits = {"model.safetensors": (2500, 255, 6), "config.json": (330, 127, 4)}  # of the weights, the header
    for place, value in data.draw(changes(*limits[damaged])):
        files[damaged][place % len(files[damaged])] = value
    for name, raw in files.items():
        (folder / name).write_bytes(raw)
    load_or_refuse(folder)


ROPE_FIELDS = ["rope_type", "type", "factor", "rope_theta", "low_freq_factor", "high_freq_factor", "attention_factor"]
ROPE_FIELDS += ["beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "short_factor", "long_factor"]
ROPE_FIELDS += ["original_max_position_embeddings", "partial_rotary_factor", "full_attention", "sliding_attention"]
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["linear", "llama3", "yarn", "longrope", "su", "default", "relu", 1, 2, 4, 8]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(ROPE_FIELDS),
            inner,
            max_size=6,
        )
    ),
    max_leaves=12,
)
FIELDS = [*CONFIG, "rope_scaling", "rope_parameters", "layer_types", "sliding_window", "use_sliding_window"]
FIELDS += ["max_window_layers", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "mlp_only_layers"]
FIELDS += ["decoder_sparse_step", "n_embd", "n_head", "n_layer", "n_positions", "n_inner", "multi_query", "rope_theta"]
FIELDS += ["query_pre_attn_scalar", "attn_logit_softcapping", "original_max_position_embeddings", "hidden_activation"]
FAMILY_NAMES = ["llama", "gpt2", "gpt_bigcode", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "mixtral"]
FAMILY_NAMES += ["qwen3_moe", "smollm3", "granite", "exaone4", "olmo3", "hunyuan_v1_dense", "ministral3", "cohere2"]
FAMILY_NAMES += ["olmoe", "qwen2_moe", "granitemoe", "dots1", "glm4_moe", "ernie4_5_moe", "minimax_m2", "gpt_oss"]
FIELDS += ["num_local_experts", "n_routed_experts", "n_shared_experts", "n_group", "topk_group", "moe_k", "rotary_dim"]
FAMILY_NAMES += ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "lfm2_moe"]
FAMILY_NAMES += ["granitemoehybrid", "nemotron_h"]
FIELDS += ["mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv", "mamba_expand"]
FIELDS += ["shared_intermediate_size", "time_step_limit", "position_embedding_type"]
FIELDS += ["layers_block_type", "hybrid_override_pattern", "mamba_num_heads", "mamba_head_dim", "n_groups"]
FIELDS += ["ssm_state_size", "conv_kernel", "use_bias", "moe_shared_expert_intermediate_size", "mlp_hidden_act"]
FIELDS += ["conv_L_cache", "conv_bias", "block_ff_dim", "block_multiple_of", "full_attn_idxs", "num_dense_layers"]
FIELDS += ["linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_conv_kernel_dim"]
FIELDS += ["full_attention_interval", "partial_rotary_factor", "head_dim", "attn_output_gate"]
FIELDS += [
    "first_k_dense_replace",
    "routed_scaling_factor",
    "moe_num_experts",
    "moe_num_shared_experts",
    "moe_norm_min",
    "swiglu_limit",
]


@settings(FUZZ, max_examples=400)
@given(
    family=st.sampled_from(FAMILY_NAMES),
    changes=st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=4),
)
@pytest.mark.filterwarnings("ignore::hasten.errors.HastenWarning")
def test_any_values_of_config_fields_load_or_are_refused(sound, family, changes):
    folder, weights, _ = sound
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes | {"model_type": family}))
    load_or_refuse(folder)

"""Families that change one or two things of Llama.

Seed-OSS: biases on q, k and v. Arcee AFM: squared ReLU instead of a gate. StarCoder 2 (arXiv 2402.19173): LayerNorm,
biases, GELU instead of a gate. Nemotron and Minitron (dense, arXiv 2402.16819): LayerNorm whose weights are stored
minus one, squared ReLU, half of each head rotated. Granite 3 and 4 (dense), and Granite 3's mixture of experts: four
scalars. SmolLM3: layers without rotary positions. Hunyuan (dense): queries and keys normalised after their rotary turn.
Apertus (arXiv 2509.14233): xIELU, whose two numbers each layer learns, instead of a gate. nanochat: norms without
weights, one of them behind the embedding, heads rotated backwards and then normalised, squared ReLU, capped logits.
"""

from dataclasses import replace
from typing import Any

from hasten.model.activations import XIELU
from hasten.model.config import Fields, LayerConfig, ModelConfig, RopeConfig
from hasten.model.families.family import (
    ACTIVATION_NAMES,
    LLAMA_NAMES,
    ROPE_KINDS,
    Family,
    expert_counts,
    layer_count,
    layers_of_kinds,
    llama_config,
    rope,
    rope_fields,
    sizes,
    window_of,
)
from hasten.model.families.slices import Stacks


def biases(fields: Fields) -> dict[str, Any]:
    """`attention_bias` and `mlp_bias`, as in Llama."""
    bias = fields.flag("attention_bias", False)
    return {"qkv_bias": bias, "output_bias": bias, "mlp_bias": fields.flag("mlp_bias", False)}


def full_layers(fields: Fields) -> list[str]:
    """A kind for each layer: full attention."""
    return ["full_attention"] * layer_count(fields)


def seed_oss_config(fields: Fields) -> ModelConfig:
    return llama_config(
        fields,
        qkv_bias=fields.flag("attention_bias", True),
        output_bias=fields.flag("attention_out_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
    )


SEED_DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524_288}
SEED_OSS = Family("seed_oss", "SeedOssForCausalLM", seed_oss_config, defaults=SEED_DEFAULTS)


def arcee_config(fields: Fields) -> ModelConfig:
    return llama_config(fields, gated=False, **biases(fields))


ARCEE_DEFAULTS = {"hidden_act": "relu2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
ARCEE = Family("arcee", "ArceeForCausalLM", arcee_config, defaults=ARCEE_DEFAULTS)


def starcoder2_config(fields: Fields) -> ModelConfig:
    fields.only(norm_type="layer_norm", mlp_type="default")
    bias = fields.flag("use_bias", True)
    return llama_config(
        fields,
        window=window_of(fields),
        norm="layernorm",
        norm_eps=fields.number("norm_epsilon", default=1e-5, high=1.0),
        activation=fields.choice("hidden_act", options=ACTIVATION_NAMES),
        gated=False,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        tie_embeddings=fields.flag("tie_word_embeddings", True),
    )


STARCODER2_NAMES = LLAMA_NAMES | {"up": "c_fc", "down": "c_proj"}
STARCODER2_DEFAULTS = {
    "num_key_value_heads": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "initializer_range": 0.018042,
}
STARCODER2 = Family(
    "starcoder2", "Starcoder2ForCausalLM", starcoder2_config, STARCODER2_NAMES, defaults=STARCODER2_DEFAULTS
)


def nemotron_config(fields: Fields) -> ModelConfig:
    eps = fields.number("norm_eps", default=1e-5, high=1.0)
    return llama_config(fields, norm="layernorm", norm_eps=eps, norm_offset=1.0, gated=False, **biases(fields))


NEMOTRON_DEFAULTS = {
    "hidden_act": "relu2",
    "max_position_embeddings": 4096,
    "initializer_range": 0.0134,
    "partial_rotary_factor": 0.5,
}
NEMOTRON = Family("nemotron", "NemotronForCausalLM", nemotron_config, defaults=NEMOTRON_DEFAULTS)


def granite_scales(fields: Fields) -> dict[str, Any]:
    """Granite's scalars, but for that of scores, which layers have."""
    return {
        "embedding_scale": fields.number("embedding_multiplier", default=1.0),
        "residual_scale": fields.number("residual_multiplier", default=1.0),
        "logit_scale": 1 / fields.number("logits_scaling", default=1.0, low=1e-6),
    }


def granite_config(fields: Fields, **changes: Any) -> ModelConfig:
    scale = fields.number("attention_multiplier", default=1.0, low=1e-6)
    layers = layers_of_kinds(fields, full_layers(fields), window=None, scale=scale)
    return llama_config(fields, layers=layers, **granite_scales(fields), **(biases(fields) | changes))


GRANITE = Family("granite", "GraniteForCausalLM", granite_config, defaults={"max_position_embeddings": 2048})


def granite_moe_config(fields: Fields) -> ModelConfig:
    counts = expert_counts(fields, "num_local_experts")
    size = fields.integer("intermediate_size")
    return granite_config(fields, has_experts=lambda layer: True, mlp_bias=False, expert_size=size, **counts)


GRANITE_MOE_DEFAULTS = {"max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2}
GRANITE_MOE_NAMES = LLAMA_NAMES | {"mlp": "block_sparse_moe", "router": "router"}
GRANITE_MOE = Family(
    "granitemoe",
    "GraniteMoeForCausalLM",
    granite_moe_config,
    GRANITE_MOE_NAMES | {"router": "router.layer"},
    defaults=GRANITE_MOE_DEFAULTS,
    stacks=Stacks("input_linear.weight", "output_linear.weight"),
    in_memory=GRANITE_MOE_NAMES,
)


def smollm3_layers(fields: Fields) -> tuple[LayerConfig, ...]:
    """Layers whose entry in `no_rope_layers` is 0 have no rotary positions, and a window if `use_sliding_window`."""
    count = layer_count(fields)
    every = fields.integer("no_rope_layer_interval", default=4)
    turned = fields.value("no_rope_layers")
    if turned is None:
        turned = [int((i + 1) % every != 0) for i in range(count)]
    if not isinstance(turned, list) or len(turned) != count or not all(one in (0, 1) for one in turned):
        raise fields.fail("no_rope_layers", f"a list of {count} of 0 and 1", turned)
    window = window_of(fields) if fields.flag("use_sliding_window", False) else None
    kinds = ["full_attention" if one or window is None else "sliding_attention" for one in turned]
    layers = layers_of_kinds(fields, kinds, window=window)
    return tuple(layer if one else replace(layer, rope=None) for layer, one in zip(layers, turned, strict=True))


def smollm3_config(fields: Fields) -> ModelConfig:
    tied = fields.flag("tie_word_embeddings", True)
    layers = smollm3_layers(fields)
    return llama_config(fields, theta=2_000_000.0, layers=layers, tie_embeddings=tied, **biases(fields))


SMOLLM3_DEFAULTS = {"num_key_value_heads": 4, "max_position_embeddings": 32_768}
SMOLLM3 = Family("smollm3", "SmolLM3ForCausalLM", smollm3_config, defaults=SMOLLM3_DEFAULTS)


def hunyuan_rope(fields: Fields) -> RopeConfig:
    """The rotary table; what the files call "dynamic" and give an `alpha` is a larger theta, whatever the length."""
    size, given = sizes(fields)["head_dim"], rope_fields(fields)
    dynamic = given is not None and "dynamic" in (given.value("rope_type"), given.value("type"))
    alpha = given.number("alpha", default=None, low=1e-6) if given is not None and dynamic else None
    kinds = ROPE_KINDS | ({"dynamic": "default"} if alpha else {})
    found = rope(fields, size, given, theta=10_000.0, kinds=kinds)
    if not alpha:
        return found
    if size <= 2:
        raise fields.fail("head_dim", "greater than 2", size)
    return replace(found, theta=found.theta * alpha ** (size / (size - 2)))


def hunyuan_config(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    fields.only(use_cla=False, use_qk_norm=True, use_rotary_pos_emb=True, num_experts=1)
    ropes = (hunyuan_rope(fields),)
    return llama_config(fields, ropes=ropes, qk_norm="rotated_head", qkv_bias=bias, output_bias=bias)


HUNYUAN_NAMES = LLAMA_NAMES | {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}
HUNYUAN_DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
HUNYUAN = Family(
    "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", hunyuan_config, HUNYUAN_NAMES, defaults=HUNYUAN_DEFAULTS
)


def apertus_config(fields: Fields) -> ModelConfig:
    bias, given = fields.flag("attention_bias", False), rope_fields(fields) or Fields(APERTUS_ROPE, fields.where)
    return llama_config(
        fields,
        ropes=(rope(fields, sizes(fields)["head_dim"], given, theta=12_000_000.0),),
        activation=fields.choice("hidden_act", options=ACTIVATION_NAMES | {"xielu": "xielu"}),
        qk_norm="head",
        gated=False,
        qkv_bias=bias,
        output_bias=bias,
    )


def apertus_constants(config: ModelConfig) -> dict[str, float]:
    """The two numbers of xIELU that are not learned, which the files hold for each layer."""
    numbers = {"beta": XIELU.BETA, "eps": XIELU.EPS} if config.activation == "xielu" else {}
    layers = range(len(config.layers))
    return {f"model.layers.{i}.mlp.act_fn.{name}": number for i in layers for name, number in numbers.items()}


APERTUS_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
APERTUS = Family(
    "apertus",
    "ApertusForCausalLM",
    apertus_config,
    LLAMA_NAMES
    | {"activation": "act_fn", "attention_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"},
    defaults={"hidden_act": "xielu", "max_position_embeddings": 65_536, "rms_norm_eps": 1e-5},
    constants=apertus_constants,
)


def nanochat_config(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    table = rope(fields, sizes(fields)["head_dim"], rope_fields(fields), theta=10_000.0)
    return llama_config(
        fields,
        ropes=(replace(table, backwards=True),),
        norm_weights=False,
        embedding_norm=True,
        qk_norm="rotated_head",
        gated=False,
        qkv_bias=bias,
        output_bias=bias,
        logit_softcap=fields.number("final_logit_softcapping", default=None, low=1e-6),
    )


NANOCHAT = Family(
    "nanochat",
    "NanoChatForCausalLM",
    nanochat_config,
    LLAMA_NAMES | {"up": "fc1", "down": "fc2"},
    defaults={"hidden_act": "relu2", "max_position_embeddings": 2048, "final_logit_softcapping": 15.0},
)

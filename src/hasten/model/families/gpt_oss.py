"""gpt-oss (arXiv 2508.10925): attention sinks, windows in every other layer, experts in every layer.

The gated MLP of an expert has limits: (up + 1)·gate·σ(1.702·gate), with gate at most 7 and up within ±7. The weights of
the chosen experts are the softmax of their logits. The experts of a layer are two tensors of matrices (in, out), in
which gate and up alternate.
"""

from hasten.model.config import Fields, ModelConfig
from hasten.model.families.family import (
    LLAMA_NAMES,
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

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def gpt_oss_config(fields: Fields) -> ModelConfig:
    fields.only(hidden_act="silu", swiglu_alpha=1.702)
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(layer_count(fields))]
    given = rope_fields(fields) or Fields(YARN, fields.where)
    bias = fields.flag("attention_bias", True)
    return llama_config(
        fields,
        layers=layers_of_kinds(fields, kinds, window=window_of(fields)),
        ropes=(rope(fields, sizes(fields)["head_dim"], given, theta=150_000.0),),
        has_experts=lambda layer: True,
        attention_sinks=True,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=True,
        activation="quick_gelu",
        swiglu_limit=fields.number("swiglu_limit", default=7.0, low=1e-3),
        up_offset=1.0,
        expert_size=fields.integer("intermediate_size"),
        router_bias=True,
        **expert_counts(fields, "num_local_experts", "num_experts"),
    )


GPT_OSS_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
}
GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    gpt_oss_config,
    LLAMA_NAMES | {"router": "router"},
    defaults=GPT_OSS_DEFAULTS,
    stacks=Stacks("experts.gate_up_proj", "experts.down_proj", alternating=True, transposed=True),
)

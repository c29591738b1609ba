"""Nemotron-H (arXiv 2504.03624), Nemotron Nano 2 and Nemotron 3: each layer is Mamba-2, attention, an MLP or experts.

Attention has no rotary positions, MLPs are squared ReLUs without a gate. Mamba-2's steps have no least length, as in
the models' own code; transformers raises those of a prompt to `time_step_min`, and not those of single tokens.
"""

from typing import Any

from hasten.errors import CheckpointError
from hasten.model.config import Fields, LayerConfig, ModelConfig
from hasten.model.families.family import ACTIVATION_NAMES, LLAMA_NAMES, Family, expert_counts, llama_config
from hasten.model.families.granite_hybrid import MAMBA_NAMES, check_step_limit, mamba_heads, mamba_rows
from hasten.model.families.routed import expert_groups
from hasten.model.mixer_config import MambaConfig

# The kinds of layers, as `hybrid_override_pattern` writes them, and as lists name them today and in older files.
LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
NAMES = {kind: kind for kind in LETTERS.values()} | {"mamba": "linear_attention", "attention": "full_attention"}


def layer_kinds(fields: Fields) -> list[str]:
    """The kind of each layer. Raises CheckpointError for others, and where Mamba-2 or attention is missing."""
    spellings = {"layers_block_type": NAMES, "layer_types": NAMES, "hybrid_override_pattern": LETTERS}
    name = next((name for name in spellings if name in fields), None)
    if name is None:
        raise CheckpointError(f"{fields.where} lacks 'layers_block_type', which a nemotron_h needs")
    given, written = fields.value(name), spellings[name]
    fits = isinstance(given, str if written is LETTERS else list) and 0 < len(given) <= 1 << 10
    if not fits or not all(isinstance(one, str) and one in written for one in given):
        raise fields.fail(name, f"1 to 1024 of {', '.join(written)}", given)
    kinds = [written[one] for one in given]
    if fields.values.get("num_hidden_layers") not in (None, len(kinds)):
        wanted = f"{len(kinds)}, the number of layers in {name}, or absent"
        raise fields.fail("num_hidden_layers", wanted, fields.value("num_hidden_layers"))
    for needed in ("linear_attention", "full_attention"):
        if needed not in kinds:
            raise CheckpointError(f"{fields.where}: none of the {len(kinds)} layers is {needed}; one has to be")
    return kinds


def nemotron_experts(fields: Fields) -> dict[str, Any]:
    """Experts scored by sigmoids, beside an MLP for every token; those of Nemotron 3 Super read a narrower stream."""
    fields.only(n_shared_experts=1, mlp_bias=False)
    counts = expert_counts(fields, "n_routed_experts", "num_local_experts")
    return counts | {
        "expert_size": fields.integer("moe_intermediate_size"),
        "expert_latent": fields.integer("moe_latent_size", default=0, low=0),
        "shared_size": fields.integer("moe_shared_expert_intermediate_size"),
        "expert_scores": "sigmoid",
        "expert_choice_bias": True,
        "normalize_experts": fields.flag("norm_topk_prob", True),
        "expert_weight_scale": fields.number("routed_scaling_factor"),
        **expert_groups(fields, counts),
    }


def nemotron_h_config(fields: Fields) -> ModelConfig:
    fields.only(mamba_hidden_act="silu", attention_bias=False)
    check_step_limit(fields)
    kinds = layer_kinds(fields)
    heads, groups = mamba_heads(fields, "mamba_num_heads", "n_groups")
    head_dim = fields.integer("head_dim", "attention_head_dim", high=1 << 12)
    attention = LayerConfig(scale=head_dim**-0.5, rope=None, mlp=False)
    layers = {
        "linear_attention": LayerConfig(rope=None, keeps_state=True, mlp=False),
        "full_attention": attention,
        "mlp": LayerConfig(rope=None, mixes=False),
        "moe": LayerConfig(rope=None, mixes=False),
    }
    experts = nemotron_experts(fields) if "moe" in kinds else {}
    read = {"num_hidden_layers": len(kinds), "head_dim": head_dim}
    given = Fields({**fields.values, **read}, fields.where, fields.defaults)
    return llama_config(
        given,
        layers=tuple(layers[kind] for kind in kinds),
        has_experts=lambda layer: kinds[layer] == "moe",
        mixer=MambaConfig(
            kernel=fields.integer("conv_kernel", low=2, high=1 << 8),
            heads=heads,
            head_dim=fields.integer("mamba_head_dim", high=1 << 12),
            groups=groups,
            state_dim=fields.integer("ssm_state_size", high=1 << 12),
            biased=fields.flag("use_bias", False),
            conv_biased=fields.flag("use_conv_bias", True),
        ),
        ropes=(),
        norm_eps=fields.number("layer_norm_epsilon", high=1.0),
        activation=fields.choice("mlp_hidden_act", options=ACTIVATION_NAMES),
        gated=False,
        mlp_bias=fields.flag("mlp_bias", False),
        source=dict(fields.values),
        **experts,
    )


NEMOTRON_H_NAMES = (
    LLAMA_NAMES
    | MAMBA_NAMES
    | {"embedding": "backbone.embeddings", "norm": "backbone.norm_f", "blocks": "backbone.layers"}
    | {"attention": "mixer", "mlp": "mixer", "choice_bias": "gate.e_score_correction_bias"}
    | {"narrow": "fc1_latent_proj", "widen": "fc2_latent_proj"}
    | {"attention_norm": "norm", "mlp_norm": "norm"}
)
NEMOTRON_H = Family(
    "nemotron_h",
    "NemotronHForCausalLM",
    nemotron_h_config,
    NEMOTRON_H_NAMES,
    mamba_rows,
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "mlp_hidden_act": "relu2",
        "layer_norm_epsilon": 1e-5,
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "conv_kernel": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "routed_scaling_factor": 1.0,
    },
    in_memory={ours: theirs.replace("backbone.", "model.") for ours, theirs in NEMOTRON_H_NAMES.items()},
    unused=lambda config: ("mtp.",),
)

"""GPT-2: learned positions, LayerNorm, biases everywhere, weights stored transposed (in, out)."""

from functools import partial
from typing import Any

from hasten.errors import CheckpointError
from hasten.model.config import Fields, LayerConfig, ModelConfig
from hasten.model.families.family import ACTIVATION_NAMES, Family, Places, TensorSlice, common_fields, layer_count


def gpt_config(fields: Fields, **changes: Any) -> ModelConfig:
    """What GPT-2 and GPT-BigCode share."""
    hidden = fields.integer("n_embd", "hidden_size")
    heads = fields.integer("n_head", "num_attention_heads", high=1 << 12)
    if hidden % heads:
        raise CheckpointError(f"{fields.where}: n_embd ({hidden}) must be a multiple of n_head ({heads})")
    scale = (hidden // heads) ** -0.5 if fields.flag("scale_attn_weights", True) else 1.0
    by_layer = fields.flag("scale_attn_by_inverse_layer_idx", False)
    values: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": fields.integer("n_inner", default=4 * hidden, high=1 << 22),
        "layers": tuple(
            LayerConfig(scale=scale / (i + 1) if by_layer else scale)
            for i in range(layer_count(fields, "n_layer", "num_hidden_layers"))
        ),
        "heads": heads,
        "kv_heads": heads,
        "head_dim": hidden // heads,
        "max_positions": fields.integer("n_positions", "max_position_embeddings", high=1 << 24),
        "norm": "layernorm",
        "norm_eps": fields.number("layer_norm_epsilon", default=1e-5, high=1.0),
        "activation": fields.choice("activation_function", options=ACTIVATION_NAMES),
        "gated": False,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "learned_positions": True,
        "tie_embeddings": fields.flag("tie_word_embeddings", True),
    }
    return ModelConfig(**(common_fields(fields) | values | changes))


def gpt_places(config: ModelConfig, *, transposed: bool, interleaved: bool = False) -> Places:
    """interleaved: the fused q, k and v alternate head by head."""
    yield "embedding.weight", TensorSlice("transformer.wte.weight")
    yield "positions.weight", TensorSlice("transformer.wpe.weight")
    yield "head.weight", TensorSlice("lm_head.weight")
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    fused = {"q": (0, q), "k": (q, q + kv), "v": (q + kv, q + 2 * kv)}
    for kind in ("weight", "bias"):
        yield f"norm.{kind}", TensorSlice(f"transformer.ln_f.{kind}")
        turned = transposed and kind == "weight"
        for i in range(len(config.layers)):
            ours, theirs = f"blocks.{i}", f"transformer.h.{i}"
            yield f"{ours}.attention_norm.{kind}", TensorSlice(f"{theirs}.ln_1.{kind}")
            yield f"{ours}.mlp_norm.{kind}", TensorSlice(f"{theirs}.ln_2.{kind}")
            for part, (our, (start, stop)) in enumerate(fused.items()):
                piece = TensorSlice(f"{theirs}.attn.c_attn.{kind}", start, stop, transposed=turned)
                if interleaved:
                    piece = TensorSlice(piece.name, interleaved=(3, part, config.head_dim))
                yield f"{ours}.attention.{our}.{kind}", piece
            yield f"{ours}.attention.output.{kind}", TensorSlice(f"{theirs}.attn.c_proj.{kind}", transposed=turned)
            yield f"{ours}.mlp.up.{kind}", TensorSlice(f"{theirs}.mlp.c_fc.{kind}", transposed=turned)
            yield f"{ours}.mlp.down.{kind}", TensorSlice(f"{theirs}.mlp.c_proj.{kind}", transposed=turned)


places = partial(gpt_places, transposed=True)

DEFAULTS = {"n_positions": 1024, "activation_function": "gelu_new"}
FAMILY = Family("gpt2", "GPT2LMHeadModel", gpt_config, places, base="transformer.", defaults=DEFAULTS)

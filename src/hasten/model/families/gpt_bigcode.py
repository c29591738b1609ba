"""GPT-BigCode, StarCoder (arXiv 2305.06161): GPT-2 with one key/value head for all query heads (multi-query)."""

from hasten.model.config import Fields, ModelConfig
from hasten.model.families.family import Family, Places, TensorSlice
from hasten.model.families.gpt2 import gpt_config, gpt_places


def config(fields: Fields) -> ModelConfig:
    heads = fields.integer("n_head", "num_attention_heads", high=1 << 12)
    return gpt_config(fields, kv_heads=1 if fields.flag("multi_query", True) else heads)


def places(config: ModelConfig) -> Places:
    yield from gpt_places(config, transposed=False)
    q, kv = config.heads * config.head_dim, config.head_dim
    shared = {"q": (0, q), "k": (q, q + kv), "v": (q + kv, q + 2 * kv)}
    for i in range(len(config.layers)):
        for part, (our, (start, stop)) in enumerate(shared.items()):
            for kind in ("weight", "bias"):
                name = f"transformer.h.{i}.attn.c_attn.{kind}"
                # Without multi-query the three parts alternate head by head.
                piece = (
                    TensorSlice(name, start, stop)
                    if config.kv_heads == 1
                    else TensorSlice(name, interleaved=(3, part, kv))
                )
                yield f"blocks.{i}.attention.{our}.{kind}", piece


DEFAULTS = {"n_positions": 1024, "activation_function": "gelu_pytorch_tanh"}
FAMILY = Family("gpt_bigcode", "GPTBigCodeForCausalLM", config, places, base="transformer.", defaults=DEFAULTS)

"""What GGUF calls our tensors and settings, and what it stores otherwise than Hugging Face: for reading and writing."""

from typing import NamedTuple

import torch
from torch import Tensor

from hasten.model.config import ModelConfig

# `general.architecture` -> `model_type` of config.json.
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3": "gemma3_text"}
# Names of metadata after the architecture's -> fields of config.json, and of ModelConfig.
FIELDS = {
    "context_length": ("max_position_embeddings", "max_positions"),
    "embedding_length": ("hidden_size", "hidden_size"),
    "feed_forward_length": ("intermediate_size", "intermediate_size"),
    "attention.head_count": ("num_attention_heads", "heads"),
    "attention.head_count_kv": ("num_key_value_heads", "kv_heads"),
    "attention.key_length": ("head_dim", "head_dim"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attn_logit_softcapping": ("attn_logit_softcapping", "attention_softcap"),
    "final_logit_softcapping": ("final_logit_softcapping", "logit_softcap"),
    "block_count": ("num_hidden_layers", ""),
    "attention.sliding_window": ("sliding_window", ""),
    "attention.sliding_window_pattern": ("sliding_window_pattern", ""),
    "rope.freq_base": ("rope_theta", ""),
    "rope.freq_base_swa": ("rope_local_base_freq", ""),
}
FREQUENCIES = "rope_freqs.weight"  # Llama 3.1's: by what each rotary frequency is divided
PARTS = {
    "embedding": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "attention_norm": "attn_norm",
    "attention_post_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp_post_norm": "post_ffw_norm",
} | {f"attention.{part}": f"attn_{part}" for part in ("q", "k", "v", "output", "q_norm", "k_norm")}
PARTS |= {f"mlp.{part}": f"ffn_{part}" for part in ("gate", "up", "down")}


class Place(NamedTuple):
    """Where one of our tensors stands in a GGUF file.

    order: of our rows, those that are stored first, second, …; None: as they are. offset: what is added to each number.
    """

    name: str
    order: Tensor | None = None
    offset: float = 0.0


def place_of(ours: str, config: ModelConfig) -> Place:
    """The place of a tensor of ours, such as "blocks.0.attention.q.weight".

    llama.cpp turns neighbouring elements of a llama's q and k against each other, where we turn element i against
    element i + D/2: the rows of each head are stored in its order. It adds Gemma's 1 to the norms when it converts.
    """
    module, _, leaf = ours.rpartition(".")
    _, index, part = module.split(".", 2) if module.startswith("blocks.") else ("", "", module)
    order = None
    if config.family in ("llama", "mistral") and part in ("attention.q", "attention.k"):
        heads = config.heads if part == "attention.q" else config.kv_heads
        order = torch.arange(heads * config.head_dim).view(heads, 2, -1).transpose(1, 2).flatten()
    name = f"{PARTS[part]}.{leaf}"
    return Place(f"blk.{index}.{name}" if index else name, order, config.norm_offset if part.endswith("norm") else 0.0)

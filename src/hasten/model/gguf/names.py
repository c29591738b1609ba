"""What GGUF calls our tensors, and how it stores some of them otherwise than Hugging Face: for reading and writing."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hasten.model.config import ModelConfig

# `general.architecture` -> `model_type` of config.json.
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3": "gemma3_text"}
# Names of metadata after the architecture's -> fields of config.json.
FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
}
FREQUENCIES = "rope_freqs.weight"  # Llama 3.1's: by what each rotary frequency is divided
PARTS = {
    "embedding": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "attention_norm": "attn_norm",
    "attention_post_norm": "post_attention_norm",
    "attention.q": "attn_q",
    "attention.k": "attn_k",
    "attention.v": "attn_v",
    "attention.output": "attn_output",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "mlp_norm": "ffn_norm",
    "mlp_post_norm": "post_ffw_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where one of our tensors stands in a GGUF file.

    order: of our rows, those that are stored first, second, …; None: as they are. offset: what is added to each number.
    """

    name: str
    order: Tensor | None
    offset: float


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
    offset = config.norm_offset if part.endswith("norm") else 0.0
    return Place(f"blk.{index}.{PARTS[part]}.{leaf}" if index else f"{PARTS[part]}.{leaf}", order, offset)

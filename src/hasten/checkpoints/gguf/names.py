"""What GGUF calls our tensors and settings, and what it stores otherwise than Hugging Face: for reading and writing."""

import re
from typing import NamedTuple

import torch
from torch import Tensor

from hasten.checkpoints.gguf.architectures import ARCHITECTURES, OF_FAMILY
from hasten.model.config import ModelConfig
from hasten.model.families import FAMILIES

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
    "expert_count": ("num_experts", "experts"),
    "expert_used_count": ("num_experts_per_tok", "experts_per_token"),
    "expert_feed_forward_length": ("moe_intermediate_size", "expert_size"),
    "block_count": ("num_hidden_layers", ""),
    "attention.sliding_window": ("sliding_window", ""),
    "attention.sliding_window_pattern": ("sliding_window_pattern", ""),
    "rope.freq_base": ("rope_theta", ""),
    "rope.freq_base_swa": ("rope_local_base_freq", ""),
}
FREQUENCIES = "rope_freqs.weight"  # Llama 3.1's: by what each rotary frequency is divided
LONG_ROPE = ("rope_factors_short.weight", "rope_factors_long.weight")  # Phi-3's, the same for short and long texts
PARTS = {
    "embedding": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "attention_norm": "attn_norm",
    "attention_post_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp_post_norm": "post_ffw_norm",
} | {f"attention.{part}": f"attn_{part}" for part in ("q", "k", "v", "output", "q_norm", "k_norm")}
PARTS |= {f"mlp.{part}": f"ffn_{part}" for part in ("gate", "up", "down")} | {"mlp.router": "ffn_gate_inp"}
PARTS |= {f"mlp.experts.{part}": f"ffn_{part}_exps" for part in ("gate", "up", "down")}
PARTS |= {f"mlp.shared.{part}": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}
PARTS |= {"mlp.shared_gate": "ffn_gate_inp_shexp"}
# Vectors that are parameters of a part itself.
VECTORS = {"attention.sinks": "attn_sinks.weight", "mlp.choice_bias": "exp_probs_b.bias"}


class Place(NamedTuple):
    """Where one of our tensors is in a GGUF file.

    order: of our rows, those that are stored first, second, …; None: as they are. offset: what is added to each number.
    expert: which matrix of a stack of all experts'. one_row: the Hugging Face folder has a matrix of one row, the file
    a vector.
    """

    name: str
    order: Tensor | None = None
    offset: float = 0.0
    expert: int | None = None
    one_row: bool = False


def place_of(ours: str, config: ModelConfig) -> Place:
    """The place of a tensor of ours, such as "blocks.0.attention.q.weight".

    llama.cpp turns neighbouring elements of a llama's q and k against each other, where we turn element i against
    element i + D/2: the rotated rows of each head are stored in its order. It adds Gemma's 1 to the norms when it
    converts.
    """
    module, _, leaf = ours.rpartition(".")
    _, index, part = module.split(".", 2) if module.startswith("blocks.") else ("", "", module)
    if (vector := VECTORS.get(f"{part}.{leaf}")) is not None:
        return Place(f"blk.{index}.{vector}", one_row=leaf in FAMILIES[config.family].one_row)
    architecture = ARCHITECTURES[OF_FAMILY[config.family]]
    order, expert = None, None
    if found := re.fullmatch(r"(mlp\.experts)\.(\d+)\.(\w+)", part):
        part, expert = f"{found[1]}.{found[3]}", int(found[2])
    if architecture.reordered and part in ("attention.q", "attention.k"):
        heads = config.heads if part == "attention.q" else config.kv_heads
        rows = torch.arange(heads * config.head_dim).view(heads, config.head_dim)
        turned = config.ropes[0].dim
        order = torch.cat((rows[:, :turned].unflatten(1, (2, -1)).transpose(1, 2).flatten(1), rows[:, turned:]), 1)
        order = order.flatten()
    name = f"{(PARTS | architecture.parts)[part]}.{leaf}"
    offset = config.norm_offset if part.endswith("norm") and leaf == "weight" else 0.0
    return Place(f"blk.{index}.{name}" if index else name, order, offset, expert, one_row=part == "mlp.shared_gate")

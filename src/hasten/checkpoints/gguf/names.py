"""What GGUF calls our tensors and settings, and what it stores otherwise than Hugging Face: for reading and writing."""

import re
from typing import NamedTuple

import torch
from torch import Tensor

from hasten.checkpoints.gguf.architectures import ARCHITECTURES, architecture_of
from hasten.model.config import ModelConfig
from hasten.model.families import FAMILIES
from hasten.model.mixer_config import DeltaConfig, MambaConfig

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
JOINED = "ffn_gate_up_exps"  # gate, then up, of each expert, where they are one matrix
PARTS |= {f"mlp.shared.{part}": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}
PARTS |= {"mlp.shared_gate": "ffn_gate_inp_shexp"}
PARTS |= dict.fromkeys(("mixer.query", "mixer.key", "mixer.value"), "attn_qkv") | {"mixer.z": "attn_gate"}
PARTS |= {"mixer.beta": "ssm_beta", "mixer.decay": "ssm_alpha", "mixer.conv": "ssm_conv1d"}
PARTS |= {"mixer.value_norm": "ssm_norm", "mixer.out": "ssm_out"}
# Vectors that are parameters of a part itself.
VECTORS = {"attention.sinks": "attn_sinks.weight", "mlp.choice_bias": "exp_probs_b.bias"}
VECTORS |= {"mixer.log_rate": "ssm_a", "mixer.rate_bias": "ssm_dt.bias", ".scale": "layer_output_scale.weight"}
VECTORS |= {"mixer.step_bias": "ssm_dt.bias", "mixer.skip": "ssm_d"}
VECTORS |= {"mlp.router_scale": "ffn_gate_inp.scale", "mlp.expert_scale": "ffn_down_exps.scale"}
BY_HEAD = ".kv_up.weight"  # ends the name of what latent attention multiplies head by head
# Numbers that are no tensors in a file but metadata, a list with one of each layer.
LISTED = {"mlp.activation.alpha_p": "xielu.alpha_p", "mlp.activation.alpha_n": "xielu.alpha_n"}


class HeadRows(NamedTuple):
    """Rows `start` to `stop` of each of `heads` equal parts of a matrix (N, K): in a file a tensor (heads, rows, K), or
    (heads, K, rows) if it is turned.
    """

    heads: int
    start: int
    stop: int
    turned: bool = False

    def in_file(self, tensor: Tensor) -> Tensor:
        own = tensor.unflatten(0, (self.heads, -1))[:, self.start : self.stop]
        return own.transpose(1, 2) if self.turned else own

    def shape(self, columns: int) -> tuple[int, int, int]:
        """The tensor's shape in a file."""
        rows = self.stop - self.start
        return (self.heads, columns, rows) if self.turned else (self.heads, rows, columns)


class Place(NamedTuple):
    """Where one of our tensors is in a GGUF file.

    order: of our rows, those that are stored first, second, …; None: as they are. columns: the same of our columns.
    offset: what is added to each number. expert: which matrix of a stack of all experts'. half: which half of that
    matrix's rows; None: all. one_row: the Hugging Face
    folder has a matrix of one row, the file a vector. depthwise: a convolution of each channel, (C, 1, K), is (C, K) in
    the file. rate: the logarithm x of a rate is stored as -e^x. groups: the rows of a tensor's parts are in this many
    groups, each of which has rows of all parts. layer: the name is that of metadata, a list of which this is a number.
    width: our vector is a matrix in the file, with rows of this many numbers; 0: it is a vector. by_head: the file has
    these rows of each head alone.
    """

    name: str
    order: Tensor | None = None
    offset: float = 0.0
    expert: int | None = None
    one_row: bool = False
    columns: Tensor | None = None
    depthwise: bool = False
    rate: bool = False
    groups: int = 1
    layer: int | None = None
    half: int | None = None
    width: int = 0
    by_head: HeadRows | None = None

    def in_file(self, tensor: Tensor) -> Tensor:
        """A plain tensor of ours as the file has it."""
        tensor = tensor if self.by_head is None else self.by_head.in_file(tensor)
        tensor = tensor if self.order is None else tensor[self.order]
        tensor = tensor if self.columns is None else tensor[:, self.columns]
        tensor = -tensor.float().exp() if self.rate else tensor
        return tensor.float() + self.offset if self.offset else tensor

    def of_file(self, tensor: Tensor) -> Tensor:
        """A plain tensor of the file as we have it: a view where nothing is stored otherwise."""
        tensor = tensor if self.order is None else tensor.index_select(0, self.order.argsort())
        tensor = tensor if self.columns is None else tensor.index_select(1, self.columns.argsort())
        tensor = tensor.transpose(1, 2) if self.by_head is not None and self.by_head.turned else tensor
        tensor = (-tensor.float()).log() if self.rate else tensor
        return tensor - self.offset if self.offset else tensor

    def whole_blocks(self, elements: int) -> bool:
        """Whether blocks of `elements` columns stay together in the file's order."""
        if self.columns is None:
            return True
        if len(self.columns) % elements:
            return False
        blocks = self.columns.view(-1, elements)
        return torch.equal(blocks // elements * elements + torch.arange(elements), blocks)

    def in_blocks(self, rows: Tensor, *, elements: int, back: bool = False) -> Tensor:
        """Rows of blocks, uint8 (N, bytes of a row), with their columns in the file's order, or back in ours."""
        if self.columns is None:
            return rows
        order = self.columns[::elements] // elements
        return rows.unflatten(1, (len(order), -1))[:, order.argsort() if back else order].flatten(1)


def place_of(ours: str, config: ModelConfig, *, joined: bool | None = None) -> Place:
    """The place of a tensor of ours, such as "blocks.0.attention.q.weight".

    llama.cpp turns neighbouring elements of a llama's q and k against each other, where we turn element i against
    element i + D/2: the rotated rows of each head are stored in its order. It adds Gemma's 1 to the norms when it
    converts. Of Gated DeltaNet it gives value head i the key head i modulo their number, where we give each key head
    consecutive ones: what belongs to value heads is stored in its order. joined: gate and up of an expert are one
    matrix; None: as the architecture's are written.
    """
    module, _, leaf = ours.rpartition(".")
    _, index, part = f"{module}.".split(".", 2) if module.startswith("blocks.") else ("", "", module)
    part = part.removesuffix(".")  # of a block's own parameter nothing is left
    if (listed := LISTED.get(f"{part}.{leaf}")) is not None:
        return Place(listed, layer=int(index))
    architecture = ARCHITECTURES[architecture_of(config)]
    widths = _widths(config) if part.startswith("mixer") else {}
    if (vector := VECTORS.get(f"{part}.{leaf}")) is not None:
        place = Place(f"blk.{index}.{vector}", one_row=leaf in FAMILIES[config.family].one_row, rate=leaf == "log_rate")
        place = place._replace(width=widths.get(leaf, 0))
        return _tiled(place, leaf, config) if architecture.tiled and part == "mixer" else place
    order, expert = None, None
    if found := re.fullmatch(r"(mlp\.experts)\.(\d+)\.(\w+)", part):
        part, expert = f"{found[1]}.{found[3]}", int(found[2])
    if architecture.reordered and part in ("attention.q", "attention.k"):
        heads = config.heads if part == "attention.q" else config.kv_heads
        rows = torch.arange(heads * config.head_dim).view(heads, config.head_dim)
        turned = config.ropes[0].dim if config.ropes else config.head_dim
        order = torch.cat((rows[:, :turned].unflatten(1, (2, -1)).transpose(1, 2).flatten(1), rows[:, turned:]), 1)
        order = order.flatten()
    joined = architecture.joined if joined is None else joined
    halved = joined and expert is not None and not part.endswith("down")
    name = f"{JOINED if halved else (PARTS | architecture.parts)[part]}.{leaf}"
    shifted = part.endswith("norm") and part != "mixer.value_norm" and leaf == "weight"
    place = Place(f"blk.{index}.{name}" if index else name, order, config.norm_offset if shifted else 0.0, expert)
    if part in architecture.alternating and isinstance(config.mixer, DeltaConfig):
        place = place._replace(groups=config.mixer.key_heads)
    place = place._replace(one_row=part == "mlp.shared_gate", depthwise=f"{part}.{leaf}" == "mixer.conv.weight")
    place = place._replace(width=widths.get(part.removeprefix("mixer."), 0))
    if halved:
        place = place._replace(half=int(part.endswith("up")))
    tiled = architecture.tiled and part.startswith("mixer.")
    return _tiled(place, part.removeprefix("mixer."), config) if tiled else place


def places_by_head(ours: str, config: ModelConfig) -> list[Place]:
    """The two places of what latent attention multiplies head by head: keys, turned, and values; of others none.

    Files of before April 2025 have it in one, that of `place_of`.
    """
    if config.latent is None or not ours.endswith(BY_HEAD):
        return []
    whole, split = place_of(ours, config), config.latent.key_dim
    names = (whole.name.replace("attn_kv_b", part) for part in ("attn_k_b", "attn_v_b"))
    both = HeadRows(config.heads, 0, split, turned=True), HeadRows(config.heads, split, split + config.latent.value_dim)
    return [whole._replace(name=name, by_head=rows) for name, rows in zip(names, both, strict=True)]


def _widths(config: ModelConfig) -> dict[str, int]:
    """Rows of the matrices that vectors of Mamba-2 are in a file."""
    sizes = config.mixer
    if not isinstance(sizes, MambaConfig):
        return {}
    return {"log_rate": 1, "skip": 1, "value_norm": sizes.values // sizes.groups}


def _tiled(place: Place, part: str, config: ModelConfig) -> Place:
    """The place of a part of Gated DeltaNet whose value heads are stored in turn for each key head."""
    sizes = config.mixer
    assert isinstance(sizes, DeltaConfig)
    heads = torch.arange(sizes.value_heads).view(sizes.key_heads, -1).t().flatten()
    if part in ("log_rate", "rate_bias", "beta", "decay"):
        return place._replace(order=heads)
    rows = (heads[:, None] * sizes.value_dim + torch.arange(sizes.value_dim)).flatten()
    if part in ("value", "z"):
        return place._replace(order=rows)
    if part == "conv":
        return place._replace(order=torch.cat((torch.arange(2 * sizes.keys), 2 * sizes.keys + rows)))
    return place._replace(columns=rows) if part == "out" else place

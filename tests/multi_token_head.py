"""Checkpoints with a multi-token head, and its formulas, since transformers skips it."""

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from references import make_reference

FAMILIES = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"]
_OUTPUTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")


def write_with_head(folder, family, *, agrees=False):
    """Write a random model with a head; returns the transformers model and the tensors of the head.

    agrees: the model's layers add next to nothing, so that the next token follows from the last one alone, and the head
    predicts it: it draws what the model will.
    """
    reference = make_reference(family)
    config, state = reference.config, reference.state_dict()
    if agrees:
        for name, tensor in state.items():
            if name.endswith(_OUTPUTS):
                tensor *= 0.01
    layer = f"model.layers.{config.layer_types.index('full_attention')}."
    torch.manual_seed(1)
    hidden = config.hidden_size
    head = {
        "mtp.fc.weight": torch.randn(hidden, 2 * hidden) * hidden**-0.5,
        **{f"mtp.{name}.weight": 0.1 * torch.randn(hidden) for name in ("norm", "pre_fc_norm_embedding")},
        "mtp.pre_fc_norm_hidden.weight": 0.1 * torch.randn(hidden),
    }
    for name, tensor in state.items():
        if name.startswith(layer):
            scale = 0.1 if tensor.dim() == 1 else 1.2 / tensor.shape[-1] ** 0.5
            head[name.replace(layer, "mtp.layers.0.")] = scale * torch.randn(tensor.shape)
    if agrees:
        head["mtp.fc.weight"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), dim=1)
        head["mtp.pre_fc_norm_embedding.weight"] = torch.zeros(hidden)
        head["mtp.norm.weight"] = state["model.norm.weight"].clone()
        for name in head:
            if name.endswith(_OUTPUTS):
                head[name] *= 0.01
    reference.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(load_file(file) | head, file, metadata={"format": "pt"})
    return reference, head


def drafted(reference, head, tokens, count):
    """The greedy tokens of a head behind a text, after reading all of it."""
    config, embedding = reference.config, reference.get_input_embeddings()
    own = {name.removeprefix("mtp.").removeprefix("layers.0.").removesuffix(".weight"): t for name, t in head.items()}
    tokens, found = list(tokens), []
    with torch.no_grad():
        states = reference.model(torch.tensor([tokens])).last_hidden_state[0, :-1]  # normalised by the last norm
        for _ in range(count):
            x = _norm(config, own["pre_fc_norm_embedding"], embedding(torch.tensor(tokens[1:])))
            x = torch.cat((x, _norm(config, own["pre_fc_norm_hidden"], states)), dim=-1) @ own["fc"].T
            x = _norm(config, own["norm"], _block(config, own, x))
            found.append(int(reference.lm_head(x[-1]).argmax()))
            tokens.append(found[-1])
            states = torch.cat((states, x[-1:]))
    return found


def _norm(config, weight, x):
    return x * (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * (1 + weight)


def _block(config, own, x):
    """x (T, C) -> (T, C): attention with a gate for each head, then the MLP."""
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    y = _norm(config, own["input_layernorm"], x)
    q, gate = (y @ own["self_attn.q_proj"].T).unflatten(-1, (heads, 2, size)).unbind(2)
    k, v = ((y @ own[f"self_attn.{name}_proj"].T).unflatten(-1, (kv_heads, size)) for name in "kv")
    q, k = (_turned(config, _norm(config, own[f"self_attn.{n}_norm"], t)) for n, t in (("q", q), ("k", k)))
    k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * size**-0.5
    later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    mixed = torch.einsum("hts,shd->thd", scores.masked_fill(later, -torch.inf).softmax(-1), v)
    x = x + (mixed * gate.sigmoid()).flatten(1) @ own["self_attn.o_proj"].T
    return x + _mlp(config, own, _norm(config, own["post_attention_layernorm"], x))


def _turned(config, x):
    """Heads x (T, H, D) at positions 0 … T-1, of which a part is rotated."""
    rope = config.rope_parameters
    size = int(x.shape[-1] * rope.get("partial_rotary_factor", 1.0))
    speeds = rope["rope_theta"] ** (-torch.arange(0, size, 2) / size)
    angles = torch.arange(len(x))[:, None, None] * speeds
    a, b, rest = x.split([size // 2, size // 2, x.shape[-1] - size], dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def _mlp(config, own, x):
    def gated(gate, up, down, x):
        return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

    if "mlp.gate" not in own:
        return gated(*(own[f"mlp.{name}_proj"] for name in ("gate", "up", "down")), x)
    weights, chosen = (x @ own["mlp.gate"].T).softmax(-1).topk(config.num_experts_per_tok)
    if getattr(config, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    shared = gated(*(own[f"mlp.shared_expert.{name}_proj"] for name in ("gate", "up", "down")), x)
    found = shared * (x @ own["mlp.shared_expert_gate"].T).sigmoid()
    for token in range(len(x)):
        for weight, expert in zip(weights[token], chosen[token], strict=True):
            gate, up = own["mlp.experts.gate_up_proj"][expert].chunk(2)
            found[token] += weight * gated(gate, up, own["mlp.experts.down_proj"][expert], x[token])
    return found

"""Small checkpoint folders to break, and a safetensors writer that can write what no library would."""

import json
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 11,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "head_dim": 4,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}


def tensors(config: dict[str, Any] = CONFIG, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The tensors that a Llama of this config has, by their published names."""
    generator = torch.Generator().manual_seed(0)

    def new(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.3).to(dtype)

    hidden, size = config["hidden_size"], config["intermediate_size"]
    q, kv = config["num_attention_heads"] * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    found = {"model.embed_tokens.weight": new(config["vocab_size"], hidden), "model.norm.weight": new(hidden)}
    found["lm_head.weight"] = new(config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        start = f"model.layers.{i}."
        for name, shape in {
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (size, hidden),
            "mlp.up_proj": (size, hidden),
            "mlp.down_proj": (hidden, size),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }.items():
            found[f"{start}{name}.weight"] = new(*shape)
    return found


def write_folder(folder: Path, *, config: dict[str, Any] | None = None, weights: dict | None = None, shards: int = 1):
    """A whole folder; config fields given here replace those of CONFIG."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    weights = tensors() if weights is None else weights
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = list(weights)
    index = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in names[i::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def read_raw(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_raw(path: Path, header: Any, data: bytes, length: int | None = None) -> None:
    """A safetensors file with any header (an object, or its bytes) and any claimed header length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)

"""Write an attention kernel, run a model with it, and put hasten's own kernels into a PyTorch module.

python examples/05_attention_kernel.py [MODEL]
"""

import sys

import torch
from torch import Tensor, nn

import hasten
from hasten.data.book import book
from hasten.model.transformer import Attention
from hasten.ops.attention import AttentionInputs, AttentionSpec, LayerAttention, attention, replace_in
from hasten.ops.picker import Kernel, explained

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"


def online_softmax(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
    """Causal attention over 64 keys at a time (arXiv 2205.14135): q (B, T, H, D), k and v (B, S, Hkv, D)."""
    q = q.transpose(1, 2).float() * spec.scale  # (B, H, T, D)
    k, v = (x.transpose(1, 2).float().repeat_interleave(spec.groups, dim=1) for x in (k, v))  # (B, H, S, D)
    queries, keys = q.shape[2], k.shape[2]
    last = torch.arange(keys - queries, keys).unsqueeze(1)  # (T, 1): the last key that each query sees
    out, total = torch.zeros_like(q), q.new_zeros(*q.shape[:3], 1)
    highest = q.new_full((*q.shape[:3], 1), -torch.inf)
    for start in range(0, keys, 64):
        part = slice(start, min(start + 64, keys))
        hidden = torch.arange(part.start, part.stop) > last  # (T, 64)
        scores = (q @ k[:, :, part].mT).masked_fill(hidden, -torch.inf)  # (B, H, T, 64)
        new = torch.maximum(highest, scores.amax(-1, keepdim=True))
        weights, shrink = torch.exp(scores - new), torch.exp(highest - new)
        out, total, highest = out * shrink + weights @ v[:, :, part], total * shrink + weights.sum(-1, True), new
    return (out / total).transpose(1, 2).to(v.dtype)


# In one of hasten's models: each layer holds the kernels that were picked for it.
model = hasten.unfuse(hasten.load(MODEL, dtype="float32"))  # fused blocks have an attention of their own
print(f"picked: {next(one.kernel for one in hasten.explain(model) if 'attention' in one.operator)}")
print(f"  perplexity {hasten.perplexity(model, [book()[:2000]]).perplexity:.3f}")
mine = Kernel("online-softmax", online_softmax, unsupported_reason=lambda request: None)
for layer in model.modules():
    if isinstance(layer, Attention):
        layer.kernels = LayerAttention(layer.spec, tokens=mine, dropout=mine, masked=mine, decode=mine)
print(f"ours: perplexity {hasten.perplexity(model, [book()[:2000]]).perplexity:.3f}")

# hasten's kernels in anybody's module: as a function, and in every nn.MultiheadAttention or transformers model.
x = torch.randn(1, 256, 4, 64)
encoder = replace_in(nn.TransformerEncoderLayer(64, 4, batch_first=True).eval())
with explained() as choices, torch.inference_mode():
    attention(x, x, x, window=128)
    encoder(torch.randn(1, 32, 64))
print("called: " + ", ".join(choice.kernel for choice in choices))

"""Train a small model of your own with hasten's operators: attention, fused SiLU and gate, head and loss in one.

python examples/06_training_loop.py [STEPS]
"""

import sys

import torch
from torch import Tensor, nn

from hasten.data import train_characters
from hasten.data.book import book
from hasten.ops.activation import silu_mul
from hasten.ops.attention import attention
from hasten.ops.loss import linear_cross_entropy

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 100
WIDTH, HEADS, LAYERS, CONTEXT = 128, 4, 2, 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_up = nn.Linear(WIDTH, 8 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C)
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1))  # (B, T, 3, H, D)
        x = x + self.output(attention(*qkv.unbind(2), alibi=True).flatten(-2))  # the fastest kernel that fits
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(silu_mul(gate, up))


torch.manual_seed(0)
tokenizer = train_characters([book()])
tokens = torch.tensor(tokenizer.encode(book()))
embedding = nn.Embedding(tokenizer.vocab_size, WIDTH)
nn.init.normal_(embedding.weight, std=0.02)
blocks, norm = nn.Sequential(*(Block() for _ in range(LAYERS))), nn.RMSNorm(WIDTH)
parameters = [*embedding.parameters(), *blocks.parameters(), *norm.parameters()]
optimizer = torch.optim.AdamW(parameters, lr=3e-3)

for step in range(1, STEPS + 1):
    starts = torch.randint(len(tokens) - CONTEXT - 1, (8,))
    rows = torch.stack([tokens[start : start + CONTEXT + 1] for start in starts])
    states = norm(blocks(embedding(rows[:, :-1])))
    # The sum over all tokens, in nats. The logits are computed piece by piece and never held whole.
    loss = linear_cross_entropy(states, embedding.weight, rows[:, 1:]) / rows[:, 1:].numel()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 1 or step % 20 == 0:
        print(f"step {step}: loss {loss.item():.3f}")

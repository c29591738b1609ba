"""A multi-token head: one more block, which predicts the token after the next and so drafts for its model.

After token x_(t+1), and with the model's last state h_t of the token before it,

    h' = block(joined · [token_norm(embedding(x_(t+1))), state_norm(h_t)])
    logits of x_(t+2) = head(norm(h'))

with the model's own embedding and head. h_t is normalised by the model's last norm, as Qwen's heads were trained (vLLM,
llama.cpp; those of DeepSeek and GLM read states before that norm). Of a drafted token norm(h') is in the place of h_t.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from hasten.model.config import ModelConfig
from hasten.model.fused import fuse, refusal
from hasten.model.fused_linear import packed
from hasten.model.interfaces import Context
from hasten.model.mlp import Linear
from hasten.model.norms import norm_of
from hasten.model.transformer import Transformer
from hasten.ops.linear import request_of
from hasten.ops.linear.wide import WideLinear

BESIDE_BLOCK = ("joined", "token_norm", "state_norm")  # what the head has beside a block and a norm


def head_config(config: ModelConfig) -> ModelConfig:
    """The head of a model as a model of one layer: full attention, and experts where the model has any."""
    layer = next(layer for layer in config.layers if layer.attends)
    experts = any(layer.experts for layer in config.layers)
    return replace(config, layers=(replace(layer, mlp=True, experts=experts),))


class MultiTokenHead(Transformer):
    """The head as a model of one layer; embedding, head and rotary tables are those of the model it drafts for."""

    last_norm: nn.Module  # that of the model

    def __init__(self, config: ModelConfig) -> None:
        """config: that of the model."""
        super().__init__(head_config(config))
        self.joined: Linear = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.token_norm = norm_of(config, config.hidden_size)
        self.state_norm = norm_of(config, config.hidden_size)

    def share(self, model: Transformer) -> None:
        """Take what is the model's, and be fused where it is."""
        self.embedding, self.head, self.last_norm, self.ropes = model.embedding, model.head, model.norm, model.ropes
        self.dtype_asked, self.auto_fuse, self.tokenizer = model.dtype_asked, model.auto_fuse, model.tokenizer
        if not model.readable and refusal(self) is None:
            fuse(self)
            if self.device.type == "cpu":
                self.joined = packed(self.joined)

    def shares(self, model: Transformer) -> bool:
        """Whether what it has of the model is still the model's."""
        own = (self.embedding, self.head, self.last_norm)
        return all(one is other for one, other in zip(own, (model.embedding, model.head, model.norm), strict=True))

    def after(self, tokens: Tensor, states: Tensor, positions: Tensor, context: Context) -> Tensor:
        """Hidden states h' (1, N, C) before `norm`, of tokens (1, N) and the states (N, C) of those before them.

        states: normalised.
        """
        if not self.bound:
            self.bind_once()
        x = self.token_norm(self.embed(tokens, positions))
        x = torch.cat((x, self.state_norm(states)[None].to(x.dtype)), dim=-1)  # (1, N, 2·C)
        wide = isinstance(self.joined, WideLinear)
        x = self.joined(x.to(torch.float32 if wide else request_of(self.joined).dtype))
        if self.stack is not None:
            return self.stack.run(self, x, positions, context)
        return self.each_block(x, self.rotations(positions, context.stretched), context.layers)

"""The attention of a block: queries, keys and values, their norms and rotary turn, and the layer's kernels.

B: sequences, T: tokens of each, H: query heads, Hkv: key/value heads, D: head size, C: hidden size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hasten.model.config import LayerConfig, ModelConfig
from hasten.model.interfaces import LayerContext
from hasten.model.mlp import Linear
from hasten.model.norms import norm_of, over_rms
from hasten.model.rope import Rotation, rotate
from hasten.ops.attention import AttentionRequest, AttentionSpec, LayerAttention
from hasten.ops.linear import request_of
from hasten.ops.linear.wide import WideLinear

if TYPE_CHECKING:
    from hasten.ops.attention.pattern_layout import Pattern

KeysValues = tuple[Tensor, Tensor]  # normalised and rotated, (B, T, Hkv, D) each


class Attention(nn.Module):
    """Multi-head, grouped-query (arXiv 2305.13245) or multi-query (arXiv 1911.02150) attention, by `kv_heads`.

    A layer may use the keys and values of an earlier one (arXiv 2405.12981), or its keys as values too.
    """

    kernels: LayerAttention  # set by `bind`
    k: Any  # linear layers; None: there are none of its own
    v: Any

    def __init__(self, config: ModelConfig, layer: LayerConfig) -> None:
        super().__init__()
        hidden, size, kv_heads = config.hidden_size, config.head_dim_of(layer), config.kv_heads_of(layer)
        own, self.lends_keys = layer.keys_of is None, layer.lends_keys
        self.has_gates = config.attention_gate  # a head of q is followed by its gate
        self.q: Linear = nn.Linear(hidden, config.heads * size * (1 + self.has_gates), bias=config.qkv_bias)
        self.k = nn.Linear(hidden, kv_heads * size, bias=config.qkv_bias) if own else None
        has_v = own and not layer.values_of_keys
        self.v = nn.Linear(hidden, kv_heads * size, bias=config.qkv_bias) if has_v else None
        self.output: Linear = nn.Linear(config.heads * size, hidden, bias=config.output_bias)
        self.qk_norm, self.rope_pairs = config.qk_norm, config.rope_pairs
        whole = config.qk_norm == "projection"
        self.q_norm = norm_of(config, size * config.heads if whole else size) if config.qk_norm else None
        self.k_norm = norm_of(config, size * kv_heads if whole else size) if config.qk_norm and own else None
        self.value_eps = config.norm_eps if config.value_norm else None
        self.sinks = nn.Parameter(torch.empty(config.heads)) if config.attention_sinks else None
        self.block_size: int | None = None  # of a sparse pattern that is more than a regrouping of plain attention
        self.dropout = config.dropout
        heads = AttentionSpec(heads=config.heads, kv_heads=kv_heads, head_dim=size, scale=layer.scale)
        self.spec = replace(heads, window=layer.window, softcap=config.attention_softcap)
        self.take_pattern(config.attention_pattern)

    def take_pattern(self, pattern: Pattern | None) -> None:
        """Use a sparse pattern, whose masks include the layer's window. The kernels are to be bound after this."""
        if pattern is not None:
            self.block_size = None if pattern.period is not None else pattern.block
            self.spec = replace(self.spec, window=None)

    def request(self, dtype: torch.dtype | None = None, *, device: torch.device | None = None) -> AttentionRequest:
        """The request to a kernel, in the weights' dtype and device or in those given."""
        like = request_of(self.example)
        wide = isinstance(getattr(self.example, "base", self.example), WideLinear)
        dtype = dtype or (torch.float32 if wide else like.dtype)
        request = AttentionRequest(spec=self.spec, device=device or like.device, dtype=dtype, dropout=self.dropout > 0)
        request = replace(request, block_mask=self.block_size is not None, block_size=self.block_size)
        return replace(request, sinks=self.sinks is not None)

    def bind(
        self, kernel: str | None = None, *, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> None:
        """Choose the attention kernels for the weights' device and dtype; `kernel` forces one where it fits.

        dtype: of the products, if autocast runs them in another dtype than the weights'. device: of weights to come.
        """
        self.kernels = LayerAttention.bind(self.request(dtype, device=device), forced=kernel)

    @property
    def example(self) -> Linear:
        """One of the products, which all have the same dtype and device."""
        return self.q

    @property
    def over_cache(self) -> LayerAttention:
        """The kernels of steps over a cache."""
        return self.kernels

    @property
    def supports_segments(self) -> bool:
        """Whether the kernels take packed documents as the first and last key of each query, without a mask."""
        used = {self.kernels.tokens.name, self.kernels.dropout.name if self.dropout else "native"}
        return used <= {"native", "native-sparse"}

    def forward(
        self, x: Tensor, rope: Rotation | None, layer: LayerContext, shared: KeysValues | None = None
    ) -> Tensor | tuple[Tensor, KeysValues]:
        """x (B, T, C) -> (B, T, C), with the keys and values of x where the layer lends them. shared: those it uses."""
        if shared is None:
            q, gate, k, v = self.turned(*self.project(x), rope)
        else:
            (q, gate), (k, v) = (self.turned_queries(self.q(x), rope), None), shared
        y: Tensor = self.output(self.attended(q, gate, k, v, layer))
        return (y, (k, v)) if self.lends_keys else y

    def turned_queries(self, q: Tensor, rope: Rotation | None) -> Tensor:
        """Queries (B, T, H, D) of a layer without keys: each head normalised, then rotated."""
        q = q.unflatten(-1, (self.spec.heads, -1))
        q = q if self.q_norm is None else self.q_norm(q)
        return q if rope is None else rotate(q, *rope[:2], pairs=self.rope_pairs)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, rope: Rotation | None, layer: LayerContext) -> Tensor:
        """Attention output (B, T, H·D) of projected queries, keys and values (B, T, …)."""
        return self.attended(*self.turned(q, k, v, rope), layer)

    def turned(
        self, q: Tensor, k: Tensor, v: Tensor, rope: Rotation | None
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Queries (B, T, H, D), their gates, keys and values (B, T, Hkv, D), normalised and rotated."""
        if self.qk_norm == "projection":
            q, k = self.normalized(q, k)
        q = q.unflatten(-1, (self.spec.heads, -1))  # (B, T, H, D), with gates (B, T, H, 2·D)
        q, gate = q.chunk(2, dim=-1) if self.has_gates else (q, None)
        k, v = (x.unflatten(-1, (self.spec.kv_heads, self.spec.head_dim)) for x in (k, v))  # (B, T, Hkv, D)
        if self.qk_norm == "head":
            q, k = self.normalized(q, k)
        if rope is not None:
            cos, sin, *factors = rope
            q, k = (rotate(x, cos, sin, pairs=self.rope_pairs) for x in (q, k))
            for factor in factors:
                q = q * factor[..., None, None].to(q.dtype)
        if self.qk_norm == "rotated_head":
            q, k = self.normalized(q, k)
        if self.value_eps is not None:
            v = over_rms(v, self.value_eps).to(v.dtype)
        return q, gate, k, v

    def attended(self, q: Tensor, gate: Tensor | None, k: Tensor, v: Tensor, layer: LayerContext) -> Tensor:
        """Attention output (B, T, H·D)."""
        dropout = self.dropout if self.training else 0.0
        y = layer.attend(q, k, v, attention=self.kernels, sinks=self.sinks, dropout=dropout)
        return (y if gate is None else y * gate.sigmoid()).flatten(-2)

    def normalized(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the norms of queries and keys."""
        assert self.q_norm is not None
        assert self.k_norm is not None
        return self.q_norm(q), self.k_norm(k)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project x (B, T, C) to queries, keys and values, (B, T, heads·D) each."""
        q, k = self.q(x), self.k(x)
        return q, k, k if self.v is None else self.v(x)

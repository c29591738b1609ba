"""Latent attention (MLA, arXiv 2405.04434): keys and values are products of a narrow latent, and only that is cached.

B: sequences, T: tokens of each, C: hidden size, H: heads, N: features of a query or key that are not rotated, R: those
that are, V: features of a value, L: those of the latent. For each token

    c = norm(W_c x)  (L),  k_r = turn(W_r x)  (R),  one of each for all heads;  q_h = [q_n, turn(q_r)]  (N + R)
    score of head h = (q_n · (K_h c) + q_r · k_r) · scale,    its value = V_h c

Two forms compute the same. Expanded, where no token comes before those at hand: keys [K_h c, k_r] and values V_h c of
every head. Absorbed, over a cache: q_n · (K_h c) = (K_hᵀ q_n) · c, and Σ p V_h c = V_h Σ p c, so that the queries
[K_hᵀ q_n, q_r] of all heads look at one key [c, k_r], whose first L numbers are the value, too: multi-query attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hasten.model.attention import Attention, KeysValues
from hasten.model.config import LayerConfig, ModelConfig
from hasten.model.interfaces import LayerContext
from hasten.model.norms import RMSNorm
from hasten.model.rope import Rotation, rotate
from hasten.ops.attention import AttentionSpec, LayerAttention
from hasten.ops.linear import PackedLinear

if TYPE_CHECKING:
    from hasten.model.mlp import Linear

_EPS = 1e-6  # of the norms of latents, whatever the model's own is


class LatentAttention(Attention):
    """The attention of a block whose cache keeps latents.

    spec and kernels: of the expanded form. absorbed: the kernels of the other.
    """

    absorbed: LayerAttention  # set by `bind`

    def __init__(self, config: ModelConfig, layer: LayerConfig) -> None:
        nn.Module.__init__(self)
        sizes, hidden = config.latent, config.hidden_size
        assert sizes is not None, "a layer with latent attention has its sizes in the config"
        self.sizes, queries = sizes, config.heads * sizes.query_dim
        if sizes.query_rank is None:
            self.q: Linear = nn.Linear(hidden, queries, bias=False)
            self.q_norm = None
        else:
            self.q_down: Linear = nn.Linear(hidden, sizes.query_rank, bias=config.qkv_bias)
            self.q_norm = RMSNorm(sizes.query_rank, _EPS, 0.0)
            self.q_up: Linear = nn.Linear(sizes.query_rank, queries, bias=False)
        self.kv_down: Linear = nn.Linear(hidden, sizes.kept, bias=config.qkv_bias)  # latent, then the key to be rotated
        self.kv_norm = RMSNorm(sizes.rank, _EPS, 0.0)
        self.kv_up: Linear = nn.Linear(sizes.rank, config.heads * (sizes.key_dim + sizes.value_dim), bias=False)
        self.output: Linear = nn.Linear(config.heads * sizes.value_dim, hidden, bias=config.output_bias)
        self.rope_pairs, self.dropout, self.lends_keys = config.rope_pairs, config.dropout, False
        self.sinks, self.block_size = None, None
        # Kernels have one head size: the smaller ones, mostly the values', are filled up with zeros.
        size = max(sizes.query_dim, sizes.value_dim)
        self.spec = AttentionSpec(heads=config.heads, kv_heads=config.heads, head_dim=size, scale=layer.scale)

    @property
    def example(self) -> Linear:
        return self.kv_down

    @property
    def over_cache(self) -> LayerAttention:
        return self.absorbed

    def bind(
        self, kernel: str | None = None, *, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> None:
        super().bind(kernel, dtype=dtype, device=device)
        request = self.request(dtype, device=device)
        spec = replace(request.spec, kv_heads=1, head_dim=self.sizes.kept)
        self.absorbed = LayerAttention.bind(replace(request, spec=spec), forced=kernel)

    def forward(
        self, x: Tensor, rope: Rotation | None, layer: LayerContext, shared: KeysValues | None = None
    ) -> Tensor:
        """x (B, T, C) -> (B, T, C)."""
        q, latents = self.queries(x, rope), self.latents(x, rope)
        mixed = self.expand(q, latents, layer) if layer.alone else self.absorb(q, latents, layer)
        y: Tensor = self.output(mixed.flatten(-2))
        return y

    def queries(self, x: Tensor, rope: Rotation | None) -> Tensor:
        """Queries (B, T, H, N + R), whose last R numbers are rotated."""
        sizes = self.sizes
        q = self.q(x) if self.q_norm is None else self.q_up(self.q_norm(self.q_down(x)))
        q = q.unflatten(-1, (self.spec.heads, sizes.query_dim))
        if rope is None:
            return q
        cos, sin, *factors = rope
        q = torch.cat((q[..., : sizes.key_dim], rotate(q[..., sizes.key_dim :], cos, sin, pairs=self.rope_pairs)), -1)
        for factor in factors:
            q = q * factor[..., None, None].to(q.dtype)
        return q

    def latents(self, x: Tensor, rope: Rotation | None) -> Tensor:
        """What is kept of the tokens, (B, T, 1, L + R): the normalised latent, and the rotated key of all heads."""
        latent, key = self.kv_down(x).unsqueeze(-2).split((self.sizes.rank, self.sizes.turned_dim), dim=-1)
        key = key if rope is None else rotate(key, *rope[:2], pairs=self.rope_pairs)
        return torch.cat((self.kv_norm(latent), key), dim=-1)

    def expand(self, q: Tensor, latents: Tensor, layer: LayerContext) -> Tensor:
        """Attention (B, T, H, V) to the tokens at hand, with keys and values of every head."""
        sizes, heads = self.sizes, self.spec.heads
        latent, key = latents.squeeze(-2).split((sizes.rank, sizes.turned_dim), dim=-1)
        kv = self.kv_up(latent).unflatten(-1, (heads, -1))
        k, v = kv.split((sizes.key_dim, sizes.value_dim), dim=-1)  # (B, T, H, N), (B, T, H, V)
        k = torch.cat((k, key.unsqueeze(-2).expand(-1, -1, heads, -1)), dim=-1)
        q, k, v = (F.pad(one, (0, self.spec.head_dim - one.shape[-1])) for one in (q, k, v))
        dropout = self.dropout if self.training else 0.0
        return layer.attend(q, k, v, attention=self.kernels, kept=latents, dropout=dropout)[..., : sizes.value_dim]

    def absorb(self, q: Tensor, latents: Tensor, layer: LayerContext) -> Tensor:
        """The same over a cache: queries in the space of latents, which are keys and values."""
        sizes, shape = self.sizes, q.shape[:2]
        still, turned = q.flatten(0, 1).split((sizes.key_dim, sizes.turned_dim), dim=-1)  # (B·T, H, …)
        keys, values = self._by_head(_weight_of(self.kv_up, q.dtype))  # (H, N, L), (H, V, L)
        inner = torch.einsum("thn,hnl->thl", still, keys)
        for rows, own in self._adapters():
            narrow = torch.einsum("thn,hnr->thr", still[rows].to(own.b.dtype), self._by_head(own.b)[0])
            inner[rows] += (narrow @ own.a * own.scale).to(q.dtype)
        q = torch.cat((inner, turned), dim=-1).unflatten(0, shape)  # (B, T, H, L + R)
        mixed = layer.attend(q, latents, latents, attention=self.absorbed)[..., : sizes.rank].flatten(0, 1)
        y = torch.einsum("thl,hvl->thv", mixed, values)
        for rows, own in self._adapters():
            narrow = mixed[rows].to(own.a.dtype) @ own.a.t()
            y[rows] += (torch.einsum("thr,hvr->thv", narrow, self._by_head(own.b)[1]) * own.scale).to(y.dtype)
        return y.unflatten(0, shape)

    def _by_head(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of keys and of values in a weight (H·(N + V), …), (H, N, …) and (H, V, …)."""
        keys, values = weight.unflatten(0, (self.spec.heads, -1)).split((self.sizes.key_dim, self.sizes.value_dim), 1)
        return keys, values

    def _adapters(self) -> Sequence[tuple[Any, Any]]:
        """The LoRA factors of the product for keys and values, as `LoRALinear.taken` gives them."""
        taken = getattr(self.kv_up, "taken", None)
        return () if taken is None else taken()


def _weight_of(linear: nn.Module, dtype: torch.dtype) -> Tensor:
    """The weight of a linear layer, or of the one that adapters are beside."""
    linear = getattr(linear, "base", linear)
    assert isinstance(linear, nn.Linear | PackedLinear)
    if isinstance(linear, PackedLinear):  # where a kernel was forced by name
        return linear.numbers(torch.arange(linear.out_features)).dequantize(dtype)
    return linear.weight.to(dtype)


def attention_of(config: ModelConfig, layer: LayerConfig) -> Attention:
    """Create a layer's attention, of the kind that the model has."""
    return Attention(config, layer) if config.latent is None else LatentAttention(config, layer)

"""Inputs of the gated delta rule, for its tests."""

import torch
import torch.nn.functional as F


def random_inputs(seed, *, tokens, sequences=2, key_heads=2, heads=4, key_dim=5, value_dim=3, state=True):
    """q, k, v, decay, beta and a matrix in float64, of the size that a model's are."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(size, generator=generator, dtype=torch.float64)

    q, k = (F.normalize(normal(sequences, tokens, key_heads, key_dim), dim=-1) for _ in range(2))
    v = normal(sequences, tokens, heads, value_dim)
    decay = -F.softplus(normal(sequences, tokens, heads)) * 8 * torch.rand(heads, generator=generator).double()
    beta = normal(sequences, tokens, heads).sigmoid()
    return q, k, v, decay, beta, normal(sequences, heads, key_dim, value_dim) if state else None

"""The recurrence of Mamba-2 (arXiv 2405.21060), token by token and in chunks.

For a token with key k (the paper's B), query q (C), value v (Δx) and log decay g (ΔA), of the matrix S (N, P) of each
head:

    S ← e^g S + k vᵀ;  o = Sᵀq

n: sequences, T: tokens of each, G: groups of keys and queries, H: heads (each group serves H/G consecutive ones), N and
P: sizes of a key and of a value. Computed in float32, in float64 for such values.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # tokens


def scan(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, matrix: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Outputs (n, T, H, P) and the matrix (n, H, N, P) after the last token.

    q, k (n, T, G, N), v (n, T, H, P), decay (logarithms, at most 0) (n, T, H). matrix: None is zeros.
    """
    with torch.autocast(v.device.type, enabled=False):  # sums over a whole text keep float32
        run = recurrent_scan if v.shape[1] == 1 else chunked_scan
        return run(q, k, v, decay, matrix)


def recurrent_scan(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, matrix: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`scan`, one token after the other: the reference, and a decode step."""
    q, k, v, decay, matrix = _prepared(q, k, v, decay, matrix)
    outputs = []
    for t in range(v.shape[3]):
        matrix = matrix * decay[:, :, :, t, :, None].exp() + k[:, :, :, t, :, None] * v[:, :, :, t, None]
        outputs.append(q[:, :, :, t, None] @ matrix)  # (n, G, H/G, 1, P)
    return _by_token(torch.cat(outputs, dim=3)), matrix.flatten(1, 2)


def chunked_scan(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, matrix: Tensor | None = None, *, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """`scan` in chunks of C tokens, as matrix products (the paper's section 6).

    With G the sums of decay inside a chunk and D_ij = e^(G_i - G_j) for j ≤ i: O = (Q e^G) S + (QKᵀ ∘ D) V and
    S ← e^(G_C) S + Kᵀ (e^(G_C - G) V). Keys and queries are multiplied once for all heads of a group.
    """
    q, k, v, decay, matrix = _prepared(q, k, v, decay, matrix)
    tokens = v.shape[3]
    size = min(chunk, tokens)
    q, k, v, decay = (_in_chunks(x, size) for x in (q, k, v, decay))  # (n, G, H/G or 1, chunks, C, …)
    # In float64: differences of long sums, of which most decay far, are exact to float32's last bits.
    total = decay.double().cumsum(dim=-2)  # G: (n, G, H/G, chunks, C, 1)
    future = torch.ones(size, size, dtype=torch.bool, device=v.device).triu(1)
    # Masked before the exponential, which could overflow there.
    within = (total - total.mT).to(v.dtype).masked_fill(future, float("-inf")).exp()  # D
    grown, left = (x.to(v.dtype).exp() for x in (total, total[..., -1:, :] - total))
    inside, added = (q @ k.mT * within) @ v, left * v
    outputs = []
    for i in range(v.shape[3]):
        before = torch.einsum("bgcn,bgrnp->bgrcp", q[:, :, 0, i], matrix)
        outputs.append(grown[:, :, :, i] * before + inside[:, :, :, i])
        new = torch.einsum("bgcn,bgrcp->bgrnp", k[:, :, 0, i], added[:, :, :, i])
        matrix = grown[:, :, :, i, -1:] * matrix + new
    return _by_token(torch.cat(outputs, dim=3))[:, :tokens], matrix.flatten(1, 2)


def _prepared(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, matrix: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The arguments by group and head, in the dtype of the computation.

    q, k (n, G, 1, T, N), v (n, G, H/G, T, P), decay (n, G, H/G, T, 1), matrix (n, G, H/G, N, P).
    """
    groups, dtype = k.shape[2], torch.promote_types(v.dtype, torch.float32)
    q, k = (x.to(dtype).transpose(1, 2)[:, :, None] for x in (q, k))
    v, decay = (x.to(dtype).transpose(1, 2).unflatten(1, (groups, -1)) for x in (v, decay[..., None]))
    if matrix is None:
        matrix = v.new_zeros(v.shape[0], v.shape[1] * v.shape[2], k.shape[-1], v.shape[-1])
    return q, k, v, decay, matrix.to(dtype).unflatten(1, (groups, -1))


def _in_chunks(x: Tensor, size: int) -> Tensor:
    """x (…, T, D) -> (…, chunks, C, D), with zeros behind the last token, which add nothing and do not decay."""
    return F.pad(x, (0, 0, 0, -x.shape[3] % size)).unflatten(3, (-1, size))


def _by_token(x: Tensor) -> Tensor:
    """x (n, G, H/G, T, P) -> (n, T, H, P)."""
    return x.flatten(1, 2).transpose(1, 2)

"""The gated delta rule (arXiv 2412.06464), token by token and in chunks.

For a token with key k, value v, log decay g and strength β, of the matrix S (Dk, Dv) of each head:

    S ← e^g S;  S ← S + k (β (v - Sᵀk))ᵀ;  o = Sᵀq

n: sequences, T: tokens of each, Hk: key heads, H: value heads (each key head serves H/Hk consecutive ones), Dk and Dv:
sizes of a head's keys and values. Computed in float32, in float64 for such values.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # tokens


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, matrix: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Outputs (n, T, H, Dv) and the matrix (n, H, Dk, Dv) after the last token.

    q, k (n, T, Hk, Dk), v (n, T, H, Dv), decay (logarithms, at most 0) and beta (n, T, H). matrix: None is zeros.
    """
    with torch.autocast(v.device.type, enabled=False):  # sums over a whole text keep float32
        run = recurrent_delta_rule if v.shape[1] == 1 else chunked_delta_rule
        return run(q, k, v, decay, beta, matrix)


def recurrent_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, matrix: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`delta_rule`, one token after the other: the reference, and a decode step."""
    q, k, v, decay, beta, matrix = _prepared(q, k, v, decay, beta, matrix)  # (n, H, T, …)
    outputs = []
    for t in range(v.shape[2]):
        key = k[:, :, t, None]  # (n, H, 1, Dk)
        matrix = matrix * decay[:, :, t, None, None].exp()
        error = beta[:, :, t, None, None] * (v[:, :, t, None] - key @ matrix)  # (n, H, 1, Dv)
        matrix = matrix + key.mT @ error
        outputs.append(q[:, :, t, None] @ matrix)
    return torch.cat(outputs, dim=2).transpose(1, 2), matrix


def chunked_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    matrix: Tensor | None = None,
    *,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """`delta_rule` in chunks of C tokens, as matrix products (the paper's section 3.3).

    With G the sums of decay inside a chunk and D_ij = e^(G_i - G_j) for j ≤ i: the corrections of a chunk are
    V' = U - W S, where (I + A) [U, W] = [βV, βK e^G] and A = tril(βKKᵀ ∘ D, -1). Then O = (Q e^G) S + (QKᵀ ∘ D) V' and
    S ← e^(G_C) S + (K e^(G_C - G))ᵀ V'.
    """
    q, k, v, decay, beta, matrix = _prepared(q, k, v, decay, beta, matrix)  # (n, H, T, …)
    tokens = v.shape[2]
    size = min(chunk, tokens)
    # (n, H, N, C, …). Padding changes nothing: its strength is 0, and nothing decays.
    q, k, v, decay, beta = (_in_chunks(x, size) for x in (q, k, v, decay[..., None], beta[..., None]))
    # In float64: differences of long sums, of which most decay far, are exact to float32's last bits.
    total = decay.double().cumsum(dim=-2)  # G: (n, H, N, C, 1)
    future = torch.ones(size, size, dtype=torch.bool, device=v.device).triu(1)
    # Masked before the exponential, which could overflow there.
    within = (total - total.mT).to(v.dtype).masked_fill(future, float("-inf")).exp()  # D: (n, H, N, C, C)
    grown, left = (x.to(v.dtype).exp() for x in (total, total[..., -1:, :] - total))
    system = (beta * k) @ k.mT * within  # A; what is on and above its diagonal is not read
    known = torch.cat((beta * v, beta * k * grown), dim=-1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    new, read = solved.split((v.shape[-1], k.shape[-1]), dim=-1)  # U, W
    scores, queries, keys = q @ k.mT * within, q * grown, k * left
    outputs = []
    for i in range(v.shape[2]):
        corrections = new[:, :, i] - read[:, :, i] @ matrix  # V'
        outputs.append(queries[:, :, i] @ matrix + scores[:, :, i] @ corrections)
        matrix = grown[:, :, i, -1:] * matrix + keys[:, :, i].mT @ corrections
    return torch.cat(outputs, dim=2)[:, :, :tokens].transpose(1, 2), matrix


def _prepared(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, matrix: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The arguments by head, (n, H, T, …), in the dtype of the computation, and the matrix that is there."""
    heads, dtype = v.shape[2], torch.promote_types(v.dtype, torch.float32)
    q, k = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (q, k))
    q, k, v, decay, beta = (x.to(dtype).transpose(1, 2) for x in (q, k, v, decay, beta))
    if matrix is None:
        matrix = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1])
    return q, k, v, decay, beta, matrix.to(dtype)


def _in_chunks(x: Tensor, size: int) -> Tensor:
    """x (n, H, T, D) -> (n, H, N, C, D), with zeros behind the last token."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % size)).unflatten(2, (-1, size))

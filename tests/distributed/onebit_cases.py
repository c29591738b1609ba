"""Run by every rank: compressed means and one-bit optimizers, compared with their definitions."""

import torch
import torch.distributed as dist

from hasten.distributed.compressed import compressed_mean, no_errors, pack, unpack
from hasten.training.lamb import Lamb
from hasten.training.onebit import OneBitAdam, OneBitLamb

N = 1000
ROWS = 40  # of a vocabulary, of which the last eight never occur


def everywhere(tensor):
    """The tensors of all ranks."""
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor.contiguous())
    return found


def same_everywhere(tensor):
    return all(torch.equal(tensor, other) for other in everywhere(tensor))


def reference_mean(xs, errors):
    """`compressed_mean` by definition, of all ranks' tensors in one process."""
    ranks = len(xs)
    quantized = []
    for x, own in zip(xs, errors, strict=True):
        c = own.worker.clone()
        c[: len(x)] += x
        mask = (torch.arange(len(c)) < len(x)).view(ranks, -1)
        pieces = c.view(ranks, -1)
        q = unpack(pack(pieces, mask), pieces.shape[1]) * mask
        own.worker.copy_(c - q.flatten())
        quantized.append(q)
    found = []
    for j, own in enumerate(errors):
        mask = (torch.arange(j * len(own.server), (j + 1) * len(own.server)) < len(xs[0]))[None]
        r = torch.stack([q[j] for q in quantized]).mean(0) + own.server
        p = (unpack(pack(r[None], mask), len(r)) * mask)[0]
        own.server.copy_(r - p)
        found.append(p)
    return torch.cat(found)[: len(xs[0])]


def means(rank, ranks):
    everything = torch.ones(N, dtype=torch.bool)
    own, all_errors = no_errors(N, ranks, torch.device("cpu")), None
    for step in range(4):
        xs = [torch.randn(N, generator=torch.Generator().manual_seed(100 * step + r)) for r in range(ranks)]
        before = own.worker.clone()
        found = compressed_mean(xs[rank], own, everything)
        all_errors = all_errors or [no_errors(N, ranks, torch.device("cpu")) for _ in range(ranks)]
        wanted = reference_mean(xs, all_errors)
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(own.worker, all_errors[rank].worker, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(own.server, all_errors[rank].server, rtol=1e-6, atol=1e-6)
        assert same_everywhere(found)
        # What is left out is what is missing, to the bit.
        c = before.clone()
        c[:N] += xs[rank]
        mask = torch.arange(len(c)) < N
        q = unpack(pack(c.view(ranks, -1), mask.view(ranks, -1)), len(c) // ranks).flatten() * mask
        assert torch.equal(own.worker, c - q)
        assert not own.worker[N:].any()
    kept = torch.rand(N, generator=torch.Generator().manual_seed(1)) > 0.3
    own = no_errors(N, ranks, torch.device("cpu"))
    found = compressed_mean(torch.randn(N), own, kept)
    assert not found[~kept].any()
    assert found[kept].all()
    assert not own.worker[:N][~kept].any(), "what never travels must not gather there"


def text(rank, step, ranks):
    """Tokens whose frequencies fall as 1/rank, the same on all ranks together."""
    generator = torch.Generator().manual_seed(step * ranks + rank)
    weights = 1 / torch.arange(1, ROWS - 7, dtype=torch.float)
    return torch.multinomial(weights, 65, replacement=True, generator=generator)


class Bigram(torch.nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.rows = torch.nn.Parameter(torch.randn(ROWS, 16, generator=generator) * 0.3)
        self.head = torch.nn.Parameter(torch.randn(16, ROWS, generator=generator) * 0.3)
        with torch.no_grad():
            self.rows[-8:] = 0

    def forward(self, tokens):
        logits = self.rows[tokens[:-1]] @ self.head
        return torch.nn.functional.cross_entropy(logits[:, :-8], tokens[1:])


def train(kind, rank, ranks, *, steps, plain=None, freeze_after=30, weight_decay=0.01):
    """The loss at the end; one-bit, or (`plain`) the optimizer of the warm-up for all steps."""
    model = Bigram()
    settings = {"lr": 0.02, "betas": (0.9, 0.999), "weight_decay": weight_decay}
    if plain:
        optimizer = plain(model.parameters(), **settings)
    else:
        optimizer = kind(model.parameters(), **settings)
        n = sum(p.numel() for p in model.parameters())
        errors = no_errors(n, ranks, torch.device("cpu"))
        optimizer.freeze_after = freeze_after
        optimizer.mean = lambda x, kept: compressed_mean(x, errors, kept)
    trace, warm = [], None
    for step in range(steps):
        loss = model(text(rank, step, ranks))
        loss.backward()
        if plain or not optimizer.frozen:
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= ranks
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        trace.append(float(total) / ranks)
        if step == freeze_after - 1:
            warm = [p.detach().clone() for p in model.parameters()]
    assert same_everywhere(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return sum(trace[-20:]) / 20, warm, model, optimizer


def optimizers(rank, ranks):
    for kind, plain in ((OneBitAdam, torch.optim.AdamW), (OneBitLamb, Lamb)):
        loss, warm, model, optimizer = train(kind, rank, ranks, steps=120)
        wanted, warm_wanted, other, _ = train(kind, rank, ranks, steps=120, plain=plain)
        assert all(torch.equal(a, b) for a, b in zip(warm, warm_wanted, strict=True)), "the warm-up is the plain one"
        assert optimizer.frozen
        assert not torch.equal(model.head, other.head)
        assert loss < wanted * 1.03
        assert not model.rows[-8:].any(), "rows that never occur do not move"


dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)
means(rank, ranks)
optimizers(rank, ranks)
dist.destroy_process_group()

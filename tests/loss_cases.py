"""Problems for the kernels of the loss, and the check of the Triton one on a CPU (interpreted) and on a GPU."""

import torch

from hasten.ops.loss.chunked import chunked_triton
from hasten.ops.loss.kernels import Head, reference


def inputs(*, rows=13, hidden=8, vocab=21, padding=3, dtype=torch.float64, masked=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, hidden, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab + padding, hidden, generator=generator, dtype=torch.float64)
    bias = torch.randn(vocab + padding, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    targets[torch.rand(rows, generator=generator) < masked] = -100
    return [t.to(dtype).requires_grad_() for t in (x, weight, bias)], targets


def results(run, leaves, targets, *, vocab_size, softcap=None, factor=0.37, with_bias=True, **options):
    x, weight, bias = (leaf.detach().clone().requires_grad_() for leaf in leaves)
    loss = run(x, targets, Head(weight, vocab_size, bias if with_bias else None, softcap), **options)
    (loss * factor).backward()
    return loss.detach(), x.grad, weight.grad, bias.grad


def check_triton_loss(device, dtype, *, with_bias, chunk_rows=None, **sizes):
    """It errs at most twice what plain PyTorch errs in the same dtype, against float64, and pads with zeros."""
    leaves, targets = inputs(**sizes)
    options = {"vocab_size": sizes["vocab"], "with_bias": with_bias}
    exact = results(reference, leaves, targets, **options)
    low = [leaf.detach().to(dtype) for leaf in leaves]
    plain = results(reference, low, targets, **options)
    there = [leaf.to(device) for leaf in low]
    found = results(chunked_triton, there, targets.to(device), chunk_rows=chunk_rows, **options)
    for one, other, true in zip(found, plain, exact, strict=True):
        if true is not None:
            unit = torch.finfo(dtype).eps * true.norm()  # a few numbers may be exact by chance
            assert (one.cpu().double() - true).norm() <= 2 * (other.double() - true).norm() + unit
    assert not found[2][sizes["vocab"] :].any()

"""What trains a whole model on a GPU, in Triton's interpreter; run by test_whole.py in a process of its own."""

import pytest
import torch
from torch import nn

from hasten.ops.activation.operator import reference_bias_gelu
from hasten.ops.activation.triton_gelu import bias_gelu
from hasten.ops.fp8 import Fp8Weights
from hasten.ops.fp8.products import E4M3, Fp8, scale_of
from hasten.ops.residual import Norm, add_norm
from hasten.training.fp8_model import Fp8Model
from hasten.training.update import Update
from hasten.training.whole import WholeModel
from whole_cases import make
from whole_cases import train as steps_of

DTYPES = [torch.float32, torch.float16]  # the interpreter takes bfloat16's bits for integers


def errors(found, plain, exact):
    for one, other, true in zip(found, plain, exact, strict=True):
        assert one.dtype == other.dtype
        error, allowed = (one.double() - true).norm(), (other.double() - true).norm()
        assert error <= 2 * allowed + 1e-6 * true.norm(), (error, allowed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(7, 48), (3, 100), (1, 64)])
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("used", ["both", "normed"])
def test_add_norm(dtype, rows, width, centred, biases, used):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    given = [draw(rows, width), draw(rows, width).to(dtype), draw(width), draw(width), draw(width)]
    by_total, by_normed = draw(rows, width), draw(rows, width).to(dtype)

    def run(kernel, wide):
        stream, branch, branch_bias, weight, bias = (
            one.to(torch.float64 if wide else (one.dtype if i == 1 else torch.float32)).requires_grad_()
            for i, one in enumerate(one.clone() for one in given)
        )
        norm = Norm(weight, bias if centred and biases else None, 1e-5, 0.0 if centred else 1.0, centred)
        narrow = torch.float64 if wide else dtype
        total, normed = add_norm(stream, branch, branch_bias if biases else None, norm, dtype=narrow, kernel=kernel)
        leaves = [stream, branch, weight] + ([branch_bias] if biases else []) + ([] if norm.bias is None else [bias])
        outs = [total, normed] if used == "both" else [normed]
        weights = [by_total.to(total.dtype), by_normed.to(normed.dtype)][-len(outs) :]
        return [total, normed, *torch.autograd.grad(outs, leaves, weights)]

    errors(run("triton", False), run("reference", False), run("reference", True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(5, 48), (9, 600), (1, 16)])
@pytest.mark.parametrize("biased", [True, False])
def test_bias_gelu(dtype, rows, width, biased):
    generator = torch.Generator().manual_seed(0)
    z, bias = torch.randn(rows, width, generator=generator), torch.randn(width, generator=generator)
    weights = torch.randn(rows, width, generator=generator)

    def run(function, narrow, wide):
        own, own_bias = z.to(narrow).to(wide).requires_grad_(), bias.to(torch.promote_types(wide, torch.float32))
        own_bias.requires_grad_()
        out = function(own, own_bias if biased else None)
        return [out, *torch.autograd.grad(out, [own, own_bias][: 1 + biased], weights.to(narrow).to(wide))]

    exact = run(reference_bias_gelu, dtype, torch.float64)
    errors(run(bias_gelu, dtype, dtype), run(reference_bias_gelu, dtype, dtype), exact)


class Copies:
    """Of matrices, in float16."""

    def __init__(self, parameters):
        self.fp8 = Fp8Weights([[parameters[2], parameters[0]]])
        self.made = {p: torch.zeros(p.shape, dtype=torch.float16) for p in parameters if p.dim() == 2}
        self.dtype = torch.float16

    def of(self, parameter):
        return self.made.get(parameter)

    def pairs(self):
        return self.made.items()


@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("clip", [0.5, None])
def test_adamw(narrow, clip):
    found = []
    for kernel in ("torch", "triton"):
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(shape)) for shape in ((64, 48), (48,), (96, 48))]
        groups = [
            {"params": parameters[::2], "weight_decay": 0.1},
            {"params": parameters[1:2], "weight_decay": 0.0, "lr": 3e-3},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.99), fused=True)
        copies = Copies(parameters) if narrow else None
        update = Update(optimizer, parameters, clip=clip, copies=copies, kernel=kernel)
        assert update.kernel == kernel
        norms = []
        for _ in range(4):
            gradients = [torch.randn(p.shape) for p in parameters]
            if narrow:
                gradients = [one.half() if one.dim() == 2 else one for one in gradients]
            update.scalars.copy_(torch.tensor(update.next_scalars()))
            norms.append(update.run(gradients).clone())
        states = [value for p in parameters for value in optimizer.state[p].values()]
        found.append([*norms, *(p.detach() for p in parameters), *states])
        if copies is not None:
            assert all(torch.equal(p.detach().half(), copy) for p, copy in copies.pairs())
            assert copies.fp8.largest == max(p.detach().abs().max() for p in (parameters[2], parameters[0]))
    torch.testing.assert_close(found[1], found[0], rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_whole_model_through_these_kernels(family, backend):
    """Also traced as the compiler traces it: in one graph, with the operators' shapes and gradients."""
    plain = steps_of(make("plain", family=family), steps=2)
    step = make("uncaptured", family=family, kernel="triton")
    step.model.bind()  # the Triton loss
    step.whole = step.where.module = WholeModel(step.model, dtype=torch.float32, norm="triton", gelu="triton")
    assert step.whole._loss.name == "chunked-triton"
    if backend is not None:
        step.whole._compiled = torch.compile(step.whole.run, fullgraph=True, backend=backend)
    torch.testing.assert_close(steps_of(step, steps=2), plain, rtol=1e-5, atol=1e-6)
    assert step.updater.kernel == "triton"


def near(narrow, scales, true):
    """Within a step of e4m3, but for a few: the interpreter loses the carry where rounding reaches a power of two."""
    assert scales.shape == (len(true), 1)
    assert torch.equal(scales, scale_of(true.float().abs().amax(1, keepdim=True)))
    return ((narrow.float() * scales - true).abs() <= 2**-3 * true.abs() + scales * 2**-9).float().mean() > 0.9


@pytest.mark.parametrize(("rows", "width"), [(5, 48), (3, 100)])
def test_rows_rounded_to_fp8(rows, width):
    from hasten.ops.fp8.triton_rows import bias_gelu_fp8, bias_gelu_fp8_backward, join_fp8, rows_to_fp8

    generator = torch.Generator().manual_seed(0)
    z, d_out = (torch.randn(rows, width, generator=generator) for _ in range(2))
    bias = torch.randn(width, generator=generator)
    leaves = z.clone().requires_grad_(), bias.clone().requires_grad_()
    out = reference_bias_gelu(*leaves)
    dz, dbias = torch.autograd.grad(out, leaves, d_out)
    assert near(*rows_to_fp8(z), z)
    assert near(*bias_gelu_fp8(z, bias), out)
    *rounded_dz, own_dbias = bias_gelu_fp8_backward(d_out, z, bias)
    assert near(*rounded_dz, dz)
    torch.testing.assert_close(own_dbias, dbias, rtol=1e-5, atol=1e-6)
    joined = torch.cat((z, d_out[:, :32], z[:, 8:40]), dim=1)
    *rounded_join, sums = join_fp8(z, d_out[:, :32], z[:, 8:40], torch.float32)
    assert near(*rounded_join, joined)
    torch.testing.assert_close(sums, joined.sum(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("rows", "widths"), [(16, (48, 32)), (272, (80, 144))])
def test_columns_of_fp8(rows, widths):
    """As bytes; and multiplied with the scales of both rows, within what e4m3 has left of them."""
    from hasten.ops.fp8.triton_columns import columns

    generator = torch.Generator().manual_seed(0)
    dy, x = (torch.randn(rows, width, generator=generator) for width in widths)
    dy *= torch.logspace(-3, 0, rows)[torch.randperm(rows, generator=generator)].unsqueeze(1)
    dy, x = (Fp8((one / (s := scale_of(one.abs().amax(1, keepdim=True)))).to(E4M3), s) for one in (dy, x))
    by_dy, by_x, scales = columns(*dy, *x)
    assert torch.equal(by_x.view(torch.uint8), x.values.view(torch.uint8).t())
    both = dy.scales * x.scales
    assert scales[0] == both.max()
    assert scales[4] == 1
    true = (dy.values.float() * both).t()
    wrong = (by_dy.float() * scales[0] - true).abs() > scales[0] * 2**-9  # only what falls below e4m3's normal range
    assert wrong.float().mean() < 0.1


def test_weights_in_fp8():
    generator = torch.Generator().manual_seed(0)
    sizes = ((96, 48), 3), ((16, 208), 1e-2), ((32, 208), 1)
    weights = [torch.randn(shape, generator=generator) * scale for shape, scale in sizes]
    made = Fp8Weights([weights[:1], weights[1:]])
    for _ in range(2):
        weights[1] *= 1000
        made.measure()
        made.refresh()
        for weight, one in zip((weights[0], torch.cat(weights[1:])), made.made, strict=True):
            assert torch.equal(one.columns.values.view(torch.uint8), one.rows.values.view(torch.uint8).t())
            scale = scale_of(weight.abs().max())
            assert torch.equal(one.rows.scales, scale.expand(len(weight), 1))
            assert torch.equal(one.columns.scales, scale.expand(weight.shape[1], 1))
            wrong = (one.rows.values.float() * scale - weight).abs() > 2**-3 * weight.abs() + scale * 2**-9
            assert wrong.float().mean() < 0.1


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("narrow", [True, False])
def test_add_norm_in_fp8(centred, narrow):
    from hasten.ops import fp8

    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(shape, generator=generator) for shape in ((2, 5, 48), (2, 5, 48), (48,), (48,), (48,))]
    stream, branch, branch_bias, weight, bias = (one.requires_grad_() for one in given)
    norm = Norm(weight, bias if centred else None, 1e-5, 0.0, centred)
    leaves = [stream, branch, branch_bias, weight, *([bias] if centred else [])]
    by = [torch.randn(2, 5, 48, generator=generator) for _ in range(2)]
    outs = add_norm(stream, branch, branch_bias, norm, dtype=torch.float32, kernel="triton")
    exact = torch.autograd.grad(outs, leaves, by)
    for slot in (None, fp8.layers.Slot()):
        total, x = fp8.add_norm(stream, fp8.Branch(branch, slot), branch_bias, norm, torch.float32, narrow=narrow)
        torch.testing.assert_close(total, outs[0])
        if narrow:
            assert near(*x.narrow, outs[1].view(-1, 48))
        else:
            torch.testing.assert_close(x, outs[1])
        found = torch.autograd.grad([total, x.x if narrow else x], leaves, by)
        for index, (one, true) in enumerate(zip(found, exact, strict=True)):
            if index == 1 and slot is not None:
                assert near(*slot.gradient, true.view(-1, 48))
            else:
                torch.testing.assert_close(one, true)


@pytest.mark.parametrize("scale", [None, 1e-3])
def test_the_loss_in_fp8(scale):
    """The gradient by the logits, again in FP8 under one scale."""
    from hasten.ops.loss.kernels import Head
    from hasten.ops.loss.triton_loss import loss_and_gradient

    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(5, 16, generator=generator), torch.randn(64, 16, generator=generator)
    targets = torch.tensor([3, 49, -100, 0, 17])
    head = Head(weight, 50, scale=None if scale is None else torch.tensor(scale))
    narrow = Fp8(torch.empty(5, 64, dtype=E4M3), torch.empty(1, 1))
    found = loss_and_gradient(x, targets, head, torch.zeros(()), narrow, need=True)
    one = scale_of(torch.tensor(scale or 1.0))
    assert narrow.scales == one
    wrong = (narrow.values.float() * one - found).abs() > 2**-3 * found.abs() + one * 2**-9
    assert wrong.float().mean() < 0.1


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("micro", [1, 2])
def test_a_model_in_fp8_through_these_kernels(family, micro):
    plain = steps_of(make("plain", family=family), steps=4, micro=micro)
    step = make("uncaptured", family=family, kernel="triton")
    step.model.bind()
    step.whole = step.where.module = Fp8Model(step.model, dtype=torch.float32)
    found = steps_of(step, steps=4, micro=micro)
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in plain], rel=2e-2)


@pytest.mark.parametrize("widths", [(48, 48), (64, 16), (600, 200)])
@pytest.mark.parametrize("rows", [1, 13])
def test_joined_gradients(widths, rows):
    from hasten.ops.residual.triton_join import join

    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(rows, width, generator=generator).half() for width in (widths[0], widths[1], widths[1])]
    out, sums = join(*parts, torch.float16)
    assert torch.equal(out, torch.cat(parts, dim=-1))
    torch.testing.assert_close(sums, torch.cat(parts, dim=-1).float().sum(0).half())
    assert sums.dtype == torch.float16


@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_embedding_and_first_norm(learned, centred, before):
    """before: the head's gradient is there already."""
    from hasten.ops.residual import normalized
    from hasten.training.by_hand import Tied, embed

    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    tokens, positions = torch.tensor([[3, 1, 3, 0], [6, 3, 1, 1]]), torch.tensor([[0, 1, 2, 3]])
    leaves = [draw(7, 48), draw(48), *([draw(5, 48)] if learned else []), *([draw(48)] if centred else [])]
    head, d_stream, d_normed = draw(7, 48), draw(2, 4, 48), draw(2, 4, 48)
    found = []
    for by_hand in (False, True):
        own = [one.clone().requires_grad_() for one in leaves]
        table, weight = own[:2]
        position_table = own[2] if learned else None
        norm = Norm(weight, own[-1] if centred else None, 1e-5, 0.0 if centred else 1.0, centred)
        tied = Tied()
        tied.gradient = head.clone() if before else None
        if by_hand:
            outs = embed(tokens, positions, table, position_table, norm, torch.float32, tied)
        else:
            stream = table[tokens] + (position_table[positions] if learned else 0)
            outs = stream, normalized(stream, norm)
        gradients = list(torch.autograd.grad(outs, own, (d_stream, d_normed)))
        if before and not by_hand:
            gradients[0] += head
        found.append([*outs, *gradients])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", ["chunked", "chunked-triton"])
def test_a_loss_with_its_factor(kernel):
    from hasten.ops.loss import linear_cross_entropy
    from hasten.ops.loss.kernels import Head
    from hasten.training.by_hand import Tied, loss

    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(70, 32, generator=generator), torch.randn(64, 32, generator=generator)
    targets = torch.randint(60, (70,), generator=generator)
    targets[::7] = -100
    share = torch.tensor(0.125)
    own = [one.clone().requires_grad_() for one in (x, weight)]
    exact = linear_cross_entropy(own[0], own[1], targets, vocab_size=60, kernel="reference") * share
    expected = torch.autograd.grad(exact, own)
    for tied in (None, Tied()):
        own = [one.clone().requires_grad_() for one in (x, weight)]
        found = loss(*own, targets, Head(own[1].detach(), 60), kernel, share, tied)
        by_x, by_weight = torch.autograd.grad(found, own, allow_unused=True)
        assert (by_weight is None) == (tied is not None)
        by_weight = by_weight if tied is None else tied.gradient
        torch.testing.assert_close([found, by_x, by_weight], [exact, *expected], rtol=1e-5, atol=1e-6)

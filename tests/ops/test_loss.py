"""The kernels of the loss against the reference: values, gradients, padding, masks, memory."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.errors import ConfigError
from hasten.ops.loss import KERNELS, LossRequest, linear_cross_entropy, rows_of_a_chunk
from hasten.ops.loss.chunked import chunked, chunked_triton, kernel_of
from hasten.ops.loss.kernels import Head, alone, reference, torch_loss
from hasten.ops.loss.pieces import loss_and_gradient, triton_rows
from hasten.ops.picker import explain
from loss_cases import check_triton_loss, inputs, results
from triton_cases import needs_gpu, run_interpreted

HAS_TORCH = hasattr(torch.nn.functional, "linear_cross_entropy")
NEEDS_TORCH = pytest.mark.skipif(not HAS_TORCH, reason="this torch has no linear_cross_entropy")


@settings(max_examples=60)
@given(
    rows=st.integers(1, 40),
    vocab=st.integers(1, 50),
    padding=st.integers(0, 9),
    chunk_rows=st.integers(1, 48),
    softcap=st.sampled_from([None, 2.0]),
    with_bias=st.booleans(),
    masked=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 99),
)
def test_chunks_give_the_loss_and_the_gradients_of_the_definition(
    rows, vocab, padding, chunk_rows, softcap, with_bias, masked, seed
):
    leaves, targets = inputs(rows=rows, vocab=vocab, padding=padding, masked=masked, seed=seed)
    options = {"vocab_size": vocab, "softcap": softcap, "with_bias": with_bias}
    wanted = results(reference, leaves, targets, **options)
    found = results(chunked, leaves, targets, chunk_rows=chunk_rows, **options)
    for one, other in zip(found, wanted, strict=True):
        if other is not None:
            torch.testing.assert_close(one, other, atol=1e-11, rtol=1e-11)
            assert one.dtype == torch.float64


@pytest.mark.parametrize("run", [chunked, chunked_triton])
@pytest.mark.parametrize("compiling", [True, False])
@pytest.mark.parametrize("meet", [alone, lambda numbers, operation: numbers])
@pytest.mark.parametrize(("chunk_rows", "by_itself"), [(None, {chunked: 64, chunked_triton: 256}), (48, {})])
def test_chunks_have_the_rows_of_their_kernel_and_a_whole_head_is_one_operator_where_it_is_compiled(
    run, compiling, meet, chunk_rows, by_itself, monkeypatch
):
    """Nothing is computed: a million tokens of one feature, on the meta device."""
    found = []

    def chunks(x, targets, head, rows, make, needed):
        found.append(("chunks", rows))
        return x.new_zeros(()), None, None, None

    def operator(x, targets, head, *, chunk_rows, triton=True):
        found.append(("operator", chunk_rows, triton))

    monkeypatch.setattr("hasten.ops.loss.chunked.loss_and_gradients", chunks)
    monkeypatch.setattr("hasten.ops.loss.chunked.compiled_loss", operator)
    monkeypatch.setattr("hasten.ops.loss.chunked.kernel_of", lambda name: (None, triton_rows))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    x, targets = torch.empty(1000, 1, device="meta"), torch.empty(1000, dtype=torch.int64, device="meta")
    run(x, targets, Head(torch.empty(1 << 20, 1, device="meta"), 1 << 20, meet=meet), chunk_rows=chunk_rows)
    one_operator = compiling and meet is alone
    assert found == [
        ("operator", chunk_rows, run is chunked_triton) if one_operator else ("chunks", by_itself.get(run, chunk_rows))
    ]


def test_kernels_go_by_their_names():
    make, rows = kernel_of("chunked")
    assert make is loss_and_gradient
    assert rows(7, 16384) == rows_of_a_chunk(16384)


def test_compiled_it_gives_the_same():
    (x, weight, bias), targets = inputs(dtype=torch.float32)

    def run(x, weight, bias):
        return linear_cross_entropy(x, weight, targets, vocab_size=21, bias=bias, kernel="chunked")

    wanted = torch.autograd.grad(run(x, weight, bias), (x, weight, bias))
    torch._dynamo.reset()
    loss = torch.compile(run, backend="aot_eager", fullgraph=True)(x, weight, bias)
    torch.testing.assert_close(loss, run(x, weight, bias))
    for found, own in zip(torch.autograd.grad(loss, (x, weight, bias)), wanted, strict=True):
        torch.testing.assert_close(found, own)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_gradients_of_leaves_of_three_dtypes(frozen):
    (x, weight, bias), targets = inputs(dtype=torch.float32)
    leaves = [x.detach(), weight.detach().bfloat16(), bias.detach().double()]
    for place, leaf in enumerate(leaves):
        leaf.requires_grad_(place != frozen)
    chunked(leaves[0], targets, Head(leaves[1], 21, leaves[2]), chunk_rows=5).backward()
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    reference(exact[0], targets, Head(exact[1], 21, exact[2])).backward()
    for place, (leaf, own) in enumerate(zip(leaves, exact, strict=True)):
        if place == frozen:
            assert leaf.grad is None
        else:
            torch.testing.assert_close(leaf.grad, own.grad.to(leaf.dtype), rtol=1e-2, atol=1e-2)


@NEEDS_TORCH
@pytest.mark.parametrize("with_bias", [True, False])
def test_torch_gives_the_same(with_bias):
    leaves, targets = inputs(dtype=torch.float32)
    wanted = results(reference, leaves, targets, vocab_size=21, with_bias=with_bias)
    found = results(torch_loss, leaves, targets, vocab_size=21, with_bias=with_bias)
    for one, other in zip(found, wanted, strict=True):
        if other is not None:
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kernel", ["chunked", "reference", pytest.param("torch", marks=NEEDS_TORCH)])
def test_the_padding_gets_no_probability_and_no_gradient(kernel):
    (x, weight, bias), targets = inputs(dtype=torch.float32, padding=5, masked=0.0)
    weight.data[21:] = 100.0 * x.data.mean(0).sign()  # would win every row
    bias.data[21:] = 1e4
    loss = linear_cross_entropy(x, weight, targets, vocab_size=21, bias=bias, kernel=kernel)
    loss.backward()
    same = linear_cross_entropy(x, weight[:21], targets, bias=bias[:21], kernel="reference")
    torch.testing.assert_close(loss, same)
    assert torch.equal(weight.grad[21:], torch.zeros(5, 8))
    assert torch.equal(bias.grad[21:], torch.zeros(5))
    assert weight.grad[:21].abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_lower_precision_errs_at_most_twice_as_much_as_plain_pytorch(dtype):
    leaves, targets = inputs(rows=200, hidden=64, vocab=500, padding=12)
    # Without a bias, which plain PyTorch adds before it rounds: then the logits are the same bits.
    exact = results(reference, leaves, targets, vocab_size=500, with_bias=False)
    with torch.autocast("cpu", dtype=dtype):
        low = [leaf.detach().float() for leaf in leaves]
        plain = results(reference, low, targets, vocab_size=500, with_bias=False)
        ours = results(chunked_under_autocast, low, targets, vocab_size=500, with_bias=False)
    for one, other, true in zip(ours[:3], plain[:3], exact[:3], strict=True):
        assert one.dtype == torch.float32
        error, allowed = (one.double() - true).norm(), (other.double() - true).norm()
        assert error <= 2 * allowed, (error, allowed)


def chunked_under_autocast(x, targets, head):
    return linear_cross_entropy(x, head.weight, targets, vocab_size=head.vocab_size, kernel="chunked")


def test_leading_dimensions_and_no_gradient():
    (x, weight, _), targets = inputs(rows=12, dtype=torch.float32)
    whole = linear_cross_entropy(x.view(3, 4, 8), weight, targets.view(3, 4), vocab_size=21)
    with torch.no_grad():
        assert torch.equal(whole, linear_cross_entropy(x, weight, targets, vocab_size=21))
    assert whole.requires_grad
    frozen = linear_cross_entropy(x.detach(), weight, targets, vocab_size=21, kernel="chunked")
    frozen.backward()
    assert weight.grad is not None
    loss = linear_cross_entropy(x, weight, targets, vocab_size=21, kernel="chunked")
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        loss.backward()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"targets": torch.zeros(5, dtype=torch.int64)}, "leading shape"),
        ({"vocab_size": 25}, "has 24 rows"),
        ({"targets": torch.zeros(13, dtype=torch.int32)}, "targets int64"),
        ({"kernel": "fast"}, "no kernel 'fast'; known: chunked-triton, torch, chunked, reference"),
        ({"kernel": "torch", "softcap": 3.0}, "kernel 'torch' cannot be used here"),
    ],
)
def test_what_does_not_fit_is_refused(change, text):
    (x, weight, _), targets = inputs(dtype=torch.float32)
    with pytest.raises(ConfigError, match=text):
        linear_cross_entropy(x, weight, change.pop("targets", targets), **change)


def test_every_refusal_has_its_reason():
    choice = explain(KERNELS, LossRequest(device=torch.device("cpu"), dtype=torch.bfloat16))
    assert choice.kernel == "chunked"
    reasons = dict(choice.others)
    assert "float32" in reasons["torch"] or "2.13" in reasons["torch"]


def test_memory_grows_with_a_chunk_and_not_with_all_rows():
    # 2,048 x 16,384 logits are 128 MiB in float32, and the plain way holds three times that at its peak.
    code = textwrap.dedent("""
        import sys, torch
        from peak_memory import PeakMemory
        from hasten.ops.loss import linear_cross_entropy
        torch.set_num_threads(1)
        kernel = sys.argv[1]
        weight = torch.randn(16384, 32).requires_grad_()
        def run(rows):
            x = torch.randn(rows, 32).requires_grad_()
            loss = linear_cross_entropy(x, weight, torch.randint(16384, (rows,)), kernel=kernel)
            loss.backward()
            weight.grad = None
        run(64)
        for rows in (1024, 2048):
            with PeakMemory() as peak:
                run(rows)
            assert peak.exact
            print(peak.bytes)
    """)

    def peaks(kernel):
        command, folder = [sys.executable, "-c", code, kernel], Path(__file__).parents[1]  # of peak_memory.py
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
        return [int(line) for line in done.stdout.split()]

    plain, ours = peaks("reference"), peaks("chunked")
    logits = 2048 * 16384 * 4
    assert rows_of_a_chunk(16384) == 1024
    assert plain[1] > 2 * logits
    assert ours[1] < 1.3 * logits  # one chunk, its exponentials and its bits
    assert ours[1] - ours[0] < 0.2 * logits


@pytest.mark.parametrize("kernel", [None, "chunked", "reference"])
@pytest.mark.parametrize("target", [-5, 21, 23, 24, 1000])
def test_targets_that_are_no_tokens_are_refused_on_a_cpu(kernel, target):
    (x, weight, _), targets = inputs(vocab=21, padding=3)
    targets[4] = target
    with pytest.raises(ConfigError, match=f"tokens from 0 to 20, or -100 .*; found {target}$"):
        linear_cross_entropy(x, weight, targets, vocab_size=21, kernel=kernel)


def test_a_loss_over_two_devices_is_refused():
    (x, weight, _), targets = inputs()
    with pytest.raises(ConfigError, match="found cpu, meta and cpu"):
        linear_cross_entropy(x, weight.to("meta"), targets)


@pytest.mark.slow
def test_triton_in_its_interpreter():
    run_interpreted("ops/interpreted_loss.py")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_triton_on_a_gpu(dtype, with_bias):
    check_triton_loss("cuda", dtype, rows=300, hidden=128, vocab=9000, padding=24, with_bias=with_bias)

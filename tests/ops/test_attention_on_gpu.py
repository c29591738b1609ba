"""Every kernel of the attention operator on a GPU, by name: values and gradients against float64."""

import pytest
import torch

from attention_cases import explicit
from hasten.ops.attention import attention
from hasten.ops.attention.block_mask import BlockMask
from hasten.ops.attention.patterns import BigBird, Causal, Local
from triton_cases import needs_gpu

DEVICE = "cuda"
pytestmark = [pytest.mark.gpu, needs_gpu]
KERNELS = ("flash", "memory-efficient", "cudnn", "flash-triton", "sdpa", "chunked", "math", "reference")
PATTERNS = {"causal": Causal(block=64), "local": Local(block=64, radius=1), "bigbird": BigBird(block=64)}


def problem(*, heads=8, kv_heads=2, tokens=192, size=64, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, tokens, n, size) for n in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def results(run, tensors, device, dtype):
    """The output and the gradients of q, k and v, on the CPU in float64."""
    *leaves, upstream = (x.to(device, dtype).requires_grad_() for x in tensors)
    out = run(*leaves)
    found = [out, *torch.autograd.grad(out, leaves, upstream.detach())]
    return [x.detach().cpu().double() for x in found]


def check(tensors, *, kernel=None, block_mask=None, **options):
    """At most twice what explicit attention errs on the GPU in the same precision."""
    dtype, tokens = tensors[0].dtype, tensors[0].shape[1]
    same = options if block_mask is None else options | {"mask": block_mask.dense(tokens, tokens, torch.device("cpu"))}
    padding = options.get("key_padding_mask")
    if padding is not None:
        same = options | {"key_padding_mask": torch.arange(tokens) < padding[:, None]}
    exact = results(lambda *x: explicit(*x, **same), tensors, "cpu", torch.float64)
    plain = results(lambda *x: explicit(*x, **same), tensors, DEVICE, dtype)
    there = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    there |= {"kernel": kernel, "block_mask": block_mask}
    found = results(lambda *x: attention(*x, **there), tensors, DEVICE, dtype)
    for own, theirs, right in zip(found, plain, exact, strict=True):
        assert (own - right).square().mean().sqrt() <= 2 * (theirs - right).square().mean().sqrt()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("size", [64, 128])
def test_kernels_in_half_precision(kernel, dtype, size):
    check(problem(dtype=dtype, size=size), kernel=kernel)


PYTORCHS = pytest.mark.xfail(reason="on an H100 PyTorch's own kernel erred 2.5 times what plain PyTorch did, 1.3e-7")


@pytest.mark.parametrize(
    "kernel", [pytest.param("memory-efficient", marks=PYTORCHS), "sdpa", "chunked", "math", "reference"]
)
def test_kernels_in_float32(kernel):
    check(problem(dtype=torch.float32), kernel=kernel)


@pytest.mark.parametrize("kernel", [None, "flash-triton", "reference"])
@pytest.mark.parametrize("options", [{"window": 40}, {"softcap": 20.0}, {"scale": 0.3}, {"causal": False}])
def test_options(kernel, options):
    check(problem(), kernel=kernel, **options)


FLEX = "on an H200 the gradients of PyTorch's flex_attention erred 2.2 and 2.4 times what plain products did"


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [192, 256])
def test_patterns_go_through_flex(name, dtype, tokens, request):
    if (dtype, tokens) == (torch.float32, 256) and name != "local":
        request.applymarker(pytest.mark.xfail(reason=FLEX, raises=AssertionError))
    mask = BlockMask.of(PATTERNS[name], tokens)
    check(problem(dtype=dtype, tokens=tokens), kernel="flex", block_mask=mask)


def test_the_choice_with_documents_and_padding():
    tensors = problem(heads=4, kv_heads=4)
    check(tensors, cu_seqlens=torch.tensor([0, 100, 192, 384]))
    check(tensors, key_padding_mask=torch.tensor([192, 100]))


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 100}, {"softcap": 20.0}])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_the_choice_for_longer_calls(options, size):
    """On a Hopper GPU cuDNN, and ours where cuDNN needs a mask."""
    check(problem(tokens=640, size=size), **options)


def test_the_choice_for_a_continued_prompt():
    tensors = problem(tokens=600)
    tensors[0], tensors[3] = tensors[0][:, -300:].contiguous(), tensors[3][:, -300:].contiguous()
    exact = results(explicit, tensors, "cpu", torch.float64)
    plain = results(explicit, tensors, DEVICE, torch.bfloat16)
    found = results(attention, tensors, DEVICE, torch.bfloat16)
    for own, theirs, right in zip(found, plain, exact, strict=True):
        assert (own - right).square().mean().sqrt() <= 2 * (theirs - right).square().mean().sqrt()


@pytest.mark.parametrize("kernel", ["cudnn", "flash-triton"])
def test_in_a_cuda_graph(kernel):
    """Captured, forward and backward: the numbers of plain calls, also for inputs that came later."""
    q, k, v, upstream = (x.to(DEVICE).requires_grad_() for x in problem(heads=8, kv_heads=8, tokens=512))

    def step():
        out = attention(q, k, v, kernel=kernel)
        return out, *torch.autograd.grad(out, (q, k, v), upstream.detach())

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        q.copy_(torch.randn_like(q))
    graph.replay()
    for own, plain in zip(captured, step(), strict=True):
        torch.testing.assert_close(own, plain, rtol=0.02, atol=0.02)

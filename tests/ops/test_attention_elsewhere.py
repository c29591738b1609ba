"""The operator in other people's models: transformers' through its interface, nanoGPT's block, torch.compile."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hasten.errors import ConfigError
from hasten.ops.attention import KERNELS, attention, replace_in
from instruction_sets import NATIVE
from references import make_reference


def logits(model, tokens, **options):
    with torch.no_grad():
        return model(tokens, **options).logits


@pytest.mark.parametrize("case", ["llama", "gemma2", "gpt2", "qwen3", "gpt_oss"])
@pytest.mark.parametrize("kernel", [None, "chunked", "reference"])
def test_a_transformers_model_gives_the_same_logits_and_tokens(case, kernel):
    model = make_reference(case).eval()
    model.set_attn_implementation("eager")
    tokens = torch.randint(3, 101, (2, 37), generator=torch.Generator().manual_seed(0))
    padded = torch.ones_like(tokens)
    padded[0, :5] = 0
    wanted = logits(model, tokens)
    wanted_padded = logits(model, tokens, attention_mask=padded)
    continued = model.generate(tokens, max_new_tokens=12, do_sample=False)
    assert replace_in(model, kernel=kernel) is model
    torch.testing.assert_close(logits(model, tokens), wanted, rtol=1e-4, atol=1e-5)
    found = logits(model, tokens, attention_mask=padded)
    torch.testing.assert_close(found[padded.bool()], wanted_padded[padded.bool()], rtol=1e-4, atol=1e-5)
    assert torch.equal(model.generate(tokens, max_new_tokens=12, do_sample=False), continued)


@pytest.mark.parametrize("kernel", [kernel.name for kernel in KERNELS])
def test_a_transformers_model_takes_every_kernel_by_name(kernel):
    model = make_reference("llama").eval()
    assert replace_in(model, kernel=kernel) is model
    tokens = torch.arange(3, 20)[None]
    if kernel in ("flash", "sdpa") or (kernel == "native" and NATIVE):
        assert logits(model, tokens).shape[:2] == tokens.shape
    elif kernel in ("native", "triton", "memory-efficient", "cudnn"):
        with pytest.raises(ConfigError, match=f"kernel '{kernel}' cannot be used here"):
            logits(model, tokens)


def test_a_transformers_model_trains_to_the_same_gradients():
    model = make_reference("llama")
    tokens = torch.randint(3, 101, (2, 37), generator=torch.Generator().manual_seed(0))
    grads = []
    for _ in range(2):
        model.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
        replace_in(model, kernel="chunked")
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_static_cache_in_transformers():
    model = make_reference("llama").eval()
    tokens = torch.randint(3, 101, (1, 9), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
    wanted = model.generate(tokens, **options)
    assert torch.equal(replace_in(model).generate(tokens, **options), wanted)


def test_what_cannot_be_replaced_is_refused():
    with pytest.raises(ConfigError, match="found Linear"):
        replace_in(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="known: triton"):
        replace_in(make_reference("llama"), kernel="warp")


class Theirs(nn.Module):
    """Causal self-attention as nanoGPT writes it."""

    def __init__(self, width=48, heads=4):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.width = heads, width

    def forward(self, x):
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).split(self.width, dim=2)
        q, k, v = (t.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(batch, tokens, width))


class Ours(Theirs):
    """The same with the three lines of docs/attention.md."""

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in self.qkv(x).split(self.width, dim=2))
        y = attention(q, k, v)
        return self.out(y.flatten(-2))


def test_nanogpts_attention_in_three_lines():
    theirs, ours = Theirs(), Ours()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 33, 48)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kernel": "chunked"},
        {"kernel": "chunked", "alibi": True, "window": 9},
        {"kernel": "math"},
        {"softcap": 5.0},
    ],
)
def test_it_compiles_into_one_graph(options):
    def loss(q, k, v):
        return attention(q, k, v, **options).square().sum()

    torch._dynamo.reset()
    inputs = [torch.randn(1, 24, h, 8, requires_grad=True) for h in (4, 2, 2)]
    expected = torch.autograd.grad(loss(*inputs), inputs)
    found = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*inputs), inputs)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)

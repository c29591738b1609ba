"""hasten's attention in nn.MultiheadAttention, what is made of it, and F.multi_head_attention_forward."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hasten.errors import ConfigError
from hasten.ops.attention import multi_head_attention_forward, replace_in
from hasten.ops.picker import explained
from instruction_sets import NATIVE

LENGTHS = torch.tensor([9, 4, 7])
PADDING = torch.arange(9) >= LENGTHS[:, None]  # True for what is not there, as PyTorch has it
CAUSAL = nn.Transformer.generate_square_subsequent_mask(9)
GENERATOR = torch.Generator().manual_seed(0)
LATER = torch.triu(torch.ones(9, 9, dtype=torch.bool), 1)
RANDOM = (torch.rand(9, 9, generator=GENERATOR) < 0.3) & ~torch.eye(9, dtype=torch.bool)


def taken(choices):
    return [choice.kernel for choice in choices]


def compare(theirs, *tensors, kernel=None, **options):
    """Output and gradients of a module before and after; the kernels that were picked."""
    leaves = [x.clone().requires_grad_() for x in tensors]

    def run():
        out = theirs(*leaves, **options)
        out = out[0] if isinstance(out, tuple) else out
        return out, torch.autograd.grad(out.square().sum(), [*leaves, *theirs.parameters()], allow_unused=True)

    wanted, gradients = run()
    assert replace_in(theirs, kernel=kernel) is theirs
    with explained() as choices:
        found, own = run()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    for one, other in zip(own, gradients, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    return taken(choices)


@pytest.mark.parametrize(
    ("options", "kernels"),
    [
        ({}, ["native"]),
        ({"key_padding_mask": PADDING}, ["native"]),
        ({"key_padding_mask": PADDING, "attn_mask": LATER}, ["native"]),
        ({"attn_mask": CAUSAL, "is_causal": True}, ["native"]),
        ({"attn_mask": RANDOM}, ["flash"]),
        ({"attn_mask": RANDOM.expand(12, 9, 9), "key_padding_mask": PADDING}, ["flash"]),
        ({"attn_mask": torch.randn(9, 9, generator=GENERATOR)}, ["flash"]),
    ],
)
def test_self_attention_gives_the_same_values_and_gradients(options, kernels):
    module = nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(3, 9, 32, generator=torch.Generator().manual_seed(1))

    class Self(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = module

        def forward(self, x):
            return module(x, x, x, need_weights=False, **options)

    found = compare(Self(), x)
    assert not NATIVE or found == kernels


@pytest.mark.parametrize("batch_first", [True, False])
def test_other_sizes_of_keys_and_rows_without_a_batch(batch_first):
    module = nn.MultiheadAttention(24, 3, kdim=16, vdim=20, bias=False, batch_first=batch_first)
    q, k, v = torch.randn(2, 5, 24), torch.randn(2, 7, 16), torch.randn(2, 7, 20)
    shaped = (q, k, v) if batch_first else tuple(x.transpose(0, 1) for x in (q, k, v))
    compare(module, *shaped, need_weights=False)
    compare(nn.MultiheadAttention(24, 3), *torch.randn(3, 5, 24), need_weights=False)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_encoder_layers_are_not_gone_around(training, norm_first):
    layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).train(training)
    x = torch.randn(3, 9, 32)
    with torch.set_grad_enabled(training):
        there = ~PADDING[..., None]
        wanted = model(x, src_key_padding_mask=PADDING) * there
        replace_in(model)
        with explained() as choices:
            found = model(x, src_key_padding_mask=PADDING) * there
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert taken(choices) == (["native"] * 2 if NATIVE else taken(choices))
    assert len(choices) == 2
    reasons = dict(choices[0].others)
    assert reasons["flash-triton"]
    assert "block masks" in reasons["native-sparse"]


def test_a_decoder_layer_attends_to_itself_and_to_the_encoder():
    layer = nn.TransformerDecoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
    options = {"tgt_mask": CAUSAL, "tgt_is_causal": True, "memory_key_padding_mask": PADDING}
    found = compare(layer, torch.randn(3, 9, 32), torch.randn(3, 9, 32), **options)
    assert not NATIVE or found == ["native", "native"]


def test_what_pytorch_computes_and_what_is_refused():
    module = replace_in(nn.MultiheadAttention(32, 4, batch_first=True))
    x = torch.randn(3, 9, 32)
    plain = nn.MultiheadAttention(32, 4, batch_first=True)
    plain.load_state_dict(module.state_dict())
    with explained() as choices:
        out, weights = module(x, x, x)
    assert not choices
    torch.testing.assert_close((out, weights), plain(x, x, x))
    replace_in(module, kernel="chunked")
    with pytest.raises(ConfigError, match="'chunked' cannot be used here: the weights were asked for"):
        module(x, x, x)
    with pytest.raises(ConfigError, match=r"keys of its own \(bias_k\)"):
        replace_in(nn.MultiheadAttention(32, 4, add_bias_kv=True), kernel="chunked")(x, x, x, need_weights=False)
    with pytest.raises(ConfigError, match="'native' cannot be used here: it takes no explicit mask"):
        replace_in(module, kernel="native")(x, x, x, attn_mask=RANDOM, need_weights=False)
    module = replace_in(module, kernel=None)
    assert module(x, x, x, key_padding_mask=torch.ones(3, 9, dtype=torch.bool), need_weights=False)[0].isfinite().all()


def test_the_function_takes_the_arguments_of_pytorchs():
    module = nn.MultiheadAttention(32, 4)
    x = torch.randn(9, 3, 32)
    weights = (module.in_proj_weight, module.in_proj_bias, None, None, False, 0.0, module.out_proj.weight)
    options = {"training": False, "key_padding_mask": PADDING, "need_weights": False}
    arguments = (x, x, x, 32, 4, *weights, module.out_proj.bias)
    wanted, _ = F.multi_head_attention_forward(*arguments, **options)
    found, nothing = multi_head_attention_forward(*arguments, **options)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert nothing is None


def test_who_listens_inside_of_another_does_not_end_that_one():
    module, x = replace_in(nn.MultiheadAttention(32, 4)), torch.randn(9, 3, 32)
    with explained() as outer:
        with explained() as inner:
            pass
        module(x, x, x, need_weights=False)
    assert len(outer) == 1
    assert not inner


def test_dropout_of_a_module_drops():
    module = replace_in(nn.MultiheadAttention(32, 4, dropout=0.5, batch_first=True))
    x = torch.randn(3, 9, 32)
    one, two = (module(x, x, x, need_weights=False)[0] for _ in range(2))
    assert not torch.equal(one, two)
    module.eval()
    assert torch.equal(*(module(x, x, x, need_weights=False)[0] for _ in range(2)))

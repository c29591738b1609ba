"""Rotary frequencies equal those of transformers, and rotation keeps what it must."""

import math

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from hasten.model.config import RopeConfig
from hasten.model.families import read_config
from hasten.model.rope import RotaryTable, frequencies, rotate
from references import CASES

PUBLISHED = {
    "llama 2": ("llama", {"rope_theta": 10000.0}),
    "llama 3.1": (
        "llama",
        {
            "rope_theta": 500000.0,
            "max_position_embeddings": 131072,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "qwen 2.5 yarn": (
        "qwen2",
        {
            "rope_theta": 1e6,
            "max_position_embeddings": 32768,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        },
    ),
    "yarn without truncation": (
        "llama",
        {
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 2.5,
                "truncate": False,
                "beta_fast": 24.0,
                "beta_slow": 2.0,
                "mscale": 1.2,
                "mscale_all_dim": 0.7,
                "original_max_position_embeddings": 1024,
            },
        },
    ),
    "gemma 3": ("gemma3_text", {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "rope_local_base_freq": 1e4}),
    "phi 4 mini": (
        "phi3",
        {
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0 + i / 10 for i in range(24)],
                "long_factor": [1.0 + 2.0 * i for i in range(24)],
            },
        },
    ),
}
SIZES = {
    "vocab_size": 11,
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
}


def reference_rotary(model_type, values):
    """The rotary module of transformers for such a config."""
    name = next(name for name in CASES if name == model_type)
    config = getattr(transformers, CASES[name][0]).from_dict(values)
    with torch.device("meta"):
        module = getattr(transformers, CASES[name][1])(config)
    return type(module.model.rotary_emb)(config)


@pytest.mark.parametrize("name", list(PUBLISHED))
@pytest.mark.parametrize("length", [16, 5000])
def test_cos_and_sin_equal_transformers(name, length):
    model_type, changes = PUBLISHED[name]
    values = SIZES | {"model_type": model_type, "pad_token_id": 0} | changes
    config = read_config(values)
    theirs = reference_rotary(model_type, values)
    positions = torch.arange(length)[None]
    kinds = ("sliding_attention", "full_attention") if model_type == "gemma3_text" else (None,)
    assert len(config.ropes) == len(kinds)
    for rope, kind in zip(config.ropes, kinds, strict=True):
        cos, sin = RotaryTable(rope)(positions)
        extra = () if kind is None else (kind,)
        expected_cos, expected_sin = theirs(torch.zeros(1), positions, *extra)
        half = rope.dim // 2
        # float32 angles of a few thousand radians are known to about 3e-4
        assert (cos - expected_cos[..., :half]).abs().max() < 5e-4
        assert (sin - expected_sin[..., :half]).abs().max() < 5e-4


def test_longrope_switches_for_each_sequence_by_itself():
    rope = RopeConfig(
        theta=1e4, dim=4, scaling="longrope", original_positions=8, short_factor=(1.0, 1.0), long_factor=(2.0, 4.0)
    )
    table = RotaryTable(rope)
    long, short = torch.arange(9), torch.arange(9) % 8
    both_cos, _ = table(torch.stack([long, short]))
    assert torch.equal(both_cos[0], table(long[None])[0][0])
    assert torch.equal(both_cos[1], table(short[None])[0][0])
    assert not torch.equal(both_cos[0, :8], both_cos[1, :8])


@given(
    dim=st.sampled_from([2, 4, 16, 64]),
    extra=st.sampled_from([0, 2, 7]),
    shift=st.integers(0, 1000),
    seed=st.integers(0, 100),
)
def test_rotation_keeps_length_and_depends_on_distance_only(dim, extra, shift, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 5, 3, dim + extra, generator=generator, dtype=torch.float32)
    table = RotaryTable(RopeConfig(theta=10000.0, dim=dim))
    at, later = table(torch.arange(5)), table(torch.arange(5) + shift)
    turned = rotate(q, *at)
    assert torch.equal(turned[..., dim:], q[..., dim:])
    torch.testing.assert_close(turned.norm(dim=-1), q.norm(dim=-1), rtol=1e-5, atol=1e-5)
    here = torch.einsum("thd,shd->hts", turned, rotate(k, *at))
    there = torch.einsum("thd,shd->hts", rotate(q, *later), rotate(k, *later))
    torch.testing.assert_close(here, there, rtol=0, atol=2e-3)


def test_position_zero_changes_nothing_and_half_precision_stays():
    x = torch.randn(1, 1, 2, 8).bfloat16()
    turned = rotate(x, *RotaryTable(RopeConfig(theta=1e4, dim=8))(torch.zeros(1, 1)))
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, x)


def test_linear_and_default_frequencies_are_what_the_papers_say():
    plain = frequencies(RopeConfig(theta=100.0, dim=4))
    assert plain.tolist() == pytest.approx([1.0, 0.1])
    stretched = frequencies(RopeConfig(theta=100.0, dim=4, scaling="linear", factor=4.0))
    assert stretched.tolist() == pytest.approx([0.25, 0.025])


def test_llama3_keeps_short_wavelengths_and_stretches_long_ones():
    rope = RopeConfig(theta=500000.0, dim=128, scaling="llama3", factor=8.0, original_positions=8192)
    plain, found = frequencies(RopeConfig(theta=500000.0, dim=128)), frequencies(rope)
    wavelength = 2 * math.pi / plain
    assert torch.equal(found[wavelength < 8192 / 4], plain[wavelength < 8192 / 4])
    torch.testing.assert_close(found[wavelength > 8192], plain[wavelength > 8192] / 8)
    assert (found[1:] < found[:-1]).all()


def test_frequencies_stay_float32_whatever_the_model_is_cast_to():
    from references import tiny_llama

    model = tiny_llama()
    before = model.ropes[0].frequencies.clone()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        model.to(dtype)
        assert torch.equal(model.ropes[0].frequencies, before)


@pytest.mark.parametrize("made_on", ["meta", "cpu"])
def test_frequencies_are_there_after_a_time_on_the_meta_device(made_on):
    rope = RopeConfig(
        theta=1e4, dim=4, scaling="longrope", original_positions=8, short_factor=(1.0, 1.5), long_factor=(2.0, 4.0)
    )
    with torch.device(made_on):
        table = RotaryTable(rope)
    assert torch.equal(table.frequencies, frequencies(rope))
    table.to("meta").to_empty(device="cpu")
    assert torch.equal(table.frequencies, frequencies(rope))
    assert torch.equal(table.long_frequencies, frequencies(rope, long=True))

"""The noise of a draw at both ends of its range, and draws where no native kernel is."""

import math

import pytest
import torch

from hasten.ops import triton_support
from hasten.ops.draw import draw, draw_at_once, exponential_noise, largest, reference_draw
from hasten.ops.draw.operator import least_kept
from hasten.ops.draw.splitmix import FIRST, GOLDEN, SECOND


def unmixed(z: int) -> int:
    """The number that SplitMix64's finalizer turns into z."""
    for shift, factor in ((31, SECOND), (27, FIRST), (30, 1)):
        found = z
        for _ in range(64 // shift):
            found = z ^ (found >> shift)
        z = found * pow(factor, -1, 2**64) % 2**64
    return z


def seed_of(bits: int, *, step: int, token: int) -> int:
    """The seed with which a token's noise at a step is made of these 53 random bits."""
    key = (unmixed(bits << 11) - (token + 1) * GOLDEN) % 2**64
    seed = unmixed((unmixed(key) - step * GOLDEN) % 2**64)
    return seed - 2**64 if seed >= 2**63 else seed


@pytest.mark.parametrize("step", [0, 5])
@pytest.mark.parametrize("token", [0, 8])
@pytest.mark.parametrize(
    ("bits", "noise"),
    [
        (0, 2.0**-54),  # never 0
        (1, 2.0**-53),
        (2, 2.0**-52),
        (3, 3 * 2.0**-53),
        (1 << 52, math.log(2)),
        (2**53 - 1, 24 * math.log(2)),  # never infinite
    ],
)
def test_noise_is_precise_from_the_smallest_to_the_largest(bits, noise, step, token):
    seeds = torch.tensor([seed_of(bits, step=step, token=token)])
    found = exponential_noise(seeds, torch.tensor([step]), vocab_size=9)
    assert found[0, token].item() == pytest.approx(noise, rel=1e-6, abs=0)


@pytest.mark.parametrize("isa", [None, "none"])
def test_noise_of_either_end_decides_a_draw(isa, monkeypatch):
    if isa is not None:
        monkeypatch.setenv("HASTEN_ISA", isa)
    seeds = torch.tensor([seed_of(bits, step=0, token=3) for bits in (0, 1, 2**53 - 1)])
    steps, scores = torch.zeros(3, dtype=torch.int64), torch.zeros(3, 9)
    found = draw(scores, seeds, steps)
    assert found[:2].tolist() == [3, 3]
    assert found[2] != 3
    assert torch.equal(found, reference_draw(scores, seeds, steps))


def test_tensors_on_a_cpu_reach_no_triton_kernel(monkeypatch):
    monkeypatch.setenv("HASTEN_ISA", "none")
    monkeypatch.setattr(triton_support, "refusal", lambda device: None)
    scores, numbers = torch.randn(4, 30, generator=torch.Generator().manual_seed(0)), torch.arange(4)
    assert torch.equal(draw(scores, numbers, numbers), reference_draw(scores, numbers, numbers))
    off = {"temperature": None, "top_k": None, "top_p": None, "log_min_p": None, "greedy": None, "drawn": True}
    assert draw_at_once(scores, numbers, numbers, **off) is None
    assert least_kept(scores, torch.full((4, 1), 3), None) is None


def test_the_largest_of_each_row_descend_without_the_native_library(monkeypatch):
    monkeypatch.setenv("HASTEN_ISA", "none")
    scores = torch.tensor([[1.0, 3.0, 2.0], [6.0, 4.0, 5.0], [-math.inf, 0.0, -math.inf]])
    assert largest(scores, 2).tolist() == [[3.0, 2.0], [6.0, 5.0], [0.0, -math.inf]]

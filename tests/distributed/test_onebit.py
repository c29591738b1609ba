"""Compressed means, 1-bit Adam and LAMB."""

import math
from pathlib import Path

import pytest
import torch

import ranks
from hasten.distributed.compressed import pack
from hasten.distributed.placement import Replicated
from hasten.training import onebit
from hasten.training.onebit import OneBitAdam, OneBitLamb
from hasten.training.optimizers import make_optimizer
from hasten.training.recipe import Optimizer

CASES = (Path(__file__).parent / "onebit_cases.py").read_text()


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])  # slow: four processes on two cores
def test_ranks_agree_and_learn(size):
    for status, _, errors in ranks.run(CASES, ranks=size):
        assert status == 0, errors


def test_bytes_on_the_way():
    n = 4096
    packed = pack(torch.randn(2, n), torch.ones(2, n, dtype=torch.bool))
    assert packed.dtype == torch.uint8
    assert packed.shape == (2, n / 8 + 4)


@pytest.fixture
def uncompressed(monkeypatch):
    """The mean of one rank that loses nothing."""
    monkeypatch.setattr(onebit.OneBitOptimizer, "mean", staticmethod(lambda x, kept: x * kept), raising=False)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_lamb_after_the_freeze_is_the_papers(uncompressed, weight_decay):
    generator = torch.Generator().manual_seed(0)
    x = torch.nn.Parameter(torch.randn(6, 5, generator=generator))
    y = torch.nn.Parameter(torch.randn(7, generator=generator) * 0.1)
    z = torch.nn.Parameter(torch.tensor([0.5]))  # whose step is shorter than 1, and against the decay now and then
    rate, eps, b1, b2 = 0.05, 1e-3, 0.9, 0.999
    optimizer = OneBitLamb([x, y, z], lr=rate, betas=(b1, b2), eps=eps, weight_decay=weight_decay)
    optimizer.freeze_after = 5
    wanted = {p: {"m": 0.0, "v": 0.0, "x": p.detach().clone().double(), "c": None, "f": 1.0} for p in (x, y, z)}
    for step in range(1, 12):
        for p, own in wanted.items():
            p.grad = torch.randn(p.shape, generator=generator) * (1 + 0.2 * step)
            g, before = p.grad.double(), own["m"]
            own["m"] = b1 * own["m"] + (1 - b1) * g
            m_hat = own["m"] / (1 - b1**step)
            if step <= 5:
                own["v"] = b2 * own["v"] + (1 - b2) * g**2
                u = m_hat / ((own["v"] / (1 - b2**step)).sqrt() + eps) + weight_decay * own["x"]
                c = (own["x"].norm() / u.norm()).clamp(0.01, 10)
                own["c"] = c if own["c"] is None else 0.9 * own["c"] + 0.1 * c
                own["x"] = own["x"] - rate * c * u
                if step == 5:
                    own["v"] = own["v"].clamp(min=own["v"].mean() / 10)
                own["fresh"] = own["v"]
                continue
            implied = (own["m"] - b1 * before) / (1 - b1)
            own["fresh"] = b2 * own["fresh"] + (1 - b2) * implied**2
            f = ((own["v"].sqrt() + eps) / (own["fresh"].sqrt() + eps)).max()
            direction = m_hat / ((own["v"] / (1 - b2**5)).sqrt() + eps)
            u = direction + weight_decay * own["x"]
            if weight_decay:
                share = min(1.0, float(direction.norm() / u.norm()))
                f = f * share + 1 - share
            own["f"] = float(f.clamp(0.5, 4.0).clamp(0.9 * own["f"], 1.1 * own["f"]))
            own["x"] = own["x"] - rate * own["c"] * own["f"] * u
        optimizer.step()
        for p, own in wanted.items():
            torch.testing.assert_close(p.detach().double(), own["x"], rtol=2e-5, atol=2e-5)
    assert optimizer.frozen


@pytest.mark.parametrize("kind", [OneBitAdam, OneBitLamb])
def test_a_rare_token_moves_no_further_than_a_tenth_of_the_mean_variance_allows(uncompressed, kind):
    """Rows of an embedding: seen in each step of the warm-up, seen once and faintly, never seen."""
    x = torch.nn.Parameter(torch.ones(3, 2))
    rate, b1, b2 = 0.01, 0.9, 0.99
    optimizer = kind([x], lr=rate, betas=(b1, b2), eps=1e-12, weight_decay=0.0)
    optimizer.freeze_after = 10
    for step in range(10):
        x.grad = torch.tensor([[1.0], [1e-4 if step == 0 else 0.0], [0.0]]).expand(3, 2)
        optimizer.step()
    seen, rare, never = optimizer.state[x]["exp_avg_sq"][:, 0].tolist()
    assert seen == pytest.approx(1 - b2**10)
    assert rare == pytest.approx(0.1 * seen / 3, rel=1e-4)
    assert never == 0
    if kind is OneBitAdam:
        before = x.detach().clone()
        x.grad = torch.tensor([[0.0], [1.0], [0.0]]).expand(3, 2)
        optimizer.step()
        moved = (before - x.detach())[:, 0]
        assert 0 < moved[1] <= 1.1 * rate * (1 - b1) / (1 - b1**11) * math.sqrt(30)
        assert moved[2] == 0


def test_a_step_that_overflowed_in_float16_is_skipped_after_the_freeze_too(uncompressed):
    x = torch.nn.Parameter(torch.ones(4))
    placement = Replicated.__new__(Replicated)
    placement.optimizer_params, placement.one_bit_mean = {"x": x}, lambda x, kept: x * kept
    placement.parameters, placement.experts = {"x": x}, None
    optimizer = make_optimizer(placement, Optimizer(kind="onebit-adam", beta2=0.999, freeze_after=2))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for gradient in (1.0, 2.0, 1.0, math.inf, 1.0):
        x.grad, before = scaler.scale(torch.full((4,), gradient)), x.detach().clone()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(x, before) == math.isinf(gradient)
        assert x.isfinite().all()
    assert optimizer.frozen


def test_the_variance_ends_the_warm_up_when_it_is_steady(uncompressed):
    def frozen_at(gradient):
        x = torch.nn.Parameter(torch.zeros(3))
        optimizer = OneBitAdam([x], lr=1e-4, betas=(0.9, 0.99))  # looked at every 100 steps
        for step in range(1, 1500):
            x.grad = torch.full((3,), gradient(step))
            optimizer.step()
            if optimizer.frozen:
                return step
        return 0

    assert frozen_at(lambda step: 1.0) == 200, "few gradients are no change"
    assert frozen_at(lambda step: 1e-4) == 200, "however small they are"
    falling = frozen_at(lambda step: 1.0 + 10.0 * max(0.0, 1 - step / 350))
    assert falling % 100 == 0
    assert falling >= 500, "not while the variance falls"


def test_the_variance_is_not_steady_while_it_rises(uncompressed):
    x = torch.nn.Parameter(torch.zeros(3))
    optimizer = OneBitAdam([x], lr=1e-4, betas=(0.9, 0.9))  # looked at every 10 steps
    for step in range(1, 101):
        x.grad = torch.full((3,), 1.0 + min(step, 40) / 10)
        optimizer.step()
        assert not optimizer.frozen or step >= 50
    assert optimizer.frozen


def test_adam_after_the_freeze_is_the_papers(uncompressed):
    generator = torch.Generator().manual_seed(0)
    x = torch.nn.Parameter(torch.randn(8, generator=generator))
    rate, eps, decay, b1, b2 = 0.05, 1e-2, 0.1, 0.9, 0.99
    optimizer = OneBitAdam([x], lr=rate, betas=(b1, b2), eps=eps, weight_decay=decay)
    optimizer.freeze_after = 3
    m, v, wanted = 0.0, 0.0, x.detach().clone().double()
    for step in range(1, 8):
        x.grad = None if step == 6 else torch.randn(8, generator=generator) * step  # none counts as zero
        g = torch.zeros(8).double() if x.grad is None else x.grad.double()
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2 if step <= 3 else v
        size = (v / (1 - b2 ** min(step, 3))).sqrt() + eps
        wanted = wanted * (1 - rate * decay) - rate * (m / (1 - b1**step)) / size
        if step == 3:
            v = v.clamp(min=v.mean() / 10)
        optimizer.step()
        torch.testing.assert_close(x.detach().double(), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", [OneBitAdam, OneBitLamb])
def test_momenta_are_sent_in_units_of_their_steps(kind):
    """LAMB's tensors in one size too: the mean of theirs at the freeze. What never had a gradient is not sent."""
    sent = []
    x, y, never, late = (torch.nn.Parameter(torch.ones(n)) for n in (4, 3, 2, 2))
    eps, b1 = 1e-3, 0.8
    optimizer = kind([x, y, never, late], lr=0.01, betas=(b1, 0.9), eps=eps, weight_decay=0.0)
    optimizer.freeze_after = 3
    optimizer.mean = lambda values, kept: sent.append((values, kept)) or values * kept
    generator = torch.Generator().manual_seed(0)

    def take_a_step():
        never.grad = torch.zeros(2)
        for p, size in ((x, 1.0), (y, 1e-3)):
            p.grad = torch.randn(p.shape, generator=generator) * size
        momenta = [b1 * optimizer.state[p]["exp_avg"] + (1 - b1) * p.grad for p in (x, y) if optimizer.state[p]]
        optimizer.step()
        return momenta

    for _ in range(3):
        take_a_step()
    assert not sent
    units = [optimizer.state[p]["exp_avg_sq"].sqrt() + eps for p in (x, y)]
    sizes = [(optimizer.state[p]["exp_avg"] / u).square().mean().sqrt() for p, u in zip((x, y), units, strict=True)]
    factors = [1.0, 1.0] if kind is OneBitAdam else [sum(sizes) / 3 / size for size in sizes]  # of three; one is zero
    for _ in range(2):
        late.grad = torch.ones(2)
        momenta = take_a_step()
        values, kept = sent.pop()
        parts = [m / u * factor for m, u, factor in zip(momenta, units, factors, strict=True)]
        torch.testing.assert_close(values, torch.cat([*parts, torch.zeros(2)]))
        assert kept.tolist() == [True] * 7 + [False] * 2
        for p, momentum in zip((x, y), momenta, strict=True):
            torch.testing.assert_close(optimizer.state[p]["exp_avg"], momentum)
    assert torch.equal(never, torch.ones(2))
    assert torch.equal(late, torch.ones(2)), "a parameter without gradients in the warm-up never moves"


@pytest.mark.parametrize(("gradient", "change", "bound"), [(100.0, 0.9, 0.5), (0.0, 1.1, 4.0)])
def test_lambs_correction_changes_by_a_tenth_a_step_up_to_its_bounds(uncompressed, gradient, change, bound):
    x = torch.nn.Parameter(torch.ones(3))
    optimizer = OneBitLamb([x], lr=1e-4, betas=(0.0, 0.5), weight_decay=0.0)
    optimizer.freeze_after = 4
    factors = []
    for step in range(24):
        x.grad = torch.full((3,), 1.0 if step < 4 else gradient)
        x.grad[2] = 0.0  # an element that never moves has no say
        optimizer.step()
        factors.append(float(optimizer.state[x].get("factor", 1.0)))
    limit = min if change > 1 else max
    assert factors[3:] == pytest.approx([limit(change**n, bound) for n in range(21)], rel=1e-5)

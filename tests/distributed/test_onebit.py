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
    rate, eps, b1, b2 = 0.05, 1e-6, 0.9, 0.999
    optimizer = OneBitLamb([x, y], lr=rate, betas=(b1, b2), eps=eps, weight_decay=weight_decay)
    optimizer.freeze_after = 5
    wanted = {p: {"m": 0.0, "v": 0.0, "x": p.detach().clone().double(), "c": None, "f": 1.0} for p in (x, y)}
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
    falling = frozen_at(lambda step: 1.0 + 10.0 * max(0.0, 1 - step / 350))
    assert falling % 100 == 0
    assert falling >= 500, "not while the variance falls"

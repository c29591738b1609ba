"""Activation checkpointing: the same gradients, less kept, and what is computed twice."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

from hasten.data import Batch
from hasten.errors import ConfigError
from hasten.model.initialize import initialize
from hasten.training import activations
from hasten.training.activations import apply_checkpointing
from hasten.training.build import apply_compile, shape_config
from hasten.training.optimizers import adamw
from hasten.training.precision import Precision
from hasten.training.recipe import Optimizer, Shape
from hasten.training.step import TrainStep

KINDS = ("none", "selective", "full", "offload")
CONFIG = shape_config(Shape(layers=4, hidden_size=64, heads=2, feed_forward=128), vocab_size=50, positions=64)
TOKENS = torch.randint(50, (4, 64), generator=torch.Generator().manual_seed(0))
DATA = Batch(inputs=TOKENS, targets=TOKENS, documents=None)


def step_of(kind, *, attention=None, precision="float32", dropout=0.0, compiled=False):
    from dataclasses import replace

    model = initialize(replace(CONFIG, dropout=dropout), seed=1)
    model.bind(attention=attention)
    if kind != "none":
        apply_checkpointing(model, kind)
    if compiled:
        apply_compile(model)
    return TrainStep(model, adamw(model, Optimizer()), Precision(precision, "cpu"))


def gradients(step):
    torch.manual_seed(3)  # dropout
    step.model.train()
    step.loss(DATA).backward()
    return {name: p.grad.clone() for name, p in step.model.named_parameters()}


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("attention", ["reference", "sdpa"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_gradients_are_equal(kind, attention, dropout):
    wanted = gradients(step_of("none", attention=attention, dropout=dropout))
    found = gradients(step_of(kind, attention=attention, dropout=dropout))
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, atol=0, rtol=0)


@pytest.mark.slow  # compiles
@pytest.mark.parametrize("kind", KINDS[1:])
def test_gradients_are_equal_in_bfloat16_and_compiled(kind):
    wanted = gradients(step_of("none", precision="bfloat16"))
    found = gradients(step_of(kind, precision="bfloat16"))
    assert all(torch.equal(found[name], gradient) for name, gradient in wanted.items())
    wanted = gradients(step_of("none"))
    found = gradients(step_of(kind, compiled=True))
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-4, rtol=1e-4)


def kept_bytes(step):
    """Bytes of the tensors that the forward pass keeps for the backward pass, weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in step.model.parameters()}
    found = {}
    seen_by = []

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
            seen_by.append(tensor)  # kept alive, so that no address is used twice
        return tensor

    step.model.train()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        step.loss(DATA)
    return sum(found.values())


def test_less_is_kept_the_more_is_computed_again():
    # What a selective checkpoint keeps lies in its own cache, not in the graph: measured in memory, see below.
    whole, full = (kept_bytes(step_of(kind, attention="reference")) for kind in ("none", "full"))
    tokens = 4 * 64
    assert full < 0.35 * whole
    assert full > 4 * tokens * 64 * 4  # the four inputs
    assert whole - full > 4 * 4 * 2 * 64 * 64 * 4  # among others the score matrices


def test_what_stays_between_the_blocks_is_on_the_host(monkeypatch):
    """Without a GPU: what would lie there is let go of once it is copied, and each block's input is copied once."""
    given, copies = [], []

    def on_host(tensor, own=activations.on_host):
        given.append(StorageWeakRef(tensor.untyped_storage()))
        copies.append(own(tensor))
        return copies[-1]

    monkeypatch.setattr(activations, "on_host", on_host)
    for compiled in (False, True):
        step = step_of("offload", compiled=compiled)
        step.model.train()
        loss = step.loss(DATA)
        assert [tuple(copy.shape) for copy in copies] == [(4, 64, 64)] * 4
        assert all(storage.expired() for storage in given)
        loss.backward()
        given.clear()
        copies.clear()


def flops(kind):
    step = step_of(kind, attention="reference")
    with FlopCounterMode(display=False) as counter:
        step.run([DATA])
    return counter.get_total_flops()


def test_selective_repeats_no_matrix_product_of_the_weights_and_full_repeats_the_forward():
    none, selective, full = map(flops, KINDS[:3])
    scores = 4 * 2 * (2 * 4 * 2 * 64 * 64 * 32)  # layers x two products of B x H x T x T x D
    tokens = 4 * 64
    forward = 4 * 2 * tokens * (4 * 64 * 64 + 3 * 64 * 128)
    assert none < selective <= none + scores
    assert full > selective
    assert full - none == pytest.approx(forward + scores, rel=0.2)  # the last product is not needed again


def test_evaluation_is_the_same_and_an_unknown_kind_is_refused():
    with torch.no_grad():
        losses = {float(step_of(kind).loss(DATA)) for kind in KINDS}
    assert len(losses) == 1
    with pytest.raises(ConfigError, match="choose one of none, selective, full, offload"):
        apply_checkpointing(initialize(CONFIG, seed=0), "some")

import torch

from hasten.model.initialize import initialize
from hasten.training.build import shape_config
from hasten.training.optimizers import adamw, parameter_groups, set_learning_rate
from hasten.training.recipe import Optimizer, Shape


def model(family):
    shape = Shape(family=family, layers=2, hidden_size=32, heads=2, feed_forward=64)
    return initialize(shape_config(shape, vocab_size=50, positions=16), seed=0)


def test_matrices_decay_and_norms_and_biases_do_not():
    for family in ("llama", "gpt2"):
        net = model(family)
        decayed, kept = parameter_groups(net.parameters(), weight_decay=0.1)
        names = {id(p): name for name, p in net.named_parameters()}
        assert decayed["weight_decay"] == 0.1
        assert kept["weight_decay"] == 0.0
        assert all("norm" in names[id(p)] or names[id(p)].endswith("bias") for p in kept["params"])
        assert not any("norm" in names[id(p)] or names[id(p)].endswith("bias") for p in decayed["params"])
        assert len(decayed["params"]) + len(kept["params"]) == len(names)


def test_a_parameter_without_gradient_only_decays_where_it_should():
    net = model("gpt2")
    optimizer = adamw(net, Optimizer(learning_rate=0.1, weight_decay=0.5))
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in net.named_parameters():
        expected = before[name] * (1 - 0.1 * 0.5) if parameter.dim() >= 2 else before[name]
        torch.testing.assert_close(parameter.detach(), expected)


def test_the_rate_of_every_group_is_set():
    optimizer = adamw(model("llama"), Optimizer())
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]

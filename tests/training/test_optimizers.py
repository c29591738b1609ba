import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from hasten.data import Batch
from hasten.distributed.placement import Placement
from hasten.errors import ConfigError
from hasten.model.initialize import initialize
from hasten.training import muon, optimizers
from hasten.training.build import shape_config
from hasten.training.lamb import Lamb
from hasten.training.muon import Muon
from hasten.training.onebit import OneBitAdam, OneBitLamb
from hasten.training.optimizers import Rule, adamw, make_optimizer, parameter_groups, parse_rule
from hasten.training.precision import Precision
from hasten.training.recipe import Optimizer, Recipe, Shape
from hasten.training.session import train
from hasten.training.step import TrainStep, set_learning_rate


def model(family="llama"):
    shape = Shape(family=family, layers=2, hidden_size=32, heads=2, feed_forward=64)
    return initialize(shape_config(shape, vocab_size=50, positions=16), seed=0)


def test_matrices_decay_and_norms_and_biases_do_not():
    for family in ("llama", "gpt2"):
        net = model(family)
        decayed, kept = parameter_groups(net.named_parameters(), weight_decay=0.1)
        names = {id(p): name for name, p in net.named_parameters()}
        assert decayed["weight_decay"] == 0.1
        assert kept["weight_decay"] == 0.0
        assert all("norm" in names[id(p)] or names[id(p)].endswith("bias") for p in kept["params"])
        assert not any("norm" in names[id(p)] or names[id(p)].endswith("bias") for p in decayed["params"])
        assert len(decayed["params"]) + len(kept["params"]) == len(names)


def test_a_rule_may_match_what_only_another_rank_has():
    net, rules = model(), [parse_rule("blocks.7.*:rate=0.1")]
    with pytest.raises(ConfigError, match=r"no parameter's name matches 'blocks.7.*'"):
        parameter_groups(net.named_parameters(), weight_decay=0.1, rules=rules)
    groups = parameter_groups(net.named_parameters(), weight_decay=0.1, rules=rules, names=["blocks.7.mlp.up.weight"])
    assert {group["rate_factor"] for group in groups} == {1.0}


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


@pytest.mark.parametrize("kind", ["adamw", "lamb", "muon"])
def test_the_rate_of_every_group_is_set_times_its_own_factor(kind):
    rules = ("embedding.*:rate=0.5", "blocks.1.*:rate=2,decay=0")
    optimizer = make_optimizer(net := model(), Optimizer(kind=kind, groups=rules))
    set_learning_rate(optimizer, 0.25)
    rates = {id(p): (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    assert len(rates) == len(list(net.parameters()))
    assert rates[id(net.embedding.weight)] == (0.125, 0.1)
    assert rates[id(net.blocks[1].mlp.up.weight)] == (0.5, 0.0)
    assert rates[id(net.blocks[0].mlp.up.weight)] == (0.25, 0.1)
    assert rates[id(net.norm.weight)] == (0.25, 0.0)


def test_rules_are_read_and_what_is_none_is_refused():
    assert parse_rule("blocks.*.norm*:rate=0.1,decay=0") == Rule("blocks.*.norm*", rate=0.1, decay=0.0)
    assert parse_rule("a:decay=0.5") == Rule("a", decay=0.5)
    for wrong in ("a", "a:", ":rate=1", "a:speed=1", "a:rate=x", "a:rate=-1", "a:rate=1,rate=2", "a:rate=inf"):
        with pytest.raises(ConfigError, match=r"write PATTERN:rate=0\.1"):
            parse_rule(wrong)
    with pytest.raises(ConfigError, match=r"no parameter's name matches 'blocks.9\.\*'; names are embedding.weight"):
        make_optimizer(model(), Optimizer(groups=("blocks.9.*:rate=2",)))
    with pytest.raises(ConfigError, match="choose one of adamw, lamb, muon"):
        make_optimizer(model(), Optimizer(kind="sgd"))
    recipe = Recipe(name="x", optimizer=Optimizer(groups=("a:rate=1",)))
    assert Recipe.from_json({"name": "x", "optimizer": {"groups": ["a:rate=1"]}}) == recipe


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"fused": False}])
def test_fused_is_one_kernel_and_otherwise_one_tensor_after_the_other(options):
    found = make_optimizer(model(), Optimizer(), **options).defaults
    assert (found["fused"], found["foreach"]) == ((False, False) if options == {"fused": False} else (True, None))


@pytest.mark.parametrize("kind", ["onebit-adam", "onebit-lamb"])
def test_one_bit_is_for_processes_that_all_have_the_whole_model(kind, monkeypatch):
    with pytest.raises(ConfigError, match="several processes that all have the whole model"):
        make_optimizer(model(), Optimizer(kind=kind))

    class Whole(Placement):
        one_bit_mean = staticmethod(lambda x, kept: x)

    monkeypatch.setattr(optimizers, "Replicated", Whole)
    placement = Whole(model())
    made = make_optimizer(placement, Optimizer(kind=kind, freeze_after=7), fused=False)
    assert (made.freeze_after, made.mean, placement.averages()) == (7, Whole.one_bit_mean, True)
    if kind == "onebit-adam":
        assert made.defaults["foreach"] is False
        assert not made._step_supports_amp_scaling
    else:
        assert made.foreach is False


@settings(max_examples=40)
@given(
    seed=st.integers(0, 100),
    decay=st.sampled_from([0.0, 0.1]),
    steps=st.integers(1, 6),
    rate=st.sampled_from([1e-3, 0.1]),
    missing=st.booleans(),
)
def test_lamb_in_lists_is_lamb_tensor_by_tensor(seed, decay, steps, rate, missing):
    generator = torch.Generator().manual_seed(seed)
    start = [torch.randn(size, generator=generator, dtype=torch.float64) for size in ((3, 4), (5,), (2, 2, 2))]
    start.append(torch.zeros(3, dtype=torch.float64))  # its norm is zero: c is 1
    both = []
    for foreach in (False, True):
        weights = [torch.nn.Parameter(value.clone()) for value in start]
        both.append((weights, Lamb(weights, lr=rate, weight_decay=decay, foreach=foreach)))
    for step in range(steps):
        for place in range(len(start)):
            gradient = torch.randn(start[place].shape, generator=generator, dtype=torch.float64)
            for weights, _ in both:  # a dropped block has no gradient, and counts its own steps
                weights[place].grad = None if missing and place == 1 and step % 2 else gradient.clone()
        for _, optimizer in both:
            optimizer.step()
    for one, other in zip(both[0][0], both[1][0], strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-10)


def test_lamb_is_the_papers_formula():
    weight = torch.nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))
    optimizer = Lamb([weight], lr=0.1, betas=(0.9, 0.99), eps=0.0, weight_decay=0.5, bounds=(0.0, 100.0))
    weight.grad = torch.tensor([0.3, -0.2], dtype=torch.float64)
    optimizer.step()
    u = torch.tensor([1.0 + 1.5, -1.0 + 2.0], dtype=torch.float64)  # the first step of Adam is the gradient's sign
    expected = torch.tensor([3.0, 4.0], dtype=torch.float64) - 0.1 * (5 / u.norm()) * u
    torch.testing.assert_close(weight.detach(), expected)
    optimizer.param_groups[0]["bounds"] = (0.01, 0.5)
    before = weight.detach().clone()
    optimizer.step()
    assert (weight - before).norm() <= 0.1 * 0.5 * 4  # ‖u‖ is below 4 here


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize(("size", "c"), [(1e6, 10.0), (1e-6, 0.01)])
def test_lambs_length_is_bounded(size, c, foreach):
    weight = torch.nn.Parameter(torch.full((4,), size, dtype=torch.float64))
    optimizer = Lamb([weight], lr=0.1, eps=0.0, foreach=foreach)
    weight.grad = torch.ones(4, dtype=torch.float64)
    optimizer.step()
    torch.testing.assert_close(size - weight.detach(), torch.full((4,), 0.1 * c, dtype=torch.float64))
    usual = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0, "bounds": (0.01, 10.0)}
    assert Lamb([weight], lr=0.1).defaults == usual


@pytest.mark.parametrize("foreach", [True, False])
def test_lambs_length_is_one_where_a_norm_is_zero(foreach):
    found = []

    class Recorded(Lamb):
        def _lengths(self, parameters, lengths):
            found.extend(lengths.tolist())

    weights = [torch.nn.Parameter(torch.full((2,), value)) for value in (0.0, 1.0, 1.0)]
    for weight, gradient in zip(weights, (1.0, 0.0, 1.0), strict=True):
        weight.grad = torch.full((2,), gradient)
    Recorded(weights, lr=0.1, eps=1.0, bounds=(0.0, 100.0), foreach=foreach).step()
    assert found == pytest.approx([1.0, 1.0, 2.0])


def test_muon_takes_the_blocks_matrices_and_adamw_the_rest():
    net = model("gpt2")
    optimizer = make_optimizer(net, Optimizer(kind="muon"))
    first, second = optimizer.members
    assert isinstance(first, torch.optim.Muon)
    names = {id(p): name for name, p in net.named_parameters()}
    for name in (names[id(p)] for group in first.param_groups for p in group["params"]):
        assert name.startswith("blocks.")
        assert name.endswith("weight")
        assert "norm" not in name
    rest = {names[id(p)] for group in second.param_groups for p in group["params"]}
    assert {"embedding.weight", "positions.weight", "norm.weight", "blocks.0.mlp.up.bias"} <= rest


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)])
def test_muon_is_pytorchs_within_its_rounding(shape, monkeypatch):
    monkeypatch.setattr("hasten.training.muon.BATCH_ELEMENTS", 2 * shape[0] * shape[1])  # three matrices: two batches
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for _ in range(3)]
    own, theirs = ([torch.nn.Parameter(weight.clone()) for weight in start] for _ in range(2))
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    optimizers = (Muon(own, **options), torch.optim.Muon(theirs, adjust_lr_fn="match_rms_adamw", **options))
    for _ in range(3):
        for one, other in zip(own, theirs, strict=True):
            one.grad = torch.randn(shape, generator=generator)
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for one, other, before in zip(own, theirs, start, strict=True):
        moved = (other - before).norm()
        assert (one - other).norm() < 0.03 * moved  # theirs iterates in bfloat16


def test_muon_multiplies_in_float32_on_a_cpu():
    dtypes = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            dtypes.update(value.dtype for value in (args[0], out) if isinstance(value, torch.Tensor))
            return out

    weight = torch.nn.Parameter(torch.ones(4, 6))
    weight.grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    with Watch():
        Muon([weight], lr=0.1).step()
    assert dtypes == {torch.float32}


def test_muons_defaults_are_pytorchs():
    weight = torch.nn.Parameter(torch.ones(2, 3))
    theirs = torch.optim.Muon([weight], lr=0.1, adjust_lr_fn="match_rms_adamw")
    assert Muon([weight], lr=0.1).defaults == theirs.defaults


@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
def test_a_matrix_without_gradient_only_decays_by_muon(shape):
    weight = torch.nn.Parameter(torch.ones(shape))
    weight.grad = torch.zeros(shape)
    Muon([weight], lr=0.1, weight_decay=0.5).step()
    assert torch.equal(weight.detach(), torch.full(shape, 0.95))


def test_muon_stacks_matrices_of_one_shape_within_its_bound(monkeypatch):
    found, plain = [], muon.orthogonal
    monkeypatch.setattr(muon, "orthogonal", lambda matrices: found.append(tuple(matrices.shape)) or plain(matrices))
    monkeypatch.setattr(muon, "BATCH_ELEMENTS", 50)
    weights = [torch.nn.Parameter(torch.ones(shape)) for shape in [(4, 6)] * 3 + [(8, 9)] * 2 + [(6, 4)]]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    Muon(weights, lr=0.1).step()
    assert found == [(2, 4, 6), (1, 4, 6), (1, 8, 9), (1, 8, 9), (1, 6, 4)], "one above the bound is alone"


@pytest.mark.parametrize("shape", [(24, 4), (4, 24)])
def test_muon_multiplies_the_shorter_sides(shape):
    """Products of 24 × 24 would take six times as long, for the same directions."""
    largest = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest.append(out.numel())
            return out

    matrices = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    with Watch():
        muon.orthogonal(matrices)
    assert max(largest) == matrices.numel()


@pytest.mark.parametrize("kind", ["adamw", "lamb", "muon"])
@pytest.mark.parametrize("fused", [True, False])
def test_each_learns(kind, fused):
    net = model()
    rate = 0.05 if kind == "lamb" else 0.01  # of LAMB a share of the tensor, so to say
    optimizer = make_optimizer(net, Optimizer(kind=kind, learning_rate=rate), fused=fused)
    step = TrainStep(net, optimizer, Precision("float32", "cpu"))
    tokens = torch.randint(0, 50, (4, 17), generator=torch.Generator().manual_seed(0))
    data = Batch(inputs=tokens[:, :-1].contiguous(), targets=tokens[:, 1:].contiguous(), documents=None)
    losses = [step.run([data]).loss.item() for _ in range(12)]
    assert losses[-1] < 0.85 * losses[0]


@pytest.mark.parametrize("kind", ["lamb", "muon"])
def test_a_run_goes_on_exactly(recipe, kind):
    options = {"kind": kind, "steps": 12, "checkpoint_every": 4, "groups": ("embedding.*:rate=0.5",)}
    lines, again = [], []
    train(recipe(name="whole", **options), progress=False, on_step=lines.append)

    class Killed(Exception):
        pass

    def kill(line):
        if line["step"] == 6:
            raise Killed

    with pytest.raises(Killed):
        train(recipe(name="killed", **options), progress=False, on_step=kill)
    train(recipe(name="killed", **options), progress=False, on_step=again.append)
    assert [line["loss"] for line in again] == [line["loss"] for line in lines[4:]]


@pytest.mark.parametrize("kind", [OneBitAdam, OneBitLamb])
def test_a_rare_element_does_not_leap_when_its_variance_is_frozen(kind):
    weight = torch.nn.Parameter(torch.ones(64))
    usual = torch.ones(64)
    usual[0], usual[1] = 1e-4, 0.0  # a token that was hardly seen, and a row that pads the vocabulary
    optimizer = kind([weight], lr=0.01, betas=(0.9, 0.99), weight_decay=0.0)
    optimizer.freeze_after, optimizer.mean = 5, lambda x, kept: x
    for gradient in [usual] * 5 + [torch.ones(64) * (usual > 0)]:
        before, weight.grad = weight.detach().clone(), gradient.clone()
        optimizer.step()
    assert optimizer.frozen
    moved = (before - weight.detach()).abs()
    assert moved[0] <= moved[2], "which has had such gradients all the time"
    assert moved[0] > 0
    assert weight[1] == 1

"""A layer whose experts are on several ranks computes what one with all of them does, however few rows go where."""

import json
import textwrap

import pytest

import hasten
import ranks
from hasten.model.families import read_config
from hasten.model.initialize import initialize

# Of three rows of inputs, in each case: the rows of each rank, and the experts to which all of them are sent.
LAYER = textwrap.dedent("""
    import json, sys
    import torch
    import torch.distributed as dist
    from hasten.distributed.expert_parallel import apply_expert_parallel
    from hasten.distributed.launch import joined
    from hasten.model.experts import Experts
    from hasten.model.families import read_config
    from hasten.model.initialize import initialize

    def layer_of(model):
        return next(one for one in model.modules() if isinstance(one, Experts))

    def computed(layer, x, shares, chosen, weight):
        out = layer.routed(x, shares, chosen)
        (out * weight).sum().backward()
        return out

    with joined() as ranks:
        for case in json.loads(sys.argv[1]):
            config = read_config(case["config"])
            whole, divided = initialize(config, seed=0), initialize(config, seed=0)
            held = apply_expert_parallel(divided, ranks, case["degree"])
            generator = torch.Generator().manual_seed(0)
            rows, k = sum(case["rows"]), config.experts_per_token
            x = torch.randn(rows, config.hidden_size, generator=generator)
            weight = torch.randn(rows, config.hidden_size, generator=generator)
            shares = torch.rand(rows, k, generator=generator)
            allowed = torch.tensor(case["experts"])
            picks = torch.stack([torch.randperm(len(allowed), generator=generator)[:k] for _ in range(rows)])
            chosen = allowed[picks]
            x.requires_grad_(case["trains_input"])
            shares.requires_grad_()
            expected = computed(layer_of(whole), x, shares, chosen, weight)
            first = sum(case["rows"][: ranks.rank])
            own = slice(first, first + case["rows"][ranks.rank])
            x_own = x.detach()[own].requires_grad_(case["trains_input"])
            shares_own = shares.detach()[own].requires_grad_()
            found = computed(layer_of(divided), x_own, shares_own, chosen[own], weight[own])
            torch.testing.assert_close(found, expected[own])
            torch.testing.assert_close(shares_own.grad, shares.grad[own])
            if case["trains_input"]:
                torch.testing.assert_close(x_own.grad, x.grad[own])
            held.average(one for name, one in divided.named_parameters() if name in held.own)
            layer = next(name for name, one in whole.named_modules() if isinstance(one, Experts))
            for name, one in divided.named_parameters():
                assert not held.lacks(name)
                if name in held.own and name.startswith(layer):
                    reference = whole.get_parameter(name).grad
                    assert (one.grad is None) == (reference is None), name
                    if reference is not None:  # ranks average what their losses have in common, and so do gradients
                        torch.testing.assert_close(one.grad * ranks.size, reference)
            names = dict(whole.named_parameters()).keys()
            assert held.elsewhere.keys() | dict(divided.named_parameters()).keys() == names
            assert all(held.lacks(name) for name in held.elsewhere)
            print("compared", case["rows"])
""")
CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
}
BIASED = CONFIG | {"model_type": "gpt_oss", "intermediate_size": 24, "num_local_experts": 8, "sliding_window": 4}
ALL = list(range(8))
USUAL = {"degree": 2, "experts": ALL, "config": CONFIG, "trains_input": True}


@pytest.mark.parametrize(
    ("count", "cases"),
    [
        (
            2,
            [
                {"rows": [5, 11]},
                {"rows": [6, 6], "experts": [1, 2]},  # nothing goes to the second rank, which waits for gradients
                {"rows": [6, 6], "experts": [6, 7], "trains_input": False},
                {"rows": [0, 7]},
                {"rows": [9, 0], "experts": [0, 1]},
                {"rows": [4, 4], "config": BIASED},
            ],
        ),
        (
            4,
            [
                {"rows": [3, 5, 2, 4]},  # two pairs, each with all experts
                {"rows": [3, 5, 0, 4], "degree": 4},
                {"rows": [3, 5, 2, 1], "experts": [3, 4]},  # experts that one pair reaches and no other, and none
            ],
        ),
    ],
)
def test_a_divided_layer_computes_what_a_whole_one_does(count, cases):
    for status, said, errors in ranks.run(LAYER, json.dumps([USUAL | case for case in cases]), ranks=count):
        assert status == 0, errors
        assert said.count("compared") == len(cases)


# A model that is made without memory, and weights that are drawn, or read from a folder, one at a time (`zero 3`).
START = textwrap.dedent("""
    import json, sys
    import torch
    from hasten.checkpoints.load import open_checkpoint
    from hasten.distributed.launch import joined
    from hasten.model.families import read_config
    from hasten.model.initialize import initialize
    from hasten.training import build
    from hasten.training.recipe import Parallel, Recipe, Techniques
    with joined() as ranks:
        config = read_config(json.loads(sys.argv[1]))
        whole = initialize(config, seed=0)
        techniques = Techniques(precision="float32", compile=False)
        recipe = Recipe(name="start", techniques=techniques, parallel=Parallel(zero=3, experts=2))
        for source in (None, open_checkpoint(sys.argv[2])):
            model, weights = build.model_and_weights(source, config, recipe, device=torch.device("cpu"))
            assert all(one.is_meta for one in model.parameters())
            placement = build.training_step(model, recipe, ranks=ranks, weights=weights).where
            experts = 0
            for name, one in placement.parameters.items():
                own = one.full_tensor() if hasattr(one, "full_tensor") else one
                assert torch.equal(own.detach(), whole.get_parameter(name).detach()), name
                experts += ".experts." in name
                assert hasattr(one, "full_tensor") == (".experts." not in name)
            assert experts == 4 * 3, "half of them"
            assert not placement.has_whole_model
            assert placement.everywhere.keys() == dict(whole.named_parameters()).keys()
""")


def test_each_rank_makes_or_reads_its_own_experts(tmp_path):
    hasten.save(initialize(read_config(CONFIG), seed=0), tmp_path)
    for status, _, errors in ranks.run(START, json.dumps(CONFIG), tmp_path):
        assert status == 0, errors

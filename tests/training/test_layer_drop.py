"""Progressive layer dropping: the schedule, the draws, what a dropped block costs, what evaluation sees."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from hasten.data import Batch
from hasten.model.context import TrainingContext, training_context
from hasten.model.initialize import initialize
from hasten.training.build import apply_compile, shape_config
from hasten.training.layer_drop import block_scales_of_step, draw_block_scales, keep_probabilities, theta
from hasten.training.optimizers import adamw
from hasten.training.precision import Precision
from hasten.training.recipe import Optimizer, Shape
from hasten.training.session import train
from hasten.training.setup import set_up
from hasten.training.step import IGNORED, TrainStep

LAYERS = 4
CONFIG = shape_config(
    Shape(layers=LAYERS, hidden_size=32, heads=2, kv_heads=1, feed_forward=64), vocab_size=50, positions=16
)
CONTEXT = TrainingContext([None] * LAYERS)
TOKENS = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.arange(16).unsqueeze(0)


def model_of(config=CONFIG):
    return initialize(config, seed=1)


def test_the_schedule_is_the_papers():
    assert theta(0, total=1000, floor=0.5, decay=100) == 1
    assert theta(10, total=1000, floor=0.5, decay=100) == pytest.approx(0.5 + 0.5 * math.exp(-1))
    assert theta(999, total=1000, floor=0.5, decay=100) == pytest.approx(0.5)
    assert theta(5, total=None, floor=0.5, decay=100) == 1
    assert keep_probabilities(4, theta=0.5) == [1, 0.875, 0.75, 0.625]


@given(st.integers(1, 40), st.floats(0.05, 1), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 64))
def test_draws_depend_on_seed_step_and_micro_step_alone(layers, now, seed, step, micro):
    kept = keep_probabilities(layers, theta=now)
    assert kept[0] == 1
    before = torch.get_rng_state()
    block_scales = draw_block_scales(kept, seed=seed, step=step, micro_step=micro)
    torch.rand(3)  # whatever else a rank draws
    assert block_scales == draw_block_scales(kept, seed=seed, step=step, micro_step=micro)
    torch.set_rng_state(before)
    assert block_scales[0] == 1
    assert all(gate in (0.0, 1 / p) for gate, p in zip(block_scales, kept, strict=True)), (
        "scaled by what it was drawn with"
    )


def test_another_step_micro_step_or_seed_is_another_draw():
    kept = [0.5] * 64
    drawn = [
        draw_block_scales(kept, seed=a, step=b, micro_step=c)
        for a, b, c in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))
    ]
    assert len({tuple(block_scales) for block_scales in drawn}) == 4


def test_blocks_are_kept_as_often_as_said():
    kept, count = keep_probabilities(6, theta=0.4), 4000
    sums = [0.0] * 6
    for step in range(count):
        for layer, gate in enumerate(draw_block_scales(kept, seed=0, step=step, micro_step=0)):
            sums[layer] += gate
    for total, p in zip(sums, kept, strict=True):
        deviation = math.sqrt((1 / p - 1) / count)  # of the mean of G/p, which is 1
        assert abs(total / count - 1) <= 5 * deviation


class LinearPart(torch.nn.Module):
    """Stands for attention or MLP; half the block is linear then, and so the mean over draws is exact."""

    def __init__(self, matrix):
        super().__init__()
        self.matrix = matrix

    def forward(self, x, *_):
        return x @ self.matrix


def test_the_mean_over_the_draws_is_the_whole_block_where_it_is_linear():
    model = model_of().double()
    block = model.blocks[3]
    generator = torch.Generator().manual_seed(2)
    block.attention_norm = block.mlp_norm = torch.nn.Identity()
    zero = torch.zeros(32, 32, dtype=torch.float64)
    for attention, mlp in ((torch.randn(32, 32, generator=generator).double(), zero), (zero, torch.eye(32).double())):
        block.attention, block.mlp = LinearPart(attention), LinearPart(mlp)
        x = torch.randn(2, 5, 32, generator=generator).double()
        whole = block(x, None, None)
        p = 0.625
        kept = block(x, None, None, torch.tensor(1 / p, dtype=torch.float64))
        torch.testing.assert_close(p * kept + (1 - p) * x, whole)  # the mean over G
        block_scales = [draw_block_scales([1, 1, 1, p], seed=0, step=step, micro_step=0)[3] for step in range(2000)]
        mean = sum(kept if gate else x for gate in block_scales) / len(block_scales)
        share = sum(gate > 0 for gate in block_scales) / len(block_scales)
        torch.testing.assert_close(mean, share * kept + (1 - share) * x)
        assert share == pytest.approx(p, abs=0.05)


def test_a_gate_of_one_is_the_plain_model():
    model = model_of().train()
    plain = model(TOKENS, POSITIONS, CONTEXT)
    torch.testing.assert_close(model(TOKENS, POSITIONS, CONTEXT, block_scales=[1.0] * LAYERS), plain, atol=0, rtol=0)


def test_evaluation_runs_every_block_and_scales_none(recipe):
    made = recipe(layers=LAYERS, layer_drop=0.2, layer_drop_decay=1000.0, steps=20, export="last")
    lines = []
    result = train(made, progress=False, on_step=lambda line: lines.append(dict(line)))
    assert lines[-1]["kept_blocks"] < 1, "the run was still dropping when it was validated"
    setup = set_up(replace(made, init=str(result.model_folder)), progress=False)
    model = setup.model.eval()

    def loss(block_scales):
        """The validation loss of the exported model, by its forward pass alone."""
        total = targets = 0
        with torch.no_grad():
            for batch in setup.validation._batches():
                context = training_context(model, batch.inputs.shape[1])
                positions = torch.arange(batch.inputs.shape[1]).unsqueeze(0)
                total += float(
                    model(batch.inputs, positions, context, targets=batch.targets, block_scales=block_scales)
                )
                targets += int((batch.targets != IGNORED).sum())
        return total / targets

    assert result.validation_loss == pytest.approx(loss(None), rel=1e-6)
    every_one_scaled = [1 / p for p in keep_probabilities(LAYERS, theta=0.2)]
    (of_the_last_step,) = block_scales_of_step(made, layers=LAYERS, step=19, total=20)
    for block_scales in (every_one_scaled, of_the_last_step):
        assert loss(block_scales) != pytest.approx(result.validation_loss, rel=1e-5), block_scales


def test_a_block_left_out_is_the_model_without_it_and_gets_no_gradient():
    model = model_of().train()
    block_scales = [1.0, 0.0, 2.0, 0.0]
    out = model(TOKENS, POSITIONS, CONTEXT, block_scales=block_scales)
    out.sum().backward()
    assert all(p.grad is None for index in (1, 3) for p in model.blocks[index].parameters())
    assert all(p.grad is not None for index in (0, 2) for p in model.blocks[index].parameters())
    small = replace(CONFIG, layers=CONFIG.layers[:2])
    shallow = initialize(small, seed=1).train()
    shallow.load_state_dict(model.state_dict() | {}, strict=False)
    shallow.blocks[1].load_state_dict(model.blocks[2].state_dict())
    with torch.no_grad():
        shallow.blocks[1].attention.output.weight *= 2
        shallow.blocks[1].mlp.down.weight *= 2
    torch.testing.assert_close(shallow(TOKENS, POSITIONS, TrainingContext([None] * 2)), out)


def flops(step, block_scales):
    with FlopCounterMode(display=False) as counter:
        step.run([Batch(inputs=TOKENS, targets=TOKENS, documents=None)], block_scales=block_scales)
    return counter.get_total_flops()


def step_of(config=CONFIG, **options):
    model = initialize(config, seed=1)
    return TrainStep(model, adamw(model, Optimizer(learning_rate=1e-3)), Precision("float32", "cpu"), **options)


def test_counted_flops_fall_by_the_blocks_left_out():
    step = step_of()
    whole = flops(step, None)
    assert flops(step, [[1.0] * LAYERS]) == whole
    each = [whole - flops(step, [[0.0 if i == layer else 1.0 for i in range(LAYERS)]]) for layer in range(LAYERS)]
    assert len(set(each)) == 1
    assert flops(step, [[1.0, 0.0, 0.0, 2.0]]) == whole - 2 * each[0]
    # θ = 0.5 and 12 layers: 23% of the blocks' work (TECHNIQUES, "Progressive layer dropping")
    assert 1 - sum(keep_probabilities(12, theta=0.5)) / 12 == pytest.approx(0.23, abs=0.002)


@pytest.mark.slow  # compiles
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_compiled_blocks_are_not_compiled_anew(checkpointing):
    from torch._dynamo.utils import counters

    from hasten.training.activations import apply_checkpointing

    torch._dynamo.reset()
    plain, compiled = step_of(), step_of()
    if checkpointing != "none":
        apply_checkpointing(compiled.model, checkpointing)
    apply_compile(compiled.model)
    data = Batch(inputs=TOKENS, targets=TOKENS, documents=None)
    kept = keep_probabilities(LAYERS, theta=0.4)
    counters.clear()
    seen = []
    for step in range(6):
        block_scales = [draw_block_scales(kept, seed=3, step=step, micro_step=0)]
        one, other = plain.run([data], block_scales=block_scales), compiled.run([data], block_scales=block_scales)
        torch.testing.assert_close(one.loss, other.loss, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(one.gradient_norm, other.gradient_norm, atol=1e-5, rtol=1e-4)
        seen.append(counters["stats"]["unique_graphs"])
    assert seen[0] == seen[-1] == 1, "one graph for all blocks, block_scales and steps"
    torch._dynamo.reset()


def test_a_run_drops_and_goes_on_with_the_same_draws(recipe):
    options = {"layer_drop": 0.3, "layer_drop_decay": 200.0, "layers": 4, "steps": 12, "checkpoint_every": 4}
    lines = []
    whole = train(recipe(name="whole", **options), progress=False, on_step=lambda line: lines.append(dict(line)))
    assert whole.steps == 12
    kept = [line["kept_blocks"] for line in lines]
    assert kept[0] == 1
    assert min(kept) < 0.8

    class Killed(Exception):
        pass

    def kill(line):
        if line["step"] == 6:
            raise Killed

    with pytest.raises(Killed):
        train(recipe(name="killed", **options), progress=False, on_step=kill)
    again = []
    train(recipe(name="killed", **options), progress=False, on_step=lambda line: again.append(dict(line)))
    assert [line["step"] for line in again] == list(range(5, 13))
    for one, other in zip(again, lines[4:], strict=True):
        assert (one["kept_blocks"], one["loss"]) == (other["kept_blocks"], other["loss"])


def test_dropped_blocks_are_not_counted_as_work(recipe):
    with_drop, without = [], []
    train(recipe(name="a", layer_drop=0.2, layer_drop_decay=1000.0, steps=8), progress=False, on_step=with_drop.append)
    train(recipe(name="b", steps=8), progress=False, on_step=without.append)
    work = [line["mfu"] / line["tokens_per_second"] for line in with_drop]
    full = without[0]["mfu"] / without[0]["tokens_per_second"]
    assert work[0] == pytest.approx(full, rel=0.05)
    dropped = [w for w, line in zip(work, with_drop, strict=True) if line["kept_blocks"] < 1]
    assert dropped
    assert max(dropped) < 0.95 * full

"""Training with a sparse pattern, and with packed documents as intervals instead of a mask."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hasten
from hasten.data import Batch
from hasten.errors import ConfigError, HastenWarning
from hasten.model.context import TrainingContext, training_context
from hasten.model.initialize import initialize
from hasten.ops.native import library
from hasten.planning.cost import training_flops_per_token
from hasten.training.activations import apply_checkpointing
from hasten.training.build import apply_compile, shape_config
from hasten.training.optimizers import adamw
from hasten.training.precision import Precision
from hasten.training.recipe import Optimizer, Shape
from hasten.training.session import train
from hasten.training.step import TrainStep

LENGTH = 128
SHAPE = {"layers": 3, "hidden_size": 64, "heads": 4, "feed_forward": 64}


def step_of(pattern=None, *, precision="float32", kernel=None, compiled=False, **options):
    config = shape_config(Shape(attention_pattern=pattern, **SHAPE), vocab_size=50, positions=LENGTH)
    model = initialize(config, seed=1)
    model.bind(attention=kernel)
    if compiled:
        apply_compile(model)
    return TrainStep(model, adamw(model, Optimizer(learning_rate=1e-2)), Precision(precision, "cpu"), **options)


def batch_of(seed=0, documents=None):
    tokens = torch.randint(50, (2, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return Batch(inputs=tokens[:, :-1].contiguous(), targets=tokens[:, 1:].contiguous(), documents=documents)


def documents_of(*lengths):
    rows = [torch.repeat_interleave(torch.arange(len(own)), torch.tensor(own)) for own in lengths]
    return torch.stack(rows)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.filterwarnings("ignore:.*cannot skip the blocks")
def test_steps_with_a_pattern_are_those_of_explicit_scores(precision):
    own, explicit = (
        step_of("bigbird:block=16,random-blocks=2", precision=precision, kernel=kernel)
        for kernel in (None, "reference")
    )
    dense = step_of(None, precision=precision)
    for _ in range(5):
        losses = [step.run([batch_of()]).loss.item() for step in (own, explicit, dense)]
    tolerance = 1e-4 if precision == "float32" else 2e-2
    assert losses[0] == pytest.approx(losses[1], rel=tolerance)
    if precision == "float32":
        assert losses[0] != pytest.approx(losses[2], rel=1e-3)
    taken = "sdpa" if library(part="training") is None else "native-sparse"
    assert {block.attention.kernels.tokens.name for block in own.model.blocks} == {taken}


@pytest.mark.parametrize("pattern", ["bigbird:block=16,random-blocks=2", "atrous:block=1,stride=3"])
def test_patterns_beside_packed_documents(pattern):
    documents = documents_of([40, 1, 87], [100, 28])
    own, explicit = (step_of(pattern, kernel=kernel, separate_documents=True) for kernel in (None, "reference"))
    for number in range(3):
        losses = [step.run([batch_of(number, documents)]).loss.item() for step in (own, explicit)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    together = step_of(pattern).loss(batch_of()).item()
    assert own.model.blocks[0].attention.kernels.tokens.name.startswith("native") == (
        library(part="training") is not None
    )
    apart = step_of(pattern, separate_documents=True).loss(batch_of(documents=documents)).item()
    assert apart != pytest.approx(together, rel=1e-4)


def test_a_recipe_trains_with_a_pattern_dropout_and_packed_documents(recipe):
    made = recipe(
        attention_pattern="atrous:block=1,stride=2", dropout=0.1, separate_documents=True, steps=12, context=64
    )
    with pytest.warns(HastenWarning, match="transformers does not know it"):
        result = train(made, progress=False)
    model = hasten.load(result.model_folder, dtype="stored")
    assert model.config.attention_pattern.period == 2
    assert len(hasten.generate(model, "def", max_new_tokens=8, temperature=0)[0].tokens) == 8


@pytest.mark.slow  # compiles
def test_one_compiled_graph_serves_the_blocks_of_all_patterns_of_a_model():
    torch._dynamo.reset()
    pattern = "bigbird:block=16,random-blocks=2"
    compiled, eager = step_of(pattern, compiled=True), step_of(pattern)
    counters = torch._dynamo.utils.counters
    counters.clear()
    for number in range(3):
        losses = [step.run([batch_of(number)]).loss.item() for step in (compiled, eager)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_a_recipe_trains_exports_and_goes_on_with_its_pattern(recipe, tmp_path):
    made = recipe(name="sparse", attention_pattern="local:block=16,radius=0", steps=12, checkpoint_every=6, context=64)
    with pytest.warns(HastenWarning, match="transformers does not know it"):
        result = train(made, progress=False)
    model = hasten.load(result.model_folder, dtype="stored")
    assert model.config.attention_pattern.reach == 16
    out = hasten.generate(model, "def", max_new_tokens=40, temperature=0)[0]
    assert len(out.tokens) == 40
    again = recipe(name="tuned", init=str(result.model_folder), steps=2, context=64)
    with pytest.warns(HastenWarning):
        tuned = train(again, progress=False)
    assert hasten.load(tuned.model_folder, dtype="stored").config.attention_pattern == model.config.attention_pattern


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention_pattern": "bigbrid"}, "known: causal"),
        ({"attention_pattern": "local:block=20"}, "multiples of 64"),
    ],
)
def test_what_cannot_be_is_refused(recipe, changes, said):
    with pytest.raises(ConfigError, match=said):
        train(recipe(**changes), progress=False)


def test_counted_flops_follow_the_pattern():
    def attended(pattern):
        config = shape_config(Shape(attention_pattern=pattern, **SHAPE), vocab_size=50, positions=1024)
        return training_flops_per_token(config, 1024)

    dense, causal, local = attended(None), attended("causal:block=64"), attended("local:block=64,radius=0")
    assert causal == pytest.approx(dense)
    seen = 3 * 3 * 4 * SHAPE["hidden_size"]  # layers, forward and backward, FLOPs for each key seen
    assert dense - local == pytest.approx(seen * (1025 - 65) / 2)


@pytest.mark.parametrize("window", [None, 20])
def test_intervals_are_the_mask(window):
    documents = documents_of([40, 1, 87], [128])
    context = TrainingContext([window], documents, intervals=True)
    mask = TrainingContext([window], documents).layers[0].mask
    assert torch.equal(context.layers[0].intervals.dense(LENGTH), mask)


@pytest.mark.parametrize("kind", ["selective", "full"])
@pytest.mark.parametrize("pattern", ["bigbird:block=16,random-blocks=2", None])
def test_activations_that_are_computed_again_change_nothing(pattern, kind):
    documents = None if pattern else documents_of([40, 1, 87], [100, 28])
    plain, again = (step_of(pattern, separate_documents=pattern is None) for _ in range(2))
    apply_checkpointing(again.model, kind)
    for number in range(2):
        one, other = (step.run([batch_of(number, documents)]) for step in (plain, again))
        assert one.loss == other.loss
        assert one.gradient_norm == other.gradient_norm


class Largest(TorchDispatchMode):
    """The most elements that any result had."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else [out]:
            if isinstance(one, torch.Tensor):
                self.elements = max(self.elements, one.numel())
        return out


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_documents_kept_apart_cost_no_mask_and_change_nothing(precision):
    documents = documents_of([40, 1, 87], [100, 28])
    own, explicit = (
        step_of(precision=precision, kernel=kernel, separate_documents=True) for kernel in (None, "reference")
    )
    native = library(part="training") is not None  # without it the documents cost a mask
    assert own.model.blocks[0].attention.supports_segments == native
    tolerance = 1e-4 if precision == "float32" else 2e-2
    for number in range(4):
        data = batch_of(number, documents)
        losses = [step.run([data]).loss.item() for step in (own, explicit)]
        assert losses[0] == pytest.approx(losses[1], rel=tolerance)
    together = step_of(precision=precision).loss(batch_of()).item()
    apart = step_of(precision=precision, separate_documents=True).loss(batch_of(documents=documents)).item()
    assert apart != pytest.approx(together, rel=1e-4)
    if native and precision != "float16":
        with Largest() as sizes:
            training_context(own.model, LENGTH, documents)
            own.loss(batch_of(documents=documents))
        assert sizes.elements < 2 * LENGTH * LENGTH

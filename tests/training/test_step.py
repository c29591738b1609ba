from dataclasses import replace

import pytest
import torch

from hasten.data import Batch
from hasten.model.context import TrainingContext
from hasten.model.initialize import initialize
from hasten.ops.loss import operator
from hasten.training.build import shape_config
from hasten.training.optimizers import adamw
from hasten.training.precision import Precision
from hasten.training.recipe import Optimizer, Shape
from hasten.training.step import TrainStep

CONFIG = shape_config(
    Shape(layers=2, hidden_size=32, heads=2, kv_heads=1, feed_forward=64), vocab_size=50, positions=16
)


def batch(rows=4, seed=0, masked=0.0, documents=None):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 50, (rows, 17), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < masked] = -100
    return Batch(inputs=tokens[:, :-1].contiguous(), targets=targets, documents=documents)


def rows(whole, start, stop):
    return Batch(inputs=whole.inputs[start:stop], targets=whole.targets[start:stop], documents=None)


def step_of(config=CONFIG, precision="float32", **options):
    model = initialize(config, seed=1)
    optimizer = adamw(model, Optimizer(learning_rate=1e-3))
    return TrainStep(model, optimizer, Precision(precision, "cpu"), **options)


def weights(step):
    return {name: p.detach().clone() for name, p in step.model.named_parameters()}


def test_unequal_micro_batches_are_one_big_batch():
    whole = batch(rows=8, masked=0.4)
    whole.targets[0:2, 3:] = -100  # the first micro-batch has far fewer targets
    whole.targets[4:6] = -100  # the third has none
    one, four = step_of(clip=0.05), step_of(clip=0.05)
    a = one.run([whole])
    b = four.run([rows(whole, i, i + 2) for i in range(0, 8, 2)])
    assert a.tokens == b.tokens == 8 * 16
    assert a.targets.item() == b.targets.item() == (whole.targets != -100).sum()
    torch.testing.assert_close(a.loss, b.loss, atol=1e-6, rtol=0)
    torch.testing.assert_close(a.gradient_norm, b.gradient_norm, atol=1e-6, rtol=1e-6)


def test_the_gradients_of_unequal_micro_batches_are_those_of_one_big_batch():
    whole = batch(rows=8, masked=0.4)
    gradients = []
    for parts in ([whole], [rows(whole, 0, 1), rows(whole, 1, 5), rows(whole, 5, 8)]):
        step = step_of(clip=None)
        step.optimizer.step = lambda: None
        kept = []
        step.where.zero_grad = lambda step=step, kept=kept: kept.extend(p.grad for p in step.parameters)
        step.run(parts)
        gradients.append(kept)
    for one, many in zip(*gradients, strict=True):
        torch.testing.assert_close(one, many, atol=1e-6, rtol=1e-5)


def test_the_loss_is_the_mean_over_targets():
    step, data = step_of(), batch(masked=0.5)
    logits = step.model(data.inputs, torch.arange(16).unsqueeze(0), TrainingContext([None, None]))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), data.targets.flatten(), ignore_index=-100)
    torch.testing.assert_close(step.run([data]).loss, expected.detach())


def test_a_step_without_targets_is_harmless():
    step, data = step_of(), batch()
    data.targets.fill_(-100)
    result = step.run([data])
    assert result.loss.item() == 0
    assert result.gradient_norm.item() == 0


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_the_loss_of_a_tiny_model_falls(precision):
    step, data = step_of(precision=precision), batch(rows=2)
    losses = [step.run([data], learning_rate=1e-2).loss.item() for _ in range(40)]
    assert losses[-1] < 0.5 * losses[0]
    assert all(p.dtype == torch.float32 for p in step.model.parameters())


def test_lower_precisions_start_near_float32():
    losses = {name: step_of(precision=name).run([batch()]).loss.item() for name in ("float32", "bfloat16", "float16")}
    assert losses["bfloat16"] != losses["float32"]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=1e-2)
    assert losses["float16"] == pytest.approx(losses["float32"], rel=1e-2)


def test_float16_skips_a_step_that_overflows_and_lowers_its_scale():
    step, data = step_of(precision="float16"), batch()
    step.precision.load(step.precision.state() | {"scale": 2.0**100})
    before = weights(step)
    result = step.run([data])
    assert not torch.isfinite(result.gradient_norm)
    assert step.precision.scale() == 2.0**99
    assert all(torch.equal(before[name], p) for name, p in step.model.named_parameters())
    step.precision.load(step.precision.state() | {"scale": 1024.0})
    assert torch.isfinite(step.run([data]).gradient_norm)
    assert not all(torch.equal(before[name], p) for name, p in step.model.named_parameters())


def test_clipping_bounds_the_gradient_and_reports_the_norm_before_it():
    data = batch()
    unclipped = step_of(clip=None).run([data]).gradient_norm
    step = step_of(clip=1e-3)
    kept = []
    zero_grad = step.where.zero_grad
    step.where.zero_grad = lambda: (kept.extend(p.grad.clone() for p in step.parameters), zero_grad())
    assert step.run([data]).gradient_norm == unclipped > 1e-3
    assert torch.nn.utils.get_total_norm(kept).item() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("tied", [True, False])
def test_padding_the_vocabulary_changes_nothing_and_the_padded_rows_get_no_gradient(tied):
    config = replace(CONFIG, tie_embeddings=tied)
    plain, padded = step_of(config), step_of(config.padded_to(64))
    for name, parameter in padded.model.named_parameters():
        source = plain.model.get_parameter(name)
        parameter.data[: len(source)] = source.data
    data = batch()
    kept = []
    zero_grad = padded.where.zero_grad
    padded.where.zero_grad = lambda: (kept.append(padded.model.head.weight.grad.clone()), zero_grad())
    losses = [(plain.run([data]).loss.item(), padded.run([data]).loss.item()) for _ in range(5)]
    assert padded.model.head.weight.shape == (64, 32)
    for one, other in losses:
        assert one == pytest.approx(other, abs=1e-6)
    for gradient in kept:
        assert gradient[:50].abs().sum() > 0
        assert torch.equal(gradient[50:], torch.zeros(14, 32))


def test_packed_documents_are_kept_apart_where_asked():
    documents = torch.zeros(4, 16, dtype=torch.int64)
    documents[:, 9:] = 1
    packed = batch(documents=documents)
    changed = batch(documents=documents)
    changed.inputs[:, :9] = 7  # another first document
    for data in (packed, changed):
        data.targets[:, :9] = -100  # only the second one is scored
    with torch.no_grad():
        apart = step_of(separate_documents=True)
        assert apart.loss(packed) == apart.loss(changed)
        together = step_of(separate_documents=False)
        assert together.loss(packed) != together.loss(changed)


def test_told_to_stop_it_leaves_the_weights_and_no_gradient():
    answers = iter([False, True])
    step = step_of(should_stop=lambda: next(answers))
    before = weights(step)
    assert step.run([batch(), batch(seed=1), batch(seed=2)]) is None
    assert all(torch.equal(before[name], p) for name, p in step.model.named_parameters())
    assert all(p.grad is None for p in step.parameters)


def test_compiled_blocks_compute_the_same():
    from hasten.training.build import apply_compile

    plain, compiled = step_of(), step_of()
    apply_compile(compiled.model)
    for number in range(3):
        data = batch(seed=number)
        torch.testing.assert_close(plain.run([data]).loss, compiled.run([data]).loss, atol=1e-5, rtol=1e-5)


@pytest.mark.slow  # compiles
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_fused_activations_compute_the_same(family, precision):
    from hasten.training.build import apply_compile, apply_fused_activations

    shape = Shape(family=family, layers=2, hidden_size=32, heads=2, feed_forward=64)
    config = shape_config(shape, vocab_size=50, positions=16)
    plain, fused, compiled = (step_of(config, precision) for _ in range(3))
    dtype = plain.precision.dtype
    assert apply_fused_activations(fused.model, dtype)
    assert apply_fused_activations(compiled.model, dtype)
    apply_compile(compiled.model)
    tolerance = 1e-5 if precision == "float32" else 2e-2
    for number in range(3):
        one, two, three = (step.run([batch(seed=number)]) for step in (plain, fused, compiled))
        for other in (two, three):
            torch.testing.assert_close(other.loss, one.loss, atol=tolerance, rtol=tolerance)
            torch.testing.assert_close(other.gradient_norm, one.gradient_norm, atol=tolerance, rtol=tolerance)
    torch._dynamo.reset()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_joined_projections_compute_the_same(family):
    from hasten.training.build import apply_joined_projections

    kv_heads = 1 if family == "llama" else None
    shape = Shape(family=family, layers=2, hidden_size=32, heads=2, kv_heads=kv_heads, feed_forward=64)
    config = shape_config(shape, vocab_size=50, positions=16)
    apart, joined = step_of(config), step_of(config)
    apply_joined_projections(joined.model)
    names = [name for name, _ in apart.model.named_parameters()]
    for number in range(3):
        one, other = apart.run([batch(seed=number)]), joined.run([batch(seed=number)])
        torch.testing.assert_close(other.loss, one.loss, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(other.gradient_norm, one.gradient_norm, atol=1e-5, rtol=1e-5)
    assert [name for name, _ in joined.model.named_parameters()] == names


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_layer_that_is_replaced_later_is_called(family):
    """As LoRA or a fake-quantized layer would be: nothing reads the weight behind its back."""
    from hasten.model.attention import Attention
    from hasten.model.mlp import MLP
    from hasten.model.swap import swap_kinds
    from hasten.training.build import apply_fused_activations, apply_joined_projections
    from hasten.training.training_modules import FusedMLP, JoinedAttention

    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    shape = Shape(family=family, layers=1, hidden_size=32, heads=2, feed_forward=64)
    config = shape_config(shape, vocab_size=50, positions=16)
    plain, swapped = step_of(config), step_of(config)
    assert apply_fused_activations(swapped.model, torch.float32)
    apply_joined_projections(swapped.model)
    for step in (plain, swapped):
        block = step.model.blocks[0]
        block.attention.k.__class__ = block.mlp.up.__class__ = Doubled
    torch.testing.assert_close(swapped.run([batch()]).loss, plain.run([batch()]).loss, atol=1e-5, rtol=1e-5)
    assert isinstance(swapped.model.blocks[0].attention, JoinedAttention)
    called = []
    for block in (step.model.blocks[0] for step in (plain, swapped)):
        block.attention.q.register_full_backward_hook(lambda *_: called.append("q"))
        block.mlp.down.register_full_backward_hook(lambda *_: called.append("down"))
    for step in (plain, swapped):
        step.run([batch()])
    assert called == called[:2] * 2, "hooks are called as before"
    swap_kinds(swapped.model, {JoinedAttention: Attention, FusedMLP: MLP})
    kinds = {type(module) for module in swapped.model.modules()}
    assert not kinds & {JoinedAttention, FusedMLP}
    torch.testing.assert_close(swapped.run([batch()]).loss, plain.run([batch()]).loss, atol=1e-5, rtol=1e-5)


def test_a_loss_kernel_is_picked_once_for_each_dtype(monkeypatch):
    asked, pick = [], operator.pick

    def counted(kernels, request, **forced):
        asked.append(request.dtype)
        return pick(kernels, request, **forced)

    monkeypatch.setattr(operator, "pick", counted)
    step, data = step_of(), batch()
    for _ in range(3):
        step.run([data])
    assert asked == [torch.float32]
    step.precision = Precision("bfloat16", "cpu")
    step.loss(data)
    assert asked == [torch.float32, torch.bfloat16]
    step.model.bind(loss="reference")
    step.loss(data)
    assert len(asked) == 3, "another one was named"

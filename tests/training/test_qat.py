"""A recipe with quantization-aware training: the exported folder has the loss that was trained."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import hasten
from hasten.checkpoints.load import open_checkpoint
from hasten.cli.train import summary
from hasten.errors import ConfigError, HastenError
from hasten.ops.linear import PackedLinear
from hasten.ops.native import library
from hasten.quantization import GPTQ, Int3, Int4, quantize_to_folder
from hasten.quantization.qat import fake_layers, set_bits
from hasten.training.checkpoint_state import find
from hasten.training.evaluate import Validation
from hasten.training.journal import read
from hasten.training.precision import Precision
from hasten.training.qat import bits_of_step, block_eigenvalues
from hasten.training.recipe import Lora, Qat
from hasten.training.session import train
from hasten.training.setup import prepare_data, set_up
from hasten.training.step import TrainStep

CASES = {
    "learned": Qat(bits=4, head="int8"),
    "int4 by row": Qat(bits=4, group_size=0),
    "int8": Qat(bits=8),
    "three bits": Qat(bits=3, group_size=0),
    "three bits of weights alone": Qat(bits=3, group_size=0, activations="float"),
    "two bits": Qat(bits=2, head="same"),
    "moq": Qat(bits=4, learned_scales=False, start_bits=6, period=4, mixing_steps=2, stochastic=True),
}


def dequantized(model):
    """The model with plain layers of the numbers that its packed ones hold, which no kernel rounds."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, PackedLinear):
            plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
            plain.weight = torch.nn.Parameter(layer.dequantize())
            plain.bias = None if layer.bias is None else torch.nn.Parameter(layer.bias.float())
            model.set_submodule(name, plain)
    return model


def wide(recipe, **changes):
    """With widths that have whole groups, the row's 128 too."""
    made = recipe(**changes)
    return replace(made, model=replace(made.model, hidden_size=128, feed_forward=128))


@pytest.mark.filterwarnings("ignore:hasten reads this quantized model; transformers does not")
@pytest.mark.parametrize("name", CASES)
def test_the_folder_has_the_loss_that_was_trained(recipe, name):
    made = wide(recipe, name=name.replace(" ", "-"), qat=CASES[name], export="last")
    result = train(made, progress=False)
    data = prepare_data(made, init=None, progress=False)
    validation = Validation(
        data.validation,
        batch_size=made.data.batch_size,
        sequence_length=made.data.context,
        batches=made.run.validation_batches,
    )
    model = hasten.load(result.model_folder, dtype="stored")
    loss = validation.loss(TrainStep(model, None, Precision("float32", torch.device("cpu"))))
    # Activations that are rounded may fall to the other side of a tie.
    assert loss == pytest.approx(result.validation_loss, abs=2e-4)
    assert set(model.quantization or {}) == kept(CASES[name])
    if CASES[name].bits == 3 and CASES[name].activations == "float":
        loss = validation.loss(TrainStep(dequantized(model), None, Precision("float32", torch.device("cpu"))))
        assert loss == pytest.approx(result.validation_loss, abs=1e-5)
    # Scales, and the embedding where it is not the head, in 16 or 32 bits; this model is small, its headers are not.
    assert max(4, CASES[name].bits) < result.bits_per_weight < 32
    assert f"{result.bits_per_weight:.2f} bits a weight as stored" in summary(result)
    losses = [line["loss"] for line in read(result.folder / "train.jsonl")]
    assert result.validation_loss < losses[0] - 1.0, "it learns"


@pytest.mark.filterwarnings("ignore:hasten reads this quantized model; transformers does not")
@pytest.mark.skipif(library() is None, reason="the native kernels cannot be built here (no C++ compiler)")
@pytest.mark.parametrize("name", ["learned", "int4 by row", "int8"])
def test_trained_and_served_in_bfloat16(recipe, name):
    """Both round their products: trained and served losses are both within 5e-4 nats of the folder's exact one."""
    techniques = replace(wide(recipe).techniques, precision="bfloat16")
    made = replace(wide(recipe, name=name, qat=CASES[name], export="last"), techniques=techniques)
    result = train(made, progress=False)
    data = prepare_data(made, init=None, progress=False)
    rows = made.data.batch_size * made.run.validation_batches  # one at a time, as the fused kernels want them here
    validation = Validation(data.validation, batch_size=1, sequence_length=made.data.context, batches=rows)

    def loss(model, dtype):
        return validation.loss(TrainStep(model, None, Precision(dtype, torch.device("cpu"))))

    exact = loss(hasten.load(result.model_folder, dtype="float32"), "float32")
    served = hasten.fuse(hasten.load(result.model_folder, dtype="bfloat16"))
    assert result.validation_loss == pytest.approx(exact, abs=5e-4)
    assert loss(served, "bfloat16") == pytest.approx(exact, abs=5e-4)


def test_an_adapter_is_rounded_with_the_weights_it_stands_beside(recipe, tmp_path):
    base = train(wide(recipe, name="base", steps=10), progress=False).model_folder
    lora, qat = Lora(rank=4, targets=("q_proj", "down_proj")), Qat(bits=3, activations="float")
    made = recipe(name="both", init=str(base), lora=lora, qat=qat, steps=10, learning_rate=1e-2, export="last")
    setup = set_up(made, progress=False)
    trained = {name.rpartition(".")[2] for name, one in setup.model.named_parameters() if one.requires_grad}
    assert trained == {"a", "b", "scales"}
    result = train(made, progress=False)
    assert result.model_folder.name == "model"
    losses = [line["loss"] for line in read(result.folder / "train.jsonl")]
    assert losses[-1] < losses[0] - 0.1
    data = prepare_data(made, init=base, progress=False)
    rows, count = made.data.batch_size, made.run.validation_batches
    validation = Validation(data.validation, batch_size=rows, sequence_length=made.data.context, batches=count)
    loaded = hasten.load(result.model_folder, dtype="stored")
    loss = validation.loss(TrainStep(loaded, None, Precision("float32", torch.device("cpu"))))
    assert loss == pytest.approx(result.validation_loss, abs=2e-4)
    before = hasten.load(base, dtype="stored").blocks[0].attention
    after = loaded.blocks[0].attention.q.dequantize()
    assert torch.unique(after[0, :32]).numel() <= 8
    exact = validation.loss(TrainStep(dequantized(loaded), None, Precision("float32", torch.device("cpu"))))
    assert exact == pytest.approx(result.validation_loss, abs=1e-5)
    assert not torch.equal(after, before.q.weight.float())
    alone = recipe(name="alone", init=str(base), qat=Qat(bits=4), steps=10, learning_rate=1e-3, export="last")
    rounded = hasten.quantize(
        hasten.load(base, dtype="stored"), Int4(group_size=32, lm_head="none", scale_dtype="bfloat16")
    )
    first = read((result := train(alone, progress=False)).folder / "train.jsonl")[0]["loss"]
    data = prepare_data(alone, init=base, progress=False)
    batch = set_up(alone, progress=False).batches.batch(0)
    step = TrainStep(rounded, None, Precision("float32", torch.device("cpu")))
    assert first == pytest.approx(float(step.loss(batch).detach()) / batch.targets.numel(), abs=2e-4)
    loss = validation.loss(TrainStep(hasten.load(result.model_folder, dtype="stored"), None, step.precision))
    assert loss == pytest.approx(result.validation_loss, abs=2e-4)
    with pytest.raises(ConfigError, match=r"set lora\.dropout 0"):
        replace(made, lora=replace(lora, dropout=0.1)).check()


@pytest.mark.parametrize("bits", [4, 3])
def test_training_begins_with_a_folders_integers(recipe, tmp_path, bits):
    base = train(wide(recipe, name="base", steps=10), progress=False).model_folder
    calibration = torch.randint(
        0, hasten.load(base, dtype="stored").config.vocab_size, (8, 32), generator=torch.Generator().manual_seed(0)
    )
    scheme = (Int4 if bits == 4 else Int3)(group_size=32, lm_head="none", scale_dtype="bfloat16", activations="float")
    folder = tmp_path / "gptq"
    quantize_to_folder(hasten.load(base, dtype="stored"), scheme, folder, method=GPTQ(), calibration=calibration)
    qat = Qat(bits=bits, activations="float", init=str(folder))
    made = wide(recipe, name="begun", init=str(base), qat=qat, steps=3, learning_rate=1e-12, export="last")
    first = read((result := train(made, progress=False)).folder / "train.jsonl")[0]["loss"]
    batch = set_up(made, progress=False).batches.batch(0)
    step = TrainStep(hasten.load(folder, dtype="float32"), None, Precision("float32", torch.device("cpu")))
    assert first == pytest.approx(float(step.loss(batch).detach()) / batch.targets.numel(), abs=2e-5)
    again, before = (open_checkpoint(one).quantized for one in (result.model_folder, folder))
    for name, module in before.modules.items():
        ours, theirs = again.weight(again.modules[name]), before.weight(module)
        assert torch.equal(ours.values, theirs.values)
        assert torch.equal(ours.scales, theirs.scales)
    stored = {file.name: file.read_bytes() for file in base.iterdir()}
    lora = Lora(rank=4, targets=("q_proj",))
    result = train(replace(made, name="adapter", lora=lora, dropout=0.0), progress=False)
    assert read(result.folder / "train.jsonl")[0]["loss"] == pytest.approx(first, abs=1e-2)
    assert {file.name: file.read_bytes() for file in base.iterdir()} == stored, "frozen weights are views of its file"
    for wrong, words in ((base, r"holds no quantized blocks\.0"), (tmp_path / "none", "none")):
        with pytest.raises(HastenError, match=words):
            train(replace(made, name="no", qat=replace(qat, init=str(wrong))), progress=False)
    longer = train(
        replace(made, name="longer", init=None, qat=Qat(), model=replace(made.model, layers=3)), progress=False
    )
    for shorter, other in ((made, longer.model_folder), (replace(made, init=str(longer.model_folder)), folder)):
        with pytest.raises(ConfigError, match=r"holds a llama of . layers, and --init is a llama of ."):
            train(replace(shorter, name="no", qat=replace(qat, init=str(other))), progress=False)
    with pytest.raises(ConfigError, match=r"qat\.init: .*3 bits.*to 4 bits|4 bits.*to 3 bits"):
        train(replace(made, name="no", qat=replace(qat, bits=7 - bits)), progress=False)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.input_layernorm.weight"] *= 1.1  # as by awq
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"qat\.init: .* has another model\.layers\.1\.input_layernorm\.weight"):
        train(replace(made, name="no"), progress=False)
    shutil.rmtree(folder)
    assert train(made, progress=False).steps == 3, "a checkpoint holds what came of it"


@pytest.mark.slow
def test_curvature_stretches_the_periods(recipe):
    """The eigenvalue is the largest of the Hessian that torch differentiates twice."""
    qat = Qat(bits=4, group_size=0, learned_scales=False, start_bits=8, period=3, eigenvalue_steps=60)
    made = wide(
        recipe, name="curved", qat=qat, steps=14, attention="reference", loss="reference", fused_activation=False
    )
    small = replace(made, model=replace(made.model, hidden_size=16, heads=1, feed_forward=16))
    setup = set_up(small, progress=False)
    batch, model = setup.batches.batch(0), setup.model
    set_bits(model, 4, 1.0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = block_eigenvalues(model, batch, 60)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    for block, value in zip(model.blocks, found, strict=True):
        weights = [p for p in block.parameters() if p.dim() == 2]
        step = TrainStep(model, None, Precision("float32", torch.device("cpu")))
        first = torch.autograd.grad(step.loss(batch) / batch.targets.numel(), weights, create_graph=True)
        flat = torch.cat([g.flatten() for g in first])
        units = torch.eye(len(flat)).split(256)  # rows of the Hessian that are differentiated together
        parts = [torch.autograd.grad(flat, weights, one, retain_graph=True, is_grads_batched=True) for one in units]
        hessian = torch.cat([torch.cat([g.flatten(1) for g in part], dim=1) for part in parts])
        assert value == pytest.approx(torch.linalg.eigvalsh(hessian.double()).abs().max().item(), rel=0.05)
    train(small, progress=False)
    stretch = find(Path(small.run.folder) / "curved" / "checkpoints" / "last").progress.stretch
    assert sorted(stretch)[-1] == 5, "the most curved block takes five times as long"
    bits_of_step(model, qat, 3, [1, 5])
    assert [layer.bits for layer in fake_layers(model).values()] == [7] * 7 + [8] * 7


def kept(qat):
    """The layers that a loaded model holds in integers."""
    blocks = {f"blocks.{i}.{n}" for i in range(2) for n in ("attention.q", "attention.k", "attention.v")}
    blocks |= {f"blocks.{i}.{n}" for i in range(2) for n in ("attention.output", "mlp.gate", "mlp.up", "mlp.down")}
    return blocks | ({"head"} if qat.head != "none" else set())


def test_wrong_settings_are_named(recipe):
    for qat, words in (
        (Qat(bits=5), r"qat\.bits is 5"),
        (Qat(bits=4, group_size=48), r"qat\.group_size is 48"),
        (Qat(bits=4, start_bits=8), "--qat.no-learned-scales"),
        (Qat(bits=4, start_bits=4, learned_scales=False), r"qat\.start_bits is 4"),
        (Qat(start_bits=8), r"qat\.start_bits has no effect without qat\.bits; set that too"),
        (Qat(bits=4, stochastic=True), "without learned scales"),
        (Qat(bits=4, period=0), r"qat\.period is 0"),
        (Qat(bits=4, mixing_steps=-1), r"qat\.mixing_steps is -1"),
        (Qat(bits=4, init="folder"), r"qat\.init is a folder that --init was quantized to"),
        (Qat(bits=2, init="folder"), r"give qat\.bits 4 or 3"),
        (Qat(bits=4, head="int9"), r"qat\.head is 'int9'"),
    ):
        with pytest.raises(ConfigError, match=words):
            recipe(qat=qat).check()
    with pytest.raises(ConfigError, match="48 inputs cannot be cut"):
        train(recipe(name="odd", hidden_size=48, heads=3, qat=Qat(bits=4)), progress=False)

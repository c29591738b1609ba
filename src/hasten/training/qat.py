"""Quantization-aware training of a recipe: rounding layers, their start values, and the schedule of their bits."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hasten.checkpoints.load import open_checkpoint
from hasten.data import Batch
from hasten.errors import CheckpointError, ConfigError
from hasten.model.attention import Attention
from hasten.model.families import FAMILIES
from hasten.model.transformer import Transformer
from hasten.quantization.qat import FakeRounding, bits_at, fake_layers, fake_quantize, set_bits
from hasten.training.precision import Precision
from hasten.training.recipe import Qat
from hasten.training.step import TrainStep


def apply_rounding(model: Transformer, qat: Qat, *, begin: bool = True) -> None:
    """Replace linear layers by ones that multiply with their rounded weights. qat.bits must be set.

    begin: start from the integers and scales of `qat.init`, if it is set; False if a checkpoint will be restored.
    Raises ConfigError for a quantized model, and for a `qat.init` that does not fit.
    """
    assert qat.bits is not None
    if model.quantization:
        raise ConfigError(
            "qat.bits rounds plain weights, and these are quantized; set lora.base auto and a plain --init"
        )
    rounding = FakeRounding(
        bits=qat.bits,
        group_size=qat.group_size,
        learned=qat.learned_scales,
        activations=qat.activations,
        stochastic=qat.stochastic,
    )
    fake_quantize(model, rounding, head=qat.head)
    if qat.init is not None and begin and model.device.type != "meta":
        try:
            begin_with(model, qat.init)
        except (CheckpointError, ConfigError) as error:
            raise ConfigError(f"qat.init: {error}") from None


def begin_with(model: Transformer, folder: str) -> None:
    """Start the blocks' rounding layers from the integers and scales of a folder that the model was quantized to.

    Raises ConfigError for a folder that is not quantized, or in another format; CheckpointError as `load` does.
    """
    source = open_checkpoint(folder)
    theirs, own = ((config.family, len(config.layers)) for config in (source.config, model.config))
    if theirs != own:
        raise ConfigError(f"{folder} holds a {theirs[0]} of {theirs[1]} layers, and --init is a {own[0]} of {own[1]}")
    modules = {} if source.quantized is None else source.quantized.modules
    layers = fake_layers(model)
    for ours, piece in FAMILIES[source.config.family].places(source.config):
        name = ours.removesuffix(".weight")
        if not ours.startswith("blocks."):
            continue
        if name not in layers:
            same = piece.name in source.stored and same_numbers(model, ours, piece.of(source.read(piece.name)))
            if not same:  # AWQ of other programs scales weights and, inversely, the norm before them
                raise ConfigError(
                    f"{folder} has another {piece.name} than --init; give what `hasten quantize` made of --init"
                )
            continue
        if source.quantized is None or piece.name not in modules:
            raise ConfigError(f"{folder} holds no quantized {name}; give what `hasten quantize` made of --init")
        part = replace(piece, transposed=False)  # a quantized weight is always (out, in)
        try:
            layers[name].begin_with(source.quantized.weight(modules[piece.name]).map(part.of))
        except ConfigError as error:
            raise ConfigError(f"{folder} does not fit {name}: {error}") from None


def same_numbers(model: Transformer, name: str, other: Tensor) -> bool:
    """Whether a parameter of the model equals another tensor up to the rounding of dtypes."""
    own = model.get_parameter(name).detach()
    return own.shape == other.shape and torch.allclose(own.float(), other.to(own.device).float(), rtol=2**-7, atol=1e-6)


def bits_of_step(model: Transformer, qat: Qat, step: int, stretch: Sequence[int] = ()) -> None:
    """Set the bits that the schedule has in a step (MoQ). stretch: for each block, the factor on its periods."""
    if qat.bits is None or qat.start_bits is None:
        return
    for part, times in ((model, 1), *zip(model.blocks, stretch, strict=False)):
        bits, exact = bits_at(
            step, start=qat.start_bits, target=qat.bits, period=times * qat.period, mixing=qat.mixing_steps
        )
        set_bits(part, bits, exact)


def stretches(model: Transformer, qat: Qat, batch: Batch) -> list[int]:
    """Factors on the blocks' periods: 1 + floor(4λ), λ a block's largest eigenvalue over the largest of all (MoQ).

    Empty without `qat.eigenvalue_steps`.
    """
    if qat.bits is None or not qat.eigenvalue_steps:
        return []
    set_bits(model, qat.bits, 1.0)  # the exact weights only
    found = block_eigenvalues(model, batch, qat.eigenvalue_steps)
    most = max(found) or 1.0
    return [1 + int(4 * value / most) for value in found]


def block_eigenvalues(model: Transformer, batch: Batch, steps: int) -> list[float]:
    """Largest absolute eigenvalue of the loss's Hessian in each block's matrices, by `steps` power iterations.

    The native kernels have no second derivative, so H·v is (g(w + εv) - g(w - εv)) / 2ε, in float32: two passes a step.
    """
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    chosen = [attention.kernels for attention in attentions]
    if model.device.type != "cpu":
        for attention in attentions:  # their kernels were chosen for autocast's dtype
            attention.bind()
    plain = TrainStep(model, None, Precision("float32", model.device))  # type: ignore[arg-type] # it never steps
    batch, found = batch.to(model.device), []

    def size(tensors: list[Tensor]) -> float:
        return float(torch.linalg.vector_norm(torch.stack([t.norm() for t in tensors])))

    for number, block in enumerate(model.blocks):
        weights: list[Tensor] = [p for p in block.parameters() if p.dim() == 2 and p.requires_grad]
        generator, value = torch.Generator().manual_seed(number), 0.0
        v = [torch.randn(w.shape, generator=generator).to(w) for w in weights]
        kept = [w.detach().clone() for w in weights]
        for _ in range(steps):
            far, length, moved = 1e-3 * size(kept), size(v), []
            v = [one / length for one in v] if length else v
            for way in (far, -far):
                with torch.no_grad():
                    torch._foreach_copy_(weights, torch._foreach_add(kept, v, alpha=way))
                moved.append(torch.autograd.grad(plain.loss(batch) / batch.targets.numel(), weights))
            v = [(after - before) / (2 * far) for after, before in zip(*moved, strict=True)]
            value = size(v)
        with torch.no_grad():
            torch._foreach_copy_(weights, kept)
        found.append(value)
    for attention, kernels in zip(attentions, chosen, strict=True):
        attention.kernels = kernels
    return found

"""Quantization-aware training as a recipe asks for it."""

from hasten.errors import ConfigError
from hasten.model.transformer import Transformer
from hasten.quantization.qat import FakeRounding, bits_at, fake_quantize, set_bits
from hasten.training.recipe import Qat


def round_while_training(model: Transformer, qat: Qat) -> None:
    """Technique: linear layers multiply with what their weights will be stored as."""
    if qat.bits is None:
        return
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


def bits_of_step(model: Transformer, qat: Qat, step: int) -> None:
    """Round to as many bits as the schedule has for a step."""
    if qat.bits is not None and qat.start_bits is not None:
        schedule = {"start": qat.start_bits, "target": qat.bits, "period": qat.period, "mixing": qat.mixing_steps}
        set_bits(model, *bits_at(step, **schedule))

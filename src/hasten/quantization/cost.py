"""Prediction of GPTQ's memory."""

import torch
from torch import Tensor

from hasten.model.transformer import Transformer
from hasten.planning.memory import calibration_memory
from hasten.quantization.blocks import at_once
from hasten.quantization.gptq import GPTQ
from hasten.quantization.walk import PASS_TOKENS, computing_dtype

WORKSPACE = 32 << 20  # bytes of cuBLAS's workspace on Hopper; a quarter of it on other GPUs


def predicted_bytes(
    model: Transformer,
    tokens: Tensor,
    method: GPTQ,
    *,
    device: torch.device | None = None,
    spill: bool = False,
) -> int:
    """Bytes beside the checkpoint; if blocks are computed on another device than the model's, all bytes there.

    GPTQ holds 3.25 matrices of a layer's squared width, GPTAQ five, and the inputs of a block's experts.
    """
    device = device or model.device
    moved, size = device != model.device, computing_dtype(model, device).itemsize
    walks = 2 if method.gptaq else 1
    at_work = walks if device.type == "cpu" else 1  # threads compute passes of both walks; a GPU takes turns
    needed = calibration_memory(
        model.config,
        states=tokens.numel() * model.config.hidden_size * size,
        walks=walks,
        step=at_work * min(tokens.numel(), at_once(device) * max(PASS_TOKENS, tokens.shape[1])) * size,
        squares=5 if method.gptaq else 3.25,
        spill=spill or moved,
        moved=moved,
    ).peak
    return needed if device.type == "cpu" else needed + WORKSPACE

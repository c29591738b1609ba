"""The dtype in which a model is loaded to generate, if the caller names none.

checkpoint    where                                                  loaded in
bfloat16      anywhere                                               bfloat16
float32       a CPU whose fused steps can run it                     bfloat16
float32       elsewhere, if bfloat16 products are native             bfloat16, else float32
float16       a CPU whose fused steps can run it, a GPU              float16
float16       another CPU                                            bfloat16, whose products are faster

A quantized checkpoint follows the same rule with its plain tensors (norms, embeddings, biases).
"""

import torch

from hasten.machine import emulated
from hasten.model.config import ModelConfig
from hasten.model.fused_native import native_shape_refusal
from hasten.ops.linear.weights import PLAIN
from hasten.ops.native import obtainable


def runs_fused(config: ModelConfig, device: torch.device) -> bool:
    """Whether the native fused steps of a CPU can run a model of this shape, in 16 bits or quantized."""
    return device.type == "cpu" and native_shape_refusal(config) is None and obtainable("inference")


def inference_dtype(config: ModelConfig, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype to generate in for a checkpoint stored in `stored`."""
    if stored == torch.bfloat16 or (stored == torch.float16 and device.type != "cpu"):
        return stored
    if runs_fused(config, device):
        return stored if stored in PLAIN else torch.bfloat16
    if stored == torch.float16 or emulated(torch.bfloat16, device) is None:
        return torch.bfloat16
    return stored

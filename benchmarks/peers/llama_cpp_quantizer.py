"""llama.cpp's quantizer, called in this process: what it makes of the layers of a model, and what it wants to know."""

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import nn

import hasten
from hasten.checkpoints.gguf.names import place_of
from hasten.data import read_documents
from hasten.model.context import TrainingContext


def llama_cpp(folder: Path, requirement: str) -> ctypes.CDLL:
    """The library inside the `xllamacpp` wheel, which exports llama.cpp's quantizer; pip puts it into the folder."""
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*install, "--target", str(folder), requirement], check=True)
    library = ctypes.CDLL(str(next(folder.glob("xllamacpp/*.so"))))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    pointers, numbers = [ctypes.c_void_p] * 2, [ctypes.c_int64] * 3
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, *pointers, *numbers, ctypes.c_void_p]
    return library


def llama_cpp_type(kind: str, name: str, index: int, blocks: int, width: int) -> gguf.GGMLQuantizationType:
    """The type that llama.cpp's quantizer gives a layer of a block in a file of this kind (`llama_tensor_get_type`)."""
    types = gguf.GGMLQuantizationType
    if kind != "Q4_K_M":
        return types[kind]
    eighth = blocks // 8
    more = index < eighth or index >= 7 * blocks // 8 or (index - eighth) % 3 == 2
    chosen = types.Q6_K if more and name.endswith(("attention.v", "mlp.down")) else types.Q4_K
    if width % 256 == 0:
        return chosen
    return types.Q8_0 if chosen == types.Q6_K else types.Q5_0  # of rows that are no whole blocks of 256


@torch.no_grad()
def by_llama_cpp(model: Any, library: ctypes.CDLL, kind: str) -> float:
    """Replace the weights of the blocks by what llama.cpp makes of them; returns the bits of one."""
    size = count = 0
    for index, block in enumerate(model.blocks):
        for name, layer in block.named_modules():
            if not isinstance(layer, nn.Linear):
                continue
            rows, width = layer.weight.shape
            type = llama_cpp_type(kind, name, index, len(model.blocks), width)
            elements, stored = gguf.GGML_QUANT_SIZES[type]
            weight = np.ascontiguousarray(layer.weight.float().numpy())
            packed = np.empty((rows, width // elements * stored), dtype=np.uint8)
            library.ggml_quantize_chunk(type.value, weight.ctypes.data, packed.ctypes.data, 0, rows, width, None)
            layer.weight.copy_(torch.from_numpy(gguf.quants.dequantize(packed, type)))
            size, count = size + packed.nbytes, count + weight.size
    return 8 * size / count


def save_importance(folder: Path, text: Path, file: Path, samples: int, length: int) -> None:
    """llama.cpp's importance matrix: of each linear layer, the mean square of every input feature."""
    model = hasten.unfuse(hasten.load(folder, dtype="float32"))
    sums: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.startswith("blocks."):
            place = place_of(f"{name}.weight", model.config).name
            module.register_forward_pre_hook(
                lambda _, given, place=place: sums.update(
                    {place: sums.get(place, 0) + given[0].double().pow(2).flatten(0, -2).mean(0)}
                )
            )
        elif name == "norm":  # its output is what the head is given
            head = place_of("embedding.weight" if model.tied else "head.weight", model.config).name
            module.register_forward_hook(
                lambda _, given, out, place=head: sums.update(
                    {place: sums.get(place, 0) + out.double().pow(2).flatten(0, -2).mean(0)}
                )
            )
    documents = list(read_documents(str(text)))
    tokens = hasten.calibration_tokens(model.tokenizer, documents, samples=samples, length=length)
    context = TrainingContext([layer.window for layer in model.config.layers])
    with torch.no_grad():
        for sample in tokens:
            model(sample[None], torch.arange(length)[None], context)
    np.savez(file, **{name: (total / len(tokens)).float().numpy() for name, total in sums.items()})

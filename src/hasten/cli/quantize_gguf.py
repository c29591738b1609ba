"""`hasten quantize --format gguf`: turn a quantized folder into a file, and check the options before any work."""

import os
import shutil
import warnings
from collections.abc import Mapping
from math import prod
from pathlib import Path

from hasten.errors import ConfigError, HastenError, HastenWarning


def place_of_gguf(
    file: Path,
    source: Path,
    *,
    overwrite: bool,
    others: Mapping[str, str | Path | None],
    dtype: str,
    option: str = "--output",
) -> Path:
    """The folder that holds the model until its file is complete.

    source: the model's folder or file. others: options that name further files to write. dtype: the command's --dtype.
    option: the one that names the file. Raises ConfigError for a name without .gguf, for a dtype that the file cannot
    hold, and if something would be overwritten.
    """
    if file.suffix != ".gguf" or file.is_dir():
        raise ConfigError(f"--format gguf writes a file: {option} names one that ends in .gguf; found {file}")
    if dtype == "float32":
        raise ConfigError(
            f"--dtype float32 is not possible in {file}: the plain matrices of a GGUF file are bfloat16 or float16; "
            "choose one of these, or write a folder"
        )
    if file.exists() and file.resolve().is_relative_to(source.resolve()):
        raise ConfigError(f"{option} {file} is the model itself, which would be lost; name another file")
    if file.exists() and not overwrite:
        raise ConfigError(f"{option} {file} is there already; --overwrite replaces it")
    for name, other in others.items():
        if other and file.resolve() == Path(other).resolve():
            raise ConfigError(f"{option} {file} is also where {name} is to be written; name another file")
    folder = file.with_name(f"{file.name}.folder")
    if os.path.lexists(folder):
        raise ConfigError(
            f"{folder}, which would hold the model until its file is written, is there already. If an earlier run left "
            f"it, hasten export {folder} {file} writes the file; else move it away"
        )
    return folder


def folder_to_gguf(folder: Path, file: Path) -> float:
    """Write a folder as a GGUF file and remove the folder; returns the bits per weight of the whole file.

    If that fails the folder stays, and the error names it.
    """
    from hasten.checkpoints.gguf.header import read_gguf
    from hasten.checkpoints.gguf.write import write_gguf
    from hasten.checkpoints.load import load

    try:
        model = load(folder, dtype="stored")
        write_gguf(model, file)
    except HastenError as error:
        raise type(error)(f"{error}. The model is in {folder}: hasten export {folder} {file}") from None
    del model
    try:
        shutil.rmtree(folder)
    except OSError as error:
        warnings.warn(f"{folder} is no longer needed and cannot be removed: {error}", HastenWarning, stacklevel=2)
    tensors = read_gguf(file).tensors.values()
    return 8 * sum(tensor.bytes for tensor in tensors) / sum(prod(tensor.shape) for tensor in tensors)

"""`hasten.quantize`: quantize a loaded model's linear layers one after the other, in place or into a folder."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hasten.checkpoints.advice import export_plain
from hasten.checkpoints.export import Quantized, check_layers, export_model
from hasten.errors import ConfigError, HastenWarning
from hasten.model.fused import fuse, is_fused, refusal, take_apart
from hasten.model.layer_format import LayerFormat
from hasten.model.transformer import Transformer, require_model
from hasten.ops.linear import QuantizedWeight
from hasten.quantization.block_task import BlockResult, served
from hasten.quantization.calibration import check_calibration
from hasten.quantization.gptq import GPTQ
from hasten.quantization.report import LayerReport, compare
from hasten.quantization.resume import WorkFolder
from hasten.quantization.rounding import Search, round_weight
from hasten.quantization.schemes import Scheme, units_of
from hasten.quantization.sequential import quantize_blocks

Report = Callable[[LayerReport], None]


@torch.no_grad()
def quantize(
    model: Transformer,
    scheme: Scheme,
    *,
    method: GPTQ | None = None,
    calibration: Tensor | None = None,
    report: Report | None = None,
) -> Transformer:
    """Quantize a model for inference, in place; returns the same model.

    method: None rounds to nearest. GPTQ(...) uses `calibration`, int64 tokens (samples, length) as
    `calibration_tokens` and `own_text` make them, and adapts each block to the outputs of the quantized ones before it.

    Each layer's original weight is freed as soon as its packed form is there (with GPTQ, block by block), so the peak
    is about one layer above the model. An lm_head tied to the embedding stays one matrix with it. `report` is called
    after each layer (and costs a comparison of each). Weights of 3 and 2 bits are held as int4.

    Rounding to nearest skips layers that are quantized already, with a warning. Raises ConfigError if all of them are
    (with GPTQ: any), or if weights hold NaN or infinity. A fused model is unfused, and fused again if this fails.
    """
    with taken_apart(model, fuse_after=False):
        formats = check_quantizable(model, scheme, method, partly=method is None)
        tied = model.tied
        done: dict[str, LayerFormat] = dict(model.quantization or {})
        for name, weight in _weights(model, scheme, formats, method, calibration, report):
            old: Any = model.get_submodule(name)
            layer = served(weight, old, getattr(old, "bias", None), formats[name], model.compute_dtype)
            model.set_submodule(name, layer)
            if name == "head" and tied:
                model.tie()
            del old, weight
            # Updated layer by layer, so that it is true of a half-quantized model after an interruption.
            done[name] = formats[name]
            model.stored_types.pop(name, None)
            model.quantization = dict(done)
        if "head" in formats and not tied:  # the config may have said otherwise
            model.config = replace(model.config, tie_embeddings=False)
    return model


def _weights(
    model: Transformer,
    scheme: Scheme,
    formats: dict[str, LayerFormat],
    method: GPTQ | None,
    calibration: Tensor | None,
    report: Report | None,
) -> Iterator[tuple[str, QuantizedWeight]]:
    if method is None:
        for name, layer in formats.items():
            yield name, round_layer(model, name, layer, scheme.search, report)
        return
    tokens = check_calibration(calibration, model.config.vocab_size, model.config.max_positions)
    for result in quantize_blocks(model, formats, tokens, method, search=scheme.search):
        _report_all(result, report)
        yield from result.weights.items()
    if "embedding" in formats:
        yield "embedding", round_layer(model, "embedding", formats["embedding"], scheme.search, report)


def _report_all(result: BlockResult, report: Report | None) -> None:
    for one in result.reports:
        if report is not None:
            report(one)


@torch.no_grad()
def quantize_to_folder(
    model: Transformer,
    scheme: Scheme,
    folder: str | Path,
    *,
    method: GPTQ | None = None,
    calibration: Tensor | None = None,
    report: Report | None = None,
    spill: bool = False,
    format: str = "compressed-tensors",
    device: torch.device | None = None,
) -> None:
    """Write `model` quantized, as a folder of the layout `format` (see `export_model`); it is not changed.

    Works from file to file, layer by layer: a loaded model's weights are mapped from its files, so the peak is the
    input's pages and about one layer (the largest: often the lm_head). With GPTQ, finished blocks are kept beside the
    folder (its name and ".partial") until all are done, and the same call continues there after an interruption.
    spill: keep the samples' states there too, in mapped files instead of memory.

    device: where one block or layer at a time is computed: a GPU can quantize a model that is too large for it.

    method, calibration: as in `quantize`. `report` is called for each layer. The folder is written whole or not at
    all. Raises ConfigError as `quantize` does, CheckpointError if the folder cannot be written.
    """
    with taken_apart(model):
        folder, formats = Path(folder), check_quantizable(model, scheme, method)
        check_layers(model, formats, format)

        def weight(name: str) -> QuantizedWeight:
            return round_layer(model, name, formats[name], scheme.search, report, device=device)

        if method is None:
            export_model(model, folder, quantized=Quantized(formats, weight), format=format)
            return
        tokens = check_calibration(calibration, model.config.vocab_size, model.config.max_positions)
        with WorkFolder.open(folder, model, tokens, formats, repr((scheme, method))) as work:
            spilled = work.path if spill else None
            results = quantize_blocks(
                model, formats, tokens, method, search=scheme.search, saved=work, spill=spilled, device=device
            )
            for index, result in enumerate(results):
                work.keep(index, result)
                _report_all(result, report)

            def finished(name: str) -> QuantizedWeight:
                return weight(name) if name == "embedding" else work.weight(name)

            export_model(model, folder, quantized=Quantized(formats, finished), format=format)


def check_quantizable(
    model: Transformer, scheme: Scheme, method: GPTQ | None = None, *, partly: bool = False
) -> dict[str, LayerFormat]:
    """The formats of the layers that the scheme quantizes.

    partly: layers that are quantized already are skipped, with a warning. Raises ConfigError if the scheme or the
    method is not one, or the model cannot be quantized.
    """
    require_model(model, "hasten.quantize")
    if model.quantization is not None and not partly:
        raise already_quantized(model)
    if method is not None and not isinstance(method, GPTQ):
        found = f"the class {method.__name__}" if isinstance(method, type) else type(method).__name__
        raise ConfigError(f"the method is hasten.GPTQ(...), or None to round to nearest; found {found}")
    if not isinstance(scheme, Scheme):
        raise ConfigError(f"a scheme is hasten.Int8(...) or hasten.Int4(...); found {type(scheme).__name__}")
    asked, plain = scheme.layers(model), nn.Linear | nn.Embedding
    formats = {name: layer for name, layer in asked.items() if isinstance(model.get_submodule(name), plain)}
    if model.quantization and not formats:
        raise already_quantized(model)
    if model.quantization:
        text = f"{len(model.quantization)} layers are quantized already, and stay as they are"
        warnings.warn(text, HastenWarning, stacklevel=3)
    mixed = [
        names
        for names in units_of(formats).values()
        if len({formats[name] for name in names}) > 1 and ".experts." not in names[0]
    ]
    if mixed:
        more = "" if len(mixed) == 1 else f" (and {len(mixed) - 1} more such groups)"
        layers = f"{', '.join(mixed[0])}{more}"
        text = f"{layers} have different formats: on a GPU the model runs without the fused steps, slower"
        warnings.warn(text, HastenWarning, stacklevel=3)
    return formats


@contextmanager
def taken_apart(model: Transformer, *, fuse_after: bool = True) -> Iterator[None]:
    """Unfuse a fused model, and fuse it again at the end: after an error, or unless `fuse_after` is False.

    A model that an error left half quantized stays unfused if its layers cannot be fused.
    """
    require_model(model, "hasten.quantize")
    fused = is_fused(model, any)
    if fused:
        take_apart(model)
    failed = True
    try:
        yield
        failed = False
    finally:
        if fused and (failed or fuse_after) and refusal(model) is None:
            fuse(model)


def already_quantized(model: Transformer) -> ConfigError:
    """The error for a model that is quantized already."""
    name, layer = next(iter((model.quantization or {}).items()))
    return ConfigError(
        f"{len(model.quantization or {})} layers of this model are quantized already, such as {name} ({layer.weight}): "
        f"quantize the original checkpoint, or the plain weights that {export_plain(model.origin)} writes"
    )


def round_layer(
    model: Transformer,
    name: str,
    layer: LayerFormat,
    search: Search,
    report: Report | None = None,
    *,
    device: torch.device | None = None,
) -> QuantizedWeight:
    """Round a layer to nearest and report it; an error names the layer. device: where it is computed."""
    linear = model.get_submodule(name)
    assert isinstance(linear, nn.Linear | nn.Embedding)
    weight = linear.weight.detach().to(device)
    try:
        quantized = round_weight(weight, layer.weight, search=search)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    if report is not None:
        report(compare(name, weight, quantized, layer))
    return quantized.map(lambda tensor: tensor.to(linear.weight.device))

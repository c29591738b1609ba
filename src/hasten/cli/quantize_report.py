"""The result of `hasten quantize`: a row for each layer, and a summary by kind of layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hasten.model.transformer import Transformer
    from hasten.ops.linear.weights import WeightFormat
    from hasten.quantization import LayerReport


def bits_per_weight(model: Transformer, reports: list[LayerReport]) -> float:
    """Bits per weight of everything that is stored, embeddings and norms included."""
    from hasten.quantization.report import stored_weights

    quantized = {f"{report.name}.weight": 8 * report.bytes_after for report in reports}
    weights = stored_weights(model)
    bits = sum(quantized.get(name, 8 * weight.nbytes) for name, weight in weights.items())
    return bits / sum(weight.numel() for weight in weights.values())


def plain_embedding(model: Transformer, reports: list[LayerReport], stored: int) -> list[str]:
    """A line about an embedding that stays as it was, where that is a quarter or more of the bytes that are stored."""
    from hasten.quantization.report import stored_weights

    weight = stored_weights(model).get("embedding.weight")
    if weight is None or 4 * weight.nbytes < stored or any(report.name == "embedding" for report in reports):
        return []
    dtype = str(weight.dtype).removeprefix("torch.")
    size = f"{weight.nbytes / 1e9:.3f} of the {stored / 1e9:.3f} GB"
    return [f"the embedding stays in {dtype}, {size}; --embedding int8 rounds it too, which transformers does not read"]


def row(report: LayerReport) -> dict[str, Any]:
    """A layer's report as JSON."""
    return {
        "name": report.name,
        "bits": report.format.weight.bits,
        "group_size": report.format.weight.group_size,
        "relative_error": report.relative_error,
        "bytes_before": report.bytes_before,
        "bytes": report.bytes_after,
        "output_error": report.output_error,
        "rtn_output_error": report.nearest_output_error,
        "note": report.note,
    }


def summary(result: dict[str, Any], reports: list[LayerReport]) -> list[str]:
    """Lines of text: the errors by kind of layer (the same layer of all blocks), then sizes and time."""
    kinds: dict[tuple[str, WeightFormat], list[LayerReport]] = {}
    for report in reports:
        kind = ".".join(part for part in report.name.split(".")[1:] if not part.isdigit()) or report.name
        kinds.setdefault((kind, report.format.weight), []).append(report)
    calibrated = any(report.output_error is not None for report in reports)
    outputs = "   output error: rtn   method" if calibrated else ""
    lines = [f"{'layers':<24} {'bits':>4} {'group':>6} {'count':>6}   relative error: mean   largest{outputs}"]
    for (kind, format), found in kinds.items():
        errors = [report.relative_error for report in found]
        mean, most = sum(errors) / len(errors), max(errors)
        line = f"{kind:<24} {format.bits:>4} {format.group_size or 'row':>6} {len(found):>6} {mean:>22.4%} {most:>9.4%}"
        pairs = [(r.nearest_output_error, r.output_error) for r in found if r.output_error is not None]
        if pairs:
            nearest, own = (sum(part or 0.0 for part in column) / len(pairs) for column in zip(*pairs, strict=True))
            line += f" {nearest:>19.4%} {own:>8.4%}"
        lines.append(line)
    lines += [f"{report.name}: {report.note}" for report in reports if report.note]
    if result["method"].get("gptaq"):
        lines.append(
            "gptaq aims at the original model's outputs; its output error is that of exact weights on its inputs"
        )
    memory = f"peak memory {result['peak_memory_bytes'] / 1e9:.2f} GB"
    if "predicted_memory_bytes" in result:
        memory += f" ({result['predicted_memory_bytes'] / 1e9:.2f} predicted)"
    before, after = result["bytes_before"], result["bytes"]
    lines.append(
        f"{result['output']}: {before / 1e9:.3f} GB -> {after / 1e9:.3f} GB in {result['seconds']:.1f} s, "
        f"{result['bits_per_weight']:.2f} bits per weight, {memory}"
    )
    return lines

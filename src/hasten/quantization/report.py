"""The error and the bytes of quantized layers, as numbers and as a picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hasten.errors import ResourceError
from hasten.machine.files import replacing
from hasten.model.layer_format import LayerFormat
from hasten.model.transformer import Transformer
from hasten.ops.linear.weights import QuantizedWeight
from hasten.quantization.blocks import each_block, root_of_shares


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport:
    """One quantized layer.

    relative_error: root mean square of the rounding error over that of the weight. output_error: the same for the
    layer's outputs on the calibration samples; nearest_output_error: if it were rounded to nearest (both None without
    calibration). bytes_before, bytes_after: of the weight's numbers, scales and zeros (4 bits are half a byte). note:
    anything unusual.
    """

    name: str
    format: LayerFormat
    relative_error: float
    bytes_before: int
    bytes_after: int
    output_error: float | None = None
    nearest_output_error: float | None = None
    note: str = ""


def compare(name: str, weight: Tensor, quantized: QuantizedWeight, layer: LayerFormat) -> LayerReport:
    """Report the error of a quantized weight."""
    return LayerReport(
        name=name,
        format=layer,
        relative_error=relative_error(weight.detach(), quantized),
        bytes_before=weight.nbytes,
        bytes_after=stored_bytes(quantized),
    )


def stored_bytes(quantized: QuantizedWeight) -> int:
    """Bytes of a weight's numbers, scales and zeros; 4 bits are half a byte."""
    zeros = 0 if quantized.zeros is None else quantized.zeros.numel()
    return (quantized.values.numel() + zeros) * quantized.format.bits // 8 + quantized.scales.nbytes


def stored_weights(model: Transformer) -> dict[str, Tensor]:
    """All parameters by name; a matrix that is both head and embedding has the head's name."""
    weights: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    if model.tied:
        weights.pop("embedding.weight", None)
    return weights


def relative_error(weight: Tensor, quantized: QuantizedWeight) -> float:
    """Root mean square of the rounding error of a weight (N, K) over that of the weight; 0 for a weight of zeros."""

    def work(rows: slice) -> tuple[float, float]:
        exact = weight[rows].float()
        wrong = torch.linalg.vector_norm(quantized.rows(rows).dequantize() - exact)
        return float(wrong) ** 2, float(torch.linalg.vector_norm(exact)) ** 2

    return root_of_shares(each_block(weight, work))


def draw_errors(reports: Sequence[LayerReport], method: str, file: Path) -> None:
    """Draw a PNG: for each kind of layer the relative error of its outputs in every block, by rtn and by the method.

    Raises ResourceError if it cannot be written.
    """
    from matplotlib.figure import Figure

    kinds: dict[str, list[LayerReport]] = {}
    for report in reports:
        if report.output_error is not None:
            kinds.setdefault(".".join(part for part in report.name.split(".") if not part.isdigit()), []).append(report)
    columns = min(4, max(1, len(kinds)))
    rows = max(1, -(-len(kinds) // columns))
    figure = Figure(figsize=(3.2 * columns, 2.6 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for axis, (kind, found) in zip(axes.flat, kinds.items(), strict=False):
        axis.plot([report.nearest_output_error for report in found], "o-", label="rtn", color="#999999", markersize=3)
        axis.plot([report.output_error for report in found], "o-", label=method, color="#1f6fb4", markersize=3)
        axis.set_title(kind.removeprefix("blocks."), fontsize=9)
        axis.set_ylim(bottom=0)
        axis.yaxis.set_major_formatter("{x:.0%}")
        axis.legend(fontsize=7)
    for axis in axes.flat[len(kinds) :]:
        axis.axis("off")
    figure.supxlabel("block", fontsize=9)
    figure.supylabel("relative error of the outputs", fontsize=9)
    try:
        with replacing(file) as temporary:
            figure.savefig(temporary, dpi=120, format="png")
    except OSError as error:
        raise ResourceError(f"cannot write picture {file}: {error.strerror}") from error

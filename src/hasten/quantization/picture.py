"""The errors of a quantized model's layers, drawn."""

from collections.abc import Sequence
from pathlib import Path

from hasten.quantization.report import LayerReport


def draw_errors(reports: Sequence[LayerReport], method: str, file: Path) -> None:
    """A PNG: for each kind of layer the relative error of its outputs, block by block, of rtn and of the method."""
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
    figure.savefig(file, dpi=120)

"""Draws the parts of a profiled training step in the order in which they run: docs/timeline.png.

    python docs/draw_timeline.py [FILE]

The times are those of benchmarks/results/profile-demo-train.json, which `hasten profile train demo` measured.
"""

import json
import sys
from pathlib import Path

from matplotlib.axes import Axes

from hasten.measure.draw import BAR, BAR_FIRST, GRID, INK, LINES, picture

RESULT = Path(__file__).parents[1] / "benchmarks" / "results" / "profile-demo-train.json"
BLOCK = (  # parts of a block in the order of its forward pass; what a module computes itself is named after it
    ("attention_norm", "norm"),
    ("attention.project", "product"),
    ("attention.itself", "attention"),
    ("attention.output", "product"),
    ("mlp_norm", "norm"),
    ("mlp.gate", "product"),
    ("mlp.up", "product"),
    ("mlp.itself", "other"),
    ("mlp.down", "product"),
)
COLORS = {"product": BAR, "attention": LINES[1], "norm": LINES[2], "update": LINES[3], "other": BAR_FIRST}
NAMES = {"product": "matrix products", "norm": "norms", "update": "optimizer"}  # where they differ


class Lanes:
    """Boxes in three lanes, which grow to the right: of the step, of its modules, and of their parts."""

    def __init__(self, axes: Axes) -> None:
        self.axes, self.now = axes, 0.0

    def box(self, lane: int, begin: float, color: str, text: str = "", ink: str = INK) -> None:
        """A box from `begin` until now."""
        width = self.now - begin
        self.axes.barh(lane, width, 0.82, left=begin, color=color, edgecolor="white", linewidth=0.7)
        if width > 1.35 * len(text):
            self.axes.text(begin + width / 2, lane, text, ha="center", va="center", fontsize=8.5, color=ink)

    def part(self, seconds: float, kind: str) -> None:
        begin, self.now = self.now, self.now + 1e3 * seconds
        self.box(2, begin, COLORS[kind])


def draw_step(lanes: Lanes, rows: dict[str, dict[str, float]]) -> None:
    """The forward pass, the backward pass, whose parts come in reverse, and the update."""
    blocks = sorted({name.split(".")[2] for name in rows if name.startswith("model.blocks.")}, key=int)
    modules = [("", "embedding", [("model.embedding", "other")])]
    modules += [("block", one, [(f"model.blocks.{one}.{part}", kind) for part, kind in BLOCK]) for one in blocks]
    modules += [("", "head and loss", [("model.norm", "norm"), ("model.head", "product")])]
    for phase, order in (("forward", 1), ("backward", -1)):
        begun = lanes.now
        for before, name, parts in modules[::order]:
            begin = lanes.now
            for part, kind in parts[::order]:
                lanes.part(rows[part][phase], kind)
            lanes.box(1, begin, GRID, f"{before} {name}".strip())
        lanes.box(0, begun, GRID, f"{phase} pass")
    begin = lanes.now
    lanes.part(rows["update"]["forward"], "update")
    lanes.box(0, begin, GRID, "update")


def draw(path: Path) -> None:
    phase = json.loads(RESULT.read_text())["phases"][0]
    rows = {row["name"]: row for row in phase["rows"]}
    with picture(path, title="Timeline of a training step", size=(10.4, 2.7)) as figure:
        axes = figure.subplots()
        lanes = Lanes(axes)
        draw_step(lanes, rows)
        axes.set_yticks([0, 1, 2], ["step", "modules", "parts"], fontsize=9, color=INK)
        axes.set(xlim=(0, lanes.now), ylim=(2.5, -0.5), xlabel="ms")
        axes.grid(visible=False)
        axes.set_frame_on(False)
        for kind, color in COLORS.items():
            axes.barh(0, 0, color=color, label=NAMES.get(kind, kind))
        figure.legend(loc="outside lower left", ncols=5, fontsize=8.5)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "timeline.png")

"""Draws which tiles of the scores FlashAttention computes: docs/flash-attention.png.

    python docs/draw_flash.py [FILE]

A tile is drawn as seen whole where every query in it sees every key in it.
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle

TILE, SIZE = 4, 24  # queries or keys of a tile; keys of the drawn sequence
SEEN, EDGE, SKIPPED, INK, SOFT = "#2f6f9f", "#a9c6dc", "#f3f5f7", "#1c2733", "#66717d"
PANELS = (
    ("causal: 21 of 36 tiles, 6 with a mask", 24, None),
    ("a window of 8", 24, 8),
    ("the last 14 queries: aligned bottom right", 14, None),
)


def seen(queries: int, window: int | None) -> np.ndarray:
    """bool (queries, SIZE): which keys a query sees; the last query is at the position of the last key."""
    behind = np.arange(queries)[:, None] + SIZE - queries - np.arange(SIZE)
    return (behind >= 0) & (behind < (window or SIZE))


def draw(path: Path) -> None:
    figure = Figure(figsize=(10.4, 4.35), dpi=150, facecolor="white")
    for i, (title, queries, window) in enumerate(PANELS):
        axes = figure.add_axes((0.035 + 0.325 * i, 0.14, 0.295, 0.8))
        mask = seen(queries, window)
        for row in range(0, queries, TILE):
            for column in range(0, SIZE, TILE):
                part = mask[row : row + TILE, column : column + TILE]
                color = SEEN if part.all() else EDGE if part.any() else SKIPPED
                axes.add_patch(Rectangle((column, row), TILE, len(part), facecolor=color, edgecolor="white", lw=2))
        for row, column in zip(*np.nonzero(mask), strict=True):  # each score that counts
            axes.plot(column + 0.5, row + 0.5, ".", color="white", markersize=2.2)
        axes.set_xlim(0, SIZE)
        axes.set_ylim(SIZE, 0)
        axes.set_aspect("equal")
        axes.set_xticks([])
        axes.set_yticks([])
        for side in axes.spines.values():
            side.set_visible(False)
        axes.set_title(title, fontsize=10.5, color=INK, loc="left")
        axes.set_xlabel("keys", fontsize=9, color=SOFT, loc="left")
        axes.set_ylabel("queries", fontsize=9, color=SOFT, loc="top")
        if i == 0:
            arrow = {"arrowstyle": "-|>", "mutation_scale": 12, "color": INK, "lw": 1.2}
            axes.add_patch(FancyArrowPatch((0.4, 4 * TILE + 2), (5 * TILE - 0.4, 4 * TILE + 2), **arrow))
    legend = [Patch(color=SEEN), Patch(color=EDGE), Patch(facecolor=SKIPPED, edgecolor="#d5dae0")]
    names = ["seen whole: no mask", "at an edge: masked", "never visited"]
    figure.legend(legend, names, loc="lower left", bbox_to_anchor=(0.03, 0.0), ncols=3, frameon=False, fontsize=9)
    note = "arrow: one program of the forward pass; dots: the scores that count"
    figure.text(0.985, 0.04, note, ha="right", fontsize=9, color=SOFT)
    figure.savefig(path)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "flash-attention.png")

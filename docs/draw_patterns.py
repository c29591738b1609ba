"""Draws which blocks of keys each sparse attention pattern sees: docs/patterns.png.

    python docs/draw_patterns.py [FILE]

The masks are those of `hasten.ops.attention.patterns`, which the kernels compute with.
"""

import sys
from pathlib import Path

from matplotlib.colors import ListedColormap

from hasten.measure.draw import BAR, GRID, SOFT, picture
from hasten.ops.attention.patterns import (
    Atrous,
    BigBird,
    BSLongformer,
    Causal,
    Fixed,
    Local,
    SlidingWindow,
    Strided,
    Variable,
)

BLOCKS = 16
PATTERNS = (
    ("Causal()", Causal()),
    ("Local(radius=2)", Local(radius=2)),
    ("SlidingWindow(window=7)", SlidingWindow(window=7)),
    ("Atrous(stride=4)", Atrous(stride=4)),
    ("Strided(radius=1, stride=4)", Strided(radius=1, stride=4)),
    ("Fixed(local_blocks=4)", Fixed(local_blocks=4)),
    ("Variable(windows=(1, 2, 4))", Variable(windows=(1, 2, 4))),
    ("BSLongformer(window=5)", BSLongformer(window=5)),
    ("BigBird(random_blocks=2)", BigBird(random_blocks=2)),
    ("BigBird(causal=False)", BigBird(causal=False)),
)


def draw(path: Path) -> None:
    with picture(path, title="", size=(11, 5.1)) as figure:
        for axes, (name, pattern) in zip(figure.subplots(2, 5).flat, PATTERNS, strict=True):
            layout = pattern.layout(BLOCKS)
            seen = [[2 if sign == "1" else 1 for sign in row] for row in layout.strings()]
            if layout.causal:  # what no causal pattern can see
                seen = [[value if j <= i else 0 for j, value in enumerate(row)] for i, row in enumerate(seen)]
            axes.pcolormesh(seen, cmap=ListedColormap(["white", GRID, BAR]), vmin=0, vmax=2, edgecolors="white", lw=1)
            axes.set(aspect="equal", xticks=[], yticks=[], ylim=(BLOCKS, 0))
            axes.set_frame_on(False)
            axes.set_title(f"{name}\n{layout.density:.0%} of the blocks", fontsize=8.5)
        figure.axes[5].set_xlabel("blocks of keys", fontsize=8, color=SOFT, loc="left")
        figure.axes[5].set_ylabel("blocks of queries", fontsize=8, color=SOFT, loc="top")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "patterns.png")

"""Draws how two samples share blocks and part at their first write: docs/paging.png.

    python docs/draw_paging.py [FILE]

The tables are those of `hasten.engine.blocks.BlockManager`, which is driven here as the engine drives it.
"""

import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from hasten.engine.blocks import BlockManager

BLOCKS, SIZE = 6, 4
PROMPT = ["the", "cat", "sat", "on", "the", "mat", "and"]
SAMPLES = {1: ["slept", "all", "day"], 2: ["purred", "for", "us"]}
SHARED, OWN, FREE, INK, SOFT = "#2f6f9f", {1: "#a9c6dc", 2: "#f2c894"}, "#f3f5f7", "#1c2733", "#66717d"


class Story:
    """Two samples of one prompt: where each token lies, and who refers to each block."""

    def __init__(self) -> None:
        self.manager = BlockManager(blocks=BLOCKS, block_size=SIZE)
        self.words: dict[int, list[str]] = {}  # block -> what is written in it
        self.said: dict[int, list[str]] = {}

    def write(self, sequence: int, words: list[str]) -> list[tuple[int, int]]:
        start = len(self.said[sequence])
        self.said[sequence] = self.said[sequence] + words
        copies = self.manager.reserve(sequence, len(self.said[sequence]))
        for source, target in copies:
            self.words[target] = list(self.words[source])
        table = self.manager.block_table(sequence)
        for place, word in enumerate(words, start):
            block = self.words.setdefault(table[place // SIZE], [])
            del block[place % SIZE :]
            block.append(word)
        self.manager.written(sequence, [hash(word) % 997 for word in self.said[sequence]])
        self.manager.computed()
        return copies

    def tell(self) -> list[tuple[str, dict[int, list[int]], dict[int, list[str]], list[tuple[int, int]]]]:
        """(title, tables, contents, copies) of each panel."""
        panels = []

        def panel(title: str, copies: list[tuple[int, int]]) -> None:
            tables = {s: self.manager.block_table(s) for s in self.said}
            self.manager.check()
            panels.append((title, tables, {b: list(w) for b, w in self.words.items()}, copies))

        self.manager.begin(1, [])
        self.said[1] = []
        self.write(1, PROMPT)
        self.manager.fork(1, 2)
        self.said[2] = list(PROMPT)
        panel("1. The prompt is computed once; a fork shares its blocks", [])
        copies = [pair for s, words in SAMPLES.items() for pair in self.write(s, words[:1])]
        panel("2. The first write to a shared block copies that block only", copies)
        for s, words in SAMPLES.items():
            self.write(s, words[1:])
        panel("3. Each goes on in blocks of its own; the full one stays shared", [])
        return panels


def draw(path: Path) -> None:
    figure = Figure(figsize=(10.4, 5.6), dpi=150, facecolor="white")
    for row, (title, tables, words, copies) in enumerate(Story().tell()):
        axes = figure.add_axes((0.02, 0.685 - 0.325 * row, 0.96, 0.295))
        axes.set_xlim(0, 104)
        axes.set_ylim(0, 30)
        axes.axis("off")
        axes.text(0, 28.6, title, fontsize=10.5, color=INK, va="top")
        users: dict[int, list[int]] = {}
        for sequence, table in tables.items():
            for block in table:
                users.setdefault(block, []).append(sequence)
        for block in range(BLOCKS):
            draw_block(axes, block, words.get(block, []) if block in users else [], users.get(block, []))
        for line, (sequence, table) in enumerate(tables.items()):
            text = f"sample {sequence}:  " + "  ".join(str(block) for block in table)
            axes.text(0, 17 - 8 * line, text, fontsize=10, color=INK, va="center", family="monospace")
        for source, target in copies:
            start, end = (centre(block) for block in (source, target))
            arrow = {"arrowstyle": "-|>", "color": INK, "lw": 1.2, "connectionstyle": "arc3,rad=-0.25"}
            axes.annotate("", xy=(end, 20.5), xytext=(start, 20.5), arrowprops=arrow)
            axes.text((start + end) / 2, 24.6, "copied", fontsize=8.5, color=INK, ha="center")
    legend = [Rectangle((0, 0), 1, 1, color=color) for color in (SHARED, OWN[1], OWN[2], FREE)]
    names = ["two references", "sample 1 only", "sample 2 only", "free"]
    figure.legend(legend, names, loc="lower left", bbox_to_anchor=(0.01, -0.015), ncols=4, frameon=False, fontsize=9)
    figure.savefig(path)


def centre(block: int) -> float:
    return 30 + 12.4 * block + 5.7


def draw_block(axes: Any, block: int, words: list[str], users: list[int]) -> None:
    color = FREE if not users else SHARED if len(users) > 1 else OWN[users[0]]
    left = 30 + 12.4 * block
    axes.add_patch(Rectangle((left, 1), 11.4, 19, facecolor=color, edgecolor="#d5dae0"))
    axes.text(
        left + 10.9, 18.6, str(block), fontsize=8, ha="right", va="top", color="white" if len(users) > 1 else SOFT
    )
    for i, word in enumerate(words):
        axes.text(left + 0.8, 17.2 - 4.6 * i, word, fontsize=8.5, va="center", color="white" if len(users) > 1 else INK)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "paging.png")

"""Real text that every machine has: Python's standard library, as tokens of words, spaces and signs."""

import re
import sysconfig
from collections import Counter
from pathlib import Path

import torch

PIECES = re.compile(r"\w+|[^\S\n]+|\n+|[^\w\s]")


def tokens(vocab: int, limit: int = 40_000_000) -> torch.Tensor:
    """The library's .py files in order of their names, int64; the rarest words are token 0. limit: characters."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    parts, size = [], 0
    for path in sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).as_posix()):
        if "site-packages" in path.parts or "dist-packages" in path.parts:
            continue
        parts.append(path.read_text(encoding="utf-8", errors="replace"))
        size += len(parts[-1])
        if size >= limit:
            break
    pieces = PIECES.findall("\n".join(parts))
    counts = sorted(Counter(pieces).items(), key=lambda item: (-item[1], item[0]))
    numbers = {piece: index + 1 for index, (piece, _) in enumerate(counts[: vocab - 1])}
    return torch.tensor([numbers.get(piece, 0) for piece in pieces])


def batches(text: torch.Tensor, steps: int, rows: int, length: int) -> torch.Tensor:
    """(steps, rows, length) windows of the text, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(text) - length, (steps, rows, 1), generator=generator)
    return text[starts + torch.arange(length)]

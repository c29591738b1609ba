"""How often a draft model's token is the target's when both draw with the same noise, and when each draws with its own.

    python benchmarks/shared_noise.py --model runs/code-45m/model --draft runs/code-4m/model \\
        --output benchmarks/results/shared-noise.json

Both read the same held-out files. At every place each draws a token from its own probabilities, `--draws` times. Beside
it stands what min(1, p/q) accepts, the most that any rule can: the sum of min(p, q).
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedNoise:
    """Draw, and count."""

    model: Path
    """The target's folder."""

    draft: Path
    """A smaller model of the same vocabulary."""

    recipe: str = "code-25m"
    """The target's recipe: it says which files are held out."""

    files: int = 12
    tokens: int = 456
    draws: int = 8
    temperatures: tuple[float, ...] = (0.4, 0.8, 1.0)

    output: Path | None = None
    """Where to write the JSON; the rows are printed in any case."""

    def run(self) -> None:
        from drafted_ways import beginnings, load, scores

        from hasten.machine import configure, describe
        from hasten.machine.files import write_json

        configure(threads="auto", seed=None)
        models = [load(self.model, None), load(self.draft, None)]
        texts = beginnings(models[0], self.recipe, self.files, self.tokens)
        places = [[scores(model, text) for model in models] for text in texts]
        rows = []
        for temperature in self.temperatures:
            found = [self.agreement(target / temperature, draft / temperature) for target, draft in places]
            row = {"temperature": temperature} | {name: mean(one[name] for one in found) for name in found[0]}
            rows.append(row)
            print({name: round(value, 3) for name, value in row.items()}, flush=True)
        if self.output is not None:
            result = {"schema": 1, "machine": describe().to_json(), "model": self.model.parts[-2:]}
            result |= {"draft": self.draft.parts[-2:], "places": self.files * self.tokens, "draws": self.draws}
            write_json(self.output, result | {"rows": rows})

    def agreement(self, target: Any, draft: Any) -> dict[str, float]:
        """Scores of both (T, V) -> the shares of places where both have the same token."""
        import torch

        from hasten.ops.draw import draw

        steps = torch.arange(len(target))

        def tokens(logits: Any, seed: int) -> Any:
            return draw(logits, torch.full((len(logits),), seed), steps)

        drawn = [tokens(target, seed) for seed in range(self.draws)]
        both = [
            mean(float((one == tokens(draft, seed + off)).float().mean()) for seed, one in enumerate(drawn))
            for off in (0, self.draws)
        ]
        p, q = target.softmax(-1), draft.softmax(-1)
        return {"same_noise": both[0], "own_noise": both[1], "distribution": float(p.minimum(q).sum(-1).mean())}


if __name__ == "__main__":
    import tyro

    tyro.cli(SharedNoise).run()

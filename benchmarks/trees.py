"""Would trees of candidates pay? What a draft model's second and third choices add, against what their rows cost.

    python benchmarks/trees.py --model runs/code-45m/model --draft runs/code-4m/model \\
        --output benchmarks/results/trees.json

The target goes on from held-out files, greedily. At every place the draft's candidates are ranked, and it is counted
how often the r-th is the target's token. From these shares and the measured costs follows the best speed that a chain
of one candidate a place, and a tree of several, can have: a node of a tree counts with the product of the shares on its
path, and costs a row; each level of it costs a pass of the draft.
"""

import heapq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Trees:
    """Measure the shares, and compute."""

    model: Path
    """The target's folder."""

    draft: Path
    """A smaller model of the same vocabulary."""

    recipe: str = "code-25m"
    """The target's recipe: it says which files are held out."""

    prompts: int = 12
    prompt_tokens: int = 200
    new_tokens: int = 256
    most_rows: int = 32
    weights: tuple[str, ...] = ("bfloat16", "int8", "int4")
    """Of the target."""

    output: Path | None = None
    """Where to write the JSON; the rows are printed in any case."""

    def run(self) -> None:
        from drafted_ways import load

        from hasten.bench.step_seconds import step_seconds
        from hasten.engine.given_texts import GivenTexts
        from hasten.machine import configure, describe
        from hasten.machine.files import write_json

        configure(threads="auto", seed=None)
        shares, draft, rows = self.shares(), load(self.draft, None), []
        context = self.prompt_tokens + self.new_tokens // 2

        def seconds_of(model: Any, most: int) -> dict[int, float]:
            decoder = GivenTexts(model, batch=1, capacity=context + most)
            return step_seconds(decoder, range(1, most + 1), context, seconds=1.0)

        pass_of_draft = seconds_of(draft, 1)[1]
        for weights in self.weights:
            steps = seconds_of(load(self.model, None if weights == "bfloat16" else weights), self.most_rows)
            one = steps[1]
            row: dict[str, Any] = {"weights": weights, "draft_pass_over_step": pass_of_draft / one}
            for shape, ranks in (("chain", 1), ("tree", RANKS)):
                best = (1.0, 0, 0)
                for depth in range(1, 17):
                    for nodes, tokens in enumerate(expected(shares[:ranks], depth, self.most_rows), 1):
                        seconds = steps[1 + nodes] + depth * pass_of_draft
                        best = max(best, (tokens * one / seconds, nodes, depth))
                row[shape] = dict(zip(("ratio", "nodes", "depth"), best, strict=True))
            rows.append(row)
            print(row, flush=True)
        if self.output is not None:
            result = {"schema": 1, "machine": describe().to_json(), "shares": shares, "rows": rows}
            write_json(self.output, result | {"tokens": self.prompts * self.new_tokens})

    def shares(self) -> list[float]:
        """How often the target's token is the draft's first, second, … candidate."""
        import torch
        from drafted_ways import beginnings, generated, load, scores

        import hasten

        model = load(self.model, None)
        prompts = beginnings(model, self.recipe, self.prompts, self.prompt_tokens)
        settings = {"temperature": 0.0, "seed": 0, "max_new_tokens": self.new_tokens}
        texts, _ = generated(model, {"none": "none"}, prompts, settings)["none"]
        draft, counts, total = hasten.load(self.draft, dtype="bfloat16"), [0] * RANKS, 0
        for prompt, text in zip(prompts, texts, strict=True):
            logits = scores(draft, prompt + text)[len(prompt) - 1 : -1]
            hits = logits.topk(RANKS).indices == torch.tensor(text)[:, None]
            counts = [count + int(hit) for count, hit in zip(counts, hits.sum(0), strict=True)]
            total += len(text)
        print("shares by rank", [round(count / total, 3) for count in counts], flush=True)
        return [count / total for count in counts]


def expected(shares: list[float], depth: int, most: int) -> list[float]:
    """Tokens of a pass with the best tree of 1, 2, … nodes of at most this depth: the likeliest nodes, one by one."""
    tokens, found = 1.0, []
    waiting = [(-share, 1) for share in shares]
    heapq.heapify(waiting)
    while waiting and len(found) < most - 1:
        chance, level = heapq.heappop(waiting)
        tokens -= chance
        found.append(tokens)
        if level < depth:
            for share in shares:
                heapq.heappush(waiting, (chance * share, level + 1))
    return found


if __name__ == "__main__":
    import tyro

    tyro.cli(Trees).run()

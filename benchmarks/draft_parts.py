"""What drafts are made of: rows of one sequence, drawn tokens, shared noise, and trees of candidates.

    python benchmarks/draft_parts.py rows --output benchmarks/results/rows.json
    benchmarks/as_avx2.sh python benchmarks/draft_parts.py rows --output benchmarks/results/rows-avx2.json
    python benchmarks/draft_parts.py draws --output benchmarks/results/draws.json
    python benchmarks/draft_parts.py noise --model runs/code-45m/model --draft runs/code-4m/model \\
        --output benchmarks/results/shared-noise.json
    python benchmarks/draft_parts.py trees --model runs/code-45m/model --draft runs/code-4m/model \\
        --output benchmarks/results/trees.json

What drafts give as a whole: speculation.py.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from drafted_ways import beginnings, generated, load, scores

import hasten
from hasten.bench.step_seconds import step_seconds
from hasten.engine.given_texts import GivenTexts
from hasten.engine.params import SamplingParams
from hasten.engine.sampling import RowParams, next_tokens
from hasten.machine import configure
from hasten.machine.measure import product
from hasten.machine.precision import emulated
from hasten.measure.script import Report, Script, Table, TimedScript, main, markdown
from hasten.measure.timing import interleaved, median_ratio
from hasten.model.families import read_config
from hasten.model.fused import fuse_where_it_fits
from hasten.model.initialize import initialize
from hasten.ops import draw
from hasten.ops.draw import draw as draw_tokens
from hasten.ops.native import choose_isa
from hasten.planning.cost import parameters
from hasten.planning.shapes import SHAPES

FORMATS = ("bf16", "int8", "int4 g128", "int4 g32")


@dataclass(frozen=True, kw_only=True)
class RowCosts(TimedScript):
    """What several rows of one sequence cost beside one, as when drafts are checked: whole steps of a shape.

    The bound of R rows is the larger of one row's time and the operations of R rows (two for each weight) over the rate
    of PyTorch's product of 512 rows. `of_bound_with_attention` counts attention's operations too, in the dtype that it
    has: four for each key of a head and element of it.
    """

    result = "rows"
    shape: str = "llama-1.1b"
    layers: int = 22
    """Layers of the shape."""
    context: int = 544
    """Tokens of the sequence before the rows."""
    rows: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    formats: tuple[str, ...] = FORMATS

    def measure(self) -> Report:
        with torch.inference_mode():
            return {"isa": choose_isa(), "rows": self.costs()}

    def costs(self) -> list[dict[str, Any]]:
        """Every format with every number of rows."""
        plain = "bfloat16" if emulated("bfloat16", "cpu") is None else "float32"
        dtypes = {name: plain if name == "bf16" else "int8" for name in self.formats}
        calls: dict[Any, Callable[[], object]] = {}
        for name in self.formats:
            weights, seen, steps = self.steps(name)
            calls |= {(name, rows): step for rows, step in steps.items()}
        size = (512, 5632, 2048)
        calls |= {dtype: product(dtype, *size, "cpu") for dtype in {plain, *dtypes.values()}}
        times = interleaved(calls, self.rounds)
        found = []
        for name in self.formats:
            own, attention = (
                [seconds / (2 * size[0] * size[1] * size[2]) for seconds in times[dtype]]
                for dtype in (dtypes[name], plain)
            )
            for rows in self.rows:
                ones = times[name, 1]
                each = list(zip(ones, own, attention, strict=True))
                bounds = [max(1.0, 2 * rows * weights * o / s) for s, o, _ in each]
                both = [max(1.0, rows * (2 * weights * o + seen * a) / s) for s, o, a in each]
                ratios = [seconds / one for seconds, one in zip(times[name, rows], ones, strict=True)]
                found.append(
                    {
                        "format": name,
                        "rows": rows,
                        "seconds": median(times[name, rows]),
                        "giga_operations_per_second": 1e-9 / median(own),
                        "of_one_row": median(ratios),
                        "bound_of_one_row": median(bounds),
                        "of_bound": median(r / b for r, b in zip(ratios, bounds, strict=True)),
                        "of_bound_with_attention": median(r / b for r, b in zip(ratios, both, strict=True)),
                    }
                )
        return found

    def steps(self, name: str) -> tuple[int, int, dict[int, Callable[[], object]]]:
        """Multiplied weights of a model in this format, a row's operations of attention, and steps by their rows."""
        model = fused_shape(self.shape, name, layers=self.layers)
        config = model.config
        seen = 4 * self.context * config.heads * config.head_dim * self.layers
        return parameters(config).active, seen, steps_of(model, self.context, self.rows)


def fused_shape(shape: str, name: str, *, layers: int | None = None) -> Any:
    """A shape with random weights in one of `FORMATS`, fused where native kernels are."""
    config = read_config(SHAPES[shape] | ({} if layers is None else {"num_hidden_layers": layers}))
    model: Any = initialize(config, seed=0, dtype=torch.bfloat16).eval()
    if name != "bf16":
        scheme = hasten.Int8() if name == "int8" else hasten.Int4(group_size=int(name.removeprefix("int4 g")))
        hasten.quantize(model, scheme)
    return fuse_where_it_fits(model)


def steps_of(model: Any, context: int, counts: Sequence[int]) -> dict[int, Callable[[], object]]:
    """Steps of each number of rows of one sequence, after `context` tokens."""
    decoder = GivenTexts(model, batch=1, capacity=context + max(counts))
    decoder.prefill([[token % model.config.vocab_size for token in range(3, 3 + context)]])

    def step(rows: int) -> Callable[[], object]:
        def call() -> None:
            decoder.truncate(context)
            decoder.verify([list(range(5, 5 + rows))])

        return call

    return {rows: step(rows) for rows in counts}


FILTERS: dict[str, dict[str, Any]] = {"none": {}, "top-p 0.95": {"top_p": 0.95}, "top-k 50": {"top_k": 50}}
LIBRARIES = ("native", "none")


@dataclass(frozen=True, kw_only=True)
class Draws(TimedScript):
    """What drawing tokens costs: rows of logits to tokens at temperature 0.8, natively and by PyTorch's operators.

    The two take turns. Logits are a normal distribution's times 3 with a few tokens above, as after a text.
    """

    result = "draws"
    rows: tuple[int, ...] = (1, 8, 32)
    vocabularies: tuple[int, ...] = (32_000, 152_000)

    def measure(self) -> Report:
        cases = list(itertools.product(self.vocabularies, FILTERS, self.rows))
        calls = {(*case, library): self.call(*case, library) for case in cases for library in LIBRARIES}
        times, found = interleaved(calls, self.rounds), []
        for vocabulary, name, rows in cases:
            own, other = (times[vocabulary, name, rows, library] for library in LIBRARIES)
            row = {"vocabulary": vocabulary, "filter": name, "rows": rows, "seconds": median(own)}
            found.append(row | {"pytorch_seconds": median(other), "ratio": median_ratio(other, own)})
        return {"rows": found}

    def call(self, vocabulary: int, name: str, rows: int, library: str) -> Callable[[], object]:
        """Draws with other noise in each call."""
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(rows, vocabulary, generator=generator) * 3
        logits[:, :20] += torch.linspace(16, 8, 20)
        params = RowParams.stack(
            [SamplingParams(temperature=0.8, seed=1, **FILTERS[name])] * rows, vocab_size=vocabulary
        )
        steps, native = torch.arange(rows), draw.operator.library

        def call() -> None:
            draw.operator.library = native if library == "native" else lambda: None
            steps.add_(rows)
            next_tokens(logits, params, steps=steps)
            draw.operator.library = native

        return call


@dataclass(frozen=True, kw_only=True)
class SharedNoise(Script):
    """How often a draft model's token is the target's when both draw with the same noise, and with noise of their own.

    Both read the same held-out files. At every place each draws a token from its own probabilities, `--draws` times.
    `distribution` is what min(1, p/q) accepts, the most that any rule can: the sum of min(p, q).
    """

    result = "shared-noise"
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

    def measure(self) -> Report:
        configure(threads="auto", seed=None)
        models = [load(self.model, None), load(self.draft, None)]
        texts = beginnings(models[0], self.recipe, self.files, self.tokens)
        places = [[scores(model, text) for model in models] for text in texts]
        rows = []
        for temperature in self.temperatures:
            found = [self.agreement(target / temperature, draft / temperature) for target, draft in places]
            rows.append({"temperature": temperature} | {name: mean(one[name] for one in found) for name in found[0]})
        what = {"model": self.model.parts[-2:], "draft": self.draft.parts[-2:], "draws": self.draws}
        return what | {"places": self.files * self.tokens, "rows": rows}

    def agreement(self, target: Any, draft: Any) -> dict[str, float]:
        """Scores of both (T, V) -> the shares of places where both have the same token."""
        steps = torch.arange(len(target))

        def tokens(logits: Any, seed: int) -> Any:
            return draw_tokens(logits, torch.full((len(logits),), seed), steps)

        drawn = [tokens(target, seed) for seed in range(self.draws)]
        both = [
            mean(float((one == tokens(draft, seed + off)).float().mean()) for seed, one in enumerate(drawn))
            for off in (0, self.draws)
        ]
        p, q = target.softmax(-1), draft.softmax(-1)
        return {"same_noise": both[0], "own_noise": both[1], "distribution": float(p.minimum(q).sum(-1).mean())}


RANKS = 4


@dataclass(frozen=True, kw_only=True)
class Trees(Script):
    """Would trees of candidates pay? What a draft model's second and third choices add, against what their rows cost.

    The target goes on from held-out files, greedily. At every place the draft's candidates are ranked, and it is
    counted how often the r-th is the target's token. From these shares and the measured costs follows the best speed
    that a chain of one candidate a place, and a tree of several, can have: a node of a tree counts with the product of
    the shares on its path, and costs a row; each level of it costs a pass of the draft.
    """

    result = "trees"
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
    """Formats of the target."""

    def measure(self) -> Report:
        configure(threads="auto", seed=None)
        shares, draft, rows = self.shares(), load(self.draft, None), []
        context = self.prompt_tokens + self.new_tokens // 2

        def seconds_of(model: Any, most: int) -> dict[int, float]:
            decoder = GivenTexts(model, batch=1, capacity=context + most)
            return step_seconds(decoder, range(1, most + 1), context, seconds=1.0)

        pass_of_draft = seconds_of(draft, 1)[1]
        for weights in self.weights:
            steps = seconds_of(load(self.model, None if weights == "bfloat16" else weights), self.most_rows)
            row: dict[str, Any] = {"weights": weights, "draft_pass_over_step": pass_of_draft / steps[1]}
            for shape, ranks in (("chain", 1), ("tree", RANKS)):
                best = (1.0, 0, 0)
                for depth in range(1, 17):
                    for nodes, tokens in enumerate(expected(shares[:ranks], depth, self.most_rows), 1):
                        seconds = steps[1 + nodes] + depth * pass_of_draft
                        best = max(best, (tokens * steps[1] / seconds, nodes, depth))
                row[shape] = dict(zip(("ratio", "nodes", "depth"), best, strict=True))
            rows.append(row)
        return {"shares": shares, "rows": rows, "tokens": self.prompts * self.new_tokens}

    def shares(self) -> list[float]:
        """How often the target's token is the draft's first, second, … candidate."""
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


def row_table(report: Report) -> str:
    """`draft_parts.py rows`: several rows beside one, the bound, and 8 rows as a share of it."""
    found = {(one["format"], one["rows"]): one for one in report["rows"]}
    counts = [count for count in (2, 4, 6, 8) if any(one["rows"] == count for one in report["rows"])]
    body = []
    for name in dict.fromkeys(one["format"] for one in report["rows"]):
        last = found[name, counts[-1]]
        cells = [name, f"{found[name, 1]['seconds'] * 1e3:.1f} ms"]
        cells += [f"{found[name, count]['of_one_row']:.2f}×" for count in counts]
        body.append([*cells, f"{last['bound_of_one_row']:.2f}×", f"{last['of_bound']:.2f}"])
        body[-1].append(f"{last['of_bound_with_attention']:.2f}")
    head = ["weights", "1 row", *(f"{count} rows" for count in counts)]
    return markdown([*head, f"bound of {counts[-1]}", "measured / bound", "with attention's operations"], body)


def draw_table(report: Report) -> str:
    """`draft_parts.py draws`."""
    body = []
    for one in report["rows"]:
        cells = [f"{one['vocabulary']:,}", one["filter"], str(one["rows"]), f"{one['pytorch_seconds'] * 1e3:.2f} ms"]
        body.append([*cells, f"{one['seconds'] * 1e3:.2f} ms", f"{one['ratio']:.1f}×"])
    return markdown(["vocabulary", "filter", "rows", "PyTorch's operators", "native", "ratio"], body, left=2)


def tree_table(report: Report) -> str:
    """`draft_parts.py trees`: the best chain and the best tree of candidates, by the shares and the costs."""
    body = [
        [one["weights"], *(f"{one[kind]['ratio']:.2f}× ({one[kind]['nodes']} tokens)" for kind in ("chain", "tree"))]
        for one in report["rows"]
    ]
    return markdown(["weights", "chain", "tree"], body)


def noise_table(report: Report) -> str:
    """`draft_parts.py noise`: how often both have the same token."""
    kinds = ("own_noise", "same_noise", "distribution")
    body = [[f"{one['temperature']}", *(f"{one[kind]:.0%}" for kind in kinds)] for one in report["rows"]]
    return markdown(["temperature", "each its own noise", "the same noise", "min(1, p/q)"], body)


TABLES: dict[str, Table] = {
    **dict.fromkeys(("rows", "rows-avx2"), row_table),
    "draws": draw_table,
    "shared-noise": noise_table,
    "trees": tree_table,
}


if __name__ == "__main__":
    main({"rows": RowCosts, "draws": Draws, "noise": SharedNoise, "trees": Trees}, TABLES)

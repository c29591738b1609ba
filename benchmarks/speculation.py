"""What drafts give on real text: tokens a second with each proposer over those without, in interleaved rounds.

    python benchmarks/speculation.py --model runs/code-45m/model --draft runs/code-4m/model \\
        --output benchmarks/results/speculation.json --picture benchmarks/results/speculation.png
    python benchmarks/speculation.py --model smollm2-135m --parts kinds --weights bfloat16 file --own-layers 10 \\
        --prompts 2 --prompt-tokens 150 --new-tokens 96 --rounds 2 --output benchmarks/results/speculation-real.json

- `kinds`: a published model goes on from pieces of `hasten.data.book.texts`: a book, a chat, code, German; greedy and
  at temperature 0.8. A GGUF file is measured as it is ("file") and dequantized (the other weights).
- `texts`: the model goes on from the beginnings of held-out files, greedy and at temperature 0.8, with weights in
  bfloat16, int8 and int4. Every answer is checked to be the one without drafts.
- `edits`: a file as it was stands in the prompt, and the model is made to write it as it is after a commit of this
  repository (the output is given, so what is measured is checking and proposing). Eight files, always the same.
- `many`: 1, 4, 16 and 32 requests at once in the engine, of eight files at least.
Every figure is the median over rounds of a ratio formed within a round.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from drafted_ways import EDITS, beginnings, changed, generated, load, losses, pieces, served, written

import hasten
from hasten.bench.models import folder_name
from hasten.data.book import texts

USELESS = "useless model"
AGAIN = {"none again": "none"}  # what the ratios' medians are worth
WEIGHTS = {"bfloat16": None, "int8": "int8", "int4": "int4", "file": "file"}
TEMPERATURES = 0.0, 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Measure drafts for a model."""

    model: str
    """The target: a folder, a GGUF file or a short name."""

    draft: Path | None = None
    """A smaller model of the same vocabulary."""

    recipe: str = "code-25m"
    """The target's recipe: it says which files are held out."""

    parts: tuple[str, ...] = ("texts", "edits", "many")
    """What to measure."""

    weights: tuple[str, ...] = ("bfloat16", "int8", "int4")
    """Of the target; also file, a GGUF file's own."""

    own_layers: int | None = None
    """Draft with so many first layers of the target, too."""

    prompts: int = 8
    """Files."""

    prompt_tokens: int = 200
    """Of each that are given."""

    new_tokens: int = 256
    """That follow."""

    streams: tuple[int, ...] = (1, 4, 16, 32)
    """Requests at once."""

    rounds: int = 5
    """Every contestant once in each."""

    seed: int = 0
    """Of the draws."""

    output: Path | None = None
    """Where to write the JSON, in which other weights' rows of the same settings stay; a line a figure is printed."""

    picture: Path | None = None
    """Where to draw speed against acceptance."""

    def run(self) -> None:
        from hasten.machine import configure, describe
        from hasten.machine.files import write_json

        configure(threads="auto", seed=None)
        report: dict[str, Any] = {"schema": 1, "machine": describe().to_json(), "settings": self.settings()}
        kept = []
        if self.output is not None and self.output.exists():
            before = json.loads(self.output.read_text())
            if before["settings"] == json.loads(json.dumps(report["settings"])):  # which has no tuples
                kept = [row for row in before["rows"] if row["weights"] not in self.weights]
        rows = [*kept, *(row for weights in self.weights for row in self.of(weights))]
        rows.sort(key=lambda row: list(WEIGHTS).index(row["weights"]))
        if set(self.parts) != {"kinds"}:
            report["held_out_loss"] = losses(self.model, self.draft, self.recipe)
        report["rows"] = rows
        if self.output is not None:
            write_json(self.output, report)
        if self.picture is not None:
            draw(report, self.picture)

    def settings(self) -> dict[str, Any]:
        """All but where things lie, and the weights, which each row names."""
        found = {name: value for name, value in asdict(self).items() if not isinstance(value, Path | None)}
        found.pop("weights")
        return found | {
            "model": folder_name(self.model).removesuffix("/model"),
            "draft": self.draft and self.draft.parent.name,
        }

    def of(self, weights: str) -> list[dict[str, Any]]:
        """The rows of one format of the target's weights."""
        model, drafts = load(self.model, WEIGHTS[weights]), {"none": "none", "suffix": "suffix"}
        if self.draft is not None:
            drafts["draft model"] = load(self.draft, "int8")  # it need not be exact, and is read from memory each time
            drafts[USELESS] = useless(drafts["draft model"])  # what drafts may lose
        if self.own_layers is not None:
            own = f"self:{self.own_layers}-layers"
            drafts[own] = own
        if weights in ("bfloat16", "int8"):
            drafts["self:int4"] = load(self.model, "int4")
        rows = []
        for part in self.parts:
            for row in getattr(self, part)(model, drafts):
                row = {"part": part, "weights": weights, **row}
                shown = {name: value for name, value in row.items() if not isinstance(value, list)}
                print(*(f"{n} {v:.3f}" if isinstance(v, float) else v for n, v in shown.items()), flush=True)
                rows.append(row)
        return rows

    def kinds(self, model: Any, drafts: dict[str, Any]) -> list[dict[str, Any]]:
        """Short texts of several kinds, gone on with."""
        rows = []
        for kind, text in texts().items():
            prompts = pieces(model, text, self.prompts, self.prompt_tokens)
            rows += [{"kind": kind, **row} for row in self.continued(model, drafts, prompts)]
        return rows

    def texts(self, model: Any, drafts: dict[str, Any]) -> list[dict[str, Any]]:
        """Held-out files, gone on with."""
        prompts = beginnings(model, self.recipe, self.prompts, self.prompt_tokens)
        return self.continued(model, drafts | AGAIN, prompts)

    def continued(self, model: Any, drafts: dict[str, Any], prompts: list[list[int]]) -> list[dict[str, Any]]:
        """Prompts gone on with, at each temperature."""
        rows = []
        for temperature in TEMPERATURES:
            settings = {"temperature": temperature, "seed": self.seed, "max_new_tokens": self.new_tokens}

            def measure(some: dict[str, Any], settings: dict[str, Any] = settings) -> Any:
                return generated(model, some, prompts, settings)

            found = contest(self.rounds, drafts, measure)
            rows += [{"temperature": temperature, **row} for row in found]
        return rows

    def edits(self, model: Any, drafts: dict[str, Any]) -> list[dict[str, Any]]:
        """Files that commits changed, written anew as they are after it."""
        pairs = changed(model, EDITS)
        chosen = {name: draft for name, draft in drafts.items() if name in ("none", "suffix")}
        size = {"files": len(pairs), "tokens": sum(len(output) for _, output in pairs)}

        def measure(some: dict[str, Any]) -> Any:
            return {name: written(model, draft, pairs) for name, draft in some.items()}

        return [size | row for row in contest(self.rounds, chosen, measure)]

    def many(self, model: Any, drafts: dict[str, Any]) -> list[dict[str, Any]]:
        """Requests that come together."""
        rows = []
        for count in self.streams:
            # A few requests are soon answered, and drafts are good for some texts only: eight files at least.
            prompts = beginnings(model, self.recipe, max(8, count), self.prompt_tokens)
            batches = [prompts[at : at + count] for at in range(0, len(prompts), count)]
            found = contest(
                self.rounds, drafts | AGAIN, lambda some, b=batches: served(model, some, b, self.new_tokens)
            )
            rows += [{"streams": count, **row} for row in found]
        return rows


def useless(model: Any) -> Any:
    """A model of the same shape whose weights are random."""
    from hasten.model.fused import fuse_where_it_fits
    from hasten.model.initialize import initialize

    random = hasten.quantize(initialize(model.config, seed=0, dtype=torch.bfloat16).eval(), hasten.Int8())
    return fuse_where_it_fits(random)


def contest(rounds: int, drafts: dict[str, Any], measure: Any) -> list[dict[str, Any]]:
    """Each draft once in each round, in changing order; medians of what it gives over "none" of the same round."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in drafts}
    texts: dict[str, Any] = {}
    names = list(drafts)
    for number in range(rounds + 1):
        order = names if number % 2 else names[::-1]
        for name, (text, result) in measure({name: drafts[name] for name in order}).items():
            texts.setdefault("none", text)
            if text != texts["none"]:
                raise SystemExit(f"with {name} the text is another one")
            if number:  # the first warms up
                found[name].append(result)
    rows = []
    for name, results in found.items():
        pairs = zip(results, found["none"], strict=True)
        ratios = [own["tokens_per_second"] / base["tokens_per_second"] for own, base in pairs]
        middle = {key: median(result[key] for result in results) for key in results[0]}
        rows.append({"draft": name, "ratio": median(ratios), "ratios": ratios, **middle})
    return rows


def draw(report: dict[str, Any], path: Path) -> None:
    """Speed against the tokens of a pass, measured and as timed steps predict it."""
    from hasten.measure.draw import LINES, curve_axes
    from hasten.measure.table import machine_line

    rows = [row for row in report["rows"] if row["part"] == "texts" and "predicted_ratio" in row]
    with curve_axes(
        path,
        title="Speculative decoding: speed over plain decoding",
        subtitle=machine_line(report["machine"]),
        x_label="mean acceptance length: tokens of a pass of the model",
        y_label="times as fast; line: predicted from timed steps",
    ) as axes:
        for color, weights in zip(LINES, dict.fromkeys(row["weights"] for row in rows), strict=False):
            own = sorted((r for r in rows if r["weights"] == weights), key=lambda r: r["tokens_per_pass"])
            at = [row["tokens_per_pass"] for row in own]
            axes.plot(at, [row["predicted_ratio"] for row in own], color=color, linewidth=1.2)
            greedy, drawn = ([r for r in own if bool(r["temperature"]) is hot] for hot in (False, True))
            for some, fill, label in ((greedy, color, weights), (drawn, "white", f"{weights}, temperature 0.8")):
                points = [(row["tokens_per_pass"], row["ratio"]) for row in some]
                axes.plot(*zip(*points, strict=True), "o", color=color, markerfacecolor=fill, label=label)
            for row in greedy:
                if row["tokens_per_pass"] > 1.1:
                    at = row["tokens_per_pass"], row["ratio"]
                    axes.annotate(row["draft"], at, fontsize=7, xytext=(5, -3), textcoords="offset points")
        axes.axhline(1, color="#66717d", linewidth=0.8, linestyle=":")


if __name__ == "__main__":
    import tyro

    tyro.cli(Speculation).run()

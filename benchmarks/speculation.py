"""What drafts give on real text: tokens a second with each proposer over those without, in interleaved rounds.

    python benchmarks/speculation.py drafts --model runs/code-45m/model --draft runs/code-4m/model \\
        --output benchmarks/results/speculation.json --picture benchmarks/results/speculation.png
    python benchmarks/speculation.py drafts --model smollm2-135m --parts kinds --weights bfloat16 file \\
        --own-layers 10 --prompts 2 --prompt-tokens 150 --new-tokens 96 --rounds 2 \\
        --output benchmarks/results/speculation-real.json
    python benchmarks/speculation.py llama-cpp --model runs/code-45m/model --draft runs/code-4m/model \\
        --binary llama.cpp/build/bin/llama-speculative-simple --output benchmarks/results/llama-cpp-drafts.json

Every figure is the median over rounds of a ratio formed within a round.
"""

import json
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from drafted_ways import (
    EDITS,
    beginnings,
    changed,
    contest,
    generated,
    load,
    losses,
    pieces,
    repeated,
    served,
    useless,
    written,
)

import hasten
from hasten.bench.models import folder_name
from hasten.checkpoints.gguf.write import write_gguf
from hasten.data import book
from hasten.machine import configure, describe
from hasten.measure.draw import LINES, curve_axes
from hasten.measure.script import Report, Script, Table, main, markdown
from hasten.measure.table import machine_line

USELESS = "useless model"
AGAIN = {"none again": "none"}  # what the ratios' medians are worth
WEIGHTS = {"bfloat16": None, "int8": "int8", "int4": "int4", "file": "file"}
TEMPERATURES = 0.0, 0.8


@dataclass(frozen=True, kw_only=True)
class Speculation(Script):
    """Measure drafts for a model.

    - `kinds`: a published model goes on from pieces of `hasten.data.book.texts`: a book, a chat, code, German; greedy
      and at temperature 0.8. A GGUF file is measured as it is ("file") and dequantized (the other weights).
    - `texts`: the model goes on from the beginnings of held-out files, greedy and at temperature 0.8, with weights in
      bfloat16, int8 and int4. Every answer is checked to be the one without drafts.
    - `edits`: a file as it was is in the prompt, and the model is made to write it as it is after a commit of this
      repository (the output is given, so what is measured is checking and proposing). Eight files, always the same.
    - `many`: 1, 4, 16 and 32 requests at once in the engine, of eight files at least.

    In an output of the same settings other weights' rows stay.
    """

    result = "speculation"
    model: str
    """The target: a folder, a GGUF file or a short name."""
    draft: Path | None = None
    """A smaller model of the same vocabulary."""
    recipe: str = "code-25m"
    """The target's recipe: it says which files are held out."""
    parts: tuple[str, ...] = ("texts", "edits", "many")
    """What to measure."""
    weights: tuple[str, ...] = ("bfloat16", "int8", "int4")
    """Formats of the target; also file, a GGUF file's own."""
    own_layers: int | None = None
    """Draft with this many first layers of the target, too."""
    prompts: int = 8
    """Files."""
    prompt_tokens: int = 200
    """Tokens given of each file."""
    new_tokens: int = 256
    """That follow."""
    streams: tuple[int, ...] = (1, 4, 16, 32)
    """Requests at once."""
    rounds: int = 5
    """Every contestant once in each."""
    seed: int = 0
    """Seed of the draws."""
    picture: Path | None = None
    """Where to draw speed against acceptance."""

    def measure(self) -> Report:
        configure(threads="auto", seed=None)
        settings, before, kept = self.settings(), self.before(), list[dict[str, Any]]()
        if before.get("settings") == settings:
            kept = [row for row in before["rows"] if row["weights"] not in self.weights]
        rows = [*kept, *(row for weights in self.weights for row in self.of(weights))]
        rows.sort(key=lambda row: list(WEIGHTS).index(row["weights"]))
        found: Report = {"settings": settings, "rows": rows}
        if set(self.parts) != {"kinds"}:
            found["held_out_loss"] = losses(self.model, self.draft, self.recipe)
        if self.picture is not None:
            draw_speeds(found | {"machine": describe().to_json()}, self.picture)
        return found

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
        for kind, text in book.texts().items():
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
        """Files that commits changed, written again as they are after it."""
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


def draw_speeds(report: dict[str, Any], path: Path) -> None:
    """Speed against the tokens of a pass, measured and as timed steps predict it."""
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


TYPES = {"bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
SPEED = re.compile(r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds")
KEPT = ("tokens_per_second", "acceptance", "repeated_16_grams")  # of ours
TRIES = 3  # it sometimes ends before its last lines are written
TAKEN = re.compile(r"n_(drafted|accept)\s*= (\d+)")


@dataclass(frozen=True, kw_only=True)
class LlamaCppDrafts(Script):
    """Drafts in llama.cpp beside ours: the same pair, the same beginnings of held-out files, greedy.

    The models are exported to GGUF files. llama.cpp proposes as many tokens as `--spec-draft-n-max` says: each of
    `lengths` is measured. Its plain run is the same program with n-grams too long to be found.
    """

    result = "llama-cpp-drafts"
    model: Path
    """The target's folder."""
    draft: Path
    """The folder of a smaller model of the same vocabulary."""
    binary: Path
    """llama-speculative-simple, built with llama.cpp's examples."""
    recipe: str = "code-25m"
    """The target's recipe: it says which files are held out."""
    weights: tuple[str, ...] = tuple(TYPES)
    """Formats of the target; the draft is in int8 (Q8_0)."""
    lengths: tuple[int, ...] = (2, 4, 8)
    """Tokens that llama.cpp's draft model proposes."""
    prompts: int = 4
    """Files."""
    prompt_tokens: int = 200
    """Tokens given of each file."""
    new_tokens: int = 200
    """That follow."""
    threads: int = 2
    """Threads of both programs."""
    rounds: int = 4
    """Every contestant once in each."""

    def measure(self) -> Report:
        configure(threads=self.threads, seed=None)
        rows = [row for weights in self.weights for row in self.of(weights)]
        settings = self.settings() | {"model": self.model.parent.name, "draft": self.draft.parent.name}
        found = {"llama_cpp": self.version(), "settings": settings, "rows": rows}
        return found | {"held_out_loss": losses(self.model, self.draft, self.recipe)}

    def version(self) -> str:
        """The version that the program reports."""
        done = subprocess.run([self.binary, "--version"], capture_output=True, text=True, check=True)
        return (done.stdout + done.stderr).strip().splitlines()[0]

    def of(self, weights: str) -> list[dict[str, Any]]:
        """The rows of one format of the target's weights."""
        model = load(self.model, None if weights == "bfloat16" else weights)
        small = load(self.draft, "int8")
        prompts = beginnings(model, self.recipe, self.prompts, self.prompt_tokens)
        settings = {"temperature": 0.0, "max_new_tokens": self.new_tokens}
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            write_gguf(hasten.load(self.model, dtype="bfloat16"), folder / "model.gguf", TYPES[weights])
            write_gguf(hasten.load(self.draft, dtype="bfloat16"), folder / "draft.gguf", "Q8_0")
            for number, prompt in enumerate(prompts):
                (folder / f"{number}.txt").write_text(model.tokenizer.decode(prompt), encoding="utf-8")
            theirs = {
                "none": ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "500"],
                "n-gram": ["--spec-type", "ngram-simple"],
                "n-gram, hashed": ["--spec-type", "ngram-mod"],
            } | {
                f"draft model, {length}": ["--spec-type", "draft-simple", "--spec-draft-n-max", f"{length}"]
                for length in self.lengths
            }
            ours = {"none": "none", "suffix": "suffix", "draft model": small}
            found: dict[tuple[str, str], list[dict[str, float]]] = {}
            for number in range(self.rounds + 1):
                for name, options in theirs.items():
                    result = self.answered(folder, options, model.tokenizer)
                    found.setdefault(("llama.cpp", name), []).extend([result] if number else [])
                for name, (_, result) in generated(model, ours, prompts, settings).items():
                    kept = {key: result[key] for key in KEPT if key in result}
                    found.setdefault(("hasten", name), []).extend([kept] if number else [])
        rows = []
        for (program, name), results in found.items():
            pairs = zip(results, found[program, "none"], strict=True)
            ratio = median(one["tokens_per_second"] / plain["tokens_per_second"] for one, plain in pairs)
            middle = {key: median(result[key] for result in results) for key in results[0]}
            rows.append({"weights": weights, "program": program, "draft": name, "ratio": ratio, **middle})
            print(json.dumps(rows[-1]), flush=True)
        return rows

    def answered(self, folder: Path, options: list[str], tokenizer: Any) -> dict[str, float]:
        """llama.cpp goes on with each prompt, each time in a process of its own."""
        tokens, seconds, counts, shares = 0, 0.0, {"drafted": 0, "accept": 0}, []
        command = [self.binary, "-m", folder / "model.gguf", "-n", self.new_tokens, "-c", 1024, "-t", self.threads]
        command += ["-td", self.threads, "--temp", 0, "--top-k", 1, "--ignore-eos", *options]
        if "draft-simple" in options:
            command += ["-md", folder / "draft.gguf"]
        for number in range(self.prompts):
            whole = [*map(str, command), "-f", str(folder / f"{number}.txt")]
            for _ in range(TRIES):
                done = subprocess.run(whole, capture_output=True, text=True, errors="replace")
                said = SPEED.search(done.stdout + done.stderr)
                if not done.returncode and said is not None:
                    break
            else:
                raise SystemExit(f"{' '.join(whole)} failed:\n{done.stderr[-2000:]}")
            tokens, seconds = tokens + int(said[1]), seconds + float(said[2])
            shares.append(repeated(tokenizer.encode(done.stdout.strip())[self.prompt_tokens :]))
            for name, count in TAKEN.findall(done.stdout + done.stderr):
                counts[name] += int(count)
        found = {"tokens_per_second": tokens / seconds, "repeated_16_grams": median(shares)}
        return found | {"acceptance": counts["accept"] / max(1, counts["drafted"])}


def draft_table(report: Report) -> str:
    """`speculation.py drafts`: speed with each proposer over that without."""
    body = []
    for one in report["rows"]:
        if one["draft"] == "none":
            continue
        text = "edits" if one["part"] == "edits" else f"texts, {'greedy' if not one['temperature'] else '0.8'}"
        cells = [text, one["weights"], one["draft"], f"{one['ratio']:.2f}×"]
        if one["draft"] == "none again":
            body.append([*cells, "", "", ""])
            continue
        body.append(
            [*cells, f"{one['predicted_ratio']:.2f}×", f"{one['acceptance']:.0%}", f"{one['tokens_per_pass']:.2f}"]
        )
    return markdown(["", "weights", "draft", "speed", "predicted", "accepted", "tokens per pass"], body, left=3)


KINDS = {"alice": "a book", "chat": "a chat", "code": "code", "german": "German"}


def kind_table(report: Report) -> str:
    """`speculation.py drafts --parts kinds`: speed with each proposer over that without, and the share taken."""
    found = {(one["weights"], one["kind"], one["draft"], one["temperature"]): one for one in report["rows"]}
    drafts = [draft for draft in dict.fromkeys(key[2] for key in found) if draft != "none"]
    body = []
    for weights, kind in dict.fromkeys(key[:2] for key in found):
        cells = [KINDS[kind], weights]
        for draft in drafts:
            for temperature in (0.0, 0.8):
                one = found.get((weights, kind, draft, temperature))
                taken = f"{one['acceptance']:.0%}" if one and one["proposed_per_pass"] else "none proposed"
                cells.append("" if one is None else f"{one['ratio']:.2f}× ({taken})")
        body.append(cells)
    heads = [head for draft in drafts for head in (f"`{draft}`", "at 0.8")]
    return markdown(["text", "weights", *heads], body, left=2)


def stream_table(report: Report) -> str:
    """`speculation.py drafts --parts many`: the engine with each proposer over that without, by requests at once."""
    counts = list(dict.fromkeys(one["streams"] for one in report["rows"]))
    found = {(one["weights"], one["draft"], one["streams"]): one["ratio"] for one in report["rows"]}
    kind_table = [kind for kind in dict.fromkeys(key[:2] for key in found) if kind[1] != "none"]
    body = [[*kind, *(f"{found[*kind, count]:.2f}×" for count in counts)] for kind in kind_table]
    return markdown(["weights", "draft", *(str(count) for count in counts)], body, left=2)


def llama_cpp_table(report: Report) -> str:
    """`speculation.py llama-cpp`: both without drafts, with n-grams and with the draft model, each at its best."""
    body = []
    for weights, program in dict.fromkeys((one["weights"], one["program"]) for one in report["rows"]):
        own = [one for one in report["rows"] if (one["weights"], one["program"]) == (weights, program)]
        cells = [weights, program]
        for kind_table in (("none",), ("n-gram", "suffix"), ("draft model",)):
            best = max(
                (one for one in own if one["draft"].startswith(kind_table)), key=lambda one: one["tokens_per_second"]
            )
            ratio = "" if best["draft"] == "none" else f" ({best['ratio']:.2f}×, {best['acceptance']:.0%})"
            cells.append(f"{best['tokens_per_second']:.0f}{ratio}")
        body.append(cells)
    return markdown(["weights", "", "no draft", "n-grams", "draft model"], body, left=2)


TABLES: dict[str, Table] = {
    "speculation": draft_table,
    "speculation-server": stream_table,
    "speculation-real": kind_table,
    "llama-cpp-drafts": llama_cpp_table,
}


if __name__ == "__main__":
    main({"drafts": Speculation, "llama-cpp": LlamaCppDrafts}, TABLES)

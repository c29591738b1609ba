"""Drafts in llama.cpp beside ours: the same pair, the same beginnings of held-out files, greedy, in interleaved rounds.

    python benchmarks/llama_cpp_drafts.py --model runs/code-45m/model --draft runs/code-4m/model \\
        --binary llama.cpp/build/bin/llama-speculative-simple --output benchmarks/results/llama-cpp-drafts.json

The models are exported to GGUF files. llama.cpp proposes as many tokens as `--spec-draft-n-max` says: each of `lengths`
is measured. Its plain run is the same program with n-grams too long to be found.
"""

import json
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from drafted_ways import beginnings, generated, load, losses, repeated

TYPES = {"bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
SPEED = re.compile(r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds")
KEPT = ("tokens_per_second", "acceptance", "repeated_16_grams")  # of ours
TRIES = 3  # it sometimes ends before its last lines are written
TAKEN = re.compile(r"n_(drafted|accept)\s*= (\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaCppDrafts:
    """Measure llama.cpp's n-gram and model drafts, and ours."""

    model: Path
    """The target's folder."""

    draft: Path
    """Of a smaller model of the same vocabulary."""

    binary: Path
    """llama-speculative-simple, built with llama.cpp's examples."""

    recipe: str = "code-25m"
    """The target's recipe: it says which files are held out."""

    weights: tuple[str, ...] = tuple(TYPES)
    """Of the target; the draft is in int8 (Q8_0)."""

    lengths: tuple[int, ...] = (2, 4, 8)
    """Tokens that llama.cpp's draft model proposes."""

    prompts: int = 4
    """Files."""

    prompt_tokens: int = 200
    """Of each that are given."""

    new_tokens: int = 200
    """That follow."""

    threads: int = 2
    """Of both programs."""

    rounds: int = 4
    """Every contestant once in each."""

    output: Path | None = None
    """Where to write the JSON."""

    def run(self) -> None:
        from hasten.machine import configure, describe
        from hasten.machine.files import write_json

        configure(threads=self.threads, seed=None)
        rows = [row for weights in self.weights for row in self.of(weights)]
        settings = {name: value for name, value in asdict(self).items() if not isinstance(value, Path | None)}
        settings |= {"model": self.model.parent.name, "draft": self.draft.parent.name}
        report = {"schema": 1, "machine": describe().to_json(), "llama_cpp": self.version(), "settings": settings}
        if self.output is not None:
            report["held_out_loss"] = losses(self.model, self.draft, self.recipe)
            write_json(self.output, report | {"rows": rows})

    def version(self) -> str:
        """As the program names itself."""
        done = subprocess.run([self.binary, "--version"], capture_output=True, text=True, check=True)
        return (done.stdout + done.stderr).strip().splitlines()[0]

    def of(self, weights: str) -> list[dict[str, Any]]:
        """The rows of one format of the target's weights."""
        import hasten
        from hasten.checkpoints.gguf.write import write_gguf

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
                told = SPEED.search(done.stdout + done.stderr)
                if not done.returncode and told is not None:
                    break
            else:
                raise SystemExit(f"{' '.join(whole)} failed:\n{done.stderr[-2000:]}")
            tokens, seconds = tokens + int(told[1]), seconds + float(told[2])
            shares.append(repeated(tokenizer.encode(done.stdout.strip())[self.prompt_tokens :]))
            for name, count in TAKEN.findall(done.stdout + done.stderr):
                counts[name] += int(count)
        found = {"tokens_per_second": tokens / seconds, "repeated_16_grams": median(shares)}
        return found | {"acceptance": counts["accept"] / max(1, counts["drafted"])}


if __name__ == "__main__":
    import tyro

    tyro.cli(LlamaCppDrafts).run()

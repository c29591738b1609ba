"""Ways to decode with and without drafts, each timed: after real texts, over real edits, and in the engine.

What `speculation.py drafts` and `draft_parts.py` measure with.
"""

import atexit
import random
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from math import log
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from precision import held_out

import hasten
from hasten.bench.models import BenchmarkModel
from hasten.bench.step_seconds import step_seconds
from hasten.engine.engine import Engine, EngineSettings
from hasten.engine.generate import Generation, Timing
from hasten.engine.given_texts import GivenTexts
from hasten.engine.params import SamplingParams
from hasten.engine.request import Request
from hasten.engine.speculation import Text, make_speculator
from hasten.engine.speculation.draft_model import DraftModel
from hasten.engine.speculation.proposer import LIMIT
from hasten.model.context import TrainingContext
from hasten.model.fused import fuse_where_it_fits
from hasten.model.initialize import initialize

ROOT = Path(__file__).resolve().parents[1]


EDITED = "783f8354"  # the last commit whose edits are taken
EDITS = 8  # files
EDIT_TOKENS = 300, 1500  # of a file
# Steps of one of several that take turns: so few that the memory, whose speed changes within seconds, is as fast for
# all. The first of a turn do not count: a target's weights come back by degrees into a cache that a draft model used.
TURN, UNCOUNTED = 16, 6
Result = dict[str, float]


def load(source: str | Path, scheme: str | None) -> Any:
    """A model as it is served: bfloat16 or quantized, fused; "file": in the formats of its GGUF file."""
    model = hasten.load(source if scheme == "file" else plain(str(source)), dtype="bfloat16")
    if scheme not in (None, "file"):
        hasten.quantize(model, hasten.Int8() if scheme == "int8" else hasten.Int4(group_size=32))
    return fuse_where_it_fits(model)


@lru_cache
def plain(source: str) -> str:
    """A model with plain weights: itself, or a folder of a GGUF file's dequantized weights, until the process ends."""
    model = BenchmarkModel(model=source)
    if not model.is_gguf():
        return source
    place = tempfile.TemporaryDirectory(prefix="hasten-plain-")
    atexit.register(place.cleanup)
    return str(model.dequantized(Path(place.name) / "model").model)


def losses(target: str | Path, draft: Path | None, recipe: str) -> dict[str, float]:
    """Losses of target and draft, nats per token on 100 KB of held-out files."""
    texts, folders = held_out(100_000, recipe), {"target": target} | ({} if draft is None else {"draft": draft})
    return {name: log(hasten.perplexity(load(folder, None), texts).perplexity) for name, folder in folders.items()}


def beginnings(model: Any, recipe: str, count: int, tokens: int) -> list[list[int]]:
    """The first tokens of held-out files that are long enough."""
    found = []
    for text in held_out(1 << 60, recipe):
        ids = model.tokenizer.encode(text[: 20 * tokens])
        if len(ids) >= 2 * tokens:
            found.append(ids[:tokens])
    random.Random(0).shuffle(found)
    return found[:count]


def pieces(model: Any, text: str, count: int, tokens: int) -> list[list[int]]:
    """`count` pieces of a text, spread over it, each beginning at a line."""
    lines = text.splitlines(keepends=True)
    starts = ("".join(lines[number * len(lines) // count :]) for number in range(count))
    found = [model.tokenizer.encode(start)[:tokens] for start in starts]
    assert all(len(piece) == tokens for piece in found), "the text is too short"
    return found


def scores(model: Any, text: list[int]) -> torch.Tensor:
    """Logits (T, V) of every place, float32."""
    context = TrainingContext([layer.window for layer in model.config.layers])
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([text]), torch.arange(len(text))[None], context)
    return logits[0].float()


def facts(speculators: Sequence[Any], model: Any, context: float) -> dict[str, float]:
    """What was proposed and taken, and the ratio to plain decoding that timed steps of as many rows predict."""
    all_stats = [speculator.stats for speculator in speculators if speculator is not None]
    if not all_stats:
        return {}
    # Without the steps that read the prompts, and their tokens.
    steps, tokens = sum(s.steps - 1 for s in all_stats), sum(s.tokens - 1 for s in all_stats)
    drafted = sum((Counter(s.rows) for s in all_stats), Counter())
    rows = {count: number for count, number in drafted.items() if count <= LIMIT + 1}  # the others read prompts
    proposed, taken = sum(s.draft_tokens for s in all_stats), sum(s.accepted_tokens for s in all_stats)
    decoder = GivenTexts(model, batch=1, capacity=int(context) + max(rows))
    each = step_seconds(decoder, {1, *rows}, int(context))
    passes = sum(count * each[number] for number, count in rows.items())
    predicted = tokens * each[1] / (passes + sum(s.seconds for s in all_stats))
    return {
        "acceptance": taken / max(1, proposed),
        "tokens_per_pass": tokens / max(1, steps),
        "proposed_per_pass": proposed / max(1, steps),
        "predicted_ratio": predicted,
    }


class Stream:
    """One stream after the other, and how fast they were."""

    def __init__(self, model: Any, draft: Any, settings: dict[str, Any]) -> None:
        self.model, self.draft, self.settings = model, draft, settings
        self.texts: list[list[int]] = []
        self.timings: list[Timing] = []
        self.speculators: list[Any] = []
        self.steps: Iterator[Any] = iter(())
        self.prompt_tokens = 0  # of the latest
        self.tokens, self.seconds = 0, 0.0  # of the steps that count

    def ask(self, prompt: list[int]) -> None:
        """The next stream, which `some_steps` carries on."""
        timing, speculator = Timing(), make_speculator(self.model, self.draft)
        settings = {"ignore_eos": True, **self.settings}
        self.steps = iter(Generation(self.model, [prompt], timing=timing, speculator=speculator, **settings))
        self.prompt_tokens = len(prompt)
        self.timings.append(timing)
        self.speculators.append(speculator)
        self.texts.append([])

    def some_steps(self) -> bool:
        """False at the end of the text."""
        steps, timing = list(islice(self.steps, UNCOUNTED)), self.timings[-1]
        tokens, seconds = timing.decode_tokens, timing.decode_seconds
        steps += islice(self.steps, TURN)
        self.tokens += timing.decode_tokens - tokens
        self.seconds += timing.decode_seconds - seconds
        self.texts[-1] += [token for step in steps for output in step for token in output.tokens]
        return len(steps) == UNCOUNTED + TURN

    def result(self) -> Result:
        """Speed and drafts over all texts."""
        speed = self.tokens / self.seconds
        context = self.prompt_tokens + self.settings["max_new_tokens"] / 2
        found = {"tokens_per_second": speed, "repeated_16_grams": median(repeated(text) for text in self.texts)}
        return found | facts(self.speculators, self.model, context)


def generated(
    model: Any, drafts: dict[str, Any], prompts: list[list[int]], settings: dict[str, Any]
) -> dict[str, tuple[Any, Result]]:
    """Each prompt gone on with by each draft."""
    return in_turns({name: Stream(model, draft, settings) for name, draft in drafts.items()}, prompts)


def in_turns(contestants: dict[str, Any], questions: Sequence[Any]) -> dict[str, tuple[Any, Result]]:
    """All are asked one question after the other, and take turns with the answer; texts and result of each.

    In random order, so that nobody has always the same one before: what that one left in the caches counts.
    `turn_ratio` is the median of a turn's speed over that of "none" beside it: it leaves out what other programs took
    of some turns, and shows what a draft costs that is not taken. What one gives that is taken, the sums show.
    """
    order = random.Random(0)
    speeds: dict[str, list[float | None]] = {name: [] for name in contestants}
    for question in questions:
        for one in contestants.values():
            one.ask(question)
        going = list(contestants)
        while going:
            going = [name for name in order.sample(going, len(going)) if _turn(contestants[name], speeds[name])]
        longest = max(map(len, speeds.values()))
        for own in speeds.values():
            own += [None] * (longest - len(own))
    results = {name: (one.texts, one.result()) for name, one in contestants.items()}
    for name, (_, result) in results.items():
        pairs = zip(speeds[name], speeds["none"], strict=True)
        ratios = [own / base for own, base in pairs if own and base]  # none where a text is written in one turn
        whole = result["tokens_per_second"] / results["none"][1]["tokens_per_second"]
        result["turn_ratio"] = median(ratios) if ratios else whole
    return results


def _turn(one: Any, speeds: list[float | None]) -> bool:
    """Some steps, and their speed; None where hardly any counted."""
    tokens, seconds = one.tokens, one.seconds
    more: bool = one.some_steps()
    speeds.append((one.tokens - tokens) / (one.seconds - seconds) if more else None)
    return more


def repeated(tokens: list[int], size: int = 16) -> float:
    """The share of pieces of 16 tokens that are in the text before: loops would be easy to guess."""
    pieces = [tuple(tokens[at : at + size]) for at in range(len(tokens) - size + 1)]
    return 1 - len(set(pieces)) / len(pieces) if pieces else 0.0


def changed(model: Any, count: int) -> list[tuple[list[int], list[int]]]:
    """(prompt, output): whole files before and after a commit of this repository, as tokens; one of each commit.

    Always the same commits. Files may be longer than the texts that a small model was trained on: what it writes is
    forced, and its passes take as long.
    """
    found: list[tuple[list[int], list[int]]] = []
    log = ("log", "--no-merges", "--format=%H", "-n", "200", EDITED, "--", "src/*.py")
    for commit in _git(*log).split():
        changes = ("diff", "--name-only", "--diff-filter=M", f"{commit}^", commit, "--", "src/*.py")
        for name in _git(*changes).split():
            texts = (_git("show", f"{at}:{name}") for at in (f"{commit}^", commit))
            prompt, output = (model.tokenizer.encode(text, add_special_tokens=False) for text in texts)
            if all(EDIT_TOKENS[0] <= len(tokens) <= EDIT_TOKENS[1] for tokens in (prompt, output)):
                found.append((prompt, output))
                break
        if len(found) == count:
            break
    return found


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"edits are read from this repository's whole history: {done.stderr.strip()}")
    return done.stdout


def written(model: Any, draft: Any, pairs: list[tuple[list[int], list[int]]]) -> tuple[Any, Result]:
    """Each output, token for token, by the model's passes over it."""
    seconds, tokens, speculators = 0.0, 0, []
    for prompt, output in pairs:
        speculator = make_speculator(model, draft)
        decoder = GivenTexts(model, batch=1, capacity=len(prompt) + len(output) + 32)
        decoder.prefill([prompt])
        at, started = 1, perf_counter()  # output[0] is there after the prompt
        while at < len(output):
            drafted: list[int] = []
            if speculator is not None:
                room, text = len(output) - at - 1, prompt + output[:at]
                (drafted,) = speculator.propose(
                    [Text(number=0, tokens=text, step=at, params=SamplingParams(temperature=0), room=room)]
                )
            stepped = perf_counter()
            if drafted:
                decoder.verify([[output[at - 1], *drafted]]).argmax(-1).tolist()
            else:
                decoder.decode(torch.tensor([output[at - 1]])).argmax(-1).tolist()
            right = next((i for i, token in enumerate(drafted) if token != output[at + i]), len(drafted))
            at += right + 1
            decoder.truncate([len(prompt) + at - 1])
            if speculator is not None:
                speculator.observe(0, right + 1, checked=len(drafted))
                speculator.stepped(1 + len(drafted), perf_counter() - stepped)
        seconds += perf_counter() - started
        tokens += at - 1
        speculators.append(speculator)
    context = sum(len(p) + len(o) / 2 for p, o in pairs) / len(pairs)
    return None, {"tokens_per_second": tokens / seconds} | facts(speculators, model, context)


class Served:
    """An engine whose caches have their memory already, as those of a running server; its answers and their speed."""

    def __init__(self, model: Any, draft: Any, new_tokens: int) -> None:
        speculator = make_speculator(model, draft, tokens=64 * 1024)
        self.engine = Engine(model, model.tokenizer, EngineSettings(cache_bytes=512 << 20), speculator=speculator)
        caches = [self.engine.runner.cache]
        if speculator is not None and isinstance(speculator.proposer, DraftModel):
            caches.append(speculator.proposer.cache)
        for tensor in (tensor for cache in caches for tensor in (*cache.k, *cache.v)):
            tensor.zero_()
        self.params = SamplingParams(temperature=0, max_new_tokens=new_tokens, ignore_eos=True)
        self.texts: dict[str, list[int]] = {}
        self.tokens, self.seconds = 0, 0.0  # of the steps that count

    def ask(self, prompts: list[list[int]]) -> None:
        """Requests that come at once."""
        for prompt in prompts:
            name = str(len(self.texts))
            self.engine.add(Request(id=name, prompt=tuple(prompt), params=self.params))
            self.texts[name] = []

    def some_steps(self) -> bool:
        """Carry all on; False when all are answered."""
        self._steps(UNCOUNTED)
        started = perf_counter()
        self.tokens += self._steps(TURN)
        self.seconds += perf_counter() - started
        return not self.engine.idle

    def _steps(self, count: int) -> int:
        """Take `count` steps, and count their tokens."""
        tokens = 0
        for _ in range(count):
            if self.engine.idle:
                break
            for piece in self.engine.step():
                self.texts[piece.request_id].extend(piece.tokens)
                tokens += len(piece.tokens)
        return tokens

    def result(self) -> Result:
        """Speed and drafts over all answers."""
        stats = self.engine.stats()
        return {
            "tokens_per_second": self.tokens / self.seconds,
            "acceptance": stats.accepted_tokens / max(1, stats.draft_tokens),
            "repeated_16_grams": median(repeated(text) for text in self.texts.values()),
        }


def served(
    model: Any, drafts: dict[str, Any], batches: list[list[list[int]]], new_tokens: int
) -> dict[str, tuple[Any, Result]]:
    """Each batch by an engine of each draft."""
    return in_turns({name: Served(model, draft, new_tokens) for name, draft in drafts.items()}, batches)


def useless(model: Any) -> Any:
    """A model of the same shape whose weights are random."""
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

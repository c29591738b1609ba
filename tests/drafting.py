"""Proposers for tests, and what they draft for."""

import torch

from hasten.engine.cache import KVCache
from hasten.engine.engine import Engine
from hasten.engine.settings import EngineSettings
from hasten.engine.speculation import Draft, Speculator
from serving_cases import Counting, request, tokens_of

PROMPTS = [torch.randint(3, 100, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (41, 7, 66)]
KINDS = {
    "greedy": {},
    "draws": {"temperature": 1.0, "seed": 5},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.3, "seed": 7},
    "samples": {"n": 3, "temperature": 1.0, "seed": 10},
    "constraint": {"constraint": Counting(40, 9)},
    "logprobs": {"logprobs": 2, "prompt_logprobs": 1},
    "beams": {"beam_width": 3, "n": 2},
}


def engine_of(model, *, blocks=400, sequences=4, **more):
    """An engine with so many blocks of 4 tokens, beside the states of its sequences and their snapshots."""
    size = KVCache.bytes_per_block(model.config, block_size=4, dtype=model.dtype)
    states = 2 * sequences * KVCache.bytes_per_sequence(model.config, model.dtype)
    values = {"max_sequences": sequences, "token_budget": 24, "block_size": 4, "cache_bytes": blocks * size + states}
    return Engine(model, model.tokenizer, EngineSettings(**values | more))


def requests(tokens=30, kinds=KINDS):
    found = []
    for name, own in kinds.items():
        for number, prompt in enumerate(PROMPTS):
            own = {key: value.fork() if key == "constraint" else value for key, value in own.items()}
            found.append(request(f"{name} {number}", prompt, max_new_tokens=tokens, **own))
    return found


def answers(found):
    """The tokens of each sample."""
    return {(name, one.index): tokens_of(pieces, one.index) for name, pieces in found.items() for one in pieces}


class Proposing:
    """Proposes what a function of a text says."""

    name = "function"

    def __init__(self, function):
        self.function, self.ended = function, []

    def prior(self, kind):
        return 2 / 3

    def propose(self, texts, *, floor, chance):
        drafts = [list(self.function(text))[: max(0, text.room)] for text in texts]
        return [Draft(draft, [0] * len(draft)) for draft in drafts]

    def end(self, number, answer, *, salt=""):
        self.ended.append(number)


def proposing(function):
    """A speculator that checks all that a function of a text proposes."""
    return Speculator(Proposing(function), always=True)


def wrong(monkeypatch):
    """A speculator of drafts that are always wrong; a row of a step costs as much as a step."""
    stepped = Speculator.stepped
    monkeypatch.setattr(Speculator, "stepped", lambda self, rows, _: stepped(self, rows, float(rows)))
    return Speculator(Proposing(lambda text: [99, 99, 99]))

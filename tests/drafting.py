"""Proposers for tests."""

from hasten.engine.speculation import Draft, Speculator, StepCost, speculator

FREE = StepCost((1, 64), (1.0, 1.0), (0.0, 0.0))  # further rows cost nothing


class Proposing:
    """Proposes what a function of a text says."""

    name = "function"

    def __init__(self, function):
        self.function = function

    def prior(self, kind):
        return 2 / 3

    def propose(self, texts, *, floor, chance):
        drafts = [list(self.function(text))[: max(0, text.room)] for text in texts]
        return [Draft(draft, [0] * len(draft)) for draft in drafts]

    def end(self, number, answer, *, salt=""):
        pass


def proposing(function):
    """A speculator that checks all that a function of a text proposes."""
    return Speculator(Proposing(function), FREE, always=True)


def resting(monkeypatch):
    """A speculator of drafts that are always wrong, with short rests; a list of how many drafts there were at each step
    of a rest, and one of the texts that ended. A row of a step is dear, and steps take what its table says.
    """
    rests, ended, rested, stepped = [], [], Speculator.rested, Speculator.stepped
    dear = StepCost((1, 64), (1.0, 64.0), (0.0, 0.0))

    def note(self, tokens):
        rests.append(self.stats.drafts)
        rested(self, tokens)

    monkeypatch.setattr(speculator, "_CREDIT", 0.1)
    monkeypatch.setattr(speculator, "_INTEREST", 0.03)
    monkeypatch.setattr(Speculator, "rested", note)
    monkeypatch.setattr(
        Speculator, "stepped", lambda self, rows, at, _: stepped(self, rows, at, dear.seconds(rows, at))
    )
    proposer = Proposing(lambda text: [99, 99, 99])
    proposer.end = lambda number, answer, *, salt="": ended.append(number)
    return Speculator(proposer, dear), rests, ended

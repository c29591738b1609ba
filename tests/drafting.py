"""Proposers for tests."""

from hasten.engine.speculation import Draft, Speculator


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

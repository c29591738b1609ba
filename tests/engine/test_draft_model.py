"""A model that drafts: the native steps draft what those in Python do, and little of a text is read."""

import pytest

import hasten
from hasten.engine.params import SamplingParams
from hasten.engine.speculation import DraftModel, Text, build
from hasten.engine.speculation import draft_model as module
from hasten.model.draft import can_draft_in_one_call
from hasten.model.fused import refusal
from references import make_reference

PARAMS = {
    "greedy": [{"temperature": 0}] * 3,
    "draws": [{"temperature": 0.9}, {"temperature": 0}, {"temperature": 1.4, "repetition_penalty": 1.3}],
}


def texts_of(lengths, *, settings, room=12, begins=0):
    return [
        Text(
            number=number,
            tokens=[(begins + 7 * i + 3 * number) % 90 + 4 for i in range(length)],
            step=5 + number,
            params=SamplingParams(seed=number, **settings[number]),
            room=room - 2 * number,
        )
        for number, length in enumerate(lengths)
    ]


def fused(name):
    model = hasten.load(make_reference(name), dtype="bfloat16")
    if reason := refusal(model):
        pytest.skip(reason)
    return hasten.fuse(model)


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3", "qwen3_moe"])  # softcaps, scaled and untied embeddings
def test_native_steps_draft_what_python_does(name, kind, monkeypatch):
    model = fused(name)
    assert can_draft_in_one_call(model)
    found = []
    for native in (True, False):
        monkeypatch.setattr(module, "can_draft_in_one_call", lambda _, native=native: native)
        proposer = DraftModel(model, tokens=1024)
        own = []
        for length, floor in ((9, 0.0), (12, 0.2), (40, 0.02)):  # the second ends early, and goes back
            texts = texts_of([length, length + 3, 2 * length], settings=PARAMS[kind])
            own.append(proposer.propose(texts, floor=floor, chance=lambda kind: min(0.7, (kind + 1) / 10)))
        found.append(own)
    assert found[0] == found[1]
    lengths = [len(draft.tokens) for drafts in found[0] for draft in drafts]
    assert max(lengths) == 12
    assert min(lengths) < 6


def test_only_the_end_of_a_text_is_read(monkeypatch):
    """Of a new one, of one that went on for long without drafts, and of one that has outgrown the model's positions."""
    model = hasten.load(make_reference("llama"), dtype="float32")
    assert model.config.max_positions == 256
    proposer, read, begin = DraftModel(model, tokens=1024), [], DraftModel._begin

    def counted(self, row, text):
        found = begin(self, row, text)
        read.append(len(found.read))
        return found

    monkeypatch.setattr(DraftModel, "_begin", counted)
    for length in (20, 23, 90, 92, 120, 150, 180, 210, 240, 270, 300, 312):
        (draft,) = proposer.propose(
            texts_of([length], settings=PARAMS["greedy"], room=4), floor=0.0, chance=lambda kind: 1.0
        )
        assert len(draft.tokens) == 4
    # What was drafted was wrong. 67 tokens are too many to catch up with; 247 from the 58th on have no room.
    assert read == [20, 3, 32, 2, 28, 30, 30, 30, 30, 30, 30, 32]
    proposer.end(0, ())
    proposer._blocks.check()
    assert proposer._blocks.free == proposer._blocks.blocks


def test_a_text_that_outgrows_the_cache_is_begun_anew():
    """With its last tokens; its drafts go on."""
    proposer = DraftModel(hasten.load(make_reference("llama"), dtype="float32"), tokens=64)
    for length in range(20, 240, 4):
        (draft,) = proposer.propose(
            texts_of([length], settings=PARAMS["greedy"], room=8), floor=0.0, chance=lambda kind: 1.0
        )
        assert len(draft.tokens) == 8
        proposer._blocks.check()


def test_a_drafts_price_is_measured_before_the_first_one(monkeypatch):
    """Once for a model: a second speculator begins with it."""
    proposer, now = DraftModel(fused("llama"), tokens=256), [0.0]
    propose, rooms = proposer.propose, []

    def timed(texts, **how):
        rooms.append(texts[0].room)
        now[0] += 9.0 if len(rooms) == 1 else 0.2 + 0.1 * texts[0].room  # the first finds no memory
        return propose(texts, **how)

    monkeypatch.setattr(proposer, "propose", timed)
    monkeypatch.setattr(build.time, "perf_counter", lambda: now[0])
    drafting = build.rehearsed(proposer)
    assert [drafting.seconds(room) for room in (1, 3, 5)] == pytest.approx([0.3, 0.5, 0.7], rel=0.1)
    assert not proposer._known  # the text is forgotten
    rooms.clear()
    assert build.rehearsed(proposer) is drafting
    assert rooms == [1]

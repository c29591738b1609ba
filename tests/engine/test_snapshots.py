"""Snapshots of states: a text whose beginning was read before goes on from one, and is that of the text alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hasten
from hasten.engine import state_slots
from hasten.engine.block_table import SequenceBlocks
from hasten.engine.cache import KVCache
from hasten.engine.engine import Engine
from hasten.engine.settings import EngineSettings
from hasten.engine.state_slots import StateSlots, StateSnapshots
from hasten.model.families import read_config
from hasten.model.initialize import initialize
from references import make_reference, values_of
from serving_cases import request, run, tokens_of
from tiny_model import tiny_llama

WORDS = torch.randint(3, 100, (130,), generator=torch.Generator().manual_seed(4)).tolist()
TEXT = WORDS[:90]
MODEL = hasten.load(make_reference("qwen3_5_text"), dtype="float32")
ALONE = {}


def alone(prompt, count, model=MODEL):
    key = (model.config.family, tuple(prompt), count)
    if key not in ALONE:
        params = hasten.SamplingParams(temperature=0, max_new_tokens=count, ignore_eos=True)
        ALONE[key] = hasten.generate(model, [prompt], params)[0].tokens
    return ALONE[key]


def engine_of(*, model=MODEL, blocks=60, sequences=2, block_size=8, **more):
    """An engine with exactly these blocks, and a snapshot for each sequence."""
    size = KVCache.bytes_per_block(model.config, block_size=block_size, dtype=model.dtype)
    states = 2 * sequences * KVCache.bytes_per_sequence(model.config, model.dtype)
    assert blocks * size >= states, "else fewer sequences run"
    values = {"max_sequences": sequences, "block_size": block_size, "cache_bytes": blocks * size + states}
    return Engine(model, None, EngineSettings(**values | more))


def answered(engine, prompt, count=6):
    """The tokens of an answer, and how many of the prompt's were found."""
    found = run(engine, [request("one", prompt, max_new_tokens=count)])["one"]
    return tokens_of(found), found[0].cached_tokens


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2", "granitemoehybrid-dense", "nemotron_h-dense"])
def test_a_prompt_goes_on_from_the_last_full_block_of_another(family):
    model = MODEL if family == "qwen3_5_text" else hasten.load(make_reference(family), dtype="float32")
    engine = engine_of(model=model, blocks=80)
    assert answered(engine, TEXT[:67]) == (alone(TEXT[:67], 6, model), 0)
    assert answered(engine, TEXT[:67]) == (alone(TEXT[:67], 6, model), 64)
    longer = [*TEXT[:65], 9, 8, 7]
    assert answered(engine, longer) == (alone(longer, 6, model), 64)
    assert answered(engine, TEXT) == (alone(TEXT, 6, model), 64)
    assert answered(engine, TEXT) == (alone(TEXT, 6, model), 88)


def test_blocks_without_a_snapshot_behind_them_are_read_again():
    engine = engine_of()
    answered(engine, TEXT[:67])
    other = [*TEXT[:40], 5, 6, 7]
    assert answered(engine, other) == (alone(other, 6), 0)
    assert answered(engine, other) == (alone(other, 6), 40)


def test_long_texts_have_several(monkeypatch):
    monkeypatch.setattr(state_slots, "EVERY", 24)
    engine = engine_of(sequences=6, blocks=120)
    answered(engine, TEXT, 12)
    for length, found in ((30, 24), (50, 48), (80, 72)):
        other = [*TEXT[:length], 5, 6, 7]
        assert answered(engine, other) == (alone(other, 6), found)
    whole = TEXT + alone(TEXT, 12)  # 102 tokens; the answer passed one more
    assert answered(engine, [*whole[:99], 4]) == (alone([*whole[:99], 4], 6), 96)


def test_the_one_used_longest_ago_makes_way():
    engine = engine_of(blocks=100)  # two snapshots
    texts = [[first, *TEXT[:40]] for first in (50, 51, 52)]
    for text in texts[:2]:
        answered(engine, text)
    assert answered(engine, texts[0])[1] == 40
    answered(engine, texts[2])
    assert answered(engine, texts[0]) == (alone(texts[0], 6), 40)
    assert answered(engine, texts[1]) == (alone(texts[1], 6), 0)


def test_texts_of_other_tenants_are_not_found():
    engine = engine_of()
    run(engine, [request("one", TEXT, max_new_tokens=2, salt="a")])
    found = run(engine, [request("two", TEXT, max_new_tokens=2, salt="b")])["two"]
    assert found[0].cached_tokens == 0
    again = run(engine, [request("three", TEXT, max_new_tokens=2, salt="a")])["three"]
    assert again[0].cached_tokens == 88


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 120), st.integers(0, 3)), min_size=2, max_size=8),
    st.sampled_from([54, 60, 80]),
    st.sampled_from([8, 40]),
)
def test_whatever_came_before_each_text_is_that_of_the_text_alone(texts, blocks, budget):
    """Three beginnings of any length, few blocks, few snapshots: adopted, evicted, preempted."""
    engine = engine_of(sequences=2, blocks=blocks, block_size=4, token_budget=budget)
    prompts = [[60 + which, *WORDS[:length], *[7, 8, 9][:more]] for which, length, more in texts]
    for part in (prompts[: len(prompts) // 2], prompts[len(prompts) // 2 :]):
        found = run(engine, [request(str(i), prompt, max_new_tokens=5) for i, prompt in enumerate(part)])
        for number, prompt in enumerate(part):
            assert tokens_of(found[str(number)]) == alone(prompt, 5)


@given(st.lists(st.sampled_from([b"a", b"b", b"c", b"d", b"e"]), max_size=30), st.integers(0, 3))
def test_places_of_snapshots_are_their_own(keys, count):
    snapshots = StateSnapshots(first=10, count=count, block_size=16)
    held = {}
    for key in keys:
        place = snapshots.take(key)
        if place is not None:
            assert 10 <= place < 10 + count
            held = {other: own for other, own in held.items() if own != place} | {key: place}
        assert held == {other: snapshots.use(other) for other in list(held)}
        assert len(held) <= count
    assert snapshots.usable(list(held)) == len(held)
    snapshots.forget()
    assert snapshots.usable(keys) == 0


@pytest.mark.parametrize(("length", "mark", "due"), [(0, 0, 2048), (0, 48, 48), (48, 48, 2048), (2048, 2080, 2080)])
def test_when_the_next_is_taken(length, mark, due):
    snapshots = StateSnapshots(first=0, count=1, block_size=16)
    assert snapshots.next_due(length, mark=mark) == due
    assert snapshots.due(due, mark=mark)
    assert not snapshots.due(due - 1, mark=mark)


@pytest.mark.parametrize(("block_size", "every"), [(16, 2048), (24, 2040), (1500, 1500), (4096, 4096)])
def test_long_texts_have_them_behind_whole_blocks(block_size, every):
    snapshots = StateSnapshots(first=0, count=1, block_size=block_size)
    assert [snapshots.next_due(length, mark=0) for length in (0, every - 1, every)] == [every, every, 2 * every]
    assert [length for length in range(3 * every) if snapshots.due(length, mark=0)] == [every, 2 * every]


def test_none_is_due_within_a_block():
    snapshots = StateSnapshots(first=0, count=1, block_size=16)
    assert not snapshots.due(40, mark=40)
    assert [length for length in range(2000) if snapshots.due(length, mark=48)] == [48]


def sequence(*, held, mark, slot, key):
    return SequenceBlocks(block_table=[], chain=[b"", key], held=held, room=held, asked=0, slot=slot, mark=mark)


def test_a_step_asks_for_the_copies_that_are_due_and_a_later_sequence_for_one_back():
    slots = StateSlots(StateSnapshots(first=5, count=2, block_size=16))
    one, two = (
        sequence(held=48, mark=48, slot=slots.begin(), key=b"a"),
        sequence(held=50, mark=48, slot=slots.begin(), key=b"b"),
    )
    slots.computed([one, two])
    ((source, place),) = slots.copies()
    assert source == one.slot
    assert place in (5, 6)
    slots.computed([one])  # there is one already
    assert slots.copies() == []
    assert [slots.usable(keys) for keys in ([b"a", b"b"], [b"b", b"a"], [b"a"], [b"b"], [])] == [1, 2, 1, 0, 0]
    assert slots.begin(b"a") == 2
    assert slots.copies() == [(place, 2)]
    assert slots.copies() == []
    slots.forget()
    assert slots.usable([b"a"]) == 0


def test_a_place_that_was_given_back_is_taken_before_a_new_one_the_lowest_first():
    slots = StateSlots()
    assert [slots.begin() for _ in range(3)] == [0, 1, 2]
    slots.end(1)
    slots.end(0)
    assert [slots.begin() for _ in range(3)] == [0, 1, 3]
    assert slots.copies() == []


def test_a_step_ends_where_a_snapshot_is_due():
    slots, own = StateSlots(StateSnapshots(first=0, count=1, block_size=16)), sequence(held=0, mark=48, slot=0, key=b"")
    assert slots.until_due(own, 0, 0, 30) == 30
    assert slots.until_due(own, 0, 0, 100) == 48
    assert slots.until_due(own, 0, 40, 100) == 8
    assert slots.until_due(own, 48, 48, 100) == 100
    assert slots.until_due(own, 48, 2000, 100) == 48
    assert StateSlots().until_due(own, 0, 0, 100) == 100


def test_without_snapshots_each_cached_block_can_be_gone_on_from():
    slots = StateSlots()
    assert slots.usable([b"a", b"b"]) == 2
    slots.computed([sequence(held=48, mark=48, slot=0, key=b"a")])
    slots.forget()
    assert slots.copies() == []


def test_a_snapshot_that_was_used_or_asked_for_again_stays_longest():
    for ask in (StateSnapshots.use, StateSnapshots.take):
        snapshots = StateSnapshots(first=0, count=2, block_size=16)
        places = {key: snapshots.take(key) for key in (b"a", b"b")}
        assert sorted(places.values()) == [0, 1]
        ask(snapshots, b"a")
        assert snapshots.take(b"c") == places[b"b"]
        assert [snapshots.usable([key]) for key in (b"a", b"b", b"c")] == [1, 0, 1]
        snapshots.forget()
        assert {snapshots.take(b"d"), snapshots.take(b"e")} == {0, 1}


def test_a_chat_finds_its_earlier_turns():
    tokenizer = tiny_llama().tokenizer
    values = values_of("qwen3_5_text") | {"vocab_size": tokenizer.vocab_size, "initializer_range": 0.15}
    model = initialize(read_config(values | {"max_position_embeddings": 512}), seed=0).eval()
    model.tokenizer = tokenizer
    params = hasten.SamplingParams(temperature=0, max_new_tokens=20, ignore_eos=True)
    chat = hasten.Chat(model)
    "".join(chat.say("def add(a, b): return a + b", params))
    assert chat.reused == 0
    history = list(chat.messages)
    answer = "".join(chat.say("print(names)", params))
    assert chat.reused > 0
    prompt = tokenizer.encode_chat([*history, {"role": "user", "content": "print(names)"}])
    assert hasten.generate(model, prompt, params)[0].text == answer

"""Runs of decode steps: nothing is planned while the same sequences take one token each, and the texts are the same."""

from unittest.mock import Mock

import pytest
import torch

import hasten
from hasten.engine.block_table import Rows
from hasten.engine.layout import RaggedLayout
from hasten.engine.params import SamplingParams
from hasten.ops.native import library
from references import make_reference, tiny_llama
from serving_cases import Counting, make_engine, reason_of, request, run, tokens_of

PROMPTS = [list(range(3, 3 + n)) for n in (5, 17, 30)]


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


def counted(engine):
    """The engine, with its plans and its layouts of tables counted."""
    engine.scheduler.plan = Mock(wraps=engine.scheduler.plan)
    return engine


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 0.9, "seed": 3}, {"frequency_penalty": 0.4}])
def test_steps_of_the_same_sequences_are_not_planned(model, settings):
    engine = counted(make_engine(model, block_size=4, token_budget=64))
    found = run(engine, [request(str(i), prompt, max_new_tokens=40, **settings) for i, prompt in enumerate(PROMPTS)])
    assert engine.scheduler.plan.call_count == 3, "of the prompts, of the first decode, and for larger block tables"
    for i, prompt in enumerate(PROMPTS):
        params = SamplingParams(**{"temperature": 0, "ignore_eos": True, "max_new_tokens": 40, **settings})
        (alone,) = hasten.generate(model, prompt, params)
        assert tokens_of(found[str(i)]) == alone.tokens


def test_who_comes_and_goes_ends_a_run(model):
    engine = make_engine(model, block_size=4)
    alone = [tokens_of(run(make_engine(model), [request("a", p, max_new_tokens=24)])["a"]) for p in PROMPTS]
    engine.add(request("0", PROMPTS[0], max_new_tokens=24))
    pieces = {str(i): [] for i in range(3)}

    def steps(count):
        for _ in range(count):
            for piece in engine.step():
                pieces[piece.request_id].append(piece)
            engine.check()

    steps(6)
    engine.add(request("1", PROMPTS[1], max_new_tokens=24))
    steps(7)
    engine.abort("0")
    engine.add(request("2", PROMPTS[2], max_new_tokens=24))
    steps(40)
    assert reason_of(pieces["0"]) == "abort"
    assert tokens_of(pieces["0"]) == alone[0][: len(tokens_of(pieces["0"]))]
    assert [tokens_of(pieces[str(i)]) for i in (1, 2)] == alone[1:]
    assert engine.idle


def test_a_run_goes_on_while_nobody_who_waits_has_room(model):
    engine = counted(make_engine(model, max_sequences=2, block_size=4))
    found = run(engine, [request(str(i), PROMPTS[0], max_new_tokens=20) for i in range(3)])
    assert len({tuple(tokens_of(found[str(i)])) for i in range(3)}) == 1
    assert engine.scheduler.plan.call_count < 12


def test_blocks_filled_in_a_run_are_found_again(model):
    engine = make_engine(model, block_size=4)
    first = tokens_of(run(engine, [request("a", PROMPTS[0], max_new_tokens=12)])["a"])
    text = [*PROMPTS[0], *first]  # 17 tokens, of which the last has no key
    again = run(engine, [request("b", [*text, 9], max_new_tokens=1)])["b"]
    assert again[-1].cached_tokens == 16


def test_a_run_ends_where_the_cache_is_full(model):
    engine = make_engine(model, blocks=22, block_size=4)
    requests = [request(str(i), PROMPTS[0], max_new_tokens=50 + i) for i in range(2)]
    found = run(engine, requests)
    assert engine.stats().preemptions > 0
    for i in range(2):
        assert (
            tokens_of(found[str(i)])
            == hasten.generate(model, PROMPTS[0], temperature=0, ignore_eos=True, max_new_tokens=50 + i)[0].tokens
        )


def test_windows_constraints_and_log_probabilities_go_on_in_runs(model):
    mistral = hasten.load(make_reference("mistral"), dtype="float32")  # with a window
    for own in (model, mistral):
        engine = make_engine(own, block_size=4)
        requests = [request(str(i), prompt, max_new_tokens=30, logprobs=i) for i, prompt in enumerate(PROMPTS)]
        found = run(engine, requests)
        for i, prompt in enumerate(PROMPTS):
            (alone,) = hasten.generate(own, prompt, temperature=0, ignore_eos=True, max_new_tokens=30)
            assert tokens_of(found[str(i)]) == alone.tokens
            assert [len(piece.logprobs) for piece in found[str(i)]] == [1] * 30
    engine = counted(make_engine(model, block_size=4))
    found = run(engine, [request("a", PROMPTS[0], max_new_tokens=20, constraint=Counting(50, 9))])["a"]
    assert (tokens_of(found), reason_of(found)) == (list(range(50, 59)), "stop")
    assert engine.scheduler.plan.call_count == 2


def test_a_broken_constraint_ends_its_own_text_only(model):
    engine = make_engine(model, block_size=4)
    broken = request("b", PROMPTS[1], max_new_tokens=9, constraint=Counting(50, 9, broken_at=4))
    found = run(engine, [request("a", PROMPTS[0], max_new_tokens=9), broken])
    assert (reason_of(found["b"]), reason_of(found["a"])) == ("error", "length")
    assert tokens_of(found["b"]) == [50, 51, 52, 53]
    assert len(tokens_of(found["a"])) == 9


@pytest.mark.skipif(library() is None, reason="the fused steps are native")
@pytest.mark.parametrize("rows", ["auto", "int8"])
def test_a_fused_models_runs_give_the_bits_of_planned_steps(rows):
    model = hasten.fuse(hasten.load(make_reference("llama"), dtype="bfloat16"))
    prompts = PROMPTS[:2]
    requests = [request(str(i), p, max_new_tokens=40) for i, p in enumerate(prompts)]
    found = run(make_engine(model, kv_cache_dtype=rows), requests)
    engine = make_engine(model, kv_cache_dtype=rows)
    engine.runner.next_logits = lambda tokens, entered: None  # every step is planned
    planned = run(engine, requests)
    assert all(tokens_of(planned[str(i)]) == tokens_of(found[str(i)]) for i in range(2))


def test_a_layout_goes_on_as_if_it_were_made_again():
    tables = [[4, 2, 7], [1, 9, 5, 3]]
    layout = RaggedLayout([Rows(tables[0], 7, 1), Rows(tables[1], 12, 1)], 4)
    for step in range(1, 6):
        ends = [7 + step, 12 + step]
        entered = [
            (i, (8, 6, 10)[step % 3]) for i, end in enumerate(ends) if end % 4 == 0 and end // 4 >= len(tables[i])
        ]
        for i, block in entered:
            tables[i].append(block)
        begun = [(i, tables[i][end // 4]) for i, end in enumerate(ends) if end % 4 == 0]
        assert layout.go_on(begun)
        again = RaggedLayout([Rows(table, end, 1) for table, end in zip(tables, ends, strict=True)], 4)
        for name in ("positions", "slots", "query_start_loc", "seq_lens"):
            assert getattr(layout, name).tolist() == getattr(again, name).tolist(), name
        for own, other, end in zip(layout.table, again.table, ends, strict=True):
            assert own[: end // 4 + 1].tolist() == other[: end // 4 + 1].tolist()
        groups = layout.groups(torch.Tensor.clone)
        assert [group.positions.tolist() for group in groups] == [[[end] for end in ends]]

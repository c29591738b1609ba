"""Drafts for a model whose layers keep states: every answer is the one without, whatever was accepted."""

import random

import pytest
import torch

import hasten
from drafting import proposing
from hasten.engine.cache import KVCache
from hasten.engine.engine import Engine
from hasten.engine.settings import EngineSettings
from hasten.engine.speculation import make_speculator
from hasten.errors import ConfigError
from hasten.model.fused import fuse_where_it_fits
from instruction_sets import needs_native
from references import decided, make_reference
from serving_cases import Counting, request, run, tokens_of

FAMILIES = ["qwen3_next", "qwen3_5_text", "qwen3_5_text-kinds", "qwen3_5_moe_text"]
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


def model_of(family, dtype="bfloat16"):
    return fuse_where_it_fits(decided(hasten.load(make_reference(family), dtype=dtype)))


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


def guesses(plain):
    """Proposes how a text goes on, with mistakes and past its end."""
    texts = [PROMPTS[int(name[-1])] + tokens for (name, _), tokens in plain.items()]
    chance = random.Random(0)

    def propose(text):
        known = [one[len(text.tokens) :] for one in texts if one[: len(text.tokens)] == list(text.tokens)]
        draft = chance.choice(known)[: chance.randrange(9)] if known else []
        return [*draft, 7, 8] if chance.random() < 0.4 else draft

    return proposing(propose)


@needs_native
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_without_drafts(family):
    model = model_of(family)
    plain = answers(run(engine_of(model), requests()))
    engine = engine_of(model)
    engine.speculator = guesses(plain)
    assert answers(run(engine, requests())) == plain
    stats = engine.stats()
    assert stats.draft_tokens > stats.accepted_tokens > 100
    assert stats.prefix_hits > 0
    assert answers(run(engine, requests())) == plain, "from snapshots that were taken between drafts"


@needs_native
def test_a_preempted_text_goes_on_with_drafts():
    model = model_of("qwen3_5_text")
    kinds = {"greedy": {}, "draws": KINDS["draws"]}
    plain = answers(run(engine_of(model), requests(110, kinds)))
    engine = engine_of(model, blocks=8, sequences=3, prefix_cache=False)
    engine.speculator = guesses(plain)
    assert answers(run(engine, requests(110, kinds))) == plain
    assert engine.stats().preemptions > 0
    assert engine.stats().accepted_tokens > 50


@pytest.mark.parametrize("family", FAMILIES)
def test_readable_layers_keep_the_states_before_a_draft(family):
    model = model_of(family, "float32")
    kinds = {"greedy": {}}
    plain = answers(run(engine_of(model, blocks=2000), requests(kinds=kinds)))
    engine = engine_of(model, blocks=2000)
    engine.speculator = guesses(plain)
    assert answers(run(engine, requests(kinds=kinds))) == plain
    assert engine.stats().accepted_tokens > 30


@needs_native
@pytest.mark.parametrize("draft", ["suffix", "model"])
def test_proposers_draft_for_it(draft):
    """Also a model: the first half of the prompt again makes the suffixes right now and then."""
    model = model_of("qwen3_5_text")
    small = fuse_where_it_fits(hasten.load(make_reference("llama"), dtype="bfloat16"))
    prompts = [[*prompt, *prompt[: len(prompt) // 2]] for prompt in PROMPTS]
    params = hasten.SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)
    expected = [answer.tokens for answer in hasten.generate(model, prompts, params)]
    llm = hasten.LLM(model, max_sequences=2, draft="suffix" if draft == "suffix" else small)
    for _ in range(2):  # by the second time the suffixes are known
        assert [answer.tokens for answer in llm.generate(prompts, params)] == expected
    assert llm.engine.stats().draft_tokens > 0
    llm.close()


def test_what_drafts_itself_keeps_no_states():
    model = model_of("qwen3_5_text", "float32")
    with pytest.raises(ConfigError, match="whose layers keep states, from which rejected tokens cannot"):
        make_speculator(model, "self:2-layers")

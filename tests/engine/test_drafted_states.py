"""Drafts for a model whose layers keep states: every answer is the one without, whatever was accepted."""

import random

import pytest

import hasten
from drafting import KINDS, PROMPTS, answers, engine_of, proposing, requests
from hasten.engine.speculation import make_speculator
from hasten.errors import ConfigError
from hasten.model.fused import fuse_where_it_fits
from instruction_sets import needs_native
from references import decided, make_reference
from serving_cases import run

FAMILIES = ["qwen3_next", "qwen3_5_text", "qwen3_5_text-kinds", "qwen3_5_moe_text", "lfm2", "lfm2_moe"]
FAMILIES += ["granitemoehybrid", "granitemoehybrid-dense"]

PLAIN = [("lfm2", "float32"), ("granitemoehybrid-dense", "float32"), ("nemotron_h-dense", "float32")]


def model_of(family, dtype="bfloat16"):
    return fuse_where_it_fits(decided(hasten.load(make_reference(family), dtype=dtype)))


def guesses(plain):
    """Proposes how a text goes on, with mistakes and past its end."""
    texts = [PROMPTS[int(name[-1])] + tokens for (name, _), tokens in plain.items()]
    chance = random.Random(0)

    def propose(text):
        known = [one[len(text.tokens) :] for one in texts if one[: len(text.tokens)] == list(text.tokens)]
        draft = chance.choice(known)[: chance.randrange(9)] if known else []
        return [*draft, 7, 8] if chance.random() < 0.4 else draft

    return proposing(propose)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*(pytest.param(family, "bfloat16", marks=needs_native) for family in FAMILIES), *PLAIN],
)
def test_answers_are_those_without_drafts(family, dtype):
    model = model_of(family, dtype)
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

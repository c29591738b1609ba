"""Texts that outgrow longrope's pretraining context: computed again with other frequencies, in every engine."""

import pytest
import torch

import hasten
from hasten.engine.params import SamplingParams
from hasten.model.context import TrainingContext
from hasten.model.fused import refusal
from references import make_reference
from serving_cases import make_engine, request, run, tokens_of

GREEDY = SamplingParams(temperature=0, max_new_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return hasten.load(make_reference("phi3-longrope"), dtype="float32")


def prompts_of(model):
    """Some that stay within the context, some that outgrow it soon, and one that is longer."""
    at = model.config.stretches_at
    return [[3 + i % 90 for i in range(at - before)] for before in (15, 9, 4, 1, 0, -20)]


def whole(model, prompt, count):
    """Greedy tokens, everything computed again for each."""
    tokens = list(prompt)
    context = TrainingContext([layer.window for layer in model.config.layers])
    for _ in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([tokens]), torch.arange(len(tokens))[None], context)
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def served(model, prompts, **settings):
    engine = make_engine(model, **settings)
    found = run(engine, [request(str(i), prompt, params=GREEDY) for i, prompt in enumerate(prompts)])
    return [tokens_of(found[str(i)]) for i in range(len(prompts))], engine


def test_a_batch_and_a_server_say_what_the_whole_text_does(model):
    prompts = prompts_of(model)
    expected = [whole(model, prompt, 16) for prompt in prompts]
    assert [output.tokens for output in hasten.generate(model, prompts, GREEDY)] == expected
    assert served(model, prompts)[0] == expected
    found, engine = served(model, prompts, blocks=22)
    assert found == expected
    assert engine.scheduler.preemptions > 0


def test_samples_share_what_was_computed_before(model):
    prompt = prompts_of(model)[1]
    engine = make_engine(model)
    found = run(engine, [request("a", prompt, n=3, max_new_tokens=16)])
    assert [tokens_of(found["a"], index) for index in range(3)] == [whole(model, prompt, 16)] * 3


def test_fused_steps_give_the_same_bits_in_any_company(model):
    fused = hasten.load(make_reference("phi3-longrope"), dtype="bfloat16")
    if reason := refusal(fused):
        pytest.skip(reason)
    prompts, fused = prompts_of(model), hasten.fuse(fused)
    alone = [hasten.generate(fused, prompt, GREEDY)[0].tokens for prompt in prompts]
    assert [output.tokens for output in hasten.generate(fused, prompts, GREEDY)] == alone
    assert served(fused, prompts, token_budget=24)[0] == alone
    assert [answer.tokens for answer in hasten.generate(fused, prompts, GREEDY, draft="suffix")] == alone


def test_what_is_found_again_was_computed_with_the_same_frequencies(model):
    """The beginning of a longer text, and of a shorter one after it."""
    at = model.config.stretches_at
    long = [3 + i % 90 for i in range(at + 20)]
    engine = make_engine(model)
    for number, prompt in enumerate((long, long[: at - 4], long, long[: at - 4])):
        found = run(engine, [request(str(number), prompt, params=GREEDY)])
        assert tokens_of(found[str(number)]) == whole(model, prompt, 16)
        assert (found[str(number)][0].cached_tokens > 0) == (number > 1)

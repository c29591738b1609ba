"""`hasten.LLM`: prompts in, answers out, by calls, iterators and coroutines."""

import asyncio
import gc
import warnings
import weakref

import pytest

import hasten
from hasten.engine.request import EngineFailed, QueueFull, RequestRefused
from hasten.errors import ConfigError
from references import tiny_llama

PROMPTS = ["def add(a", "for name in", "    return", "x"]
SETTINGS = {"max_sequences": 4, "token_budget": 16, "max_length": 128}


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture
def llm(model):
    own = hasten.LLM(model, **SETTINGS)
    yield own
    own.engine.check()
    own.close()


def test_answers_are_those_of_the_prompts_alone(model, llm):
    params = hasten.SamplingParams(temperature=0, max_new_tokens=12)
    for prompt, answer in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
        (alone,) = hasten.generate(model, prompt, params)
        assert (answer.text, answer.tokens, answer.finish_reason) == (alone.text, alone.tokens, alone.finish_reason)
        assert answer.prompt_tokens == alone.prompt_tokens


def test_a_closed_llm_lets_its_cache_go_at_once(model):
    own = hasten.LLM(model, **SETTINGS)
    own.generate("def add(a", max_new_tokens=3)
    cache = weakref.ref(own.engine.runner.cache)
    gc.disable()  # it may not run for long: few objects, many bytes
    try:
        own.close()
        assert cache() is None
    finally:
        gc.enable()


def test_sampling_settings_may_be_given_by_keyword(llm):
    params = hasten.SamplingParams(temperature=0, max_new_tokens=4)
    (wanted,) = llm.generate("def add(a", params)
    assert llm.generate("def add(a", temperature=0, max_new_tokens=4)[0].tokens == wanted.tokens
    assert llm.generate("def add(a", params, max_new_tokens=2, n=1)[0].tokens == wanted.tokens[:2]
    assert "".join(part.text for part in llm.stream("def add(a", temperature=0, max_new_tokens=4)) == wanted.text
    talk = [{"role": "user", "content": "def add"}]
    assert llm.chat(talk, temperature=0, max_new_tokens=4)[0].text == llm.chat(talk, params)[0].text
    for wrong in ({"temperature": -1}, {"temprature": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            llm.generate("x", **wrong)


def test_conversations_are_answered_as_vllm_does(model, llm):
    params = hasten.SamplingParams(temperature=0, max_new_tokens=8)
    talk = [{"role": "user", "content": [{"type": "text", "text": "def add"}]}]
    plain = [{"role": "user", "content": "def add"}]
    prompt = model.tokenizer.encode_chat(plain)
    (alone,) = hasten.generate(model, prompt, params)
    for given in (talk, [talk], (tuple(talk),)):
        (answer,) = llm.chat(given, params)
        assert (answer.text, answer.prompt_tokens) == (alone.text, len(prompt))
    two = llm.chat([talk, [*talk, {"role": "assistant", "content": "x"}, *plain]], [params, params], n=2)
    assert [len(answer.completions) for answer in two] == [2, 2]
    turn = [*plain, {"role": "assistant", "content": "(a"}]
    (more,) = llm.chat(turn, params, continue_final_message=True)
    start = model.tokenizer.encode_chat(turn, add_generation_prompt=False, continue_final_message=True)
    assert model.tokenizer.decode(start).endswith("(a")
    assert more.tokens == hasten.generate(model, start, params)[0].tokens
    with pytest.raises(ConfigError, match="'tools' cannot be given"):
        llm.chat(talk, chat_template_kwargs={"tools": []})
    for wrong in ("hello", [[]], [["x"]]):
        with pytest.raises(ConfigError, match="messages"):
            llm.chat(wrong)


def test_more_prompts_than_the_queue_takes(model):
    llm = hasten.LLM(model, **SETTINGS, queue_limit=2)
    params = hasten.SamplingParams(temperature=0, max_new_tokens=3)
    answers = llm.generate(PROMPTS * 5, params)
    assert [a.tokens for a in answers[:4]] == [a.tokens for a in answers[16:]]
    llm.close()


def test_streams_may_be_read_by_turns(model, llm):
    params = hasten.SamplingParams(temperature=0, max_new_tokens=9, ignore_eos=True)
    streams = [llm.stream(prompt, params) for prompt in PROMPTS[:2]]
    texts = ["", ""]
    for pieces in zip(*streams, strict=True):
        for i, piece in enumerate(pieces):
            texts[i] += piece.text
    assert texts == [answer.text for answer in llm.generate(PROMPTS[:2], params)]


def test_a_stream_that_is_left_gives_its_blocks_back(llm):
    stream = llm.stream(PROMPTS[0], hasten.SamplingParams(max_new_tokens=50, ignore_eos=True))
    next(stream)
    stream.close()
    assert llm.stats().free_blocks == llm.stats().blocks
    assert len(llm.generate(PROMPTS[0], hasten.SamplingParams(max_new_tokens=5, ignore_eos=True))[0].tokens) == 5


def test_several_completions_with_logprobs(llm):
    params = hasten.SamplingParams(temperature=1.0, seed=3, max_new_tokens=5, ignore_eos=True)
    (answer,) = llm.generate(PROMPTS[0], params, n=3, logprobs=2, prompt_logprobs=1)
    assert len({tuple(one.tokens) for one in answer.completions}) == 3
    for one in answer.completions:
        assert [told.token for told in one.logprobs] == one.tokens
        assert all(len(told.top) == 2 and told.top[0].logprob >= told.logprob for told in one.logprobs)
    assert answer.prompt_logprobs[0] is None
    assert len(answer.prompt_logprobs) == answer.prompt_tokens
    assert b"".join(told.raw for told in answer.prompt_logprobs[1:]).decode() in PROMPTS[0]


def test_coroutines_and_calls_use_the_same_engine(llm):
    params = hasten.SamplingParams(temperature=0, max_new_tokens=8)
    wanted = [answer.text for answer in llm.generate(PROMPTS, params)]

    async def main():
        answers = await asyncio.gather(*(llm.agenerate(prompt, params) for prompt in PROMPTS))
        streamed = "".join([piece.text async for piece in llm.astream(PROMPTS[0], params)])
        return [answer.text for answer in answers], streamed

    assert asyncio.run(main()) == (wanted, wanted[0])
    assert [answer.text for answer in llm.generate(PROMPTS, params)] == wanted  # through the thread


def test_wrong_settings_are_named(model, llm):
    with pytest.raises(ConfigError, match="max_sequence"):
        hasten.LLM(model, max_sequence=3)
    with pytest.raises(ConfigError, match="token_budget is 2"):
        hasten.LLM(model, max_sequences=4, token_budget=2)
    with pytest.raises(
        ConfigError, match=r"capture_sizes is \(0,\); it must be a list of a whole number \(more than 0\)"
    ):
        hasten.LLM(model, capture_sizes=(0,))
    with pytest.raises(ConfigError, match="dtype"):
        hasten.LLM(model, dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"kv_cache_dtype is 'fp8'; it must be one of auto"):
        hasten.LLM(model, kv_cache_dtype="fp8")
    with pytest.raises(ConfigError, match="beams"):
        llm.generate("x", beams=3)
    with pytest.raises(RequestRefused, match="best_of"):
        llm.generate("x", n=2, best_of=1)


def test_twice_the_tokens_fit_in_int8(model):
    """tiny_llama has heads of 16 values in float32: 20 bytes in the place of 64."""
    wide, narrow = (hasten.LLM(model, **SETTINGS, cache_bytes=1 << 16, kv_cache_dtype=d) for d in ("auto", "int8"))
    assert (wide.stats().blocks, narrow.stats().blocks) == ((1 << 16) // 8192, (1 << 16) // 2560)
    assert narrow.stats().cache_bytes == 25 * 2560 + 160  # and a row of padding
    params = hasten.SamplingParams(temperature=0, max_new_tokens=6)
    assert all(len(answer.tokens) for answer in narrow.generate(PROMPTS, params))
    for llm in (wide, narrow):
        llm.engine.check()
        llm.close()


def test_a_failed_step_raises(model, monkeypatch):
    llm = hasten.LLM(model, **SETTINGS)

    def fail(*args, **kwargs):
        raise RuntimeError("a kernel gave up")

    monkeypatch.setattr(model, "forward", fail)
    with pytest.raises(EngineFailed, match="a kernel gave up"):
        llm.generate("x")
    with pytest.raises(EngineFailed):
        llm.generate("x")


def test_a_folder_is_loaded_and_fused(model, tmp_path):
    hasten.save(model, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm = hasten.LLM(tmp_path, dtype="float32", **SETTINGS)
    params = hasten.SamplingParams(temperature=0, max_new_tokens=6)
    assert llm.generate(PROMPTS[0], params)[0].tokens == hasten.generate(model, PROMPTS[0], params)[0].tokens
    llm.close()


def test_calls_after_coroutines_wait_for_room(model):
    """The thread takes them then, and 36 of these 40 came back empty."""
    llm = hasten.LLM(model, **SETTINGS, queue_limit=4)
    params = hasten.SamplingParams(temperature=0, max_new_tokens=3, ignore_eos=True)
    wanted = asyncio.run(llm.agenerate(PROMPTS[0], params)).tokens
    answers = llm.generate([PROMPTS[0]] * 40, params)
    assert [answer.tokens for answer in answers] == [wanted] * 40
    llm.close()
    assert not llm._async.thread._readers


def test_places_in_the_queue_come_free(model):
    llm = hasten.LLM(model, **SETTINGS, queue_limit=4)
    params = hasten.SamplingParams(temperature=0, max_new_tokens=2, ignore_eos=True)

    async def many():
        return await asyncio.gather(*(llm.agenerate(PROMPTS[0], params) for _ in range(20)), return_exceptions=True)

    for _ in range(3):  # what is over, or was never let in, takes no place
        answers = asyncio.run(many())
        served = [answer for answer in answers if not isinstance(answer, BaseException)]
        assert len(served) >= 4
        assert all(isinstance(answer, QueueFull) for answer in answers if answer not in served)
    assert llm._async.thread.waiting == 0
    llm.close()


def test_a_stream_that_was_begun_goes_on_in_the_thread(llm):
    params = hasten.SamplingParams(temperature=0, max_new_tokens=9, ignore_eos=True)
    wanted = llm.generate(PROMPTS[0], params)[0].tokens
    stream = llm.stream(PROMPTS[0], params)
    tokens = [*next(stream).tokens]
    assert asyncio.run(llm.agenerate(PROMPTS[0], params)).tokens == wanted
    assert [*tokens, *(token for piece in stream for token in piece.tokens)] == wanted


WRONG = {
    "salt": 5,
    "priority": "high",
    "timeout": "5",
    "early_stopping": "yes",
    "skip_special_tokens": 3,
    "constraint": 5,
}


@pytest.mark.parametrize(("name", "value"), [*WRONG.items(), ("timeout", float("nan")), ("priority", True)])
def test_a_setting_of_a_wrong_type_is_refused_before_a_step(llm, name, value):
    with pytest.raises(RequestRefused, match=name):
        llm.generate("x", **{name: value})
    assert llm.engine.error is None


@pytest.mark.parametrize("value", ["x", float("nan"), 1e9, True, None])
def test_a_length_penalty_that_is_no_number_or_too_large(llm, value):
    with pytest.raises(RequestRefused, match="length_penalty"):
        llm.generate("x", beam_width=2, length_penalty=value)
    assert llm.engine.error is None


@pytest.mark.parametrize("threaded", [False, True])
def test_closing_again_does_nothing_and_what_comes_later_is_told(model, threaded):
    llm = hasten.LLM(model, **SETTINGS)
    if threaded:
        asyncio.run(llm.agenerate("x"))
    llm.close()
    llm.close()
    with pytest.raises(EngineFailed, match=r"^the engine takes no requests: the engine was closed"):
        llm.generate("x")
    with pytest.raises(EngineFailed, match="closed"):
        asyncio.run(llm.agenerate("x"))


def test_several_prompts_are_refused_where_one_is_taken(llm):
    with pytest.raises(ConfigError, match="one prompt, found 2"):
        asyncio.run(llm.agenerate(PROMPTS[:2]))
    with pytest.raises(ConfigError, match="one prompt, found 2"):
        list(llm.stream(PROMPTS[:2]))

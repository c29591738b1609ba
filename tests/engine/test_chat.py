"""A conversation keeps its cache from turn to turn and says what it would say without one."""

import contextlib

import pytest

import hasten
from captured_steps import Capturer
from hasten.engine import captures, following
from hasten.engine.chat import Chat
from hasten.engine.stopping import OutputText
from hasten.errors import ConfigError
from references import tiny_llama

PARAMS = hasten.SamplingParams(temperature=0, max_new_tokens=10, ignore_eos=True)


def fresh_answer(model, messages):
    prompt = model.tokenizer.encode_chat(messages, add_generation_prompt=True)
    return hasten.generate(model, prompt, PARAMS)[0].text


def test_turns_reuse_the_cache_and_change_nothing(tiny):
    chat = Chat(tiny, system="be brief")
    for turn, text in enumerate(["hello", "for name in names", "and again"]):
        answer = "".join(chat.say(text, PARAMS))
        assert answer == fresh_answer(tiny, chat.messages[:-1])
        assert chat.messages[-1] == {"role": "assistant", "content": answer}
        assert (chat.reused > 0) == (turn > 0)


def test_a_windowed_model_keeps_the_keys_of_its_window(monkeypatch):
    monkeypatch.setattr("hasten.engine.chat._ROOM", 64)
    monkeypatch.setattr("hasten.engine.for_texts._CPU_BUDGET", 32)  # prompt tokens of a step
    model = tiny_llama(model_type="mistral", sliding_window=24)
    chat = Chat(model)
    for turn, text in enumerate(["hello", "for name in names: print(name)", "and again", "def add(a, b)"]):
        answer = "".join(chat.say(text, PARAMS))
        assert answer == fresh_answer(model, chat.messages[:-1])
        assert (chat.reused > 0) == (turn > 0)
        chat._engine.check()
    blocks, length = chat._engine.blocks, chat._engine.max_length
    assert blocks.blocks * blocks.block_size < length
    assert chat.reused > 2 * model.config.reach, "more than it kept"


def test_the_template_gets_its_variables(tiny):
    template = "{{ enable_thinking }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.MonkeyPatch.context() as here:
        here.setattr(tiny, "tokenizer", tiny.tokenizer.with_chat_template(template))
        chat = Chat(tiny, chat_template_kwargs={"enable_thinking": False})
        answer = "".join(chat.say("def", PARAMS))
        assert (
            answer == hasten.generate(tiny, tiny.tokenizer.encode("Falsedef", add_special_tokens=False), PARAMS)[0].text
        )
        with pytest.raises(ConfigError, match="'messages' cannot be given"):
            Chat(tiny, chat_template_kwargs={"messages": []})


def test_the_cache_grows_with_the_conversation(tiny, monkeypatch):
    monkeypatch.setattr("hasten.engine.chat._ROOM", 64)
    chat = Chat(tiny)
    "".join(chat.say("hello", PARAMS))
    before = chat._engine.cache_bytes
    for text in ("more", "for name in names: print(name)", "and again"):
        answer = "".join(chat.say(text, PARAMS))
        assert answer == fresh_answer(tiny, chat.messages[:-1])
        assert chat.reused > 0, "what it held is kept"
        chat._engine.check()
    assert chat._engine.cache_bytes > before


def test_a_captured_step_says_the_same(tiny, monkeypatch):
    """As on a GPU, also after the cache has grown, over which steps are captured again."""
    expected = [fresh_answer(tiny, [{"role": "user", "content": "hello"}])]
    monkeypatch.setattr("hasten.engine.chat._ROOM", 64)
    monkeypatch.setattr(following, "capture_refusal", lambda model: None)
    monkeypatch.setattr(captures, "cuda_graph", capturer := Capturer())
    chat = Chat(tiny)
    found = ["".join(chat.say("hello", PARAMS))]
    count = len(capturer.recordings)
    monkeypatch.undo()
    answers = ["".join(chat.say(text, PARAMS)) for text in ("for name in names", "more", "and again")]
    assert found == expected
    assert count > 0
    for turn, answer in enumerate(answers, start=1):
        assert answer == fresh_answer(tiny, chat.messages[: 2 * turn + 1])


def test_an_answer_that_is_stopped_stays_in_the_history(tiny):
    chat = Chat(tiny)
    answer = chat.say("hello", PARAMS)
    first = next(answer)
    answer.close()
    assert chat.messages[-1]["content"].startswith(first)
    again = "".join(chat.say("go on", PARAMS))
    assert again == fresh_answer(tiny, chat.messages[:-1])


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_step_that_is_interrupted_leaves_a_chat_that_goes_on(tiny, monkeypatch, error):
    chat = Chat(tiny)
    assert "".join(chat.say("for name in names", PARAMS))
    calls = iter([False] * 3 + [True])
    step = tiny.forward

    def forward(*given, **options):
        if next(calls, False):
            raise error("in the middle of a step")
        return step(*given, **options)

    monkeypatch.setattr(tiny, "forward", forward)
    with pytest.raises(error, match="middle of a step"):
        list(chat.say("print", PARAMS))
    monkeypatch.undo()
    assert chat.messages[-1]["role"] == "assistant"
    answer = "".join(chat.say("go on", PARAMS))
    assert answer == fresh_answer(tiny, chat.messages[:-1])
    chat._engine.check()


@pytest.mark.parametrize("calls", [1, 2])
def test_an_interruption_between_steps_leaves_a_chat_that_goes_on(tiny, monkeypatch, calls):
    chat, made, begin = Chat(tiny), [], OutputText.__init__

    def interrupted(self, *given, **options):
        made.append(self)
        if len(made) == calls:
            raise KeyboardInterrupt
        begin(self, *given, **options)

    assert "".join(chat.say("hello", PARAMS))
    monkeypatch.setattr(OutputText, "__init__", interrupted)
    for _ in range(calls):
        with contextlib.suppress(KeyboardInterrupt):
            list(chat.say("print", PARAMS))
    monkeypatch.undo()
    assert "".join(chat.say("go on", PARAMS)) == fresh_answer(tiny, chat.messages[:-1])
    assert [message["role"] for message in chat.messages[-2:]] == ["user", "assistant"]


def test_the_turn_after_an_interruption_reads_no_earlier_turn_again(tiny, monkeypatch):
    chat = Chat(tiny)
    assert "".join(chat.say("word " * 20, PARAMS))
    monkeypatch.setattr(tiny, "forward", lambda *given, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(chat.say("print", PARAMS))
    monkeypatch.undo()
    assert "".join(chat.say("go on", PARAMS)) == fresh_answer(tiny, chat.messages[:-1])
    assert chat.reused >= 16


def test_a_turn_while_an_answer_is_open_is_refused(tiny):
    chat = Chat(tiny)
    answer = chat.say("hello", PARAMS)
    next(answer)
    with pytest.raises(ConfigError, match="the last answer is still open: read it to its end or close it"):
        next(chat.say("go on", PARAMS))
    answer.close()
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]
    assert "".join(chat.say("go on", PARAMS))


def test_a_conversation_that_does_not_fit_is_refused_and_taken_back(tiny):
    chat = Chat(tiny)
    with pytest.raises(ConfigError, match="512 positions"):
        list(chat.say("word " * 600, PARAMS))
    assert chat.messages == []
    assert "".join(chat.say("hello", PARAMS))


def test_models_without_template_or_tokenizer_are_refused():
    model = tiny_llama()
    model.tokenizer = None
    with pytest.raises(ConfigError, match="tokenizer"):
        Chat(model)

"""Chats: the loss is on the assistant's words with their end token, and on nothing else."""

import pytest

from hasten.data.chat import encode_chats, render
from hasten.data.documents import Conversation
from hasten.errors import DataError

MESSAGES = (
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hello é漢"},
    {"role": "assistant", "content": "hello there é漢!"},
    {"role": "user", "content": "how are you?"},
    {"role": "assistant", "content": " fine, you?  "},
)


def learned(tokenizer, conversation):
    """For each rendered document the runs of learned text."""
    chats = render(conversation, tokenizer=tokenizer)
    texts = []
    for chat, (ids, weights) in zip(chats, encode_chats(chats, tokenizer=tokenizer), strict=True):
        assert tokenizer.decode(ids, skip_special_tokens=False) == chat.text
        runs: list[list[int]] = []
        for number, (token, weight, before) in enumerate(zip(ids, weights, [0, *weights], strict=False)):
            assert weight in (0, 1), number
            if weight and not before:
                runs.append([])
            if weight:
                runs[-1].append(token)
        texts.append([tokenizer.decode(run, skip_special_tokens=False) for run in runs])
    return texts


def test_only_the_assistants_words_and_their_end_token_are_learned(chat_tokenizer):
    assert learned(chat_tokenizer, Conversation("c", MESSAGES)) == [
        ["hello there é漢!<|im_end|>", " fine, you?  <|im_end|>"]
    ]


def test_turns_of_the_assistant_in_a_row_and_a_last_word_of_the_user(chat_tokenizer):
    messages = (*MESSAGES[:3], {"role": "assistant", "content": "more"}, {"role": "user", "content": "bye"})
    assert learned(chat_tokenizer, Conversation("c", messages)) == [["hello there é漢!<|im_end|>", "more<|im_end|>"]]


def test_an_assistant_who_speaks_first(chat_tokenizer):
    messages = ({"role": "assistant", "content": "hello"}, {"role": "user", "content": "hello"})
    assert learned(chat_tokenizer, Conversation("c", messages)) == [["hello<|im_end|>"]]


def test_a_template_that_drops_something_from_earlier_turns_gives_a_document_a_turn(make_tokenizer):
    # As Qwen3's does with the reasoning: only the last turn keeps it.
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.last %}[why] {% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = make_tokenizer(template)
    assert learned(tokenizer, Conversation("c", MESSAGES)) == [
        ["[why] hello there é漢!<|im_end|>"],
        ["[why]  fine, you?  <|im_end|>"],
    ]
    names = [chat.name for chat in render(Conversation("c", MESSAGES), tokenizer=tokenizer)]
    assert names == ["c#2", "c#4"]


def test_a_template_that_does_not_continue_its_own_prompt_is_refused(make_tokenizer, chatml):
    tokenizer = make_tokenizer(chatml.replace("assistant\n", "assistant\n<hidden>"))
    with pytest.raises(DataError, match=r"talk.jsonl:3.*does not continue its own generation prompt"):
        render(Conversation("talk.jsonl:3", MESSAGES), tokenizer=tokenizer)


def test_calls_are_learned_where_the_template_writes_them_and_refused_where_it_does_not(make_tokenizer, chatml):
    call = {"id": "", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = ({"role": "user", "content": "one and one?"}, {"role": "assistant", "content": "", "tool_calls": [call]})
    knows = chatml.replace(
        "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
    )
    assert learned(make_tokenizer(knows), Conversation("c", messages)) == [["add<|im_end|>"]]
    with pytest.raises(DataError, match=r"c: the chat template does not write the call of 'add' in messages\[1\]"):
        render(Conversation("c", messages), tokenizer=make_tokenizer(chatml))
    tools = ({"type": "function", "function": {"name": "multiply"}},)
    with pytest.raises(DataError, match=r"the chat template does not show the tool 'multiply'"):
        render(Conversation("c", messages, tools), tokenizer=make_tokenizer(knows))


def test_a_template_that_refuses_the_messages_names_the_conversation(make_tokenizer):
    tokenizer = make_tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match=r"talk.jsonl:3.*roles must alternate"):
        render(Conversation("talk.jsonl:3", MESSAGES), tokenizer=tokenizer)

"""Conversations as training text: the chat template's own rendering, and which characters the assistant wrote.

The assistant's words are found by rendering growing prefixes of the conversation. Turn i is what is added between the
prefix before it, with the template's generation prompt, and the prefix that includes it: exactly what the model has to
produce when it is asked. Where every such prefix is a beginning of the whole rendering, the conversation is one
document with a span a turn. Some templates render a turn otherwise once it is not the last (they drop its reasoning,
say). Then each of the assistant's turns becomes a document of its own, rendered as it is when it is the last, with loss
on that turn only: again what the model sees and has to produce. A template for which even this fails is an error.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hasten.data.documents import Conversation
from hasten.errors import DataError, HastenError
from hasten.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A rendered conversation.

    text: what is tokenized. spans: ascending (start, stop) in characters of what the assistant wrote, its end token
    included. finished: the last turn is the assistant's, so the end of the text is a target too.
    """

    name: str
    text: str
    spans: tuple[tuple[int, int], ...]
    finished: bool


def render(conversation: Conversation, *, tokenizer: Tokenizer) -> list[RenderedChat]:
    """Render as one document, or one for each assistant turn (see above). Raises DataError naming the conversation."""
    messages, name = conversation.messages, conversation.name
    whole = _render(conversation, len(messages), tokenizer=tokenizer, prompt=False)
    for tool in conversation.tools or ():
        called = (tool.get("function") or tool).get("name")
        if isinstance(called, str) and called not in whole:
            raise DataError(f"{name}: the chat template does not show the tool {called!r}; use one that knows tools")
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    rendered = [_turn(conversation, number, tokenizer=tokenizer) for number in turns]
    finished = turns[-1] == len(messages) - 1
    if all(whole.startswith(text) for text, _ in rendered):
        return [RenderedChat(name, whole, tuple((start, len(text)) for text, start in rendered), finished)]
    return [
        RenderedChat(f"{name}#{number}", text, ((start, len(text)),), finished=True)
        for number, (text, start) in zip(turns, rendered, strict=True)
    ]


def _turn(conversation: Conversation, number: int, *, tokenizer: Tokenizer) -> tuple[str, int]:
    """Render the conversation up to and including assistant turn `number`; also returns where that turn begins."""
    message, name = conversation.messages[number], conversation.name
    text = _render(conversation, number + 1, tokenizer=tokenizer, prompt=False)
    if number == 0:  # nothing before it: templates do not render an empty list, so its words are looked for
        content = message["content"].strip()
        start = text.find(content) if content else -1
    else:
        before = _render(conversation, number, tokenizer=tokenizer, prompt=True)
        start = len(before) if text.startswith(before) else -1
    for call in message.get("tool_calls", ()):
        if call["function"]["name"] not in text[max(start, 0) :]:
            raise DataError(
                f"{name}: the chat template does not write the call of {call['function']['name']!r} in "
                f"messages[{number}]; use a template that knows tool calls"
            )
    if start < 0:
        raise DataError(
            f"{name}: the chat template does not continue its own generation prompt for messages[{number}], so the "
            "assistant's words cannot be found in its text; use a template that renders an answer after the prompt "
            "given for it"
        )
    return text, start


def _render(conversation: Conversation, count: int, *, tokenizer: Tokenizer, prompt: bool) -> str:
    """Render the first `count` messages."""
    messages, tools = conversation.messages[:count], conversation.tools
    try:
        return tokenizer.render_chat(messages, add_generation_prompt=prompt, tools=tools)
    except HastenError as error:
        raise DataError(f"{conversation.name}: {error}") from error


def encode_chats(chats: Sequence[RenderedChat], *, tokenizer: Tokenizer) -> list[tuple[list[int], list[int]]]:
    """(ids, weights) of each chat, tokens located through their offsets in the rendered text.

    weights: 1 for the tokens that lie inside a span, up to the end token where the template writes one (not the line
    end that follows it), else 0. A token across the border of a span counts as prompt.
    """
    enders = special_ids(tokenizer)
    encodings = tokenizer.backend.encode_batch([chat.text for chat in chats], add_special_tokens=False)
    result = []
    for chat, encoding in zip(chats, encodings, strict=True):
        ids: list[int] = encoding.ids
        weights = [0] * len(ids)
        position = 0
        for start, stop in chat.spans:
            inside = []
            while position < len(ids) and encoding.offsets[position][0] < stop:
                first, last = encoding.offsets[position]
                # `last > start`: a token of spaces may be given the empty offset (start, start).
                if first >= start and last > start and last <= stop:
                    inside.append(position)
                position += 1
            ends = [at for at in inside if ids[at] in enders]
            if ends and not chat.text[encoding.offsets[ends[-1]][1] : stop].strip():
                inside = [at for at in inside if at <= ends[-1]]
            for at in inside:
                weights[at] = 1
        result.append((ids, weights))
    return result


def special_ids(tokenizer: Tokenizer) -> set[int]:
    """Ids of tokens that are no text: those that may end an answer are among them."""
    added = tokenizer.backend.get_added_tokens_decoder()
    return {number for number, token in added.items() if token.special}.union(tokenizer.eos_ids)

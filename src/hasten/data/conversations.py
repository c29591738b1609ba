"""Converts records of a data set to conversations: OpenAI's messages, ShareGPT's turns, Alpaca's instructions.

Messages have the form that chat templates expect, as in the server (`hasten.text.chat.plain_messages`).
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from hasten.data.documents import Conversation
from hasten.errors import ConfigError, DataError
from hasten.text.chat import plain_messages

SHARE_GPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
# The fields of each kind of record, those that it must have first.
KINDS = {
    "messages": (("messages",), ("tools",)),
    "ShareGPT": (("conversations",), ("system", "tools")),
    "Alpaca": (("instruction", "output"), ("input", "system")),
}
CHAT_FIELDS = tuple(sorted({name for kinds in KINDS.values() for names in kinds for name in names}))
KNOWN = "'messages' for a chat, 'conversations' (ShareGPT), or 'instruction' and 'output' (Alpaca)"


def chat_kind(names: Iterable[str]) -> str | None:
    """The kind of conversation that records with these fields hold, or None."""
    there = set(names)
    return next((kind for kind, (needed, _) in KINDS.items() if there.issuperset(needed)), None)


def conversation(record: Mapping[str, Any], *, name: str) -> Conversation | None:
    """The conversation in a record, or None if there is none. Raises DataError if it is malformed."""
    kind = chat_kind(field for field, value in record.items() if value is not None)
    if kind is None:
        return None
    tools = _tools(record.get("tools"), name=name) if kind != "Alpaca" else None
    if kind == "messages":
        given, field = record["messages"], "messages"
    elif kind == "ShareGPT":
        given, field = _turns(record["conversations"], name=name), "conversations"
        given = [*_system(record), *given]
    else:
        given, field = [*_system(record), *_instruction(record, name=name)], "instruction"
    return Conversation(name, _checked(given, name=name, field=field), tools)


def _system(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "system", "content": record["system"]}] if record.get("system") else []


def _turns(turns: object, *, name: str) -> list[Any]:
    """Convert ShareGPT's {"from", "value"} to messages; messages stay as they are."""
    if not isinstance(turns, list):
        raise DataError(f"{name}: 'conversations' must be a list of turns, found {turns!r:.60}")
    found = []
    for number, turn in enumerate(turns):
        if not isinstance(turn, dict) or ("role" not in turn and not {"from", "value"} <= turn.keys()):
            raise DataError(
                f"{name}: conversations[{number}] must be an object with 'from' and 'value', found {turn!r:.60}"
            )
        if "role" in turn:
            found.append(turn)
            continue
        if turn["from"] not in SHARE_GPT_ROLES:
            raise DataError(
                f"{name}: conversations[{number}] is from {turn['from']!r:.40}; known are "
                f"{', '.join(SHARE_GPT_ROLES)} (write others, such as calls of tools, as 'messages')"
            )
        found.append({"role": SHARE_GPT_ROLES[turn["from"]], "content": turn["value"]})
    return found


def _instruction(record: Mapping[str, Any], *, name: str) -> list[dict[str, Any]]:
    """Convert Alpaca's record: `input` follows the instruction after an empty line."""
    asked = [record["instruction"], record.get("input") or ""]
    for field, text in zip(("instruction", "input"), asked, strict=True):
        if not isinstance(text, str):
            raise DataError(f"{name}: the field {field!r} is a {type(text).__name__}, expected text")
    content = "\n\n".join(filter(None, asked))
    return [{"role": "user", "content": content}, {"role": "assistant", "content": record["output"]}]


def _checked(messages: object, *, name: str, field: str) -> tuple[dict[str, Any], ...]:
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{name}: {field!r} must be a list with at least one message, found {messages!r:.60}")
    try:
        found = plain_messages(messages, where=f"{name}: {field}", complete=True)
    except ConfigError as error:
        raise DataError(str(error)) from None
    for number, message in enumerate(found):
        check_unicode(message["content"], name=f"{name}: {field}[{number}]")
    if not any(message["role"] == "assistant" for message in found):
        raise DataError(f"{name}: no message has the role 'assistant', so there is nothing to learn; leave it out")
    return tuple(found)


def _tools(tools: object, *, name: str) -> tuple[Mapping[str, Any], ...] | None:
    """Read tools as JSON schemas; some data sets store them as text, because a column has one type."""
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{name}: 'tools' is text that is not JSON ({error})") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{name}: 'tools' must be a list of objects, found {tools!r:.60}")
    return tuple(tools)


def check_unicode(text: str, *, name: str) -> None:
    """Raise DataError for text that UTF-8 cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{name}: has half a surrogate pair at character {error.start}, which is not Unicode text; repair it"
        ) from error

"""From messages to token ids. Nothing of a request reaches the chat template but its messages and its tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hasten.errors import HastenError
from hasten.serving.api.chat_schema import Message
from hasten.serving.api.errors import ApiError, check_limit
from hasten.serving.api.service import Service


async def encode_conversation(
    messages: Sequence[Message],
    service: Service,
    *,
    tools: list[dict[str, Any]] | None,
    add_special_tokens: bool = False,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Token ids of the conversation in the model's own template, up to where the answer begins."""
    check_limit("messages", len(messages), service.settings.messages, what="of them")
    plain = [_plain(message) for message in messages]
    tokenizer = service.tokenizer

    def render() -> str:
        return tokenizer.render_chat(plain, add_generation_prompt=add_generation_prompt, tools=tools)

    try:  # a template is a program: it is never run where it could hold up everybody
        text = await service.in_thread(render)
    except HastenError as error:
        raise ApiError(str(error)[:500], param="messages", code="chat_template") from None
    return await service.encode(text, add_special_tokens=add_special_tokens, param="messages")


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates know it: text in one piece, "developer" by its older name, arguments as values."""
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": "" if content is None else content}
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id or "",
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            plain[name] = getattr(message, name)
    return plain


def _arguments(text: str) -> Any:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text

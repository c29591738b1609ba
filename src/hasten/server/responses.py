"""/v1/responses, OpenAI's protocol of items: https://platform.openai.com/docs/api-reference/responses

A body is read into a `ChatBody` (`response_items.py` has the items); what its outputs add becomes the events of a
stream, the last of which has the whole answer.
"""

from __future__ import annotations

import copy
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from pydantic import BeforeValidator, Field
from pydantic_core import to_json

from hasten.engine.request import Request, RequestOutput
from hasten.server.answers import AnswerBuilder, EventStream, Json, after, chat_logprobs, reply
from hasten.server.bodies import (
    ChatBody,
    ConversationPart,
    Count,
    Effort,
    ModelBody,
    Name,
    Neutral,
    Probability,
    Text,
    check_parts,
)
from hasten.server.chat import ChatTurn, body_of, count_tokens_of
from hasten.server.documentation import ERRORS, STREAMED, DeletedResponse, ResponsesAnswer, TokenCount
from hasten.server.errors import ApiError, naming_fields
from hasten.server.response_items import Item, ItemList, ItemTool, Offered, messages_of, read_items
from hasten.server.service import Service
from hasten.server.tools import ParsedCall
from hasten.text.answer_reader import CallPiece

# What fields of a ChatBody are called here.
NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
_ECHOED = ("instructions", "max_output_tokens", "metadata", "previous_response_id", "temperature", "top_p", "user")


class TextFormat(ConversationPart):
    """text, json_object (any JSON object), or json_schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(max_length=256)] | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class TextConfig(ConversationPart):
    """The form of the answer. Its verbosity has no effect."""

    format: TextFormat | None = None


class Reasoning(ConversationPart):
    """How much the model reasons. Summaries are not made."""

    effort: Effort | None = None


class ItemChoice(ConversationPart):
    """Forces a call of one tool."""

    type: Literal["function", "custom"]
    name: Name


class InputBody(ModelBody):
    """The conversation of a request, whose tokens are counted."""

    input: Text | ItemList | None = None
    instructions: Text | None = None
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    tools: Annotated[list[ItemTool], Field(max_length=1024, fail_fast=True), BeforeValidator(check_parts)] | None = None
    tool_choice: Literal["auto", "none", "required"] | ItemChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    bookkeeping = (ModelBody.bookkeeping - {"include", "metadata", "store"}).union(
        ("access_programs", "image", "max_tool_calls", "stream_options")
    )
    neutral: ClassVar[Neutral] = {
        "background": (False,),
        "conversation": (),
        "moderation": (),
        "prompt": (),
        "truncation": ("disabled",),
    }


class ResponsesBody(InputBody):
    """A conversation to answer. store: whether later requests may refer to the answer (they may by default)."""

    max_output_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Probability | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=1024)] | None = None
    include: Annotated[list[Text], Field(max_length=64, fail_fast=True)] | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    stream: bool | None = None


class ResponseStore:
    """Answers that later requests may refer to, the latest `most` of them, in at most `most_bytes`."""

    def __init__(self, *, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes, self._bytes = most, most_bytes, 0
        self._kept: OrderedDict[str, tuple[Json, list[Item], int]] = OrderedDict()

    def add(self, response: Json, items: list[Item]) -> None:
        """Keep an answer, and the items of its conversation up to its end."""
        size = len(to_json(response)) + sum(len(item.model_dump_json()) for item in items)
        self._kept[response["id"]] = (response, items, size)
        self._bytes += size
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            self.remove(next(iter(self._kept)))

    def find(self, name: str, *, param: str | None = None) -> tuple[Json, list[Item]]:
        """The answer and its conversation. Raises ApiError (404) if it is not kept."""
        if name not in self._kept:
            message = f"there is no response {name[:80]!r}; this server keeps the latest {self._most:,}"
            raise ApiError(message, status=404, param=param, code="previous_response_not_found")
        self._kept.move_to_end(name)
        response, items, _ = self._kept[name]
        return response, items

    def remove(self, name: str) -> None:
        """Forget an answer that is kept."""
        self._bytes -= self._kept.pop(name)[2]


def add_responses(router: APIRouter, service: Service) -> None:
    settings = service.settings
    store = ResponseStore(most=settings.stored_responses, most_bytes=settings.bodies_bytes)

    def read(body: InputBody, http: HttpRequest, **fields: Any) -> tuple[ChatBody, list[Item], Offered]:
        """The request as a ChatBody, its items after those of the previous response, and its tools."""
        offered = Offered(body.tools or [])
        service.check_in(body, http, without_effect=offered.left_out)
        items: list[Item] = []
        if body.previous_response_id is not None:
            items += store.find(body.previous_response_id, param="previous_response_id")[1]
        given = body.input
        if isinstance(given, str):
            given = read_items([{"type": "message", "role": "user", "content": given}])
        items += given or []
        return _chat(body, items, offered, **fields), items, offered

    @router.post("/v1/responses", response_model=ResponsesAnswer, responses=ERRORS | STREAMED)
    async def responses(body: ResponsesBody, http: HttpRequest) -> Response:
        """Answer a conversation of items."""
        same = {name: getattr(body, name) for name in ("temperature", "top_p", "stream")}
        if body.top_logprobs is not None or "message.output_text.logprobs" in (body.include or ()):
            same |= {"logprobs": True, "top_logprobs": body.top_logprobs}
        with naming_fields(NAMES):
            chat, items, offered = read(body, http, max_tokens=body.max_output_tokens, **same)
            kept = store if body.store is not False and settings.stored_responses else None
            return await _Answer(service, chat, body, items, offered, kept).respond(http)

    @router.post("/v1/responses/input_tokens", response_model=TokenCount, responses=ERRORS)
    async def input_tokens(body: InputBody, http: HttpRequest) -> Response:
        """Count the tokens of a conversation."""
        with naming_fields(NAMES):
            count = await count_tokens_of(read(body, http)[0], service)
        return reply({"object": "response.input_tokens", "input_tokens": count})

    @router.get("/v1/responses/{name}", response_model=ResponsesAnswer, responses={404: ERRORS[404]})
    async def stored(name: str) -> Response:
        """A stored response."""
        return reply(store.find(name)[0])

    @router.delete("/v1/responses/{name}", response_model=DeletedResponse, responses={404: ERRORS[404]})
    async def delete(name: str) -> Response:
        """Delete a stored response."""
        store.find(name)
        store.remove(name)
        return reply({"id": name, "object": "response", "deleted": True})

    @router.post("/v1/responses/{name}/cancel", response_model=ResponsesAnswer, responses={404: ERRORS[404]})
    async def cancel(name: str) -> Response:
        """A stored response. It has ended; one that runs is cancelled by closing its connection."""
        return reply(store.find(name)[0])


class _Answer(AnswerBuilder[ChatBody]):
    """One response: reasoning, a message, then calls. A part of it is an event."""

    def __init__(
        self,
        service: Service,
        chat: ChatBody,
        body: ResponsesBody,
        items: list[Item],
        offered: Offered,
        store: ResponseStore | None,
    ) -> None:
        super().__init__(service, chat, prompts=1)
        self.turn = ChatTurn(chat, service, self.samples, fold=True)
        self._items, self._offered, self._store = items, offered, store
        self._output: list[Json] = []
        self._open: Json | None = None  # the item that is open
        self._call: ParsedCall | None = None  # the call that is open, with its arguments so far
        self._logprobs: list[Json] = []  # of tokens whose text has not come
        self._events = 0
        given = body.model_dump(by_alias=True, exclude_none=True)
        self._response: Json = {"id": "", "object": "response", "created_at": self.created, "status": "in_progress"}
        self._response |= {"error": None, "incomplete_details": None, "model": body.model, "output": []}
        self._response |= {name: given.get(name) for name in _ECHOED} | {"metadata": given.get("metadata", {})}
        self._response |= {
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "reasoning": {"effort": given.get("reasoning", {}).get("effort"), "summary": None},
            "store": store is not None,
            "text": given.get("text") or {"format": {"type": "text"}},
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": given.get("tools", []),
            "truncation": "disabled",
            "usage": None,
        }

    async def requests(self, name: str) -> list[Request]:
        self._mark = secrets.token_hex(12)  # in the ids of items and calls, which tools and logs see
        self.id = self._response["id"] = f"resp_{secrets.token_hex(16)}"  # whoever knows it can read the response
        return [await self.turn.request(self.id)]

    def take(self, which: int, output: RequestOutput) -> list[Json]:
        events: list[Json] = []
        if not self._events:
            begun = dict(self._response)
            events += [self._event("created", response=begun), self._event("in_progress", response=begun)]
        said = self.turn.read(output)
        self._logprobs += chat_logprobs(output.logprobs or ())["content"] if self.body.logprobs else []
        cut = said.finish_reason == "length"
        if said.reasoning:
            events += self._add_reasoning(said.reasoning, cut=cut)
            self._logprobs = []  # only a message has them
        if said.text or (said.finish_reason is not None and not self._output and not said.calls):
            events += self._add_text(said.text, cut=cut)
        for piece in said.calls:
            events += self._add_call(piece, cut=cut)
        if said.finish_reason is not None:
            events += self._close(cut=cut)
            events.append(self._end(cut=cut))
        return events

    def stream(self, first: Json, parts: AsyncIterator[Json]) -> EventStream:
        return EventStream(after(first, parts), named=True, failure=self._failed)

    def whole(self, parts: list[Json]) -> Json:
        return self._response

    def _event(self, kind: str, **fields: Any) -> Json:
        """An event with its number."""
        event = {"type": f"response.{kind}", "sequence_number": self._events} | fields
        self._events += 1
        return event

    def _begin(self, kind: str, part: Json, *, cut: bool, **fields: Any) -> list[Json]:
        """Begin an item with one part, unless one of its kind is open."""
        if self._open is not None and self._open["type"] == kind:
            return []
        events = self._close(cut=cut)
        mark = "msg" if kind == "message" else "rs"
        self._open = {"type": kind, "id": self._number(mark), **fields, "content": [part], "status": "in_progress"}
        self._output.append(self._open)
        events.append(self._item("output_item.added", item=self._open | {"content": []}))
        return [*events, self._in_part("content_part.added", part=copy.deepcopy(part))]

    def _add_reasoning(self, text: str, *, cut: bool) -> list[Json]:
        """Add to the reasoning, which begins with its first text."""
        events = self._begin("reasoning", {"type": "reasoning_text", "text": ""}, cut=cut, summary=[])
        self._output[-1]["content"][0]["text"] += text
        return [*events, self._in_part("reasoning_text.delta", delta=text)]

    def _add_text(self, text: str, *, cut: bool) -> list[Json]:
        """Add to the message, which begins with its first text."""
        logprobs, self._logprobs = self._logprobs, []
        part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        events = self._begin("message", part, cut=cut, role="assistant")
        part = self._output[-1]["content"][0]
        part["text"] += text
        part["logprobs"] += logprobs
        if text:
            events.append(self._in_part("output_text.delta", delta=text, logprobs=logprobs))
        return events

    def _add_call(self, piece: CallPiece, *, cut: bool) -> list[Json]:
        """Begin a call, or add to the arguments of the one that is open."""
        events: list[Json] = []
        if piece.name is not None:
            events += self._close(cut=cut)
            self._call = ParsedCall(piece.name, "")
            self._open = item = self._offered.item_of(self._call, call_id=self._number("call"))
            item["id"] = self._number("ctc" if "input" in item else "fc")
            item["status"] = "in_progress"
            self._output.append(item)
            events.append(self._item("output_item.added", item=dict(item)))
        assert self._call is not None
        assert self._open is not None
        self._call = ParsedCall(self._call.name, self._call.arguments + piece.arguments)
        if piece.arguments and "arguments" in self._open:  # the input of a custom tool is known at its end
            arguments = self._in_call("function_call_arguments.delta", delta=piece.arguments)
            events.append(arguments)
        return events

    def _close(self, *, cut: bool) -> list[Json]:
        """End the item that is open."""
        item, self._open = self._open, None
        if item is None:
            return []
        events = []
        if self._call is not None:
            call, self._call = self._call, None
            item |= self._offered.item_of(call, call_id=item["call_id"])
            events = self._call_done(item, call.name)
        else:
            part = item["content"][0]
            texts = {"text": part["text"]} | ({"logprobs": part["logprobs"]} if "logprobs" in part else {})
            events = [self._in_part(f"{part['type']}.done", **texts), self._in_part("content_part.done", part=part)]
        item["status"] = "incomplete" if cut else "completed"
        return [*events, self._item("output_item.done", item=item)]

    def _call_done(self, item: Json, name: str) -> list[Json]:
        """The events of whole arguments, or of a custom tool's whole input."""
        if "input" not in item:
            return [self._in_call("function_call_arguments.done", name=name, arguments=item["arguments"])]
        kind = "custom_tool_call_input"
        delta = self._in_call(f"{kind}.delta", delta=item["input"])
        return [delta, self._in_call(f"{kind}.done", name=name, input=item["input"])]

    def _item(self, kind: str, **fields: Any) -> Json:
        """An event of the last item."""
        return self._event(kind, output_index=len(self._output) - 1, **fields)

    def _in_part(self, kind: str, **fields: Any) -> Json:
        """An event of the last item's text."""
        return self._item(kind, item_id=self._output[-1]["id"], content_index=0, **fields)

    def _in_call(self, kind: str, **fields: Any) -> Json:
        """An event of the last item, a call."""
        return self._item(kind, item_id=self._output[-1]["id"], **fields)

    def _end(self, *, cut: bool) -> Json:
        """Complete the response, and keep it."""
        status = "incomplete" if cut else "completed"
        details = {"reason": "max_output_tokens"} if cut else None
        usage = {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.turn.reasoning_tokens},
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        self._response |= {"status": status, "incomplete_details": details, "output": self._output, "usage": usage}
        if self._store is not None:
            self._store.add(self._response, [*self._items, *read_items(self._output)])
        return self._event(status, response=self._response)

    def _failed(self, error: ApiError) -> Json:
        """The last event of a stream that fails."""
        failure = {"code": error.code or error.type, "message": error.message}
        return self._event("failed", response=self._response | {"status": "failed", "error": failure})

    def _number(self, kind: str) -> str:
        return f"{kind}_{self._mark}_{self.service.number()}"


def _chat(body: InputBody, items: list[Item], offered: Offered, **fields: Any) -> ChatBody:
    """The same as a ChatBody."""
    messages = messages_of(items, offered)
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    if offered.tools:
        fields["tools"] = offered.tools
        fields["parallel_tool_calls"] = body.parallel_tool_calls
    if isinstance(body.tool_choice, ItemChoice):
        fields["tool_choice"] = {"type": "function", "function": {"name": body.tool_choice.name}}
    elif offered.tools or body.tool_choice == "required":
        fields["tool_choice"] = body.tool_choice
    form = None if body.text is None else body.text.format
    if form is not None:
        named = {"name": form.name, "schema": form.json_schema}
        schema = named if form.type == "json_schema" else None
        fields["response_format"] = {"type": form.type, "json_schema": schema}
    fields["reasoning_effort"] = None if body.reasoning is None else body.reasoning.effort
    return body_of(ChatBody, model=body.model, messages=messages, user=body.user, **fields)

"""Ollama's API, /api/chat, /api/generate and /api/embed: https://github.com/ollama/ollama/blob/main/docs/api.md

A body is read into a `ChatBody`, or a `CompletionBody` where no template changes the prompt; what its outputs add
becomes the objects of a stream, one a line.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from pydantic import BeforeValidator, ConfigDict, Field
from pydantic_core import to_json

from hasten.engine.request import Request, RequestOutput
from hasten.server.answers import AnswerBuilder, EventStream, Json, after, chat_logprobs, reply
from hasten.server.bodies import (
    MANY,
    STOPS,
    Body,
    ChatBody,
    ConversationPart,
    ModelBody,
    Name,
    Neutral,
    Penalty,
    Probability,
    SamplingBody,
    Stop,
    Text,
    Texts,
    ToolList,
    check_parts,
)
from hasten.server.build_request import Samples, check_limit, constraint_of, prompts_of
from hasten.server.chat import ChatTurn, Said, body_of
from hasten.server.completions import CompletionBody, completion_prompts, completion_request
from hasten.server.documentation import LINES, OLLAMA_ERRORS, OllamaChat, OllamaEmbeddings, OllamaText
from hasten.server.embeddings import vectors_of
from hasten.server.errors import ApiError, naming_fields
from hasten.server.service import Service
from hasten.server.tools import arguments_of, format_of
from hasten.text.answer_reader import CallPiece
from hasten.text.infill import infill_marks

# What fields of a ChatBody or CompletionBody are called here.
NAMES = {"response_format": "format", "max_tokens": "options.num_predict", "stop": "options.stop"}


class OllamaOptions(Body):
    """How tokens are drawn. Other options (num_ctx, num_thread, …) have no effect and are named as ignored."""

    model_config = ConfigDict(extra="allow")
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    top_p: Probability | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None  # -1: none
    num_predict: Annotated[int, Field(ge=-2, le=2**31 - 1)] | None = None  # 0 and below: as many as there is room for
    stop: Stop | Annotated[list[Stop], Field(max_length=STOPS, fail_fast=True)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    neutral: ClassVar[Neutral] = {
        "mirostat": (0,),
        "penalize_newline": (True,),
        "repeat_last_n": (-1,),  # penalties look at the whole text
        "tfs_z": (1, 1.0),
        "typical_p": (1, 1.0),
    }


class OllamaCalledFunction(ConversationPart):
    """A call's function, with its arguments as an object."""

    name: Name
    arguments: dict[str, Any]


class OllamaCall(ConversationPart):
    """A call of an earlier answer."""

    id: Annotated[str, Field(max_length=256)] | None = None
    function: OllamaCalledFunction


class OllamaMessage(ConversationPart):
    """One turn. tool_name: the function whose result the message of a tool is."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text | None = None
    thinking: Text | None = None
    tool_calls: Annotated[list[OllamaCall], Field(fail_fast=True)] | None = None
    tool_name: Name | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    neutral: ClassVar[Neutral] = {"images": ([],)}


class OllamaBody(ModelBody):
    """Fields shared by /api/chat and /api/generate. Answers are streamed unless `stream` is false.

    think: whether the model reasons first, or how much. format: "json", or the JSON schema of the answer.
    """

    stream: bool | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=1024)] | None = None
    bookkeeping = ModelBody.bookkeeping | {"keep_alive"}
    neutral: ClassVar[Neutral] = {"template": ("",)}

    def without_effect(self) -> list[str]:
        """Names of options that have no equivalent here."""
        options = self.options or OllamaOptions()
        return [f"options.{name}" for name in options.model_extra or ()]

    def sampling(self) -> Json:
        """The fields that a ChatBody and a CompletionBody have alike."""
        options = self.options or OllamaOptions()
        same = ("temperature", "top_k", "top_p", "min_p", "stop", "presence_penalty", "frequency_penalty")
        fields = {name: getattr(options, name) for name in same}
        fields["repetition_penalty"] = options.repeat_penalty
        fields["seed"] = None if options.seed == -1 else options.seed
        fields["max_tokens"] = options.num_predict if (options.num_predict or 0) > 0 else None
        if isinstance(self.format, dict):
            fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": self.format}}
        elif self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        own = {"model": self.model, "user": self.user, "add_special_tokens": self.add_special_tokens}
        return fields | own | {"stream": self.stream is not False}

    def conversation(self, messages: list[Json], **fields: Any) -> ChatBody:
        """A ChatBody of these messages; a last one of the assistant is continued, and means nothing if it is blank."""
        if self.think is not None:
            fields["reasoning_effort"] = self.think if isinstance(self.think, str) else None if self.think else "none"
        if self.think:
            fields["chat_template_kwargs"] = {"enable_thinking": True, "thinking": True}  # Qwen's, DeepSeek's names
        if messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
            fields["continue_final_message"] = bool(messages[-1]["content"].strip())
            messages = messages if fields["continue_final_message"] else messages[:-1]
        fields |= {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs}
        return body_of(ChatBody, messages=messages, **self.sampling(), **fields)


class OllamaChatBody(OllamaBody):
    """A conversation; without messages it asks only whether the model is loaded."""

    messages: Annotated[list[OllamaMessage], Field(max_length=MANY, fail_fast=True), BeforeValidator(check_parts)]
    tools: ToolList | None = None


class OllamaGenerateBody(OllamaBody):
    """A prompt; without one it asks only whether the model is loaded.

    raw: no template changes the prompt. suffix: nor does one then; the answer is what is missing between the two.
    """

    prompt: Text | None = None
    system: Text | None = None
    raw: bool | None = None
    suffix: Text | None = None
    neutral: ClassVar[Neutral] = OllamaBody.neutral | {"context": ([],), "images": ([],)}


class OllamaEmbedBody(ModelBody):
    """A text, or several."""

    input: Text | Texts
    bookkeeping = ModelBody.bookkeeping | {"keep_alive"}
    neutral: ClassVar[Neutral] = {"dimensions": ()}


def add_ollama(router: APIRouter, service: Service) -> None:

    @router.post("/api/chat", response_model=OllamaChat, responses=OLLAMA_ERRORS | LINES)
    async def chat(body: OllamaChatBody, http: HttpRequest) -> Response:
        """Answer a conversation, in Ollama's protocol."""
        service.check_in(body, http, without_effect=body.without_effect())
        if not body.messages:
            return reply(_object(body.model, "message", "", done=True, done_reason="load"))
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        await _check_abilities(service, body, tools=bool(tools))
        with naming_fields(NAMES):
            asked = body.conversation(_turns(body.messages), **({"tools": tools} if tools else {}))
            return await _Answer(service, asked, key="message").respond(http)

    @router.post("/api/generate", response_model=OllamaText, responses=OLLAMA_ERRORS | LINES)
    async def generate(body: OllamaGenerateBody, http: HttpRequest) -> Response:
        """Answer a prompt in the model's chat template, or continue it (`raw`), in Ollama's protocol."""
        service.check_in(body, http, without_effect=body.without_effect())
        if not body.prompt:
            return reply(_object(body.model, "response", "", done=True, done_reason="load"))
        if (body.raw or body.suffix) and (body.system or body.think):
            name, without = "system" if body.system else "think", "raw" if body.raw else "suffix"
            raise ApiError(f"{name} needs the chat template, which {without} leaves out; give one of them", param=name)
        await _check_abilities(service, body, tools=False, insert=bool(body.suffix))
        with naming_fields(NAMES):
            return await _Answer(service, _asked(body, service), key="response").respond(http)

    @router.post("/api/embed", response_model=OllamaEmbeddings, responses=OLLAMA_ERRORS)
    async def embed(body: OllamaEmbedBody, http: HttpRequest) -> Response:
        """Vectors of texts, of length 1, in Ollama's protocol."""
        service.check_in(body, http)
        given = await prompts_of(body.input, service, param="input", add_special_tokens=body.add_special_tokens)
        vectors = await vectors_of(given, service, model=body.model)
        tokens = http.state.facts["prompt_tokens"] = sum(map(len, given))
        took = round((time.perf_counter() - http.state.arrived) * 1e9)
        times = {"total_duration": took, "load_duration": 0, "prompt_eval_count": tokens}
        return reply({"model": body.model, "embeddings": vectors.tolist(), **times})


async def abilities(service: Service) -> list[str]:
    """What the served model can do, in Ollama's words: completion, insert, tools, thinking."""
    found = ["completion"]
    if service.has_tokenizer:
        if infill_marks(service.tokenizer) is not None:
            found.append("insert")
        form, templates = await service.answer_format(tools=True), service.tokenizer.templates
        template = templates.get("tool_use", templates.get("default"))
        if template is not None and (form.calls is not None or format_of(form, template.source) is not None):
            found.append("tools")
        if form.reasoning is not None:
            found.append("thinking")
    return found


async def _check_abilities(service: Service, body: OllamaBody, *, tools: bool, insert: bool = False) -> None:
    """Raise ApiError, in Ollama's words, for what the model's chat template or tokenizer cannot do."""
    if not tools and not body.think and not insert:
        return
    known = await abilities(service)
    wanted = ((tools, "tools", "tools"), (body.think, "thinking", "think"), (insert, "insert", "suffix"))
    for asked, ability, param in wanted:
        if asked and ability not in known:
            raise ApiError(f'"{body.model[:200]}" does not support {ability}', param=param)


def _asked(body: OllamaGenerateBody, service: Service) -> ChatBody | CompletionBody:
    """The prompt as a conversation; where no template is to change it, or there is none, as it is."""
    if body.raw or body.suffix or (not body.system and not service.tokenizer.templates):
        scores = (body.top_logprobs or 0) if body.logprobs else None
        return body_of(CompletionBody, prompt=body.prompt, suffix=body.suffix, logprobs=scores, **body.sampling())
    system = [{"role": "system", "content": body.system}] if body.system else []
    return body.conversation([*system, {"role": "user", "content": body.prompt}])


def _turns(turns: Sequence[OllamaMessage]) -> list[Json]:
    """Chat messages. Calls without an id get one, and results the id of the first open call of their function."""
    messages: list[Json] = []
    opened: list[tuple[str, str]] = []  # ids and names of calls that have no result yet
    count = 0
    for turn in turns:
        message: Json = {"role": turn.role, "content": turn.content or "", "reasoning_content": turn.thinking or None}
        if turn.role == "tool":
            known = next((call for call in opened if turn.tool_name in (None, call[1])), None)
            if known is not None:
                opened.remove(known)
            message["tool_call_id"] = turn.tool_call_id or (None if known is None else known[0])
            message["name"] = turn.tool_name or (None if known is None else known[1])
        calls = []
        for call in turn.tool_calls or ():
            name, count = call.function.name, count + 1
            opened.append((call.id or f"call_{count}", name))
            arguments = json.dumps(call.function.arguments, ensure_ascii=False)
            calls.append({"id": opened[-1][0], "function": {"name": name, "arguments": arguments}})
        messages.append(message | ({"tool_calls": calls} if calls else {}))
    return messages


def _object(model: str, key: str, text: str, said: Json | None = None, **rest: Any) -> Json:
    """An object of an answer. key: "message" of a chat, or "response". said: what is beside the text."""
    made = {"model": model, "created_at": datetime.now(UTC).isoformat()}
    if key == "message":
        return made | {key: {"role": "assistant", "content": text} | (said or {})} | rest
    return made | {key: text} | (said or {}) | rest


class _RawTurn:
    """A prompt that no template changes; what `ChatTurn` is of a conversation."""

    def __init__(self, body: CompletionBody, service: Service, samples: Samples) -> None:
        self._body, self._service, self._samples = body, service, samples
        check_limit("top_logprobs", body.logprobs or 0, service.settings.logprobs)

    async def request(self, name: str) -> Request:
        body, service = self._body, self._service
        (prompt,) = await completion_prompts(body, service)
        constraint = None if body.response_format is None else await constraint_of(body.response_format, service)
        how: Json = {"samples": self._samples, "constraint": constraint, "default": None}
        return completion_request(body, service, id=name, prompt=prompt, **how)

    def read(self, output: RequestOutput) -> Said:
        return Said(output.text, [], output.finish_reason)


class _Lines(EventStream):
    """A stream of JSON objects, one a line."""

    media_type = "application/x-ndjson"
    end = b""

    def encode(self, chunk: Json) -> bytes:
        return to_json(chunk, inf_nan_mode="null") + b"\n"


class _Answer(AnswerBuilder[SamplingBody]):
    """One answer. A part of it is an object of its stream; the last one has the times and counts."""

    def __init__(self, service: Service, body: ChatBody | CompletionBody, *, key: str) -> None:
        super().__init__(service, body, prompts=1)
        self.turn: ChatTurn | _RawTurn
        if isinstance(body, ChatBody):
            self.turn = ChatTurn(body, service, self.samples, fold=True)
        else:
            self.turn = _RawTurn(body, service, self.samples)
        self._key, self._begun = key, False
        self._open: CallPiece | None = None  # the call whose arguments come
        self._text = self._thinking = ""
        self._calls: list[Json] = []
        self._logprobs: list[Json] = []
        self._end: Json = {}

    async def requests(self, name: str) -> list[Request]:
        self.id = f"ollama-{name}-{self.service.number()}"
        return [await self.turn.request(self.id)]

    def take(self, which: int, output: RequestOutput) -> list[Json]:
        said = self.turn.read(output)
        calls = self._complete(said.calls, ended=said.finish_reason is not None)
        scores = chat_logprobs(output.logprobs or ())["content"]
        self._text += said.text
        self._thinking += said.reasoning
        self._calls += calls
        self._logprobs += scores
        parts = []
        if said.text or said.reasoning or calls or scores or not self._begun:
            self._begun = True
            parts.append(self._part(said.text, said.reasoning, calls, scores, done=False))
        if said.finish_reason is not None:
            reason = "length" if said.finish_reason == "length" else "stop"
            self._end = {"done": True, "done_reason": reason} | self._times()
            parts.append(self._part("", "", [], [], **self._end))
        return parts

    def stream(self, first: Json, parts: AsyncIterator[Json]) -> EventStream:
        return _Lines(after(first, parts), failure=ApiError.ollama_body)

    def whole(self, parts: list[Json]) -> Json:
        return self._part(self._text, self._thinking, self._calls, self._logprobs, **self._end)

    def _part(self, text: str, thinking: str, calls: list[Json], scores: list[Json], **rest: Any) -> Json:
        said = ({"thinking": thinking} if thinking else {}) | ({"tool_calls": calls} if calls else {})
        if scores:
            rest["logprobs"] = scores
        return _object(self.body.model, self._key, text, said, **rest)

    def _complete(self, pieces: Sequence[CallPiece], *, ended: bool) -> list[Json]:
        """The calls that these pieces complete: arguments are an object, so none of a call is sent before its end."""
        whole: list[CallPiece] = []
        for piece in pieces:
            if piece.name is None and self._open is not None:
                self._open.arguments += piece.arguments
            else:
                whole += [] if self._open is None else [self._open]
                self._open = CallPiece(piece.index, piece.name, piece.arguments)
        if ended and self._open is not None:
            whole.append(self._open)
            self._open = None
        return [self._call(call) for call in whole]

    def _call(self, call: CallPiece) -> Json:
        function = {"index": call.index, "name": call.name, "arguments": arguments_of(call.arguments)}
        return {"id": f"call_{self.service.number()}", "function": function}

    def _times(self) -> Json:
        """Counts of tokens, and nanoseconds: to the first token, and from it to the last."""
        times = self.stopwatch.timings(self.prompt_tokens, self.cached_tokens, self.completion_tokens)
        prompt, answer = (round(times[name] * 1e6) for name in ("prompt_ms", "predicted_ms"))
        return {
            "total_duration": prompt + answer,
            "load_duration": 0,
            "prompt_eval_count": self.prompt_tokens,
            "prompt_eval_duration": prompt,
            "eval_count": self.completion_tokens,
            "eval_duration": answer,
        }

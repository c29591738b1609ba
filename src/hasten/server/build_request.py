"""Builds the engine's Request from a validated body: the server's limits, the model's defaults, the prompt's tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hasten.engine.params import RECOMMENDED, SamplingParams
from hasten.engine.request import Request
from hasten.errors import ConfigError, HastenError
from hasten.server.bodies import Message, ResponseFormat, SamplingBody, TemplateBody, TextPart
from hasten.server.errors import ApiError
from hasten.server.reasoning import AfterReasoning
from hasten.server.service import Service, too_long
from hasten.server.settings import ServerSettings
from hasten.server.structured import Grammar, grammar_of
from hasten.text.chat import check_template_kwargs, plain_messages

# What a body and SamplingParams have under one name, beside what a folder recommends.
_SAME = ("presence_penalty", "frequency_penalty", "stop", "stop_token_ids", "ignore_eos")


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Number of samples (or beams) of each prompt; the fields are those of the engine's Request."""

    n: int
    best_of: int | None = None
    beam_width: int = 0
    length_penalty: float = 1.0
    early_stopping: bool = False

    @property
    def ranked(self) -> bool:
        """Whether texts are compared with each other, and so come all at once, when all are complete."""
        return self.beam_width > 0 or (self.best_of or self.n) > self.n


def build_request(
    body: SamplingBody,
    service: Service,
    *,
    id: str,
    prompt: Sequence[int],
    max_tokens: int,
    samples: Samples,
    constraint: Grammar | AfterReasoning | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    skip_special_tokens: bool,
) -> Request:
    """Build the engine's request. Raises ApiError naming the field."""
    return Request(
        id=id,
        prompt=prompt,
        params=sampling_params(body, service, max_tokens=max_tokens, constrained=grammar_of(constraint) is not None),
        n=samples.n,
        best_of=samples.best_of,
        beam_width=samples.beam_width,
        length_penalty=samples.length_penalty,
        early_stopping=samples.early_stopping,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        priority=body.priority or 0,
        salt=body.cache_salt or "",
        adapter=service.check_model(body.model),
        timeout=service.settings.request_timeout,
        constraint=constraint,
        skip_special_tokens=skip_special_tokens,
        whole=not body.stream,
    )


def sampling_params(body: SamplingBody, service: Service, *, max_tokens: int, constrained: bool) -> SamplingParams:
    """Sampling parameters of a request. Raises ApiError naming the field."""
    # A beam search draws nothing, so the folder's recommended temperature does not apply.
    defaults: Mapping[str, Any] = {"temperature": 0.0} if body.use_beam_search else service.settings.defaults
    known = {name: defaults[name] for name in RECOMMENDED if defaults.get(name) is not None}
    chosen = known | body.model_dump(include={*RECOMMENDED, *_SAME}, exclude_none=True)
    if chosen.get("top_k") == -1:  # vLLM's value for all
        chosen["top_k"] = 0
    highest = max(body.stop_token_ids or (), default=0)
    if highest >= service.vocabulary:
        message = f"stop_token_ids: {highest} is no token id below {service.vocabulary}"
        raise ApiError(message, param="stop_token_ids")
    if (body.min_tokens or 0) > max_tokens:
        raise ApiError(f"min_tokens is {body.min_tokens}, above the {max_tokens} that may come", param="min_tokens")
    if constrained:
        for name in ("ignore_eos", "min_tokens", "stop", "stop_token_ids"):
            if getattr(body, name):
                message = f"{name} cannot be combined with structured output, which decides where it ends"
                raise ApiError(message, param=name)
    try:
        return SamplingParams(
            **chosen,
            logit_bias=_biases(body.logit_bias, service) if body.logit_bias else {},
            seed=None if body.seed is None else body.seed % 2**62,  # room to number the samples of one seed
            max_new_tokens=max_tokens,
            min_new_tokens=body.min_tokens or 0,
        )
    except ConfigError as error:
        raise ApiError(str(error), code="invalid_value") from None


def check_limit(name: str, found: int, most: int) -> None:
    """Raise ApiError naming the field if its value is above the server's limit."""
    if found > most:
        raise ApiError(f"{name}: {found:,}; this server's limit is {most:,}", param=name)


def samples_of(body: SamplingBody, settings: ServerSettings, *, prompts: int) -> Samples:
    """Number of samples (or beams) of a request, checked against the limits."""
    n, best_of = body.n or 1, body.best_of
    if best_of is not None and best_of < n:
        raise ApiError(f"best_of is {best_of}, below n, which is {n}", param="best_of")
    if best_of is not None and best_of > n and body.stream:
        raise ApiError("best_of cannot be streamed: the best samples are known at the end", param="best_of")
    drawn = best_of or n
    check_limit("n" if best_of is None else "best_of", drawn, settings.samples)
    if drawn * prompts > settings.choices:
        message = f"{prompts} prompts with {drawn} samples each are {drawn * prompts}; at most {settings.choices}"
        raise ApiError(message, param="prompt")
    if body.use_beam_search:
        penalty = 1.0 if body.length_penalty is None else body.length_penalty
        return Samples(n=n, beam_width=drawn, length_penalty=penalty, early_stopping=bool(body.early_stopping))
    for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
        if getattr(body, name) not in (None, neutral):
            raise ApiError(f"{name} needs use_beam_search", param=name)
    return Samples(n=n, best_of=None if best_of == n else best_of)


def room(
    prompt: Sequence[int], wanted: int | None, service: Service, *, param: str, wanted_by: str, default: int | None
) -> int:
    """Maximum number of new tokens: as many as `wanted` and as fit behind the prompt; 400 if the prompt does not fit.

    With `strict_length` it is also a 400 if `wanted` tokens do not fit. param, wanted_by: the request fields that hold
    the prompt and `wanted`, for the error.
    """
    left = service.max_length - len(prompt)
    if left < 1:
        raise too_long(len(prompt), service.max_length, param=param)
    if wanted is None:
        return left if default is None else min(default, left)
    if wanted > left and service.settings.strict_length:
        message = (
            f"the prompt's {len(prompt):,} tokens and {wanted:,} to follow are {len(prompt) + wanted:,}; this server's "
            f"limit is {service.max_length:,} together"
        )
        raise ApiError(message, param=wanted_by, code="context_length_exceeded")
    return min(wanted, left)


async def constraint_of(wanted: ResponseFormat, service: Service) -> Grammar | None:
    """The grammar of a structured answer, or None for text. Raises ApiError (400) for a schema that is refused."""
    given = wanted.json_schema
    if given is not None and wanted.type != "json_schema":
        message = f"response_format: json_schema is given with type {wanted.type}; use type json_schema"
        raise ApiError(message, param="response_format")
    if wanted.type == "text":
        return None
    schema: dict[str, Any] | bool | None = {"type": "object"}
    if wanted.type == "json_schema":
        schema = None if given is None else given.json_schema
    if schema is None:
        message = "response_format of type json_schema needs json_schema.schema"
        raise ApiError(message, param="response_format.json_schema")
    return await service.grammars.constraint(schema, param="response_format")


async def encode_conversation(
    messages: Sequence[Message],
    body: TemplateBody,
    service: Service,
    *,
    tools: list[dict[str, Any]] | None,
    add_special_tokens: bool = False,
    fold: bool = False,
) -> list[int]:
    """Token ids of the conversation in the model's own template, up to where the answer begins.

    fold: messages that the template refuses are rendered once more with `folded` turns.
    """
    continued = body.continue_final_message is True
    prompted = not continued if body.add_generation_prompt is None else body.add_generation_prompt
    variables = _variables(body, service.settings.chat_template_kwargs)
    tokenizer = service.tokenizer

    def render(turns: Sequence[Message]) -> str:
        return tokenizer.render_chat(
            plain_messages([turn.model_dump(exclude_none=True) for turn in turns]),
            add_generation_prompt=prompted,
            continue_final_message=continued,
            tools=tools,
            chat_template_kwargs=variables,
        )

    if continued and prompted:
        message = "add_generation_prompt begins a new turn, continue_final_message continues the last one; give one"
        raise ApiError(message, param="add_generation_prompt")
    try:  # a template is a program: it never runs on the event loop
        try:
            text = await service.in_thread(lambda: render(messages))
        except ConfigError:
            if not fold:
                raise
            text = await service.in_thread(lambda: render(folded(messages)))
    except HastenError as error:
        raise ApiError(str(error)[:500], param="messages", code="chat_template") from None
    return await service.encode(text, add_special_tokens=add_special_tokens, param="messages")


def folded(messages: Sequence[Message]) -> list[Message]:
    """Join system messages at the beginning into one, and put later ones, as text, into the user's next turn.

    For templates that know one system message, and turns of user and assistant one after the other.
    """
    turns: list[Message] = []
    for message in messages:
        role = "system" if message.role == "developer" else message.role
        if role == "system" and any(turn.role != "system" for turn in turns):
            role = "user"
        if turns and turns[-1].role == role and role in ("system", "user"):
            parts = [*_text_parts(turns[-1]), *_text_parts(message)]
            turns[-1] = Message(role=role, content=parts)
        else:
            turns.append(message.model_copy(update={"role": role}))
    return turns


def _text_parts(message: Message) -> list[TextPart]:
    content = message.content or []
    return [TextPart(type="text", text=content)] if isinstance(content, str) else content


def _variables(body: TemplateBody, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of the template: the server's, the effort, and the request's own."""
    given = body.chat_template_kwargs or {}
    try:
        check_template_kwargs(given)
    except ConfigError as error:
        raise ApiError(f"chat_template_kwargs: {error}"[:500], param="chat_template_kwargs") from None
    effort: dict[str, Any] = {}
    if body.reasoning_effort == "none":
        effort = {"enable_thinking": False, "thinking": False}  # Qwen's and DeepSeek's names
    elif body.reasoning_effort is not None:
        effort = {"reasoning_effort": body.reasoning_effort}
    return {**defaults, **effort, **given}


async def prompts_of(
    given: Any, service: Service, *, param: str, add_special_tokens: bool | None
) -> list[tuple[int, ...]]:
    """Token ids of one prompt or several, each a text or its ids (`bodies.Prompts`). Raises ApiError naming `param`."""
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not given:
        raise ApiError(f"{param} is empty", param=param)
    found = []
    for one in given:
        ids = one
        if isinstance(one, str):
            ids = await service.encode(one, add_special_tokens=add_special_tokens is not False, param=param)
        if len(ids) > service.max_length:
            raise too_long(len(ids), service.max_length, param=param)
        found.append(check_ids(ids, service, param=param))
    return found


def check_ids(prompt: Sequence[int], service: Service, *, param: str) -> tuple[int, ...]:
    """Check token ids from a request: at least one, and all in the vocabulary."""
    if not prompt:
        raise ApiError("the prompt is empty: it needs at least one token", param=param)
    if max(prompt) >= service.vocabulary:
        raise ApiError(f"token id {max(prompt)}: the vocabulary has {service.vocabulary}", param=param)
    return tuple(prompt)


def _biases(given: Mapping[str, float], service: Service) -> dict[int, float]:
    biases = {}
    for key, value in given.items():
        # One spelling only: of "05" and "5" one would be ignored.
        plain = key.isascii() and key.isdigit() and len(key) < 10 and str(int(key)) == key
        if not plain or int(key) >= service.vocabulary:
            raise ApiError(f"logit_bias: {key[:40]!r} is no token id below {service.vocabulary}", param="logit_bias")
        biases[int(key)] = value
    return biases

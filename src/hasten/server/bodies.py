"""Request bodies: parsed within limits, and validated by base classes that know every field.

- Bookkeeping (`metadata`, `prompt_cache_key`, …) is accepted and has no effect.
- A field that would change the answer and is not supported is accepted only with a neutral value (one that asks for
  nothing), because clients send their defaults. Any other value is a 400 that names the field.
- An unknown field of a request has no effect; the response header `x-hasten-ignored` names it. With
  `ServerSettings.strict_fields` it is a 400. Inside `response_format` and tools it is always a 400.
- null counts as absent everywhere.
"""

import json
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, ClassVar

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError, from_json

from hasten.server.responses import ApiError

Probability = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Text = Annotated[str, Field(max_length=1 << 22)]
# Bodies are validated on the event loop, where all requests wait. So validation ends at the first wrong item (an error
# for each of a million would take minutes and gigabytes), and at the first item too many.
MANY = 4096
PROMPTS, STOPS, STOP_TOKENS, BIASES = 256, 16, 256, 1024
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Texts = Annotated[list[Text], Field(max_length=PROMPTS, fail_fast=True)]
Prompts = Text | Texts | TokenIds | Annotated[list[TokenIds], Field(max_length=PROMPTS, fail_fast=True)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]  # an empty one would end every answer at once
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
Neutral = dict[str, tuple[Any, ...]]  # field -> the values that ask for nothing, beside null
NESTING, KEYS = 64, 4096  # maximum levels of a body, and keys of an object in it


class BodyRoute(APIRoute):
    """A route whose JSON body is parsed by `parse_json` instead of Python's parser."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def handle_parsed(request: Request) -> Response:
            parsed = _ParsedRequest(request.scope, request.receive)
            if body := await parsed.body():
                parsed.value = parse_json(body)
            return await handle(parsed)

        return handle_parsed


class _ParsedRequest(Request):
    value: Any = None

    async def json(self) -> Any:
        return self.value


def parse_json(data: bytes) -> Any:
    """Parse JSON; raises ApiError (400) if it is invalid, nested too deeply, or an object has too many keys.

    NaN, infinity, numbers of more than 4,300 digits, lone surrogates and invalid UTF-8 are refused (RFC 8259). Python's
    own parser accepts the first and the third, and recurses as deeply as the input nests.
    """
    try:
        value = from_json(data, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        code = "nesting" if "recursion" in str(error) else "invalid_json"
        raise ApiError(f"the body is not valid JSON: {error}", code=code) from None
    depth, level = 0, [value]
    while level:
        if any(len(item) > KEYS for item in level if isinstance(item, dict)):
            raise ApiError(f"an object in the body has more than {KEYS:,} keys", code="too_many_keys")
        level = [item for items in level for item in _children(items) if isinstance(item, (dict, list))]
        depth += 1
        if depth > NESTING and level:
            raise ApiError(f"the body is nested deeper than {NESTING} levels", code="nesting")
    return value


def _children(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


class Body(BaseModel):
    """An object in a request. Unknown fields are refused.

    bookkeeping: fields that are accepted without effect. neutral: fields that are not supported, each with the values
    that ask for nothing.
    """

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=(), hide_input_in_errors=True)
    bookkeeping: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[Neutral] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        kept = {}
        for name, value in values.items():
            if value is None or name in cls.bookkeeping:
                continue
            if name in cls.neutral:
                accepted = cls.neutral[name]
                if not any(type(value) is type(item) and value == item for item in accepted):
                    only = f"; accepted: {', '.join(map(json.dumps, accepted))}" if accepted else ""
                    context = {"field": name, "only": only}
                    raise PydanticCustomError("unsupported", "{field} is not supported by this server{only}", context)
                continue
            kept[name] = value
        return kept


class RequestBody(Body):
    """A whole request. Its unknown fields are `model_extra`, which `Service.note_ignored` reports."""

    model_config = ConfigDict(extra="allow")
    bookkeeping: ClassVar[frozenset[str]] = frozenset(
        (
            *("betas", "cache_control", "client_metadata", "context_management", "include", "metadata", "prediction"),
            *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "request_id", "safety_identifier"),
            *("service_tier", "store", "verbosity"),
        )
    )


class StreamOptions(Body):
    """include_usage: a last chunk with the usage. continuous_usage_stats (vLLM's): the usage in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    bookkeeping = frozenset({"include_obfuscation"})


class JsonSchema(Body):
    """A named JSON schema. strict has no effect: answers always follow the schema."""

    name: Annotated[str, Field(max_length=256)] | None = None
    description: Text | None = None
    json_schema: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Body):
    """text, json_object (any JSON object), or json_schema."""

    type: Annotated[str, Field(pattern="^(text|json_object|json_schema)$")]
    json_schema: JsonSchema | None = None


class ModelBody(RequestBody):
    """A request that the model computes."""

    model: Annotated[str, Field(max_length=512)]
    user: Annotated[str, Field(max_length=512)] | None = None  # in the log of the request
    add_special_tokens: bool | None = None


class SamplingBody(ModelBody):
    """Fields shared by completions and chat completions. Defaults are the model folder's, else OpenAI's."""

    n: Annotated[int, Field(ge=1, le=1024)] | None = None
    best_of: Annotated[int, Field(ge=1, le=1024)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=STOPS, fail_fast=True)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=BIASES)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=STOP_TOKENS)] | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    use_beam_search: bool | None = None  # best_of (else n) beams; the n best are returned
    length_penalty: Annotated[float, Field(ge=-10, le=10, allow_inf_nan=False)] | None = None
    early_stopping: bool | None = None
    response_format: ResponseFormat | None = None
    cache_salt: Annotated[str, Field(max_length=512)] | None = None  # requests of one salt share cached prefixes


# Other fields that clients of OpenAI, vLLM, SGLang and llama.cpp send, and the values that ask for nothing.
_ZERO, _ONE = (0, 0.0), (1, 1.0)
COMMON_NEUTRAL: Neutral = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "detokenize": (True,),
    "dry_multiplier": _ZERO,
    "dynatemp_range": _ZERO,
    "ebnf": (),
    "grammar": ("",),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "kv_transfer_params": (),
    "logits_processors": (),
    "lora_path": (),
    "max_new_tokens": (),
    "min_new_tokens": (0,),
    "mirostat": (0,),
    "moderation": (),
    "n_predict": (-1,),
    "prompt_logprobs": (),
    "regex": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "tfs_z": _ONE,
    "thinking_budget_tokens": (),
    "thinking_token_budget": (),
    "top_a": _ZERO,
    "top_n_sigma": (-1, -1.0, *_ZERO),
    "truncate_prompt_tokens": (),
    "truncation": ("disabled",),
    "typical_p": _ONE,
    "xtc_probability": _ZERO,
}

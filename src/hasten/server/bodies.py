"""Request bodies, validated by base classes that know every field.

- Bookkeeping (`metadata`, `prompt_cache_key`, …) is accepted and has no effect.
- A field that would change the answer and is not supported is accepted only with a neutral value (one that asks for
  nothing), because clients send their defaults. Any other value is a 400 that names the field.
- An unknown field of a request has no effect; the response header `x-hasten-ignored` names it. With
  `ServerSettings.strict_fields` it is a 400. Inside `response_format` and tools it is always a 400.
- null counts as absent everywhere.
"""

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

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
    """A request that the model computes. Without a name it is for the served one: `Service.check_in` puts that in."""

    model: Annotated[str, Field(max_length=512)] = ""
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

Name = Annotated[str, Field(min_length=1, max_length=256)]
FUNCTION_NAME = "^[A-Za-z0-9_.-]{1,128}$"


class ConversationPart(Body):
    """A part of a conversation. Unknown fields are dropped, because clients send back answers of other servers too."""

    model_config = ConfigDict(extra="ignore")


class TextPart(ConversationPart):
    """A part of a message. Images, audio and files are refused."""

    type: Literal["text"]
    text: Text


class FunctionCall(ConversationPart):
    """A function call by the assistant; the arguments are JSON in a string."""

    name: Name
    arguments: Text


class ToolCall(ConversationPart):
    """One call of an earlier turn."""

    id: Annotated[str, Field(max_length=256)] | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(ConversationPart):
    """One turn. The further fields of an assistant's answer may be sent back with it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None  # the same by its other name
    neutral: ClassVar[Neutral] = {"refusal": (), "audio": (), "function_call": ()}


class Function(Body):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    bookkeeping = frozenset({"cache_control"})


class Tool(Body):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: Function
    bookkeeping = frozenset({"cache_control"})


class NamedFunction(Body):
    """The name in a forced choice."""

    name: Name


class ToolChoice(Body):
    """Forces a call of one function."""

    type: Literal["function"]
    function: NamedFunction


def check_parts(items: Any) -> Any:
    """Refuse more than `MANY` items, or parts, calls and inner tools in all of them, before any is parsed."""
    level, count = items if isinstance(items, list) else [], 0
    while level:
        if len(level) + count > MANY:
            raise PydanticCustomError("too_long", "There are more than {most} items, parts and calls", {"most": MANY})
        count += 0 if level is items else len(level)
        lists = [item.get(name) for item in level if isinstance(item, dict) for name in _LISTS]
        level = [part for parts in lists if isinstance(parts, list) for part in parts]
    return items


_LISTS = ("content", "output", "summary", "tool_calls", "tools")
TOOLS = 128
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Messages = Annotated[list[Message], Field(min_length=1, max_length=MANY, fail_fast=True), BeforeValidator(check_parts)]
ToolList = Annotated[list[Tool], Field(max_length=TOOLS, fail_fast=True)]


class TemplateBody(RequestBody):
    """The fields that decide how the chat template renders a conversation.

    continue_final_message: the answer continues the last message. add_generation_prompt: whether the text ends with
    the beginning of an answer; by default unless the last message is continued.
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None


class ChatBody(SamplingBody, TemplateBody):
    """A conversation; the answer has n choices."""

    messages: Messages
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=1024)] | None = None
    tools: ToolList | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    thinking_budget_tokens: Count | None = None  # tokens after which reasoning is ended
    neutral: ClassVar[Neutral] = {k: v for k, v in COMMON_NEUTRAL.items() if k != "thinking_budget_tokens"} | {
        "audio": (),
        "chat_template": (),  # a template is a program: only the model's own is run
        "documents": ([],),
        "echo": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "web_search_options": (),
    }

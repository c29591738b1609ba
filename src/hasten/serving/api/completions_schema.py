"""/v1/completions as OpenAI describes it: https://platform.openai.com/docs/api-reference/completions"""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from hasten.serving.api.fields import COMMON_NEUTRAL, Body, Count, Neutral, Prompts, SamplingBody, Text


class JsonSchema(Body):
    """A named JSON schema. strict: it is always kept to."""

    name: Annotated[str, Field(max_length=256)] | None = None
    description: Text | None = None
    json_schema: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Body):
    """text, json_object (any JSON object), or json_schema."""

    type: Annotated[str, Field(pattern="^(text|json_object|json_schema)$")]
    json_schema: JsonSchema | None = None


class CompletionBody(SamplingBody):
    """A prompt, several, or their token ids; each gives n choices."""

    prompt: Prompts
    max_tokens: Count | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=1024)] | None = None
    response_format: ResponseFormat | None = None
    neutral: ClassVar[Neutral] = COMMON_NEUTRAL | {"suffix": ("",), "prompt_embeds": ()}

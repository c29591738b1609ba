"""response_format, the same in completions and chat: https://platform.openai.com/docs/guides/structured-outputs"""

from typing import Annotated, Any

from pydantic import Field

from hasten.serving.api.fields import Body, Text


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

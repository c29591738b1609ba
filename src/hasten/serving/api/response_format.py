"""response_format: from OpenAI's three types to a constraint."""

from __future__ import annotations

from typing import Any

from hasten.serving.api.errors import ApiError
from hasten.serving.api.grammar import Grammar
from hasten.serving.api.response_schema import ResponseFormat
from hasten.serving.api.service import Service


async def constraint_of(wanted: ResponseFormat | None, service: Service) -> Grammar | None:
    """The constraint, or None for text. Raises ApiError (400) for a schema that is refused."""
    if wanted is None or wanted.type == "text":
        if wanted is not None and wanted.json_schema is not None:
            raise ApiError("response_format: json_schema stands beside type text", param="response_format")
        return None
    schema: dict[str, Any] | bool | None
    if wanted.type == "json_object":
        if wanted.json_schema is not None:
            message = "response_format: json_schema stands beside type json_object; say type json_schema"
            raise ApiError(message, param="response_format")
        schema = {"type": "object"}
    else:
        schema = None if wanted.json_schema is None else wanted.json_schema.json_schema
        if schema is None:
            message = "response_format of type json_schema needs json_schema.schema"
            raise ApiError(message, param="response_format.json_schema")
    return await service.grammars.constraint(schema, param="response_format")

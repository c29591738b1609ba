"""tools and tool_choice: what the template is shown, what the answer is held to, how calls are read."""

from __future__ import annotations

from typing import Any

from hasten.serving.api.chat_schema import ChatBody, ToolChoice
from hasten.serving.api.errors import ApiError, check_limit
from hasten.serving.api.grammar import Grammar
from hasten.serving.api.service import Service
from hasten.serving.api.tool_formats import MARKERS, CallReader, Format, find_format

# Keywords of JSON schema whose values are schemas by name, and those whose values are no schemas.
_NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_DATA = ("const", "enum", "default", "examples")


class Tools:
    """The tools of one request.

    "auto" reads calls in the model's own format out of the answer. A forced choice ("required", or a function's name)
    holds every token to the JSON of a call, so that it works with any model: an object with a name that was offered
    and arguments that keep to its schema. "none" does not show the tools to the model.
    """

    def __init__(self, body: ChatBody, service: Service) -> None:
        self._service = service
        tools = body.tools or []
        check_limit("tools", len(tools), service.settings.tools, what="of them")
        choice = body.tool_choice or ("auto" if tools else "none")
        if choice != "none" and not tools:
            raise ApiError("tool_choice needs tools", param="tool_choice")
        self._functions = {tool.function.name: tool.function for tool in tools}
        if len(self._functions) < len(tools):
            raise ApiError("tools: two functions have the same name", param="tools")
        self.named = choice.function.name if isinstance(choice, ToolChoice) else None
        if self.named is not None and self.named not in self._functions:
            message = f"tool_choice: {self.named[:80]!r} is none of the tools"
            raise ApiError(message, param="tool_choice")
        self._forced = self.named is not None or choice == "required"
        self._off = choice == "none"
        self.parallel = body.parallel_tool_calls is not False
        self._format: Format | None = None
        if self._off:
            self.shown: list[dict[str, Any]] | None = None
            return
        if self._forced and body.response_format is not None and body.response_format.type != "text":
            message = "response_format cannot be combined with a forced tool_choice, which decides the form itself"
            raise ApiError(message, param="response_format")
        template = _template(service)
        self._format = find_format(template)
        if "tools" not in template:
            raise ApiError("the chat template of this model has no place for tools", param="tools")
        if self._format is None and not self._forced:
            message = 'this model\'s format of tool calls is not known; tool_choice "required" or a name works'
            raise ApiError(message, param="tool_choice")
        self.shown = [tool.model_dump(exclude_none=True) for tool in tools]

    async def constraint(self) -> Grammar | None:
        """What holds the answer of a forced choice to calls; None otherwise."""
        if not self._forced:
            return None
        names = [self.named] if self.named is not None else list(self._functions)
        several = self.named is None and self.parallel
        at = "#/items" if several else "#"
        if len(names) == 1:
            schema = self._schema(names[0], at=at)
        else:
            schema = {"anyOf": [self._schema(name, at=f"{at}/anyOf/{i}") for i, name in enumerate(names)]}
        if several:
            schema = {"type": "array", "items": schema, "minItems": 1}
        return await self._service.grammars.constraint(schema, param="tools")

    def reader(self) -> CallReader | None:
        """What reads the calls out of one answer; None where none can be."""
        if self._off:
            return None
        return CallReader(self._functions, form=None if self._forced else self._format)

    def skip_special_tokens(self, asked: bool) -> bool:
        """Whether the answer's special tokens are left out: not where one of them marks a call."""
        if self._off or self._forced or self._format is None:
            return asked
        marker = MARKERS[self._format]
        added = self._service.tokenizer.backend.get_added_tokens_decoder().values()
        return asked and not any(token.special and token.content == marker for token in added)

    def _schema(self, name: str, *, at: str) -> dict[str, Any]:
        """The schema of one call, which stands at the pointer `at` of the whole."""
        given = self._functions[name].parameters or {"type": "object", "properties": {}}
        arguments = _moved(given, f"{at}/properties/arguments")
        return {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": arguments},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }


def _moved(schema: Any, at: str) -> Any:
    """A JSON schema as part of another, at the pointer `at`: what it refers to within itself has moved with it."""
    if isinstance(schema, list):
        return [_moved(item, at) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            moved[key] = at + value[1:]
        elif key in _NAMED and isinstance(value, dict):
            moved[key] = {name: _moved(item, at) for name, item in value.items()}
        elif key not in ("$id", "$schema"):  # of a document by itself
            moved[key] = value if key in _DATA else _moved(value, at)
    return moved


def _template(service: Service) -> str:
    templates = service.tokenizer.templates
    template = templates.get("tool_use", templates.get("default"))
    return "" if template is None else template.source

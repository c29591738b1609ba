"""Errors in OpenAI's shape, {"error": {"message", "type", "param", "code"}}; under /v1/messages in Anthropic's, under
/api in Ollama's.

https://platform.openai.com/docs/guides/error-codes, https://docs.anthropic.com/en/api/errors
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from starlette.responses import JSONResponse

from hasten.engine.request import DeadlineExceeded, EngineFailed, QueueFull, RequestRefused
from hasten.errors import HastenError

# status -> (OpenAI's type, when it is sent)
ERRORS = {
    400: ("invalid_request_error", "The request is not valid; the field is named."),
    401: ("authentication_error", "No valid key."),
    403: ("permission_error", "The Host header, or what is asked, is not allowed."),
    404: ("not_found_error", "No such model or adapter."),
    408: ("invalid_request_error", "The body did not arrive in time."),
    413: ("invalid_request_error", "The body is too large."),
    415: ("invalid_request_error", "The body is not application/json."),
    429: ("rate_limit_error", "The queue is full; Retry-After says when to come again."),
    500: ("server_error", "The server failed."),
    503: ("overloaded_error", "Overloaded, or shutting down; Retry-After says when to come again."),
    504: ("timeout_error", "The deadline passed."),
}


ANTHROPIC = "/v1/messages"  # paths whose errors have Anthropic's shape
# status -> Anthropic's type, where it is not OpenAI's
_ANTHROPIC_TYPES = {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}
_OVERLOADED = 529  # Anthropic's status for 503
OLLAMA = "/api/"  # paths whose errors have Ollama's shape


class ApiError(Exception):
    """An error response: HTTP status, message, the field at fault, a code for programs, headers."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        """OpenAI's type."""
        return ERRORS.get(self.status, ERRORS[400] if self.status < 500 else ERRORS[500])[0]

    def body(self) -> dict[str, Any]:
        """The error as JSON, in OpenAI's shape."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def anthropic_body(self, request_id: str) -> dict[str, Any]:
        """The error as JSON, in Anthropic's shape."""
        error = {"type": _ANTHROPIC_TYPES.get(self.status, self.type), "message": self.message}
        return {"type": "error", "error": error, "request_id": request_id}

    def ollama_body(self) -> dict[str, Any]:
        """The error as JSON, in Ollama's shape."""
        return {"error": self.message}

    def response(self, path: str, request_id: str) -> JSONResponse:
        """The error as a response, in the shape that clients of the path know."""
        status, body = self.status, self.body()
        if path.startswith(ANTHROPIC):
            status, body = _OVERLOADED if status == 503 else status, self.anthropic_body(request_id)
        elif path.startswith(OLLAMA):  # whose status for a full queue is 503
            status, body = 503 if status == 429 else status, self.ollama_body()
        return JSONResponse(body, status_code=status, headers=self.headers)

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """The error about a field of a ChatBody, with the field's name in the body that was sent."""
        field, dot, rest = (self.param or "").partition(".")
        name = names.get(field)
        if name is None:
            return self
        message = re.sub(rf"\b{field}\b", name, self.message)
        return ApiError(message, status=self.status, param=name + dot + rest, code=self.code, headers=self.headers)


@contextmanager
def naming_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors about fields of a ChatBody name those of the body that was sent."""
    try:
        yield
    except ApiError as error:
        raise error.renamed(names) from None


class ClientGone(Exception):
    """The client closed the connection, or read nothing for too long."""


def overloaded(message: str, *, seconds: float = 1.0, status: int = 503) -> ApiError:
    """The error of an overloaded server; the client should retry after `seconds` (OpenAI's clients do)."""
    return ApiError(message, status=status, code="overloaded", headers={"Retry-After": str(max(1, round(seconds)))})


def from_library(error: HastenError) -> ApiError:
    """The error response for an error of the library."""
    if isinstance(error, QueueFull):
        return overloaded(str(error), seconds=error.retry_after, status=429)
    if isinstance(error, RequestRefused):
        return ApiError(str(error), param=error.field, code="request_refused")
    if isinstance(error, DeadlineExceeded):
        return ApiError(str(error), status=504, code="deadline_exceeded")
    if isinstance(error, EngineFailed):
        return ApiError(str(error), status=500, code="engine_failed")
    return ApiError(str(error))


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The 400 for a body that does not match its schema; names the first field at fault."""
    first = max(errors[:64], key=_meant, default=None)
    if first is None:
        return ApiError("the request is not valid")
    param = first.get("ctx", {}).get("field") or _name(_path(first))
    if first["type"] == "json_invalid":
        return ApiError("the body is not JSON", code="invalid_json")
    if first["type"] == "extra_forbidden":
        return ApiError(f"{param}: there is no such field", param=param, code="unknown_parameter")
    if first["type"] == "missing":
        message = f"{param or 'the body'} is missing; this request needs it"
        return ApiError(message, param=param, code="missing_required_parameter")
    code = "unsupported_parameter" if first["type"] == "unsupported" else "invalid_value"
    message = first["msg"] if first["type"] == "unsupported" else f"{param or 'body'}: {first['msg']}"
    return ApiError(message, param=param, code=code)


def _meant(error: Mapping[str, Any]) -> tuple[bool, int, int, bool]:
    """Sort key for the errors of a union, in which every member fails: highest for the member that was meant.

    That is the one that counted a list, or failed deepest, furthest, and at a value of its own type.
    """
    path = _path(error)
    place = path[-1] if path and isinstance(path[-1], int) else -1
    return error["type"] in ("unsupported", "too_long"), len(path), place, not error["type"].endswith("_type")


def _path(error: Mapping[str, Any]) -> list[str | int]:
    return [part for part in error.get("loc", ()) if part not in ("body", "query", "header")]


def _name(path: Sequence[str | int]) -> str | None:
    """Path of a field, as in messages[0].content, without pydantic's names of union members (`list[int]`, `str`)."""
    name = ""
    for part in path:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool"):
            name += f".{part}" if name else part
    return name[:100] or None

"""A request body from strangers: parsed once, strictly, within limits, before anything else sees it."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json

from hasten.serving.api.errors import ApiError


class _ParsedRequest(Request):
    async def json(self) -> Any:
        return self.state.json


class ParsedRoute(APIRoute):
    """A route whose body is the value that stands in the request's state (`parse_json`)."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_parsed(request: Request) -> Response:
            return await handle(_ParsedRequest(request.scope, request.receive))

        return handle_parsed


def parse_json(data: bytes, *, nesting: int, keys: int) -> Any:
    """The JSON value; raises ApiError (400) unless it is one, within the depth, no object with more keys.

    No NaN or infinity, no number of more than 4,300 digits, no half surrogate pair, valid UTF-8 (RFC 8259). Python's
    own parser accepts the first and the third, and recurses as deeply as it is told to.
    """
    try:
        value = from_json(data, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        code = "nesting" if "recursion" in str(error) else "invalid_json"
        raise ApiError(f"the body is not JSON that can be read: {error}", code=code) from None
    depth, level = 0, [value]
    while level:
        if any(len(item) > keys for item in level if isinstance(item, dict)):
            raise ApiError(f"an object in the body has more than {keys:,} keys", code="too_many_keys")
        level = [item for items in level for item in _children(items) if isinstance(item, (dict, list))]
        depth += 1
        if depth > nesting and level:
            raise ApiError(f"the body is nested deeper than {nesting} levels", code="nesting")
    return value


def _children(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()

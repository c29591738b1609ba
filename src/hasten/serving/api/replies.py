"""How responses leave: JSON in one piece, or server-sent events, one `data:` line a chunk, `[DONE]` at the end.

https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from fastapi import Response
from pydantic_core import to_json

from hasten.serving.api.errors import ApiError, ClientGone
from hasten.serving.api.logs import log_exception

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send


def reply(body: Any) -> Response:
    """A JSON response; a number that JSON does not have becomes null."""
    return Response(to_json(body, inf_nan_mode="null"), media_type="application/json")


class EventStream(Response):
    """Sends chunks as events. A failure after the first one is an event of its own, since the status has gone out."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[dict[str, Any]]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for chunk in self.chunks:
                await _event(send, to_json(chunk, inf_nan_mode="null"))
        except ApiError as error:
            await _event(send, to_json(error.body()))
        except ClientGone:
            raise
        except Exception as error:
            log_exception(scope["state"]["request_id"], error)
            failed = ApiError("the server failed at this request", status=500, code="internal_error")
            await _event(send, to_json(failed.body()))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


async def _event(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})

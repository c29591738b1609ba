"""One JSON object a line to standard error: what was asked, how it ended; never a prompt, an answer or a key."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime

LOGGER = "hasten.server"


class JsonLines(logging.Formatter):
    """A record as one JSON object; newlines in it are escaped, so that nobody can forge a line."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {"time": time, "level": record.levelname.lower(), "event": record.getMessage()}
        line |= getattr(record, "fields", {})
        return json.dumps(line, default=str)


def configure_logs(level: str = "info") -> None:
    """Let our log and uvicorn's go to standard error as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    # asyncio warns of every write to a client that has gone: that is in the request's own line.
    for name, least in ((LOGGER, level.upper()), ("uvicorn.error", "WARNING"), ("asyncio", "ERROR")):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(least)


def log_request(fields: Mapping[str, object], *, quiet: bool) -> None:
    """The line of a request that ended; a quiet one is for debugging."""
    logging.getLogger(LOGGER).log(logging.DEBUG if quiet else logging.INFO, "request", extra={"fields": fields})


def log_exception(request_id: str, error: BaseException) -> None:
    """Our own mistake, with its traceback."""
    text = "".join(traceback.format_exception(error))
    fields = {"request_id": request_id, "error": f"{type(error).__name__}: {error}", "traceback": text}
    logging.getLogger(LOGGER).error("failed", extra={"fields": fields})

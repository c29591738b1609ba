"""Logs one JSON object a line to standard error: request, status, times; never a prompt, an answer or a key."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime

LOGGER = "hasten.server"


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object; newlines are escaped, so that no log line can be forged."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {"time": time, "level": record.levelname.lower(), "event": record.getMessage()}
        line |= getattr(record, "fields", {})
        return json.dumps(line, default=str)


def configure_logs(level: str = "info") -> None:
    """Write our log and uvicorn's to standard error as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    # asyncio warns of every write to a client that has gone: that is in the request's own line.
    for name, least in ((LOGGER, level.upper()), ("uvicorn.error", "WARNING"), ("asyncio", "ERROR")):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(least)


def log_request(fields: Mapping[str, object], *, quiet: bool) -> None:
    """Log a request that ended; a quiet one at debug level."""
    logging.getLogger(LOGGER).log(logging.DEBUG if quiet else logging.INFO, "request", extra={"fields": fields})


def log_exception(request_id: str, error: BaseException) -> None:
    """Log an internal error with its traceback."""
    text = "".join(traceback.format_exception(error))
    fields = {"request_id": request_id, "error": f"{type(error).__name__}: {error}", "traceback": text}
    logging.getLogger(LOGGER).error("failed", extra={"fields": fields})

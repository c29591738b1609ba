"""The log: one JSON object a line on standard error, with request, status, times; never a prompt, an answer or a key.

A record's own fields are in `extra={"fields": {...}}`.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime

LOGGER = "hasten.server"


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object; newlines are escaped, so that no log line can be forged."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {"time": time, "level": record.levelname.lower(), "event": record.getMessage()}
        line |= getattr(record, "fields", {})
        if record.exc_info is not None and (error := record.exc_info[1]) is not None:
            line["error"] = f"{type(error).__name__}: {error}"
            line["traceback"] = "".join(traceback.format_exception(error))
        return json.dumps(line, default=str)


def configure_logs(level: str = "info") -> None:
    """Write our log and uvicorn's to standard error as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    # asyncio warns about every write to a disconnected client, which the request's own line reports.
    for name, least in ((LOGGER, level.upper()), ("uvicorn.error", "WARNING"), ("asyncio", "ERROR")):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(least)

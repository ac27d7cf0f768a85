"""Log lines: text for people, JSON for machines; one line an event, to standard error.

Rules of this file: a record's ``fields`` are printed as they are; what they hold is the business of who logs.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time

# What breaks a line, steers a terminal or turns its writing direction; a client may have put it there.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class TextFormatter(logging.Formatter):
    """``12:00:01 INFO POST /v1/completions 200 request_id=... completion_tokens=16``."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {k: v for k, v in getattr(record, "fields", {}).items() if k not in ("method", "path", "status")}
        words = [time.strftime("%H:%M:%S", time.localtime(record.created)), record.levelname, record.getMessage()]
        text = " ".join([*words, *(f"{name}={value}" for name, value in fields.items())])
        text = _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {"time": round(record.created, 3), "level": record.levelname, "logger": record.name}
        line |= {"message": record.getMessage(), **getattr(record, "fields", {})}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(level: str, *, as_json: bool) -> None:
    """Send this program's log to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    logger = logging.getLogger("offbook")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(level.upper())
    # What every connection start and stop would say is not news; the adapter's own warnings are.
    logging.getLogger("offbook.http").setLevel(
        max(logger.level, logging.WARNING) if level != "debug" else logging.DEBUG
    )

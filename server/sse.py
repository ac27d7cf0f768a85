"""Server-sent events, exactly as the clients' parsers compare them: ``data: <json>`` and a blank line, nothing else.

Rules of this file: pure; no comments, no event names, no keep-alives; every event is whole before it is written.
"""

from __future__ import annotations

DONE = b"data: [DONE]\n\n"


def event(payload: bytes) -> bytes:
    """One event. ``payload`` is JSON, which never holds a line break outside an escape."""
    return b"data: " + payload + b"\n\n"

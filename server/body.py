"""Bytes of a request body to fields, or a clear refusal, in bounded time and memory.

Rules of this file: pure. One strict parse decides what JSON is (UTF-8 without a byte order mark, no NaN, no unpaired
surrogates, no key twice in one object); the size is bounded before this file sees a byte.
"""

from __future__ import annotations

import codecs
import json
import re

import msgspec

_decoder = msgspec.json.Decoder()
_JSON_TYPE = re.compile(r"(application|text)/(json|[\w.+-]+\+json)", re.IGNORECASE)
_UTF8 = ("utf-8", "utf8", "us-ascii")


class BadBody(Exception):
    """The body cannot be read as a JSON object; ``status`` is 400 or 415."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


def check_media(content_type: str | None, content_encoding: str | None) -> None:
    """Raises BadBody (415) unless the headers promise plain JSON in UTF-8. No header at all is taken as JSON."""
    if content_encoding and content_encoding.strip().lower() != "identity":
        raise BadBody(f"Content-Encoding {content_encoding[:60]!r} is not supported: send the body uncompressed", 415)
    if not content_type:
        return
    media, *parameters = (part.strip() for part in content_type.split(";"))
    if not _JSON_TYPE.fullmatch(media):
        raise BadBody(f"Content-Type {media[:60]!r} is not supported: send application/json", 415)
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset" and value.strip().strip('"').lower() not in _UTF8:
            raise BadBody(f"charset {value[:40]!r} is not supported: JSON is sent in UTF-8", 415)


def parse(data: bytes) -> dict[str, object]:
    """The fields of a JSON object. Raises BadBody (400)."""
    if data.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise BadBody("The body starts with a byte order mark: send plain UTF-8 JSON")
    try:
        fields = _decoder.decode(data)
    except RecursionError:
        raise BadBody("The body is nested too deeply") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadBody(f"The body is not valid JSON: {_reason(data, error)}") from None
    if not isinstance(fields, dict):
        raise BadBody("The body should be a JSON object")
    # A colon ends every key, so equal counts mean no nested objects and no key twice; otherwise look properly.
    if data.count(b":") != len(fields):
        _refuse_duplicates(data)
    return fields


def _refuse_duplicates(data: bytes) -> None:
    try:
        json.loads(data, object_pairs_hook=_unique)
    except RecursionError:
        raise BadBody("The body is nested too deeply") from None


def _unique(pairs: list[tuple[str, object]]) -> None:
    if len({key for key, _ in pairs}) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise BadBody(f"The key {twice[:60]!r} appears twice in one object")


def _reason(data: bytes, error: Exception) -> str:
    """The decoder's words, but for the one failure that it misnames: an escaped half of a surrogate pair."""
    text = str(error)
    if not data.strip():
        return "it is empty"
    if "truncated" in text and re.search(rb"\\u[dD][89a-fA-F]", data):
        return "a string holds an unpaired surrogate, or the input was cut short"
    return text.removeprefix("JSON is malformed: ").split(" - at ")[0]

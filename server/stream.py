"""A streamed answer as the body of a response.

Rules of this file: one write for all that has piled up; an error is an event of its own, after whole events; the answer
is closed on every exit.
"""

from __future__ import annotations

import logging

from quart.wrappers.response import ResponseBody

from ..actors.answer import Answer
from ..actors.errors import CompletionError
from .exchange import Exchange
from .http11 import WriteBody
from .replies import wire_error
from .translate import StreamWriter

_logger = logging.getLogger("offbook.http")


class AnswerBody(ResponseBody):
    """What Quart iterates over: bytes of whole events.

    The first piece and the last go through Quart, which begins and ends the response; those between are written by
    ``write_body``, where there is one.
    """

    def __init__(
        self, answer: Answer, writer: StreamWriter, exchange: Exchange, write_body: WriteBody | None = None
    ) -> None:
        self._answer = answer
        self._writer = writer
        self._exchange = exchange
        self._write_body = write_body
        self._begun = False
        self._over = False

    async def __aenter__(self) -> AnswerBody:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._answer.close()

    def __aiter__(self) -> AnswerBody:
        return self

    async def __anext__(self) -> bytes:
        if self._over:
            raise StopAsyncIteration
        piece = await self._next_piece()
        if self._write_body is not None:
            while self._begun and not self._over:
                await self._write_body(piece)
                piece = await self._next_piece()
        self._begun = True
        return piece

    async def _next_piece(self) -> bytes:
        """All that is due; the end, which is ``_over``, comes alone."""
        try:
            deltas = await self._answer.next_all()
            if deltas:
                return b"".join(map(self._writer.chunk, deltas))
            self._over = True
            return self._writer.end()
        except CompletionError as error:
            self._over = True
            self._exchange.error = error.code
            return self._writer.error(wire_error(error, in_stream=True))
        except Exception:
            _logger.exception("a stream broke")
            self._over = True
            self._exchange.error = CompletionError.code
            bug = CompletionError("The server failed while it wrote this answer")
            return self._writer.error(wire_error(bug, in_stream=True))

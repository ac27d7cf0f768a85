"""Every known trap of Hypercorn and Quart-Trio, on real sockets: these tests are what lets the pins move.

The applications are small and hang or fail at one named point. Times are short real ones: a socket knows no other.
Long, since every trap is sprung on the same application.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
import trio
from hypercorn.config import Config
from hypercorn.trio.tcp_server import TCPServer
from quart import Response, request
from quart_trio import QuartTrio
from raw_http import connect, request_bytes, serving

from offbook.server import hypercorn_adapter
from offbook.server.http11 import body_writer

BLOCK = b"x" * 65536
LIMIT_S = 5.0  # for a test; nothing here should take a second


class Witness:
    """What handlers saw."""

    def __init__(self) -> None:
        self.began = trio.Event()
        self.cancelled = trio.Event()
        self.ended = trio.Event()


def make_app(witness: Witness | None = None) -> QuartTrio:
    seen = witness or Witness()
    app = QuartTrio(__name__, static_folder=None)
    app.config.update(MAX_CONTENT_LENGTH=1000, RESPONSE_TIMEOUT=None, PROPAGATE_EXCEPTIONS=False)

    @app.get("/ping")
    async def ping() -> str:
        return "pong"

    @app.post("/echo")
    async def echo() -> bytes:
        return await request.get_data(as_text=False)  # type: ignore[return-value]

    @app.get("/endless")
    async def endless() -> Response:
        async def blocks() -> AsyncIterator[bytes]:
            seen.began.set()
            try:
                while True:
                    yield BLOCK
            finally:
                seen.ended.set()

        return streaming(blocks())

    @app.get("/big")
    async def big() -> bytes:
        return BLOCK * 128

    @app.get("/hang")
    async def hang() -> str:
        seen.began.set()
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            seen.cancelled.set()
            raise
        return ""

    @app.get("/drip/<int:events>")
    async def drip(events: int) -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            seen.began.set()
            try:
                for _ in range(events):
                    yield b"drop"
                    await trio.sleep(0.05)
            except trio.Cancelled:
                seen.cancelled.set()
                raise
            finally:
                seen.ended.set()

        return streaming(pieces())

    @app.get("/broken")
    async def broken() -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"begin"
            raise RuntimeError("after the headers")

        return streaming(pieces())

    return app


def streaming(pieces: Any) -> Response:
    response = Response(pieces)
    response.timeout = None
    return response


async def settles(condition: Any) -> None:
    """Waits until it holds; the test's limit bounds it."""
    while not condition():  # noqa: ASYNC110  # nothing tells when a server has settled
        await trio.sleep(0.01)


# -- readers ---------------------------------------------------------------------------------------------------------


async def test_a_client_that_stops_reading_is_cut_and_hurts_nobody() -> None:
    seen = Witness()
    with trio.fail_after(LIMIT_S):
        stuck = serving(make_app(seen), write_timeout_s=0.4)
        async with stuck as server, connect(server.port, receive_buffer=4096) as client:
            await client.send(request_bytes("GET", "/endless"))
            await seen.began.wait()
            for _ in range(5):
                assert (await server.get("/ping")).body == b"pong"
            await seen.ended.wait()
            await settles(lambda: server.config.connections == 0)


async def test_a_slow_but_living_reader_gets_everything() -> None:
    """The write timeout is one of progress, not of the whole response."""
    with trio.fail_after(LIMIT_S):
        slow = serving(make_app(), write_timeout_s=0.3)
        async with slow as server, connect(server.port, receive_buffer=65536) as client:
            began = trio.current_time()
            await client.send(request_bytes("GET", "/big"))
            _, headers = await client.response_head()
            left = int(headers["content-length"]) - len(client._buffer)
            while left > 0:
                left -= len(await client.stream.receive_some(262144))
                await trio.sleep(0.008)
            assert (left, trio.current_time() - began > 0.3) == (0, True)


@pytest.mark.parametrize("path", ["/endless", "/big"])  # in mid-stream; in the last, shielded send
async def test_a_blocked_write_does_not_hold_up_a_hard_stop(path: str) -> None:
    with trio.fail_after(LIMIT_S):
        stuck = serving(make_app(), write_timeout_s=60.0)
        async with stuck as server, connect(server.port, receive_buffer=4096) as client:
            await client.send(request_bytes("GET", path))
            await settles(lambda: server.config._blocked_writes)
            server.config.abort_writes()
            server.scope.cancel()


async def test_an_endless_response_to_nobody_lets_others_run() -> None:
    """After the client is gone ``send`` does nothing: it must still let others run, and be cancelled."""
    seen = Witness()
    with trio.fail_after(LIMIT_S):
        async with serving(make_app(seen)) as server:
            async with connect(server.port) as client:
                await client.send(request_bytes("GET", "/endless"))
                await seen.began.wait()
            assert (await server.get("/ping")).body == b"pong"
            await seen.ended.wait()


# -- the end of a response -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"GET /ping HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        b"GET /ping HTTP/1.0\r\n\r\n",
        b"GET /drip/2 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    ],
    ids=["close", "1.0", "stream"],
)
async def test_a_connection_that_should_close_closes(data: bytes) -> None:
    with trio.fail_after(LIMIT_S):
        async with serving(make_app()) as server, connect(server.port) as client:
            await client.send(data)
            assert b" 200 " in await client.read_to_end()


async def test_an_idle_connection_is_closed_in_time_and_can_be_used_until_then() -> None:
    with trio.fail_after(LIMIT_S):
        async with serving(make_app(), keep_alive_timeout=0.3) as server, connect(server.port) as client:
            for _ in range(3):
                assert (await client.request("GET", "/ping")).body == b"pong"
                await trio.sleep(0.15)
            assert await client.read_to_end() == b""


async def test_slow_headers_are_cut() -> None:
    with trio.fail_after(LIMIT_S):
        async with serving(make_app(), keep_alive_timeout=0.3) as server, connect(server.port) as client:
            try:
                while True:
                    await client.send(b"G")
                    await trio.sleep(0.05)
            except trio.BrokenResourceError:
                pass


async def straight(scope: Any, receive: Any, send: Any) -> None:
    """A body whose pieces, large ones too, go through the layers and past them in turns."""
    write = body_writer(scope)
    assert write is not None
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for size, past in ((1, False), (1, True), (70_000, True), (15, False), (16, True)):
        piece = b"x" * size
        await (write(piece) if past else send({"type": "http.response.body", "body": piece, "more_body": True}))
    await send({"type": "http.response.body", "body": b"end", "more_body": False})


async def test_pieces_written_past_the_layers_are_framed_as_the_others() -> None:
    whole = b"x" * 70_033 + b"end"
    with trio.fail_after(LIMIT_S):
        async with serving(cast(Any, straight)) as server, connect(server.port) as client:
            assert (await client.request("GET", "/")).body == whole
            assert (await client.request("GET", "/")).body == whole  # the connection is as good as before
            async with connect(server.port) as old:
                await old.send(b"GET / HTTP/1.0\r\n\r\n")
                head, _, body = (await old.read_to_end()).partition(b"\r\n\r\n")
                assert b"chunked" not in head.lower() and body == whole


def test_behind_another_server_there_is_no_way_past() -> None:
    assert body_writer({}) is None and body_writer({"state": {}}) is None


async def test_pipelined_requests_are_answered_in_order() -> None:
    with trio.fail_after(LIMIT_S):
        async with serving(make_app()) as server, connect(server.port) as client:
            await client.send(request_bytes("POST", "/echo", b"one") + request_bytes("POST", "/echo", b"two"))
            assert [(await client.response()).body for _ in range(2)] == [b"one", b"two"]


async def test_a_failure_after_the_headers_leaves_the_body_unfinished() -> None:
    with trio.fail_after(LIMIT_S):
        async with serving(make_app()) as server, connect(server.port) as client:
            await client.send(request_bytes("GET", "/broken"))
            answer = await client.read_to_end()
            assert b"begin" in answer and not answer.endswith(b"0\r\n\r\n")


# -- early answers to long requests ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/echo", "/nope"])  # 413 after some of the body, 404 before any
async def test_an_early_answer_survives_the_rest_of_the_body(path: str) -> None:
    """B222: the rest is neither parsed as a request nor answered by a reset that eats the reply."""
    body = b"GET /ping HTTP/1.1\r\n\r\n" * 50_000
    with trio.fail_after(LIMIT_S):
        async with serving(make_app()) as server, connect(server.port) as client:
            async with trio.open_nursery() as nursery:

                async def upload() -> None:
                    try:
                        await client.send(request_bytes("POST", path, body))
                    except trio.BrokenResourceError:
                        pass

                nursery.start_soon(upload)
                answer = await client.read_to_end()
            assert answer.startswith(b"HTTP/1.1 413 " if path == "/echo" else b"HTTP/1.1 404 ")
            assert answer.count(b"HTTP/1.1") == 1
            await settles(lambda: server.config.connections == 0)


async def test_a_body_beyond_the_limit_in_chunks_is_refused() -> None:
    with trio.fail_after(LIMIT_S):
        async with serving(make_app()) as server, connect(server.port) as client:
            await client.send(b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
            try:
                for _ in range(100):
                    await client.send(b"200\r\n" + b"y" * 512 + b"\r\n")
            except trio.BrokenResourceError:
                pass
            status, _ = await client.response_head()
            assert status == 413


# -- shutdown --------------------------------------------------------------------------------------------------------


async def test_idle_and_unused_connections_do_not_hold_up_a_stop() -> None:
    """B227."""
    with trio.fail_after(LIMIT_S):
        async with serving(make_app()) as server, connect(server.port) as used, connect(server.port) as unused:
            await used.request("GET", "/ping")
            began = trio.current_time()
            server.stop.set()
            await server.ended.wait()
            assert trio.current_time() - began < 0.5
            assert await used.read_to_end() == b""
            assert await unused.read_to_end() == b""


async def test_a_stop_lets_responses_end_and_takes_no_new_connection() -> None:
    """B226."""
    seen = Witness()
    with trio.fail_after(LIMIT_S):
        async with serving(make_app(seen)) as server, connect(server.port) as client:
            await client.send(request_bytes("GET", "/drip/6"))
            await seen.began.wait()
            server.stop.set()
            await trio.sleep(0.05)
            with pytest.raises(OSError):
                async with connect(server.port):
                    pass
            assert (await client.response()).body == b"drop" * 6
            assert await client.read_to_end() == b""


async def test_a_stop_ends_at_its_deadline() -> None:
    seen = Witness()
    with trio.fail_after(LIMIT_S):
        async with serving(make_app(seen), graceful_timeout=0.3) as server, connect(server.port) as client:
            await client.send(request_bytes("GET", "/hang"))
            await seen.began.wait()
            server.stop.set()
            await server.ended.wait()
            assert seen.cancelled.is_set()


# -- long streams and early leavers ----------------------------------------------------------------------------------


async def test_a_stream_outlives_every_timeout() -> None:
    app = make_app()
    app.config["RESPONSE_TIMEOUT"] = 0.2
    with trio.fail_after(LIMIT_S):
        async with serving(app, keep_alive_timeout=0.2, write_timeout_s=0.2) as server:
            assert (await server.get("/drip/12")).body == b"drop" * 12


async def test_leaving_before_the_first_byte_cancels_the_handler() -> None:
    seen = Witness()
    with trio.fail_after(LIMIT_S):
        async with serving(make_app(seen)) as server:
            async with connect(server.port) as client:
                await client.send(request_bytes("GET", "/hang"))
                await seen.began.wait()
            await seen.cancelled.wait()
            await settles(lambda: server.config.connections == 0)


async def test_leaving_in_mid_stream_cancels_the_stream() -> None:
    seen = Witness()
    with trio.fail_after(LIMIT_S):
        async with serving(make_app(seen)) as server:
            async with connect(server.port) as client:
                await client.send(request_bytes("GET", "/drip/1000"))
                await client.response_head()
                await client.chunk()
            await seen.ended.wait()
            await settles(lambda: server.config.connections == 0)


# -- what is not HTTP/1.1 --------------------------------------------------------------------------------------------


async def test_leaving_with_another_request_under_way_frees_the_connection() -> None:
    """The reader waits for the next request's turn then, and sees no end of file."""
    witness = Witness()
    with trio.fail_after(LIMIT_S):
        async with serving(make_app(witness)) as served:
            async with connect(served.port) as client:
                await client.send(2 * request_bytes("GET", "/endless"))
                await witness.began.wait()
                await client.response_head()
            await witness.ended.wait()
            await settles(lambda: served.config.connections == 0)


async def test_http2_with_prior_knowledge_is_refused() -> None:
    with trio.fail_after(LIMIT_S):
        async with serving(make_app()) as server, connect(server.port) as client:
            await client.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
            answer = await client.read_to_end()
            assert answer.startswith(b"HTTP/1.1 505 ")
            assert answer.count(b"content-length") == 1


async def test_an_offer_of_h2c_is_ignored() -> None:
    with trio.fail_after(LIMIT_S):
        async with serving(make_app()) as server:
            headers = {"connection": "upgrade, http2-settings", "upgrade": "h2c", "http2-settings": "AAMAAABkAAQAAP__"}
            answer = await server.get("/ping", **headers)
            assert (answer.status, answer.body) == (200, b"pong")


async def test_websockets_are_refused() -> None:
    with trio.fail_after(LIMIT_S):
        async with serving(make_app()) as server:
            key = {"sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==", "sec-websocket-version": "13"}
            answer = await server.get("/ping", connection="upgrade", upgrade="websocket", **key)
            assert (answer.status, answer.json["error"]["type"]) == (400, "invalid_request_error")


MALFORMED = {
    "length abc": b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: abc\r\n\r\n",
    "two lengths": b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
    "length and chunks": (
        b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    ),
    "negative length": b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
    "chunk size zz": b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n\r\n",
    "no colon": b"GET /ping HTTP/1.1\r\nhost: x\r\nnonsense\r\n\r\n",
    "no host": b"GET /ping HTTP/1.1\r\n\r\n",
    "garbage": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "headers too large": b"GET /ping HTTP/1.1\r\nhost: x\r\n" + b"a: " + b"b" * 200_000 + b"\r\n\r\n",
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
async def test_a_malformed_second_request_gets_a_json_error_and_the_end(data: bytes) -> None:
    """B223."""
    with trio.fail_after(LIMIT_S):
        async with serving(make_app()) as server, connect(server.port) as client:
            assert (await client.request("GET", "/ping")).status == 200
            await client.send(data)
            answer = await client.response()
            assert answer.status in (400, 431)
            assert isinstance(answer.json["error"]["message"], str)
            assert await client.read_to_end() == b""


async def test_expecting_100_continue_is_answered() -> None:
    with trio.fail_after(LIMIT_S):
        async with serving(make_app()) as server, connect(server.port) as client:
            await client.send(b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\nexpect: 100-continue\r\n\r\n")
            assert (await client.stream.receive_some(100)).startswith(b"HTTP/1.1 100 ")
            await client.send(b"ok")
            assert (await client.response()).body == b"ok"


# -- the cap on connections ------------------------------------------------------------------------------------------


async def test_one_connection_too_many_gets_an_honest_503() -> None:
    with trio.fail_after(LIMIT_S):
        async with serving(make_app(), connections_max=2) as server:
            async with connect(server.port) as one, connect(server.port) as two:
                await one.request("GET", "/ping")
                await two.request("GET", "/ping")
                answer = await server.get("/ping")
                assert (answer.status, answer.headers["retry-after"]) == (503, "1")
                assert answer.json["error"]["code"] == "overloaded"
                assert (await one.request("GET", "/ping")).status == 200
            await settles(lambda: server.config.connections == 0)
            assert (await server.get("/ping")).status == 200


async def test_keep_alive_is_no_slower_than_new_connections() -> None:
    """B228: no waiting for delayed acknowledgements."""
    with trio.fail_after(LIMIT_S):
        async with serving(make_app()) as server, connect(server.port) as client:
            took = []
            for _ in range(20):
                began = trio.current_time()
                await client.send(b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n")
                await client.send(b"ok")
                await client.response()
                took.append(trio.current_time() - began)
            assert sorted(took)[10] < 0.03


def test_others_who_serve_with_hypercorn_in_this_process_are_left_alone() -> None:
    made = hypercorn_adapter._connection(None, Config(), None, {}, None)
    assert type(made) is TCPServer

"""One seed, one world behind the HTTP door: bytes in memory streams, parser, routes, engine, SSE bytes.

The server side is the real one from the connection down; only the socket is memory. Clients send requests in random
pieces, garbage, or half of a request; they read to the end, slowly or never, half-close, or leave at any point. Every
answer that comes whole is held against the oracle of sim_requests.py.
"""

from __future__ import annotations

import math
import random
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import trio
import trio.testing
from door import joined
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import wrap_app
from raw_http import Answered, RawClient, request_bytes
from sim_device import SimDevice, loaded_with
from sim_executor import SimExecutor
from sim_faults import Faults, check_step
from sim_oracle import compiled_already
from sim_requests import DEFAULT_MAX_TOKENS, check_body, fits, random_fields
from simulate import World, run_world, settled

from offbook.actors import admission
from offbook.actors.config import EngineConfig
from offbook.actors.engine import Engine, open_engine
from offbook.actors.request import CompletionRequest, from_fields
from offbook.server.app import Door, create_app
from offbook.server.hypercorn_adapter import Connection, DoorConfig, shield_final

PATIENCE_S = 120.0  # virtual: nobody waits longer for anything
ENDINGS = {400: "does not fit", 429: "over its share", 500: "failed", 503: "turned away", 504: "too late"}


class MemorySocketStream(trio.abc.HalfCloseableStream):
    """A trio.SocketStream to the adapter: a pair of memory streams, and a socket that knows addresses only."""

    def __init__(self, inner: trio.StapledStream[trio.abc.SendStream, trio.abc.ReceiveStream]) -> None:
        self._inner = inner
        self.socket = self
        self.family = socket.AF_INET

    def getpeername(self) -> tuple[str, int]:
        return ("127.0.0.1", 1)

    getsockname = getpeername

    def fileno(self) -> int:
        return -1  # so that every write takes the way of one that did not fit the kernel's buffer

    def close(self) -> None:
        for side in (self._inner.send_stream, self._inner.receive_stream):
            cast(Any, side).close()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._inner.send_all(bytes(data))

    async def wait_send_all_might_not_block(self) -> None:
        await self._inner.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._inner.receive_some(max_bytes)

    async def send_eof(self) -> None:
        await self._inner.send_eof()

    async def aclose(self) -> None:
        await self._inner.aclose()


def simulate_door(seed: int, *, cancel_at: int | None = None, victim: int | None = None, clients_max: int = 8) -> World:
    """As ``simulate``, over HTTP."""
    world = World(random.Random(f"door {seed}"))
    run_world(world, seed, _scenario, cancel_at, victim, clients_max)
    return world


async def _scenario(world: World, scopes: list[trio.CancelScope], desks: list[admission._Desk]) -> None:
    rng = world.rng
    device = SimDevice(rng.choice((6, 12, 40)), slots=16)
    executor = SimExecutor(device)
    config = EngineConfig(
        running_max=rng.choice((1, 3, 16)), step_tokens_max=rng.choice((5, 100)), queue_max=rng.choice((1, 4, 100)),
        choices_max=9, client_share_max=rng.choice((None, None, 1)), grammar_compile_s=math.inf,
        default_max_tokens=DEFAULT_MAX_TOKENS,
    )  # fmt: skip
    faults = Faults(random.Random(rng.random()), executor, fatal=False)
    world.faults = faults.counts
    http = DoorConfig()
    http.write_timeout_s, http.keep_alive_timeout, http.linger_s = 2.0, 3.0, 0.5
    http.connections_max = rng.choice((3, 1000, 1000))
    async with open_engine(config, loaded=loaded_with(executor, device)) as engine:
        await trio.lowlevel.checkpoint()
        compiled_already(engine._constraints)
        faults.install(engine, lambda step: check_step(engine, desks[0], step))
        door = Door()
        door.engine = engine
        app = cast(Any, wrap_app(cast(Any, shield_final(cast(Any, create_app(door)))), 0, "asgi"))
        with trio.fail_after(20 * PATIENCE_S):
            async with trio.open_nursery() as connections:
                await _clients(world, engine, scopes, (app, http, connections))
            await settled(world, engine, desks[0])
        assert http.connections == 0
        world.note("end", sorted(world.endings.items()))


Place = tuple[Any, DoorConfig, trio.Nursery]


async def _clients(world: World, engine: Engine, scopes: list[trio.CancelScope], place: Place) -> None:
    rng = world.rng
    async with trio.open_nursery() as nursery:
        for i in range(rng.randrange(1, len(scopes))):
            stream = connect(*place, lockstep=rng.random() < 0.5)
            full = place[1].connections_max < len(scopes)
            client = _Client(world, engine, i, random.Random(rng.random()), stream, full)
            nursery.start_soon(client.run, scopes[i])
            if rng.random() < 0.5:
                await trio.sleep(rng.choice((0, 0.003, 0.05)))


def connect(app: Any, http: DoorConfig, nursery: trio.Nursery, *, lockstep: bool) -> trio.abc.HalfCloseableStream:
    """The client's end of a new connection. ``lockstep``: a side that does not read stops the other's writing."""
    pair = trio.testing.lockstep_stream_pair() if lockstep else trio.testing.memory_stream_pair()
    ours, theirs = pair
    stream = MemorySocketStream(cast(Any, theirs))
    connection = Connection(app, http, WorkerContext(None), ConnectionState({}), cast(Any, stream))
    nursery.start_soon(connection.run)
    return cast(trio.abc.HalfCloseableStream, ours)


@dataclass
class _Client:
    """One connection: a few requests, or what passes for them."""

    world: World
    engine: Engine
    name: int
    rng: random.Random
    stream: trio.abc.HalfCloseableStream
    full: bool  # there may be too many connections

    async def run(self, scope: trio.CancelScope) -> None:
        ending = "gone"
        try:
            with scope, trio.fail_after(PATIENCE_S):
                ending = await self._act()
        except (EOFError, trio.BrokenResourceError, trio.ClosedResourceError):
            assert self.full, "nobody who reads is cut while there is room"
            ending = "cut"
        finally:
            await trio.aclose_forcefully(self.stream)
            self.world.endings[ending] += 1
            self.world.note(self.name, ending)

    async def _act(self) -> str:
        temper = self.rng.random()
        if temper < 0.1:
            return await self._babble()
        if temper < 0.25:
            return await self._pipeline()
        for _ in range(self.rng.randrange(1, 3)):
            ending = await self._ask(self.rng.random())
            if ending != "done":
                return ending
        return "done"

    async def _babble(self) -> str:
        """Garbage, or a good start that goes wrong; the server says so and closes, or just closes."""
        start = self.rng.choice(
            (b"", b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\n", b"GET / ")
        )
        with suppress(trio.BrokenResourceError):  # it may have heard enough before the end
            await self._send(start + self.rng.randbytes(self.rng.randrange(200)))
            await self.stream.send_eof()
        got = await RawClient(cast(Any, self.stream)).read_to_end()
        assert not got or got.startswith(b"HTTP/1.1 4") or b"503" in got[:20] or b"505" in got[:20], got
        return "babbled"

    async def _pipeline(self) -> str:
        """Several requests before any answer, and perhaps the end of what it has to say; it may then leave at once."""
        asked = [self._request() for _ in range(self.rng.randrange(2, 4))]
        leaves = self.rng.random() < 0.3
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send_all, [raw for _, raw in asked])
            if leaves:
                await trio.sleep(self.rng.choice((0.0, 0.01, 0.2)))
                ending = "left waiting"
            else:
                ending = await self._read_all([request for request, _ in asked])
            nursery.cancel_scope.cancel()
        return ending

    async def _read_all(self, requests: list[CompletionRequest]) -> str:
        client = RawClient(cast(Any, self.stream))
        for request in requests:
            ending = self._judge(request, await client.response())
            if ending not in ("done", "failed"):
                return ending
        return "done"

    async def _send_all(self, parts: list[bytes]) -> None:
        for part in parts:
            await self._send(part)

    def _request(self) -> tuple[CompletionRequest, bytes]:
        """A request and its bytes, with the body in one piece or in chunks."""
        fields = random_fields(self.rng, self.engine.card.context_length)
        raw = request_bytes("POST", "/v1/completions", {k: v for k, v in fields.items() if v is not None})
        if self.rng.random() < 0.2:
            head, _, body = raw.partition(b"\r\n\r\n")
            lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"content-length")]
            cut = self.rng.randrange(1, len(body))
            chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:cut], body[cut:], b""))
            raw = b"\r\n".join([*lines, b"transfer-encoding: chunked", b"", b""]) + chunks
        return from_fields(fields), raw

    async def _ask(self, temper: float) -> str:
        request, raw = self._request()
        if temper < 0.1:
            await self._send(raw[: self.rng.randrange(len(raw))])
            return "left in its own words"
        await self._send(raw)
        client = RawClient(cast(Any, self.stream))
        if temper < 0.2:
            await trio.sleep(self.rng.choice((0.0, 0.004, 0.03, 0.3)))
            return "left waiting"
        if temper < 0.25:
            await trio.sleep(20)  # never reads; longer than the write timeout
            return "never read"
        if temper < 0.3:
            await self.stream.send_eof()  # for this server as good as leaving
            got = await client.read_to_end()
            assert not got or got.startswith(b"HTTP/1.1 "), got
            return "half-closed"
        status, headers = await client.response_head()
        if temper < 0.4 and headers.get("transfer-encoding") == "chunked":
            for _ in range(self.rng.randrange(4)):
                if not await client.chunk():
                    break
            return "left reading"
        if temper < 0.5:
            await trio.sleep(0.5)  # reads late
        answer = await client.body(status, headers)
        return self._judge(request, answer)

    def _judge(self, request: CompletionRequest, answer: Answered) -> str:
        if answer.status != 200:
            assert answer.status in ENDINGS, (answer.status, answer.body)
            assert answer.json["error"]["message"]
            assert answer.status != 400 or not fits(request, self.engine.card.context_length)
            if answer.status in (429, 503):
                assert int(answer.headers["retry-after"]) >= 1
            return ENDINGS[answer.status]
        if not request.stream:
            check_body(request, answer.json, self.engine.card.context_length)
            return "done"
        events = answer.events
        if any("error" in event for event in events):
            return "failed"
        check_body(request, joined(events), self.engine.card.context_length)
        return "done"

    async def _send(self, data: bytes) -> None:
        while data:
            n = self.rng.choice((len(data), 1, 7, 50)) if len(data) < 400 else len(data)
            await self.stream.send_all(data[:n])
            data = data[n:]
            if self.rng.random() < 0.1:
                await trio.sleep(self.rng.choice((0, 0.01)))

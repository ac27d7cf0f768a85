"""A seeded crowd of clients on real sockets: some behave, most do not.

Rules of this file: what a client does is decided by its number and the seed alone; whatever comes back is judged here,
so that a crowd of any size ends in one table of what happened. Times are short real ones: sockets know no other.
"""

from __future__ import annotations

import json
import random
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import trio
from raw_http import Answered, RawClient, connect, request_bytes

PATH = "/v1/completions"
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset
PATIENCE_S = 60.0  # no client waits longer for anything: a time-out here is a failure


class Crowd:
    """``happened``: (role, what came of it) -> how often; ``surprises``: what should never have come."""

    def __init__(self, port: int, model: str, seed: int, *, at_once: int = 100) -> None:
        self.port = port
        self.model = model
        self.seed = seed
        self.happened: Counter[tuple[str, str]] = Counter()
        self.surprises: list[str] = []
        self._limit = trio.CapacityLimiter(at_once)

    async def come(self, clients: dict[str, int]) -> None:
        """``{"leaver": 200, ...}``: all of them, in a random order, and none left at the end."""
        roles = [role for role, n in clients.items() for _ in range(n)]
        random.Random(self.seed).shuffle(roles)
        async with trio.open_nursery() as nursery:
            for number, role in enumerate(roles):
                nursery.start_soon(self._client, role, number)

    async def _client(self, role: str, number: int) -> None:
        chance = random.Random(f"{self.seed}/{number}")
        act: Callable[[random.Random], Awaitable[str]] = getattr(self, f"_{role}")
        async with self._limit:
            with trio.move_on_after(PATIENCE_S) as patience:
                try:
                    outcome = await act(chance)
                except (trio.BrokenResourceError, EOFError):
                    outcome = "cut"
                except AssertionError as error:
                    outcome = "surprise"
                    self.surprises.append(f"seed {self.seed}, client {number} ({role}): {error}")
            if patience.cancelled_caught:
                outcome = "surprise"
                self.surprises.append(f"seed {self.seed}, client {number} ({role}): nothing for {PATIENCE_S} s")
            self.happened[role, outcome] += 1

    def body(self, chance: random.Random, **fields: Any) -> dict[str, Any]:
        """A good request."""
        prompt = "".join(chance.choice("the sky is blue ") for _ in range(chance.randint(1, 200)))
        extras: dict[str, Any] = chance.choice(
            [{}, {"n": 3}, {"logprobs": 3}, {"echo": True}, {"stop": ["e"]}, {"temperature": 0}]
        )
        tokens = chance.choice([0, 1, 5, 40])
        return {"model": self.model, "prompt": prompt, "max_tokens": tokens, "seed": 1, **extras, **fields}

    # -- those who behave ----------------------------------------------------------------------------------------

    async def _asker(self, chance: random.Random) -> str:
        """One connection, a few requests on it."""
        async with connect(self.port) as client:
            for _ in range(chance.randint(1, 4)):
                answer = await client.request("POST", PATH, self.body(chance))
                if answer.status != 200:
                    return turned_away(answer)
                assert answer.json["choices"]
        return "answered"

    async def _streamer(self, chance: random.Random) -> str:
        async with connect(self.port) as client:
            answer = await client.request("POST", PATH, self.body(chance, stream=True))
            if answer.status != 200:
                return turned_away(answer)
            assert answer.events[-1]["usage"]
        return "answered"

    # -- those who leave -----------------------------------------------------------------------------------------

    async def _leaver(self, chance: random.Random) -> str:
        """Goes at a random moment: before a byte, in the head, in the body, before the answer, in the middle of it."""
        body = self.body(chance, max_tokens=200, ignore_eos=True, stream=chance.random() < 0.7)
        data = request_bytes("POST", PATH, body)
        async with connect(self.port) as client:
            if chance.random() < 0.5:
                client.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            moment = chance.random()
            if moment < 0.3:
                await client.send(data[: chance.randint(0, len(data))])
                return "left early"
            await client.send(data)
            if moment < 0.6:
                await trio.sleep(chance.random() * 0.2)
                return "left waiting"
            for _ in range(chance.randint(1, 20)):
                if not await client.stream.receive_some(chance.choice([1, 100, 4096])):
                    return "cut"
        return "left reading"

    async def _churner(self, chance: random.Random) -> str:
        """Comes and goes."""
        for _ in range(chance.randint(5, 20)):
            async with connect(self.port) as client:
                if chance.random() < 0.5:
                    await client.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        return "left"

    # -- those who dawdle ----------------------------------------------------------------------------------------

    async def _slow_reader(self, chance: random.Random) -> str:
        """Asks for much and reads almost nothing; the server cuts it, or it gives up."""
        body = self.body(chance, max_tokens=300, ignore_eos=True, stream=True, n=4, logprobs=5)
        async with connect(self.port, receive_buffer=4096) as client:
            await client.send(request_bytes("POST", PATH, body))
            for _ in range(chance.randint(2, 8)):
                if not await client.stream.receive_some(64):
                    return "cut"
                await trio.sleep(chance.random() * 0.5)
        return "left"

    async def _slow_head(self, chance: random.Random) -> str:
        """Slow loris: a header byte now and then, for ever. The server has to end it."""
        async with connect(self.port) as client:
            for byte in b"GET /health HTTP/1.1\r\nx-slow: " + b"a" * 10_000:
                await client.send(bytes([byte]))
                with trio.move_on_after(0.2):
                    return "answered" if await client.stream.receive_some(100) else "cut"
        raise AssertionError("it was borne for ever")

    async def _slow_body(self, chance: random.Random) -> str:
        """The same with a body that never becomes whole; a 408, and the connection ends."""
        async with connect(self.port) as client:
            await client.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n")
            for _ in range(1000):
                await client.send(b"{")
                with trio.move_on_after(0.2):
                    answer = await client.response()
                    assert answer.status in (408, 503), answer.status
                    return str(answer.status)
        raise AssertionError("it was borne for ever")

    async def _silent(self, chance: random.Random) -> str:
        """Connects and says nothing: half-open, until the server has had enough."""
        async with connect(self.port) as client:
            return "answered" if await client.stream.receive_some(1) else "cut"

    # -- those who talk nonsense ---------------------------------------------------------------------------------

    async def _fool(self, chance: random.Random) -> str:
        """A flood of bad requests on one connection."""
        bad: list[bytes | dict[str, Any]] = [
            b"{", b"", b"[]", b"\xff", b'{"a":' * 2000, {"model": self.model}, {"model": "x", "prompt": "y"},
            self.body(chance, temperature=9), self.body(chance, nonsense=1), self.body(chance, n=10**9),
            self.body(chance, prompt=[10**6]), self.body(chance, prompt="x" * 100_000),
            self.body(chance, response_format={"type": "grammar", "grammar": "root ::= ("}),
        ]  # fmt: skip
        async with connect(self.port) as client:
            for _ in range(20):
                answer = await client.request("POST", PATH, chance.choice(bad))
                if answer.status == 503:
                    return turned_away(answer)
                assert 400 <= answer.status < 500, (answer.status, answer.body[:200])
                assert answer.json["error"]["message"]
        return "refused"

    async def _babbler(self, chance: random.Random) -> str:
        """Bytes that are no HTTP."""
        async with connect(self.port) as client:
            await client.send(chance.randbytes(chance.randint(1, 5000)) + b"\r\n\r\n")
            out = await client.read_to_end()
            assert not out or out.startswith(b"HTTP/1.1 4") or b" 503 " in out[:20], out[:100]
        return "refused"


def turned_away(answer: Answered) -> str:
    """A 503 or 429 that says when to come again; anything else is a surprise."""
    assert answer.status in (429, 503), (answer.status, answer.body[:300])
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert json.loads(answer.body)["error"]["message"]
    return f"{answer.status}"


async def sing(client: RawClient, model: str) -> str:
    """The canary's one song: whatever else goes on, every time the same."""
    body = {"model": model, "prompt": "The sky is", "max_tokens": 8, "temperature": 0, "logprobs": 1}
    answer = await client.request("POST", PATH, body)
    assert answer.status == 200, (answer.status, answer.body)
    return json.dumps(answer.json["choices"])

"""``offbook serve``: the root of the process. Port, engine, signals, in one nursery; whatever crashes ends it.

The port opens first: while the model loads, ``/health`` says ``starting`` (503) and requests get a 503 with
``Retry-After``, so that a supervisor can tell a slow start from a dead process. The first SIGTERM or SIGINT drains: new
requests are refused, those in progress go on for at most ``drain_s`` and are then told that it is over; exit code 0. A
second one tells them so at once.
"""

from __future__ import annotations

import errno
import json
import logging
import signal
import sys
from functools import partial

import msgspec
import trio

from ..actors.config import EngineConfig
from ..actors.engine import open_engine
from ..actors.events import ModelCard
from .app import Door, DoorSettings, create_app
from .hypercorn_adapter import DoorConfig, serve
from .progress import ProgressBar

_logger = logging.getLogger("offbook.serve")


LAST_WORDS_S = 2.0  # for what is left at the end of a drain to be told so
AT_ONCE_S = 0.5  # the same, at a second signal


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How to listen and how to stop."""

    host: str = "127.0.0.1"
    port: int = 8000
    connections_max: int = 1000
    write_timeout_s: float = 30.0
    keep_alive_s: float = 15.0
    drain_s: float = 60.0  # for requests in progress when the first signal comes
    drain_delay_s: float = 0.0  # the port stays open so long, refusing: for load balancers that poll /health


class PortError(Exception):
    """The address cannot be listened on."""


def listen(settings: ServeSettings) -> DoorConfig:
    """Open the port. Raises PortError."""
    config = DoorConfig()
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    config.bind = [f"{host}:{settings.port}"]
    config.connections_max = settings.connections_max
    config.write_timeout_s = settings.write_timeout_s
    config.keep_alive_timeout = settings.keep_alive_s
    config.graceful_timeout = settings.drain_s + LAST_WORDS_S
    config.backlog = 512
    try:
        for socket in config.create_sockets().insecure_sockets:
            socket.listen(config.backlog)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            message = f"port {settings.port} on {settings.host} is in use: choose another with --port"
            raise PortError(message) from None
        raise PortError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}") from None
    return config


async def run(engine_config: EngineConfig, door_settings: DoorSettings, settings: ServeSettings) -> int:
    """Serve until told to stop; the exit code. Raises PortError, and whatever ``open_engine`` raises."""
    sys.setswitchinterval(0.0005)  # the device's thread waits this long for the GIL, not 5 ms, when the loop is busy
    http = listen(settings)
    house = _House(http, settings)
    house.door.connections = lambda: http.connections
    app = create_app(house.door, door_settings)
    async with trio.open_nursery() as root:
        house.everything = root.cancel_scope
        await root.start(house.listen_to_signals)
        urls = await root.start(house.serve, app)
        _say(f"offbook listens on {urls[0]} and loads the model")
        with ProgressBar() as report:
            async with open_engine(engine_config, progress=report) as engine:
                report.close()
                house.door.engine = engine
                announce(engine.card, urls[0], len(set(door_settings.api_keys)))
                await house.stop_asked.wait()
                engine.begin_drain()
                await trio.sleep(settings.drain_delay_s)
                house.stop_listening.set()
                with trio.move_on_after(settings.drain_s):
                    await house.served.wait()
                engine.end_answers()
                await house.served.wait()
        root.cancel_scope.cancel(reason="all answers are out")
    return house.exit_code


class _House:
    """What the tasks of the process tell one another."""

    def __init__(self, http: DoorConfig, settings: ServeSettings) -> None:
        self.door = Door()
        self.exit_code = 0
        self.stop_asked = trio.Event()
        self.stop_listening = trio.Event()
        self.served = trio.Event()
        self.everything = trio.CancelScope()
        self._http = http
        self._settings = settings

    async def serve(self, app: object, *, task_status: trio.TaskStatus[list[str]]) -> None:
        begin = partial(serve, shutdown_trigger=self.stop_listening.wait, task_status=task_status)
        await begin(app, self._http)  # type: ignore[arg-type]
        self.served.set()

    async def listen_to_signals(self, *, task_status: trio.TaskStatus[None]) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            task_status.started()
            async for number in signals:
                name = signal.Signals(number).name
                if self.stop_asked.is_set():
                    _say(f"{name} again: stopping at once")
                    self.exit_code = 128 + number
                    self._http.abort_writes()
                    if self.door.engine is not None:
                        self.door.engine.end_answers()
                    self.everything.deadline = trio.current_time() + AT_ONCE_S
                elif self.door.engine is None:
                    _say(f"{name}: stopping before the model is loaded")
                    self.everything.cancel(reason=name)
                else:
                    active = self.door.engine.active
                    _say(f"{name}: draining {active} request{'s' if active != 1 else ''}; once more to stop at once")
                    self.stop_asked.set()


def announce(card: ModelCard, url: str, keys: int) -> None:
    """What was loaded, who may ask, and a line to try; of a key stands there only its place."""
    body = json.dumps({"model": card.id, "prompt": "The sky is", "max_tokens": 16, "temperature": 0})
    weights, kv = (f"{size / 2**20:.0f} MiB" for size in (card.weight_bytes, card.kv_bytes))
    _say(
        f"loaded {card.id} on {card.device} in {card.load_s:.1f} s: {weights} of weights, "
        f"{kv} of KV memory for {card.kv_tokens} tokens, context {card.context_length}"
    )
    _say(f"keys: {keys}" if keys else "no keys: anybody who reaches this port may use it")
    key = "-H 'authorization: Bearer YOUR_KEY' " if keys else ""
    _say(f"ready; try:\n  curl -s {url}/v1/completions {key}-H 'content-type: application/json' -d '{body}'")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()

"""The desk at the entrance, alone: verdicts, order, fairness, ageing, eviction, honest times, and its books.

The actor itself runs, on real channels; tickets are bare. "Its books" is what it counts for each client and of the
running choices: they return to nothing whatever callers do. Long, since all of it stands at one desk.
"""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from offbook.actors.admission import admission
from offbook.actors.config import EngineConfig
from offbook.actors.errors import ClientOverShare, CompletionError, EngineOverloaded
from offbook.actors.messages import AdmissionMail, Admitted, Apply, BatchingMail, Enqueue, Released
from offbook.actors.metrics import EngineMetrics
from offbook.actors.sequence import Sequence
from offbook.actors.ticket import Accepted, Event, Ticket
from offbook.kernels.params import SamplingParams


class Desk:
    """The actor's surroundings: callers on one side, batching on the other."""

    def __init__(
        self, inbox: trio.MemorySendChannel[AdmissionMail], admitted: trio.MemoryReceiveChannel[BatchingMail],
        metrics: EngineMetrics,
    ) -> None:  # fmt: skip
        self._inbox = inbox
        self._admitted = admitted
        self._metrics = metrics
        self._callers: dict[int, trio.MemoryReceiveChannel[Event]] = {}

    def apply(
        self, *, client: str | None = None, priority: bool = False, choices: int = 1, estimate: int = 1
    ) -> Ticket:
        reply, caller = trio.open_memory_channel[Event](4)
        ticket = Ticket(
            id="t", reply=reply, client=client, priority=priority, estimate=estimate, stream=True,
            asked_at=trio.current_time(),
        )  # fmt: skip
        ticket.sequences = [Sequence([1], SamplingParams(), max_tokens=1) for _ in range(choices)]
        self._callers[id(ticket)] = caller
        self._inbox.send_nowait(Apply(ticket))
        return ticket

    async def verdict(self, ticket: Ticket) -> Event:
        await trio.testing.wait_all_tasks_blocked()
        return self._callers[id(ticket)].receive_nowait()

    def enqueue(self, *tickets: Ticket) -> None:
        for ticket in tickets:
            self._inbox.send_nowait(Enqueue(ticket))

    async def accepted(self, count: int = 1, **fields: object) -> list[Ticket]:
        """So many requests, accepted and ready to run."""
        tickets = [self.apply(**fields) for _ in range(count)]  # type: ignore[arg-type]
        for ticket in tickets:
            assert isinstance(await self.verdict(ticket), Accepted)
        self.enqueue(*tickets)
        await trio.testing.wait_all_tasks_blocked()
        return tickets

    async def refusal(self, **fields: object) -> CompletionError:
        error = await self.verdict(self.apply(**fields))  # type: ignore[arg-type]
        assert isinstance(error, CompletionError)
        return error

    def leave(self, ticket: Ticket) -> None:
        self._callers[id(ticket)].close()
        ticket.abandoned = True

    async def release(self, ticket: Ticket) -> None:
        for left in reversed(range(len(ticket.sequences))):
            self._inbox.send_nowait(Released(ticket, 1, left == 0))
        await trio.testing.wait_all_tasks_blocked()

    def running(self) -> list[Ticket]:
        """What has been admitted since the last call."""
        out: list[Ticket] = []
        while True:
            try:
                message = self._admitted.receive_nowait()
            except trio.WouldBlock:
                return out
            assert isinstance(message, Admitted)
            out.append(message.ticket)

    def figure(self, name: str, **labels: str) -> float:
        return self._metrics.registry.get_sample_value(f"offbook_{name}", labels) or 0.0


@asynccontextmanager
async def desk_with(**config: object) -> AsyncIterator[Desk]:
    settings = EngineConfig(**config)  # type: ignore[arg-type]
    to_desk, at_desk = trio.open_memory_channel[AdmissionMail](settings.admission_mailbox)
    to_batching, admitted = trio.open_memory_channel[BatchingMail](settings.batching_mailbox)
    metrics = EngineMetrics()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(admission, at_desk, to_batching, settings, metrics)
        yield Desk(to_desk, admitted, metrics)
        nursery.cancel_scope.cancel()


async def test_places_and_the_queue_are_what_may_be_accepted(autojump_clock: trio.testing.MockClock) -> None:
    async with desk_with(running_max=2, queue_max=3) as desk:
        tickets = await desk.accepted(4 + 3)
        assert desk.running() == tickets[:4]
        assert isinstance(await desk.refusal(), EngineOverloaded)
        await desk.release(tickets[0])
        assert desk.running() == tickets[4:5]
        assert len(await desk.accepted()) == 1
        assert isinstance(await desk.refusal(), EngineOverloaded)


async def test_the_verdict_comes_before_anything_is_tokenized(autojump_clock: trio.testing.MockClock) -> None:
    async with desk_with(running_max=1, queue_max=1) as desk:
        first = [desk.apply() for _ in range(3)]
        assert [type(await desk.verdict(t)) for t in first] == [Accepted] * 3
        assert isinstance(await desk.refusal(), EngineOverloaded)
        assert desk.running() == []


async def test_tokens_bound_the_queue_but_never_the_only_request(autojump_clock: trio.testing.MockClock) -> None:
    async with desk_with(running_max=1, queue_tokens_max=10) as desk:
        assert isinstance(await desk.verdict(desk.apply(estimate=1000)), Accepted)
        assert isinstance(await desk.refusal(estimate=1), EngineOverloaded)


async def test_room_is_made_until_a_priority_request_fits_or_not_at_all(autojump_clock: trio.testing.MockClock) -> None:
    async with desk_with(running_max=1, queue_tokens_max=10) as desk:
        await desk.accepted(2)
        waiting = await desk.accepted(3, estimate=3)
        await desk.accepted(priority=True)
        assert isinstance(await desk.refusal(estimate=10, priority=True), EngineOverloaded)
        assert not any(t.abandoned for t in waiting)
        assert desk.figure("requests_refused_total", why="evicted") == 0
        assert isinstance(await desk.verdict(desk.apply(estimate=6, priority=True)), Accepted)
        assert desk.figure("requests_refused_total", why="evicted") == 2
        assert [type(await desk.verdict(t)) for t in waiting[1:]] == [EngineOverloaded] * 2


async def test_first_come_first_served_and_priority_before(autojump_clock: trio.testing.MockClock) -> None:
    async with desk_with(running_max=1) as desk:
        running = await desk.accepted(2)
        waiting = []
        for priority in (False, False, True, True):
            await trio.sleep(0.1)
            waiting += await desk.accepted(priority=priority)
        desk.running()
        order = []
        for ticket in running:
            await desk.release(ticket)
            order += desk.running()
        for _ in range(2):
            await desk.release(order[-1])
            order += desk.running()
        assert order == [waiting[2], waiting[3], waiting[0], waiting[1]]


async def test_the_client_with_the_least_running_is_next(autojump_clock: trio.testing.MockClock) -> None:
    async with desk_with(running_max=2) as desk:
        greedy = await desk.accepted(12, client="greedy")
        assert desk.running() == greedy[:4]
        await trio.sleep(1)
        (modest,) = await desk.accepted(client="modest")
        await desk.release(greedy[0])
        assert desk.running() == [modest]


async def test_waiting_long_counts_as_priority(autojump_clock: trio.testing.MockClock) -> None:
    async with desk_with(running_max=1, queue_max=1, priority_ageing_s=5) as desk:
        running = await desk.accepted(2)
        (old,) = await desk.accepted()
        await trio.sleep(5)
        assert isinstance(await desk.refusal(priority=True), EngineOverloaded), "too old to be evicted"
        desk.running()
        await desk.release(running[0])
        assert desk.running() == [old]


async def test_nobody_starves_behind_a_stream_of_priority(autojump_clock: trio.testing.MockClock) -> None:
    async with desk_with(running_max=1, priority_ageing_s=3) as desk:
        running = await desk.accepted(2)
        (patient,) = await desk.accepted()
        desk.running()
        for _ in range(40):
            await trio.sleep(0.25)
            await desk.accepted(priority=True)
            await desk.release(running.pop(0))
            running += desk.running()
            if patient in running:
                break
        assert patient in running
        assert trio.current_time() - patient.asked_at < 3 + 1


async def test_the_largest_request_gets_its_turn(autojump_clock: trio.testing.MockClock) -> None:
    """More choices than fit beside others: it runs alone, and small ones do not pass it for ever."""
    async with desk_with(running_max=2) as desk:
        small = await desk.accepted(4)
        (large,) = await desk.accepted(choices=9)
        later = await desk.accepted(4)
        for ticket in small:
            assert large not in desk.running()
            await desk.release(ticket)
        assert desk.running() == [large]
        await desk.release(large)
        assert desk.running() == later


async def test_who_left_does_not_hold_up_the_queue(autojump_clock: trio.testing.MockClock) -> None:
    async with desk_with(running_max=2) as desk:
        small = await desk.accepted(4)
        (large,) = await desk.accepted(choices=9)
        later = await desk.accepted(2)
        desk.running()
        desk.leave(large)
        await desk.release(small[0])
        assert desk.running() == later[:1]


async def test_retry_after_follows_the_rate_of_endings(autojump_clock: trio.testing.MockClock) -> None:
    """A refusal's time is within a factor of two of the time after which a place really is free for as many requests as
    wait; idle hours before say nothing."""
    async with desk_with(running_max=1, queue_max=10) as desk:
        (early,) = await desk.accepted()
        await desk.release(early)
        await trio.sleep(3600)
        running = await desk.accepted(2 + 10)
        desk.running()
        for _ in range(6):
            await trio.sleep(2)
            await desk.release(running.pop(0))
            await desk.accepted()
        error = await desk.refusal()
        assert error.retry_after_s is not None
        assert 10 <= error.retry_after_s <= 40, "ten wait, one ends every two seconds"


async def test_retry_after_is_between_a_second_and_a_minute(autojump_clock: trio.testing.MockClock) -> None:
    for gap in (0.001, 300):
        async with desk_with(running_max=1, queue_max=2) as desk:
            running = await desk.accepted(4)
            for _ in range(3):
                await trio.sleep(gap)
                await desk.release(running.pop(0))
                running += await desk.accepted()
            assert (await desk.refusal()).retry_after_s == (1 if gap < 1 else 60)


async def test_a_share_is_from_acceptance_to_release(autojump_clock: trio.testing.MockClock) -> None:
    async with desk_with(client_share_max=1) as desk:
        ticket = desk.apply(client="k")
        assert isinstance(await desk.verdict(ticket), Accepted)
        assert isinstance(await desk.refusal(client="k"), ClientOverShare)
        desk.enqueue(ticket)
        assert isinstance(await desk.refusal(client="k"), ClientOverShare)
        await desk.release(ticket)
        await desk.accepted(client="k")


async def test_a_share_survives_callers_who_leave_at_any_point(autojump_clock: trio.testing.MockClock) -> None:
    """Whoever leaves while its letter to admission is under way is counted out once, not twice."""
    async with desk_with(client_share_max=1) as desk:
        for letters in range(4):
            ticket = desk.apply(client="k")
            assert isinstance(await desk.verdict(ticket), Accepted)
            others = [desk.apply(client="other") for _ in range(letters % 2)]
            if letters < 2:
                desk.enqueue(ticket)
            desk.leave(ticket)
            for other in others:
                desk.leave(other)
            if letters == 3:
                desk.apply(client="third")
                desk.enqueue(ticket)
            await trio.testing.wait_all_tasks_blocked()
        (last,) = await desk.accepted(client="k")
        assert isinstance(await desk.refusal(client="k"), ClientOverShare)
        assert last in desk.running()
        assert desk.figure("requests_total", outcome="abandoned") >= 4


async def test_the_gauge_forgets_those_who_left_or_were_refused_later(autojump_clock: trio.testing.MockClock) -> None:
    async with desk_with() as desk:
        ticket = desk.apply()
        assert isinstance(await desk.verdict(ticket), Accepted)
        assert desk.figure("requests_waiting") == 1
        desk.leave(ticket)
        assert desk.figure("requests_waiting") == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_any_traffic_keeps_the_books(seed: int) -> None:
    """Random callers and endings: bounds hold at every point, everybody is heard, and the books return to nothing."""
    rng = random.Random(seed)

    async def traffic() -> None:
        bound = rng.choice((1, 3))
        share = rng.choice((None, 1, 2))
        async with desk_with(
            running_max=bound, queue_max=rng.choice((1, 5)), client_share_max=share,
            queue_tokens_max=rng.choice((5, 99)), priority_ageing_s=rng.choice((0.5, 30.0)),
        ) as desk:  # fmt: skip
            waiting: list[Ticket] = []
            running: list[Ticket] = []
            for _ in range(rng.randrange(1, 60)):
                match rng.randrange(5):
                    case 0 | 1:
                        ticket = desk.apply(
                            client=rng.choice((None, "a", "b")), priority=rng.random() < 0.3,
                            choices=rng.choice((1, 1, 2, 9)), estimate=rng.randrange(1, 9),
                        )  # fmt: skip
                        if isinstance(await desk.verdict(ticket), Accepted):
                            waiting.append(ticket)
                            if rng.random() < 0.8:
                                desk.enqueue(ticket)
                    case 2 if running:
                        await desk.release(running.pop(rng.randrange(len(running))))
                    case 3 if waiting:
                        desk.leave(waiting.pop(rng.randrange(len(waiting))))
                    case _:
                        await trio.sleep(rng.random())
                await trio.testing.wait_all_tasks_blocked()
                running += desk.running()
                choices = sum(len(t.sequences) for t in running)
                assert choices <= 2 * bound or len(running) == 1
                clients = [t.client for t in running if t.client]
                assert share is None or all(clients.count(c) <= share for c in clients)
            for ticket in waiting:
                desk.leave(ticket)
            while running:
                await desk.release(running.pop())
                running += desk.running()
            assert desk.figure("requests_waiting") == 0
            for client in ("a", "b"):
                for _ in range(share or 1):
                    (ticket,) = await desk.accepted(client=client)
                    running += desk.running()
                    assert running[-1] is ticket
                if share is not None:
                    assert isinstance(await desk.refusal(client=client), ClientOverShare)
                while running:
                    await desk.release(running.pop())

    trio.run(traffic, clock=trio.testing.MockClock(autojump_threshold=0))


def test_no_rate_is_known_at_first() -> None:
    async def first() -> None:
        async with desk_with(running_max=1, queue_max=1, deadline_s=math.inf) as desk:
            await desk.accepted(3)
            assert (await desk.refusal()).retry_after_s == 1

    trio.run(first, clock=trio.testing.MockClock(autojump_threshold=0))

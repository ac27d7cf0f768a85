"""The caller's side of a request, alone: joining, buffering, deadlines, errors and abandonment."""

from __future__ import annotations

import math
import random

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from offbook.actors.answer import Answer, Buffering
from offbook.actors.errors import DeadlineExceeded, EngineOverloaded, StepFailed
from offbook.actors.events import Delta, FinishReason, Timings, Usage
from offbook.actors.request import CompletionRequest
from offbook.actors.ticket import Accepted, Ended, Event, Ticket

USAGE = Usage(3, 2, 1)
END = Ended(USAGE, Timings(), None, 4)


def opened(
    *, deadline: float = math.inf, buffering: Buffering | None = None, capacity: float = 100
) -> tuple[trio.MemorySendChannel[Event], Answer]:
    send, receive = trio.open_memory_channel[Event](capacity)
    request = CompletionRequest(model="m", prompt="x")
    ticket = Ticket(id="a", reply=send, client=None, priority=False, estimate=1, stream=True, asked_at=0.0)
    answer = Answer(
        id="a", created=0, model="m", request=request, events=receive, ticket=ticket, deadline=deadline,
        buffering=buffering or Buffering(),
    )  # fmt: skip
    return send, answer


def delta(index: int, *tokens: int, finish: FinishReason | None = None) -> Delta:
    return Delta(index=index, text="".join(chr(96 + t) for t in tokens), token_ids=tokens, finish_reason=finish)


async def test_a_verdict_comes_first(autojump_clock: trio.testing.MockClock) -> None:
    send, answer = opened()
    send.send_nowait(Accepted())
    await answer.accepted()
    send, answer = opened()
    send.send_nowait(EngineOverloaded("full", 2.0))
    with pytest.raises(EngineOverloaded, match="full"):
        await answer.accepted()


async def test_what_piled_up_is_joined_choice_by_choice(autojump_clock: trio.testing.MockClock) -> None:
    send, answer = opened()
    send.send_nowait((delta(0, 1), delta(1, 2)))
    send.send_nowait((delta(0, 3),))
    send.send_nowait((delta(1, 4, finish="stop"),))
    send.send_nowait((delta(0, 5, finish="length"),))
    send.send_nowait(END)
    assert [d async for d in answer] == [delta(0, 1, 3, 5, finish="length"), delta(1, 2, 4, finish="stop")]
    assert answer.usage == USAGE
    assert answer.concurrent_requests == 4


async def test_the_whole_answer_by_index(autojump_clock: trio.testing.MockClock) -> None:
    send, answer = opened()
    send.send_nowait((delta(1, 9, finish="stop"),))
    send.send_nowait((delta(0, 1),))

    async def rest() -> None:
        await trio.sleep(1)
        send.send_nowait((delta(0, 2, finish="length"),))
        send.send_nowait(END)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(rest)
        assert await answer.choices() == [delta(0, 1, 2, finish="length"), delta(1, 9, finish="stop")]
    with pytest.raises(StopAsyncIteration):
        await anext(answer)


async def test_an_error_ends_it(autojump_clock: trio.testing.MockClock) -> None:
    send, answer = opened()
    send.send_nowait((delta(0, 1),))
    assert await anext(answer) == delta(0, 1)
    send.send_nowait(StepFailed("broken"))
    with pytest.raises(StepFailed, match="broken"):
        await anext(answer)
    with pytest.raises(StopAsyncIteration):
        await anext(answer)


@pytest.mark.parametrize("buffering", [Buffering(), Buffering(tokens=9)])
async def test_what_came_before_an_error_is_told_first(
    autojump_clock: trio.testing.MockClock, buffering: Buffering
) -> None:
    send, answer = opened(buffering=buffering)
    send.send_nowait((delta(0, 1), delta(1, 7)))
    send.send_nowait((delta(0, 2),))
    send.send_nowait(StepFailed("broken"))
    assert await anext(answer) == delta(0, 1, 2)
    assert await answer.next_all() == [delta(1, 7)]
    with pytest.raises(StepFailed, match="broken"):
        await anext(answer)


async def test_a_whole_answer_is_not_too_late_for_a_slow_reader(autojump_clock: trio.testing.MockClock) -> None:
    send, answer = opened(deadline=trio.current_time() + 2)
    send.send_nowait((delta(0, 1, finish="stop"),))
    send.send_nowait(END)
    await trio.sleep(5)
    assert await answer.choices() == [delta(0, 1, finish="stop")]


async def test_an_engine_that_is_gone_is_an_error(autojump_clock: trio.testing.MockClock) -> None:
    send, answer = opened()
    send.close()
    with pytest.raises(StepFailed, match="ended before"):
        await anext(answer)


@pytest.mark.parametrize("stage", ["verdict", "events", "while it is read"])
async def test_the_deadline(autojump_clock: trio.testing.MockClock, stage: str) -> None:
    send, answer = opened(deadline=trio.current_time() + 2)
    if stage == "while it is read":
        send.send_nowait((delta(0, 1),))
        assert await anext(answer)
    with pytest.raises(DeadlineExceeded):
        await (answer.accepted() if stage == "verdict" else anext(answer))
    assert trio.current_time() == pytest.approx(2)


async def test_a_deadline_inside_a_buffering_time(autojump_clock: trio.testing.MockClock) -> None:
    """Time that would let held deltas go does not outlast the deadline."""
    send, answer = opened(deadline=trio.current_time() + 2, buffering=Buffering(ms=5000))
    send.send_nowait((delta(0, 1),))
    assert await anext(answer) == delta(0, 1)
    with pytest.raises(DeadlineExceeded):
        await anext(answer)
    assert trio.current_time() == pytest.approx(2)


async def test_closing_tells_the_other_side_at_once() -> None:
    send, answer = opened()
    async with answer:
        assert not answer._ticket.abandoned
    assert answer._ticket.abandoned
    answer.close()
    with pytest.raises(trio.BrokenResourceError):
        send.send_nowait(END)


async def test_next_all_takes_what_is_due_and_keeps_what_is_held(autojump_clock: trio.testing.MockClock) -> None:
    send, answer = opened(buffering=Buffering(tokens=2))
    send.send_nowait((delta(0, 1), delta(1, 1, 2), delta(2, 5, 6)))
    assert await answer.next_all() == [delta(1, 1, 2), delta(2, 5, 6)]
    send.send_nowait((delta(0, 2, finish="stop"),))
    assert await answer.next_all() == [delta(0, 1, 2, finish="stop")]
    send.send_nowait(END)
    assert await answer.next_all() == []


@pytest.mark.parametrize(
    ("buffering", "held", "due", "wake_s"),
    [
        (Buffering(), (1, 0.0), True, math.inf),
        (Buffering(tokens=3), (2, 9.0), False, math.inf),
        (Buffering(tokens=3), (3, 0.0), True, math.inf),
        (Buffering(ms=50), (9, 0.0), False, 0.05),
        (Buffering(ms=50), (1, 0.05), True, 0.05),
        (Buffering(3, 50), (3, 0.0), True, 0.05),
        (Buffering(3, 50), (1, 0.05), True, 0.05),
        (Buffering(3, 50, "all"), (3, 0.0), False, 0.05),
        (Buffering(3, 50, "all"), (1, 0.06), False, math.inf),
        (Buffering(3, 50, "all"), (3, 0.06), True, 0.05),
    ],
)
def test_when_held_deltas_leave(buffering: Buffering, held: tuple[int, float], due: bool, wake_s: float) -> None:
    tokens, age_s = held
    assert buffering.due(tokens, 100.0, 100.0 + age_s) is due
    assert buffering.wake_at(tokens, 100.0) == 100.0 + wake_s


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32))
def test_any_buffering_only_joins(seed: int) -> None:
    """Whatever is held and however late the reader is: nothing is lost, doubled or reordered, and each held delta
    leaves within its time."""
    rng = random.Random(seed)
    buffering = Buffering(rng.choice((0, 1, 3)), rng.choice((0, 20, 500)), rng.choice(("any", "all")))
    sent: dict[int, list[int]] = {i: [] for i in range(rng.randrange(1, 4))}
    got: dict[int, list[int]] = {i: [] for i in sent}
    reasons: dict[int, FinishReason | None] = {}

    async def run() -> None:
        send, answer = opened(buffering=buffering, capacity=math.inf)

        async def write() -> None:
            todo = {i: rng.randrange(1, 12) for i in sent}
            while todo:
                chosen = rng.sample(sorted(todo), rng.randrange(1, len(todo) + 1))
                event = []
                for i in chosen:
                    tokens = [rng.randrange(1, 20) for _ in range(rng.randrange(1, 3))]
                    sent[i] += tokens
                    todo[i] -= 1
                    event.append(delta(i, *tokens, finish=None if todo[i] else "stop"))
                    if not todo[i]:
                        del todo[i]
                send.send_nowait(tuple(event))
                await trio.sleep(rng.choice((0, 0.005, 0.1)))
            send.send_nowait(END)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            async for d in answer:
                assert reasons.get(d.index) is None, "nothing after the end"
                got[d.index] += d.token_ids
                reasons[d.index] = d.finish_reason
                assert d.text == "".join(chr(96 + t) for t in d.token_ids)
                if rng.random() < 0.3:
                    await trio.sleep(rng.choice((0, 0.03)))

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))
    assert got == sent
    assert set(reasons.values()) == {"stop"}

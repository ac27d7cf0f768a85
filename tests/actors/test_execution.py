"""The device's thread and the event loop: who waits for whom, and how long."""

from __future__ import annotations

import threading

from offbook.actors.execution import _Worker


def test_who_hands_over_waits_until_the_call_is_taken_and_no_longer_than_that() -> None:
    worker, gate = _Worker("test"), threading.Event()
    first = worker.submit(gate.wait, hand_over=True)
    second = worker.submit(lambda: "second", hand_over=True)  # not taken before the first has ended
    assert not first.done() and not second.done()
    gate.set()
    assert first.result(10)
    assert second.result(10) == "second"
    worker.close()
    worker.join(10)

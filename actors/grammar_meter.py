"""What a grammar costs while an answer is written, and when that is too much.

Why: an ambiguous grammar can take the library a second for one token, where a schema of 500 properties takes it less
than a millisecond. That work is done on the event loop, or in a thread that the step waits for, so one client could
hold up everybody's streams. No limit of the library tells the two apart: a row of 1500 items is cheap where they are
the names of a schema and dear where they are the readings of one text. So time is what is bounded, on average and not
for each token, since one mask or a long token may be dear in any grammar. Rules of this file: the clock is the thread's
own processor time, so that nobody pays for a busy machine; a time is compared with the budget and nothing else.
"""

from __future__ import annotations

import math
import time

BURST_TOKENS = 8  # an answer may be ahead of its budget by so many tokens' worth
LOOP_WEIGHT = 4  # time on the event loop counts so often: all streams stand still, a mask is filled beside the device

clock = time.thread_time  # a test's own takes its place


class Meter:
    """The account of one answer: every mask, of a token or of a draft, earns ``token_ms``; all work on its grammar is
    paid from that."""

    __slots__ = ("_debt_s", "_token_s", "overspent")

    def __init__(self, token_ms: float = math.inf) -> None:
        self._token_s = token_ms / 1e3
        self._debt_s = 0.0
        self.overspent = False  # for good: what is too dear now would be dearer later

    def charge(self, began: float, *, on_loop: bool) -> None:
        """Pay for what has been done since the clock said ``began``."""
        self._debt_s += (clock() - began) * (LOOP_WEIGHT if on_loop else 1)
        if self._debt_s > BURST_TOKENS * self._token_s:
            self.overspent = True

    def earn(self) -> None:
        """One more mask is filled."""
        self._debt_s = max(self._debt_s - self._token_s, 0.0)

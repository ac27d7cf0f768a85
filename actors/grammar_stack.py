"""A call with room for deep recursion.

Why: the grammar library compiles by recursion, some 8 kB of stack a level, and a stack that overflows in native code
ends the process; the size of a worker thread's stack depends on the machine (2 MB is possible). The limits on depth,
rules and references keep the levels far below what fits here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

STACK_BYTES = 192 * 2**20  # address space; memory only as deep as a call really goes

_T = TypeVar("_T")
_size = threading.Lock()  # the size of new stacks is one setting for the whole process


def with_deep_stack(call: Callable[[], _T]) -> _T:
    """``call()`` in a short-lived thread of its own; blocks until it is done. Raises what it raises, and MemoryError
    when there is no room for such a stack."""
    done: Future[_T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:  # noqa: BLE001, ASYNC103
            done.set_exception(error)

    thread = threading.Thread(target=run, name="grammar compiler", daemon=True)
    with _size:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        except RuntimeError as error:
            raise MemoryError("no room for the grammar compiler's stack") from error
        finally:
            threading.stack_size(before)
    return done.result()

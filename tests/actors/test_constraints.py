"""Compiling grammars beside the loop: its limits, who is told what, and the cache that threads share with the loop."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import trio
import trio.testing
from byte_tokens import EOS, TABLE, ByteTokens

from offbook.actors import constraints as module
from offbook.actors.config import EngineConfig
from offbook.actors.constraints import Constraints
from offbook.actors.errors import CompletionError, EngineOverloaded, InvalidRequest
from offbook.actors.grammar import Constraint, compile_constraint
from offbook.actors.request import ResponseFormat


def fmt(text: str) -> ResponseFormat:
    return ResponseFormat(type="grammar", grammar=f'root ::= "{text}"')


class Compiler:
    """The compiler, except that a grammar with "slow" in it waits for ``go``."""

    def __init__(self) -> None:
        self.began, self.go = threading.Event(), threading.Event()
        self.asked: list[str] = []

    def __call__(self, fmt: ResponseFormat, *args: object, **options: object) -> Constraint | None:
        self.asked.append(fmt.grammar or "")
        if "slow" in self.asked[-1]:
            self.began.set()
            assert self.go.wait(60)
        return compile_constraint(fmt, *args, **options)  # type: ignore[arg-type]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    made = Compiler()
    monkeypatch.setattr(module, "compile_constraint", made)
    yield made
    made.go.set()


def constraints(**config: object) -> Constraints:
    return Constraints(EngineConfig(**config), ByteTokens(), (EOS,), len(TABLE))  # type: ignore[arg-type]


async def test_what_takes_long_is_told_so_and_who_waited_is_not_blamed(
    mock_clock: trio.testing.MockClock, compiler: Compiler
) -> None:
    these, told = constraints(grammar_compilers=1), dict[str, CompletionError]()

    async def want(text: str) -> None:
        with pytest.raises(CompletionError) as caught:
            await these.get(fmt(text))
        told[text] = caught.value

    async with trio.open_nursery() as nursery:
        nursery.start_soon(want, "slow")
        await trio.to_thread.run_sync(compiler.began.wait)
        nursery.start_soon(want, "quick")
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(5)
    assert isinstance(told["slow"], InvalidRequest) and told["slow"].status == 400
    assert "took more than 5 s" in told["slow"].message
    assert isinstance(told["quick"], EngineOverloaded) and told["quick"].retry_after_s == 5


async def test_one_compilation_serves_all_who_want_the_same(compiler: Compiler) -> None:
    these, got = constraints(grammar_compilers=1), list[Constraint | None]()

    async def want() -> None:
        got.append(await these.get(fmt("slow")))

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(want)
        await trio.testing.wait_all_tasks_blocked()
        compiler.go.set()
    assert len(compiler.asked) == 1
    assert len({id(made) for made in got}) == 1


async def test_the_most_recently_used_are_kept(compiler: Compiler) -> None:
    these = constraints(grammars_kept=2)
    for name in ("a", "b", "a", "c", "a", "b"):
        assert await these.get(fmt(name)) is not None
    assert [text[-2] for text in compiler.asked] == ["a", "b", "c", "b"]

"""The rules of the house, as tests: who may import whom, how files begin, how large they get, what is bounded.

Each rule has a planted violation beside it, so that a check that cannot fail is noticed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("kernels", "actors", "server")  # from the ground up
PURE = (
    "actors/blocks.py", "actors/choice.py", "actors/drafts.py", "actors/errors.py", "actors/events.py",
    "actors/grammar.py", "actors/prefix.py", "actors/request.py", "actors/resolve.py", "actors/schedule.py",
    "actors/sequence.py", "actors/steps.py", "actors/stops.py", "actors/text.py", "actors/thinking.py",
    "actors/tokens.py", "server/schemas.py", "server/sse.py", "server/translate.py",
)  # fmt: skip
ACTORS = ("admission", "batching", "execution", "fanout")
FILE_LINES_MAX = 350
FUNCTION_LINES_MAX = 60
MEDIAN_FUNCTION_LINES_MAX = 14


def sources(*rooms: str) -> list[Path]:
    return sorted(p for room in rooms for p in (ROOT / room).rglob("*.py"))


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(module: ast.Module, room: str) -> Iterator[str]:
    """Every import as a dotted name from the package's root ("actors.engine") or as a foreign one ("trio")."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level == 0:
                yield base
            elif node.level == 1:
                yield from _names(room, base, node)
            else:
                yield from _names("", base, node)


def _names(prefix: str, base: str, node: ast.ImportFrom) -> Iterator[str]:
    head = ".".join(part for part in (prefix, base) if part)
    if base:
        yield head
    else:
        yield from (f"{head}.{alias.name}".strip(".") for alias in node.names)


def forbidden(room: str, module: ast.Module) -> list[str]:
    above = ROOMS[ROOMS.index(room) + 1 :]
    return [name for name in imports(module, room) if name.split(".")[0] in above]


@pytest.mark.parametrize("room", ROOMS)
def test_imports_run_downwards(room: str) -> None:
    for path in sources(room):
        assert not forbidden(room, tree(path)), path


def test_an_import_upwards_is_caught() -> None:
    assert forbidden("kernels", ast.parse("from ..actors.engine import open_engine")) == ["actors.engine"]
    assert forbidden("actors", ast.parse("from .. import server")) == ["server"]


def graph() -> dict[str, set[str]]:
    modules = {f"{p.parent.name}.{p.stem}": p for p in sources(*ROOMS)}
    return {
        name: {i for i in imports(tree(path), path.parent.name) if i in modules and i != name}
        for name, path in modules.items()
    }


def cycle(edges: dict[str, set[str]]) -> list[str]:
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return path[path.index(node) :]
        if node in done:
            return []
        for successor in sorted(edges.get(node, ())):
            found = visit(successor, [*path, node])
            if found:
                return found
        done.add(node)
        return []

    return next((found for node in sorted(edges) if (found := visit(node, []))), [])


def test_no_import_cycles() -> None:
    assert cycle(graph()) == []
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c"]


def test_pure_cores_know_no_trio() -> None:
    for name in PURE:
        outside_typing = list(imports(_without_typing(tree(ROOT / name)), name.split("/")[0]))
        assert not {"trio", "quart", "hypercorn"} & {i.split(".")[0] for i in outside_typing}, name


def _without_typing(module: ast.Module) -> ast.Module:
    module.body = [n for n in module.body if not (isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")]
    return module


def test_kernels_know_nothing_of_time_and_requests() -> None:
    for path in sources("kernels"):
        heads = {i.split(".")[0] for i in imports(tree(path), "kernels")}
        assert not heads & {"trio", "quart", "hypercorn", "asyncio", "h11"}, path


def test_the_door_touches_no_tensors_and_no_channels() -> None:
    for path in sources("server"):
        names = set(imports(tree(path), "server"))
        assert not {n.split(".")[0] for n in names} & {"torch", "numpy", "cupy"}, path
        assert "open_memory_channel" not in path.read_text(), path


def test_the_actors_never_import_one_another() -> None:
    edges = graph()
    for name in ACTORS:
        assert not edges[f"actors.{name}"] & {f"actors.{other}" for other in ACTORS}, name


def test_every_channel_capacity_comes_from_the_config() -> None:
    calls = [
        (path, node)
        for path in sources(*ROOMS)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and "open_memory_channel" in ast.unparse(node.func)
    ]
    assert len(calls) >= 5
    for path, node in calls:
        capacity = ast.unparse(node.args[0])
        assert "config." in capacity or "self._capacity(" in capacity, f"{path}: {capacity}"


def test_files_begin_with_why_and_stay_small() -> None:
    for path in sources(*ROOMS):
        assert len(ast.get_docstring(tree(path)) or "") > 40, f"{path}: says why it exists"
        assert len(path.read_text().splitlines()) <= FILE_LINES_MAX, path


def functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{path}:{node.name}", (node.end_lineno or node.lineno) - node.lineno + 1


def test_functions_stay_small() -> None:
    lengths = [f for path in sources(*ROOMS) for f in functions(path)]
    assert [f for f in lengths if f[1] > FUNCTION_LINES_MAX] == []
    assert sorted(n for _, n in lengths)[len(lengths) // 2] <= MEDIAN_FUNCTION_LINES_MAX


def test_the_root_holds_what_it_should() -> None:
    allowed = {"pyproject.toml", "README.md", "LICENSE", "__init__.py", "py.typed", "constraints.txt",
               "actors", "server", "kernels", "tests"}  # fmt: skip
    present = {p.name for p in ROOT.iterdir() if not p.name.startswith(".") and p.name != "__pycache__"}
    assert {n for n in present if not n.endswith(".egg-info") and n not in ("build", "dist")} <= allowed
    body = tree(ROOT / "__init__.py").body
    assert len(body) == 1, "the root __init__.py is a docstring only"


def test_no_mocks_and_no_real_sleeping() -> None:
    pattern = re.compile(r"unittest\.mock|import mock|\btime\.sleep\(")
    for path in sources("tests"):
        if path.name != "test_house.py" and "benchmarks" not in path.parts:
            assert not pattern.search(path.read_text()), path


def test_no_bare_except_and_no_swallowed_cancellation() -> None:
    for path in sources(*ROOMS):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ExceptHandler):
                caught = ast.unparse(node.type) if node.type is not None else "BaseException"
                if caught == "BaseException":
                    text = "".join(ast.unparse(n) for n in node.body)
                    assert "raise" in text or "set_exception" in text, f"{path}:{node.lineno}"

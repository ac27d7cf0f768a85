"""The wheel holds every module, every C++ and CUDA source, and exactly one top-level name."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("actors", "server", "kernels")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from a copy of what git knows, with the build tools that are installed (no network)."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    files = [p for room in ROOMS for p in (ROOT / room).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    for path in [*files, *(ROOT / n for n in ("pyproject.toml", "README.md", "LICENSE", "__init__.py", "py.typed"))]:
        target = source / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return zipfile.ZipFile(next(out.glob("*.whl")))


def test_one_top_level_name(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"offbook"}


def test_every_module_and_source_is_in_it(wheel: zipfile.ZipFile) -> None:
    expected = {"offbook/__init__.py", "offbook/py.typed"}
    for room in ROOMS:
        for path in (ROOT / room).rglob("*"):
            if path.suffix == ".py" or path.parent.name == "csrc":
                expected.add(f"offbook/{path.relative_to(ROOT)}")
    assert len(expected) > 40
    packed = {n for n in wheel.namelist() if not n.split("/")[0].endswith(".dist-info")}
    assert packed == expected

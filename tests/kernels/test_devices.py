"""Which device opens, and what is said when none can."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from offbook.kernels import build, cpu_device, devices
from offbook.kernels.build import NoCompilerError
from offbook.kernels.devices import DeviceError, cuda_available, open_device
from offbook.kernels.model_files import ModelFiles, open_model
from offbook.kernels.step import StepLimits

SIZES: dict[str, Any] = {"kv_bytes": 1 << 20, "threads": 1, "slots": 1, "limits": StepLimits(64)}


@pytest.fixture(scope="module")
def files(tiny_model_dir: Path) -> ModelFiles:
    return open_model(tiny_model_dir)


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cuda_available", lambda: False)


def test_auto_is_the_cpu_without_cuda(files: ModelFiles, no_cuda: None) -> None:
    device = open_device(files, **SIZES)
    assert isinstance(device, cpu_device.CpuDevice)
    assert (device.vocabulary_size, device.context_length) == (300, 512)
    device.close()


@pytest.mark.parametrize(
    ("printed", "told"),
    [
        ("a.cpp: In f:\na.cpp:1:2: error: no\n  3 | x", "a.cpp:1:2: error: no"),
        ("killed\n", "killed"),
        ("", "exit status 3"),
    ],
)
def test_what_a_compiler_prints_is_told_in_one_line(printed: str, told: str, caplog: pytest.LogCaptureFixture) -> None:
    command = [sys.executable, "-c", f"import sys; sys.stderr.write({printed!r}); sys.exit(3)"]
    with caplog.at_level(logging.DEBUG), pytest.raises(NoCompilerError) as caught:
        build._run("thing", [command])
    assert str(caught.value) == f"{sys.executable} could not build thing: {told}"
    assert printed in caplog.text  # all of it, for those who ask


def test_compiling_is_announced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OFFBOOK_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "compiler", lambda: sys.executable)
    monkeypatch.setattr(build, "_run", lambda name, commands: None)
    with caplog.at_level(logging.INFO):
        assert build.build_library("step", ("step.cpp",)) == build.build_library("step", ("step.cpp",))
    assert [record.message.split(" (step)")[0] for record in caplog.records] == ["compiling the CPU kernels"]


def test_without_a_compiler_torch_steps_in_with_one_warning(
    files: ModelFiles, no_cuda: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise NoCompilerError("no C++ compiler found")

    monkeypatch.setattr(cpu_device, "CpuDevice", refuse)
    with caplog.at_level(logging.WARNING):
        device = open_device(files, **SIZES)
    assert device.name.startswith("torch float32, CPU")
    assert [r.getMessage() for r in caplog.records if "no C++ compiler found" in r.getMessage()] != []
    assert len(caplog.records) == 1
    device.close()


def test_torch_when_asked_for(files: ModelFiles) -> None:
    device = open_device(files, kind="torch-cpu", dtype="bfloat16", **SIZES)
    assert device.name == "torch bfloat16, CPU, 1 threads"
    assert device.kv_bytes <= 1 << 20
    assert device.blocks_total == (1 << 20) // 4096
    device.close()


def test_what_cannot_open_says_what_to_change(files: ModelFiles, no_cuda: None) -> None:
    with pytest.raises(DeviceError, match="no CUDA device is available"):
        open_device(files, kind="cuda", **SIZES)
    with pytest.raises(DeviceError, match="KV memory are less than one block"):
        open_device(files, kind="torch-cpu", **SIZES | {"kv_bytes": 1})
    with pytest.raises(DeviceError, match=r"not enough memory .* lower the KV memory"):
        open_device(files, kind="torch-cpu", **SIZES | {"kv_bytes": 1 << 60})


def test_cuda_needs_a_driver() -> None:
    if not any(Path("/dev").glob("nvidia*")):
        assert cuda_available() is False

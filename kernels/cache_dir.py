"""Where offbook keeps what it can make again: compiled kernels and the default model's weights.

Rules of this file: files appear whole or not at all (written beside their place, then renamed), so that a kill or a
full disk leaves nothing half-written behind under a final name.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_directory() -> Path:
    """``$OFFBOOK_CACHE_DIR``, else ``$XDG_CACHE_HOME/offbook``, else ``~/.cache/offbook``; made if missing.

    A read-only home falls back to a per-user folder under the system's temporary directory. Raises OSError when that
    cannot be made either.
    """
    chosen = os.environ.get("OFFBOOK_CACHE_DIR")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "offbook"
    places = [Path(chosen)] if chosen else [home, Path(tempfile.gettempdir()) / f"offbook-{os.getuid()}"]
    for place in places[:-1]:
        if _writable(place):
            return place
    places[-1].mkdir(mode=0o700, parents=True, exist_ok=True)
    return places[-1]


def _writable(place: Path) -> bool:
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(place, os.W_OK | os.X_OK)


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """Yields a temporary path beside ``target``; on success it becomes ``target`` in one step, on error it goes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    draft = Path(name)
    try:
        yield draft
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)

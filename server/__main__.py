"""``offbook`` and ``python -m offbook.server``."""

from __future__ import annotations

import sys

from .cli import main as run


def main() -> None:
    """The console script: ends the process with the command's exit code."""
    sys.exit(run())


if __name__ == "__main__":
    main()

"""The README's fenced blocks, so that tests and CI run what the README says and not a copy of it.

``python3 tests/support/readme.py sh 0`` prints the first ``sh`` block.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).parent.parent.parent / "README.md"


def blocks(language: str) -> list[str]:
    """All fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)


if __name__ == "__main__":
    sys.stdout.write(blocks(sys.argv[1])[int(sys.argv[2])])

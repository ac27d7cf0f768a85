"""What the scripts that prove offbook on a GPU share."""

from __future__ import annotations

import shutil
import subprocess
import sys


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def sanitize(script: str) -> None:
    """compute-sanitizer over the script's ``--short`` form, where it is installed. Raises CalledProcessError."""
    if not (sanitizer := shutil.which("compute-sanitizer")):
        return say("compute-sanitizer is not installed: memory and races were not checked")
    for tool in ("memcheck", "racecheck"):
        command = [sanitizer, "--tool", tool, "--error-exitcode", "1", sys.executable, script]
        subprocess.run([*command, "--short"], check=True, timeout=200)
        say(f"compute-sanitizer {tool}: clean")
    return None

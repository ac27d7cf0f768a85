"""Helpers for servers in trouble: a tiny one to ask, a compiler that does something else, a look into the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2 as httpx
from server_process import ServerProcess

SMALL = ("--kv-memory", "64M", "--threads", "1")
BODY = {"prompt": "the sky", "max_tokens": 4, "temperature": 0}


def ask(server: ServerProcess, **fields: Any) -> httpx.Response:
    model = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
    return httpx.post(f"{server.url}/v1/completions", json={"model": model, **BODY, **fields}, timeout=60)


def compiler(folder: Path, script: str) -> str:
    """Path of a C++ compiler that does this instead, with the output's path in $2."""
    cxx = folder / "cxx"
    version = 'if [ "$1" = --version ]; then echo 1; exit 0; fi\n'
    cxx.write_text(f'#!/bin/sh\n{version}while [ "$1" != -o ]; do shift; done\n{script}\n')
    cxx.chmod(0o755)
    return str(cxx)


def final_names(cache: Path) -> list[Path]:
    return [p for p in cache.rglob("*") if p.is_file() and not p.name.startswith(".")]

"""Processes to break: forks with SGLang imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SERVER = Path(__file__).parent / "sglang_fork_server.py"


@dataclass(frozen=True)
class Ended:
    rc: int
    stdout: str
    stderr: str


class Forks:
    """Client of ``sglang_fork_server.py``."""

    def __init__(self, process: subprocess.Popen, cwd: Path):
        self._process = process
        self._cwd = cwd

    def run(self, script: str, environ=None, path=(), argv=("script",)) -> Ended:
        """Run ``script`` in a fresh process; ``path`` entries are put in front of ``sys.path``."""
        request = {
            "script": script,
            "environ": environ or {},
            "path": [str(p) for p in path],
            "argv": list(argv),
            "cwd": str(self._cwd),
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Ended(**json.loads(self._process.stdout.readline()))


@contextmanager
def fork_server(cwd: Path) -> Iterator[Forks]:
    """A process that forks know nothing of but that SGLang is imported; they run in ``cwd``."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_")}
    process = subprocess.Popen(
        [sys.executable, "-P", str(SERVER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
    )
    assert process.stdout.readline() == "ready\n"
    yield Forks(process, cwd)
    process.stdin.close()
    process.stdout.close()
    assert process.wait() == 0

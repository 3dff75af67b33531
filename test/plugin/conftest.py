"""Processes to break: forks with SGLang imported, and fake distributions for them to find."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from sglang_unified_kv.reference.model import CONFIG

HERE = Path(__file__).parent


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


@pytest.fixture(scope="session")
def forks(tmp_path_factory):
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_")}
    process = subprocess.Popen(
        [sys.executable, "-P", str(HERE / "sglang_fork_server.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
    )
    assert process.stdout.readline() == "ready\n"
    yield Forks(process, tmp_path_factory.mktemp("forks"))
    process.stdin.close()
    process.stdout.close()
    assert process.wait() == 0


@pytest.fixture
def plugin_dist(tmp_path):
    """``plugin_dist(name, body, entry=...)``: a folder with a distribution that has one plugin."""

    def make(name: str, body: str, entry: str | None = None) -> Path:
        root = tmp_path / name
        info = root / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(
            f"[sglang.srt.plugins]\n{entry or name} = {name}:register\n"
        )
        (root / f"{name}.py").write_text(body)
        return root

    return make


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """Configuration of a tiny DeepSeek-V4: enough for SGLang to resolve its arguments."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder

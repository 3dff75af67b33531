"""scripts/env: what pip cannot bring is named with its packages, all at once."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ENV = Path(__file__).parents[2] / "scripts" / "env"


@pytest.fixture
def bare(tmp_path):
    """A PATH with the shell's tools and nothing to build with."""
    for tool in ("bash", "env", "dirname"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    return tmp_path


def run(path):
    environ = {"PATH": str(path), "HOME": str(path), "LANG": os.environ.get("LANG", "C")}
    done = subprocess.run([str(ENV)], env=environ, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    return done.stderr.splitlines()


def test_everything_missing_is_named_at_once(bare):
    lines = run(bare)
    for thing in ("Python 3.11, 3.12 or 3.13", "a C++ compiler (g++)", "ninja"):
        assert f"scripts/env: missing: {thing}" in lines
    debian, rhel = lines[-2:]
    assert "apt-get install python3.11 python3.11-venv python3.11-dev g++ ninja-build" in debian
    assert "dnf install python3.11 python3.11-devel gcc-c++ ninja-build" in rhel
    assert not list(bare.glob(".cache"))


def test_a_compiler_without_openssl_headers(bare):
    compiler = bare / "g++"
    compiler.write_text("#!/usr/bin/env bash\nexit 1\n")
    compiler.chmod(0o755)
    lines = run(bare)
    assert "scripts/env: missing: OpenSSL headers" in lines
    assert lines[-2].endswith("libssl-dev") and lines[-1].endswith("openssl-devel")

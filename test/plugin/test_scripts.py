"""scripts/env: what pip cannot bring is named with its packages, all at once."""

import os
import shutil
import subprocess
import sys
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


# Stands in for Python: makes an environment whose own Python only writes down what it is asked.
STUB = """#!/usr/bin/env bash
if [ "$1" = -c ]; then exec {python} "$@"; fi
mkdir -p "$3/bin"
printf '#!/usr/bin/env bash\\necho "${{@:1:3}}" >>{log}\\nexit {status}\\n' >"$3/bin/python"
chmod +x "$3/bin/python"
echo venv >>{log}
"""


@pytest.fixture
def setup(tmp_path):
    """Run scripts/env with a stand-in for Python; its exit code, output and what Python did."""

    def run_once(status=0):
        log = tmp_path / "log"
        log.write_text("")
        stub = tmp_path / "python"
        stub.write_text(STUB.format(python=sys.executable, log=log, status=status))
        stub.chmod(0o755)
        environ = os.environ | {
            "SGLANG_UNIFIED_KV_ENV_ROOT": str(tmp_path / "root"),
            "SGLANG_UNIFIED_KV_PYTHON": str(stub),
        }
        done = subprocess.run([str(ENV)], env=environ, capture_output=True, text=True)
        return done, log.read_text().split("\n")

    return run_once


def test_an_environment_is_built_once_and_an_unfinished_one_anew(setup, tmp_path):
    failed, did = setup(status=1)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "installing packages failed" in failed.stderr
    (unfinished,) = (tmp_path / "root").glob("env-*/")
    (unfinished / "left over").touch()

    built, did = setup()
    folder = Path(built.stdout.strip())
    assert built.returncode == 0 and folder == unfinished / "bin"
    assert did[:3] == ["venv", "-m pip install", "-m compileall -q"]
    assert not (unfinished / "left over").exists()

    again, did = setup()
    assert again.stdout == built.stdout and did == [""]


def test_the_clone_is_installed_again_when_it_moved(setup):
    built, _ = setup()
    (Path(built.stdout.strip()).parent / ".clone").write_text("elsewhere")
    _, did = setup()
    assert did == ["-m pip install", ""]

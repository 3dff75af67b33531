"""Test programs that need a process of their own, as Triton's interpreter does."""

import os
import subprocess
import sys
from pathlib import Path


def run_program(script: Path, *arguments: object) -> str:
    """What ``script`` prints; it must end well."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), *map(str, arguments)],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout

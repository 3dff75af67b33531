"""Every reference op that upstream has as a Triton kernel, against that kernel in the interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Differences allowed: none for indices, else about one unit in the last place of the output.
TOLERANCE = {
    "compression metadata": 0.0,
    "page table": 0.0,
    "sparse buffers": 0.0,
    "prefill indices c0": 0.0,
    "prefill indices c4": 0.0,
    "prefill indices c128": 0.0,
    "decode indices": 0.0,
    "window store": 0.0,
    "prefill attention c0": 2e-3,
    "prefill attention c4": 2e-3,
    "prefill attention c128": 2e-3,
    "decode attention": 2e-3,
    "rope inverse": 0.04,
    "norm and rope": 1e-5,
    "decode norm, rope and store": 0.04,
    "sinkhorn": 1e-6,
    "stream combine": 0.04,
    "stream head": 0.04,
    "chain tree": 0.0,
    "greedy acceptance": 0.0,
    "last accepted token": 0.0,
    "drafted slots": 0.0,
    "verified slots": 0.0,
    "last slots": 0.0,
    "written slots": 0.0,
    "rejected C128 states": 0.0,
    "relayed drafts": 0.0,
}


@pytest.fixture(scope="module")
def differences():
    script = Path(__file__).with_name("triton_comparison.py")
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        env={**os.environ, "SGLANG_UNIFIED_KV_REFERENCE_ENGINE": "0"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_every_case_is_judged(differences):
    assert differences.keys() == TOLERANCE.keys()


@pytest.mark.parametrize("case", TOLERANCE)
def test_matches_the_kernel(differences, case):
    found = differences[case]
    assert isinstance(found, float), found
    assert found <= TOLERANCE[case]

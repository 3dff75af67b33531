"""The edits are applied once per process; a test chooses by the switch whether HiSparse is ours."""

import os
import sys
from pathlib import Path

import pytest
from sglang_unified_kv.names import HISPARSE

os.environ[HISPARSE] = "1"
# Ranks.
sys.path.append(str(Path(__file__).parents[1] / "exact"))


@pytest.fixture(scope="session", autouse=True)
def hisparse_plugins():
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang_unified_kv.edits import HISPARSE_SERIES

    assert HISPARSE_SERIES.audit() == []

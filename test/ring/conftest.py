"""The fixes are applied once per process; a test chooses by the switch whether an object is counted anew."""

import os

import pytest
from sglang_unified_kv.names import RING_FIXES

os.environ[RING_FIXES] = "1"


@pytest.fixture(scope="session", autouse=True)
def plugins():
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang_unified_kv.edits import RING

    assert RING.audit() == []

"""The exactness tests' tools, on a GPU (``SGLANG_UNIFIED_KV_REFERENCE_DEVICE=cuda``); elsewhere skipped."""

import os
import sys
from pathlib import Path

import pytest
from sglang_unified_kv.reference import harness
from sglang_unified_kv.reference.device import DEVICE_ENV

os.environ["SGLANG_UNIFIED_KV_HISPARSE"] = "1"
sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("exact", "hisparse")]


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    skip = pytest.mark.skip(reason=f"needs a GPU: scripts/test_gpu, or {DEVICE_ENV}=cuda")
    for item in items:
        if here in item.path.parents and harness.DEFAULTS["device"] != "cuda":
            item.add_marker(skip)


@pytest.fixture(scope="module", autouse=True)
def upstream_kernels():
    """Upstream's own Triton and CUDA kernels instead of the torch reference."""
    from sglang_unified_kv.reference import upstream_kernels

    upstream_kernels.choose((upstream_kernels.TRITON, upstream_kernels.JIT))
    yield
    upstream_kernels.choose(())

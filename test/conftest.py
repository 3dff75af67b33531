"""One process, many engines: SGLang loads plugins once, so the product's edits are applied for all tests.

Whether an engine is exact or stock is decided when it is built, from the environment at that moment.
"""

import os

# Read when torch loads its OpenMP. The tensors are small and the test files run side by side.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["SGLANG_UNIFIED_KV_REFERENCE_ENGINE"] = "1"
os.environ["SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE"] = "1"
os.environ["SGLANG_UNIFIED_KV_CHECKPOINT_HOST_GB"] = "0.1"
# A record at every boundary, unless a test is about another placement.
os.environ["SGLANG_UNIFIED_KV_CHECKPOINT_POLICY"] = "grid"

import contextlib  # noqa: E402
import gc  # noqa: E402

import pytest  # noqa: E402
from forks import fork_server  # noqa: E402
from hypothesis import settings  # noqa: E402
from sglang_unified_kv import engage  # noqa: E402
from sglang_unified_kv.reference import harness  # noqa: E402, F401  (before SGLang, for a GPU)

# An example may take as long as the machine makes it.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    """The tiny model, written once per session."""
    from sglang_unified_kv.reference.model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def next_n_path(tmp_path_factory):
    """The tiny model with a layer that drafts."""
    from sglang_unified_kv.reference.model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("model") / "next-n", next_n=True)


@pytest.fixture(scope="session")
def forks(tmp_path_factory):
    """``forks.run(script, environ, ...)`` runs in a process of its own, without an import of SGLang."""
    with fork_server(tmp_path_factory.mktemp("forks")) as found:
        yield found


@contextlib.contextmanager
def environment(**values):
    """Set environment variables for a while; None unsets."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.delenv(name, raising=False) if value is None else patch.setenv(name, str(value))
        yield


@pytest.fixture(scope="session")
def make_engine(model_path):
    """``make_engine(stock=, env={...}, model=, flags=, **server_args)`` is a context manager with an engine.

    With ``flags`` these are all that it gets.
    """
    from sglang.srt.plugins import load_plugins
    from sglang_unified_kv.reference.harness import InProcessEngine

    load_plugins()  # with the product requested, whatever the first engine will be
    # Every engine that closes collects garbage: not among all that was imported, which stays.
    gc.collect()
    gc.freeze()

    @contextlib.contextmanager
    def make(*, stock=False, env=None, model=model_path, **server_args):
        switch = {
            "SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE": "0" if stock else "1",
            "SGLANG_UNIFIED_KV_RING_FIXES": "0",
        }
        with environment(**(switch | (env or {}))):
            defaults = (
                {} if "flags" in server_args else {"hicache": True, "max_total_tokens": 12288}
            )
            options = defaults | server_args
            try:
                with InProcessEngine(model, **options) as engine:
                    yield engine
            finally:
                # SGLang's sizer asks: what a later test builds without an engine is nobody's.
                engage.reset()

    return make

"""``sglang-unified-kv plan`` in this process, a model to plan, and the bytes that a plan is compared with."""

from __future__ import annotations

import contextlib
import logging
import os

from sglang_unified_kv import engage
from sglang_unified_kv.cli import app
from sglang_unified_kv.cli.stand_in import write_config as write_pro
from sglang_unified_kv.plan.capacity import GB, HOST_RESERVE
from typer.testing import CliRunner

SERVER = (
    "--attention-backend dsv4 --page-size 256 --max-running-requests 1024 --mem-fraction-static 0.85 "
    "--skip-tokenizer-init --tp-size 8 --attn-dp-size 8 --cuda-graph-backend-prefill disabled"
).split()


def device_bytes(pool) -> int:
    """Every byte of the KV pools and states of a model."""
    states = [
        s.kv_score_buffer.kv_score
        for s in pool.compress_state_pools + pool.indexer_compress_state_pools
        if s is not None
    ]
    indexer = pool.c4_indexer_kv_pool.index_k_with_scale_buffer if pool.c4_indexer_kv_pool else []
    rope = [b for b in pool.unified_kv_pool.kv_buffer_rope if b is not None]
    return sum(b.nbytes for b in [*pool.unified_kv_pool.kv_buffer, *rope, *states, *indexer])


__all__ = ["SERVER", "device_bytes", "machine", "process_state", "run_plan", "write_pro"]


def machine(weights=125, host=250, ranks=8) -> list[str]:
    """A host that leaves ``host`` GB to each of so many ranks."""
    whole = str(host * ranks + HOST_RESERVE / GB)
    return ["plan", "--hbm-gb", "288", "--weights-gb", str(weights), "--host-gb", whole]


@contextlib.contextmanager
def process_state():
    """The command may change the process that it is all of."""
    from sglang.srt.runtime_context import restore_context, snapshot_context

    before, environment = snapshot_context(), dict(os.environ)
    handlers = logging.root.handlers[:]
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        logging.root.handlers[:] = handlers
        engage.reset()
        restore_context(before)
        os.environ.clear()
        os.environ.update(environment)


def run_plan(arguments, env=()) -> tuple[int, str]:
    """Exit code and output, in single spaces; without the budget and the placement that tests have."""
    with process_state():
        os.environ.pop("SGLANG_UNIFIED_KV_CHECKPOINT_HOST_GB", None)
        os.environ.pop("SGLANG_UNIFIED_KV_CHECKPOINT_POLICY", None)
        os.environ.update(env)
        done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    return done.exit_code, " ".join(done.output.replace("│", " ").split())

"""What the strict gate adds to a match of 200,000 cached tokens, against stock's match on the same tree.

    python benchmark/gate.py [--json FILE]

The tree is SGLang's own, on its Rust core, of the reference engine; both matches walk it in turn in one
process.
Times are this CPU's; the ratios are what counts.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from array import array
from pathlib import Path
from typing import Annotated

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["SGLANG_UNIFIED_KV_REFERENCE_ENGINE"] = "1"
os.environ["SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE"] = "1"
os.environ["SGLANG_UNIFIED_KV_CHECKPOINT_HOST_GB"] = "0.2"
os.environ["SGLANG_UNIFIED_KV_CHECKPOINT_POLICY"] = "grid"

import torch  # noqa: E402
import typer  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

TOKENS, NODES, PAGE = 196_608, 24, 256


class Request:
    """What a match needs of one."""

    session = None


def main(
    repeats: Annotated[int, typer.Option(min=5, help="Matches of each kind; the median.")] = 60,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures here.")
    ] = None,
) -> None:
    """Measure and print."""
    from sglang.srt.plugins import load_plugins
    from sglang_unified_kv.reference.harness import InProcessEngine
    from sglang_unified_kv.reference.model import write_tiny_model

    load_plugins()
    with tempfile.TemporaryDirectory() as work:
        options = dict(hicache=True, hicache_ratio=1.1, max_total_tokens=TOKENS + 8 * PAGE)
        with InProcessEngine(write_tiny_model(Path(work) / "model"), **options) as engine:
            figures = measure(engine, repeats)
    table = Table(title=f"Match of {TOKENS:,} cached tokens in {NODES} nodes")
    for name in ("", "ms", "ratio to stock"):
        table.add_column(name, justify="right" if name else "left")
    for name, ms in figures.items():
        table.add_row(name, f"{ms:.3f}", f"{ms / figures['stock']:.2f}")
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1))


def measure(engine, repeats: int) -> dict[str, float]:
    """Median milliseconds of a stock match, of gated ones and of what an admission adds."""
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang_unified_kv.edits.exact.cache import StrictUnifiedRadixCache

    tree = engine.tree
    text = array("q", (7 * i % 1000 + i // 1000 for i in range(TOKENS + 1)))
    # Slots that nobody allocated: nothing is computed or freed here.
    slots, step = torch.arange(PAGE, TOKENS + PAGE), TOKENS // NODES
    for end in range(step, TOKENS + 1, step):
        key = RadixKey(text, limit=end)
        tree.insert(InsertParams(key=key, value=slots[:end], prev_prefix_len=end - step))
    store = tree.checkpoints.store
    for pages, key in enumerate(tree._chain(None, RadixKey(text, limit=TOKENS)), 1):
        store.publish(key, pages * PAGE, store.reserve(), replace=True, mixed=False)

    def stock(req):
        return UnifiedRadixCache.match_prefix(tree, params(req))

    def gated(req):
        return tree.match_prefix(params(req))

    def params(req):
        # With a limit, as the scheduler asks: one token is always computed.
        return MatchPrefixParams(key=RadixKey(text, limit=TOKENS), req=req)

    known = Request()
    view = tree._view(RadixKey(text, limit=TOKENS))
    cases = {
        "stock": lambda: stock(None),
        "gated, first match of a request": lambda: gated(Request()),
        "gated, later matches": lambda: gated(known),
        "match that an admission adds": lambda: super(StrictUnifiedRadixCache, tree).match_prefix(
            MatchPrefixParams(key=view, req=known)
        ),
        "hashing alone": lambda: tree._chain(None, RadixKey(text)),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats + 5):
        for name, case in cases.items():
            start = time.perf_counter()
            found = case()
            times[name].append((time.perf_counter() - start) * 1e3)
            if name != "hashing alone":
                assert found.device_prefix_len == TOKENS, (name, found.device_prefix_len)
    return {name: statistics.median(values[5:]) for name, values in times.items()}


if __name__ == "__main__":
    typer.run(main)

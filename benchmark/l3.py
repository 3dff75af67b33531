"""Time to first token by tier and bytes stored per token, on the reference engine, in one process.

    python benchmark/l3.py [--json FILE]

Absolute times are those of a tiny model on this CPU and mean nothing elsewhere; the ratios to the cold run
say what a hit saves of a prefill this small. Bytes are exact, and given for DeepSeek-V4-Pro as well, from
its layout.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["SGLANG_UNIFIED_KV_REFERENCE_ENGINE"] = "1"
os.environ["SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE"] = "1"
os.environ["SGLANG_UNIFIED_KV_CHECKPOINT_HOST_GB"] = "0.2"
os.environ["SGLANG_UNIFIED_KV_CHECKPOINT_POLICY"] = "grid"

import typer  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from sglang_unified_kv.checkpoint.layout import CheckpointLayout, Kind, RingSpec  # noqa: E402
from sglang_unified_kv.checkpoint.policy import Grid  # noqa: E402
from sglang_unified_kv.checkpoint.record_format import HEADER_BYTES  # noqa: E402

CACHED = (512, 2048, 7936)
"""The last with its tail just fits the reference engine's context of 8,192 tokens."""
TIERS = ("cold", "device", "host", "storage")
TAIL = 64
STRIDES = (1, 4, 8)
OPTIONS = dict(
    hicache=True,
    max_total_tokens=20480,
    chunked_prefill_size=2048,
    hicache_storage_backend="file",
    hicache_storage_prefetch_policy="wait_complete",
)


def main(
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each case; the median counts.")] = 3,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures here.")
    ] = None,
) -> None:
    """Measure and print."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    with tempfile.TemporaryDirectory() as work:
        times, stored = measure(Path(work), repeats)
    console = Console()
    table = Table(title=f"Time to first token, cached prefix + {TAIL} tokens, ratio to cold")
    for column in ("cached tokens", *TIERS):
        table.add_column(column, justify="right")
    for cached, row in times.items():
        cold = row["cold"]
        cells = [f"{row[tier] / cold:.3f} ({row[tier]:.2f} s)" for tier in TIERS]
        table.add_row(str(cached), *cells)
    console.print(table)
    table = Table(title="Bytes in storage per token")
    for column in ("", "reference engine", "ratio", "DeepSeek-V4-Pro, computed", "ratio"):
        table.add_column(column, justify="right")
    pro = pro_bytes_per_token()
    for name, value in stored.items():
        ratio, pro_ratio = value / stored["stock"], pro[name] / pro["stock"]
        table.add_row(name, f"{value:.0f}", f"{ratio:.2f}", f"{pro[name]:.0f}", f"{pro_ratio:.2f}")
    console.print(table)
    if json_file is not None:
        json_file.write_text(json.dumps({"ttft_s": times, "stored": stored, "pro": pro}, indent=2))


def measure(work: Path, repeats: int) -> tuple[dict, dict]:
    """(seconds by cached tokens and tier, bytes per token by variant)."""
    from sglang_unified_kv.reference.harness import InProcessEngine, prompt
    from sglang_unified_kv.reference.model import write_tiny_model

    model = write_tiny_model(work / "model")
    stored, times = {}, {}
    tokens = 2048
    for variant in ("stock", "strict"):
        folder = work / variant
        os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(folder)
        os.environ["SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE"] = "01"[variant == "strict"]
        with InProcessEngine(model, **OPTIONS) as engine:
            for stride in STRIDES if variant == "strict" else (None,):
                name = variant if stride is None else f"strict, stride {stride}"
                if stride is not None:
                    engine.tree.checkpoints.policy = Grid(engine.tree.page_size, stride)
                before = _bytes(folder)
                engine.run(prompt(100 + (stride or 0), tokens), 1)
                engine.drain()
                _settle(engine)
                stored[name] = (_bytes(folder) - before) / tokens
            if variant == "strict":
                engine.tree.checkpoints.policy = Grid(engine.tree.page_size, 1)
                for cached in CACHED:
                    times[cached] = _times(engine, prompt(cached, cached + TAIL), cached, repeats)
    return times, stored


def _times(engine, ids: list[int], cached: int, repeats: int) -> dict[str, float]:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    def run(tier: str) -> float:
        begun = time.perf_counter()
        output = engine.run(ids, 1)
        taken = time.perf_counter() - begun
        details = output.details or {}
        assert output.output_ids, "the request was refused"
        expected = 0 if tier == "cold" else cached
        assert output.cached_tokens == expected, (tier, output.cached_tokens)
        assert tier == "cold" or details[tier] == cached, (tier, details)
        engine.drain()
        _settle(engine)
        return taken

    seconds: dict[str, list[float]] = {tier: [] for tier in TIERS}
    for _ in range(repeats):
        engine.flush()
        engine.tree.clear_storage_backend()
        seconds["cold"].append(run("cold"))
        seconds["device"].append(run("device"))
        engine.tree.evict(EvictParams(num_tokens=10**9))
        seconds["host"].append(run("host"))
        engine.flush()
        seconds["storage"].append(run("storage"))
    return {tier: statistics.median(values) for tier, values in seconds.items()}


def _settle(engine) -> None:
    manager = engine.tree.checkpoints if hasattr(engine.tree, "checkpoints") else None
    while manager is not None and (manager.storage.saving or manager.storage.fetching):
        engine.step()


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.bin"))


def pro_bytes_per_token() -> dict[str, float]:
    """DeepSeek-V4-Pro: 61 layers, of which 30 C4 and 31 C128 with bf16 rows of 512, C4 indexer rows."""
    page = 256
    rings = [RingSpec(Kind.WINDOW, i, 1024, "bfloat16") for i in range(61)]
    for kind, row in ((Kind.ATTENTION_STATE, 8192), (Kind.INDEXER_STATE, 2048)):
        rings += [RingSpec(kind, i, row, "float32") for i in range(30)]
    layout = CheckpointLayout.of(rings, page_size=page, window=128, overlap=4)
    record = HEADER_BYTES + layout.record_bytes
    # A C4 indexer row: 128 fp8 values and a float32 scale.
    page_bytes = 30 * (page // 4) * (1024 + 132) + 31 * (page // 128) * 1024
    figures = {"stock": page_bytes / page}
    for stride in STRIDES:
        figures[f"strict, stride {stride}"] = (page_bytes + record / stride) / page
    return figures


if __name__ == "__main__":
    typer.run(main)

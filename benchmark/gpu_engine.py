"""What checkpoints cost the real engine on a GPU, stock beside strict: prefill, first token of a hit.

    SGLANG_UNIFIED_KV_REFERENCE_DEVICE=cuda python benchmark/gpu_engine.py [--json FILE]

SGLang's scheduler, radix tree and HiCache, and upstream's Triton and CUDA kernels where they run off ROCm;
the rest is torch (its share of the GPU's time is printed), so only differences between the two mean anything.
Random weights, DeepSeek-V4's head, window and page sizes, fewer layers. Stock and strict engines take turns
in one process. Without a GPU it runs too, to be tried out.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated

# Before the engine's plugins are loaded. Sums that are exact would hide the mechanism behind float64.
os.environ.update(
    SGLANG_UNIFIED_KV_REFERENCE_ENGINE="1",
    SGLANG_UNIFIED_KV_REFERENCE_CHUNK_INVARIANT="0",
    SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE="1",
    SGLANG_UNIFIED_KV_CHECKPOINT_HOST_GB="2",
    SGLANG_UNIFIED_KV_CHECKPOINT_POLICY="grid",
)

import typer
from rich.console import Console
from rich.table import Table
from sglang_unified_kv.reference import upstream_kernels
from sglang_unified_kv.reference.harness import DEFAULTS, InProcessEngine, prompt
from sglang_unified_kv.reference.model import write_tiny_model

ON_GPU = DEFAULTS["device"] == "cuda"
PAGE = 256
TAIL = 200
SHARES = (0.0, 0.6, 0.8)


def model_overrides(layers: int, length: int) -> str:
    """The tiny model's config with more layers in V4's pattern, wider, for longer prompts."""
    ratios = [0, 0] + [(4, 128)[i % 2] for i in range(layers - 2)]
    return json.dumps(
        {
            "num_hidden_layers": layers,
            "compress_ratios": ratios,
            "num_hash_layers": layers,
            "n_hash_layers": layers,
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "max_position_embeddings": length,
        }
    )


class Measured:
    """One engine, stock or strict, and its times in milliseconds."""

    def __init__(self, model: Path, strict: bool, length: int, layers: int, seed: int):
        os.environ["SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE"] = str(int(strict))
        longest = length + 1024
        self._length, self._seed = length, seed
        self.engine = InProcessEngine(
            model,
            hicache=True,
            hicache_ratio=2,
            load_format="dummy",
            chunked_prefill_size=8192,
            context_length=longest,
            max_total_tokens=4 * length,
            json_model_override_args=model_overrides(layers, longest),
        )
        if ON_GPU:
            upstream_kernels.choose((upstream_kernels.TRITON, upstream_kernels.JIT))

    def _ids(self, length: int) -> list[int]:
        self._seed += 1
        return prompt(self._seed, length)

    def _ms(self, ids: list[int], cached: int, tier: str | None = None) -> float:
        """Milliseconds from submission to the first token, of a prompt that must hit ``cached`` tokens."""
        device = self.engine.scheduler.device_module
        device.synchronize()
        start = time.perf_counter()
        output = self.engine.run(ids, 1)
        device.synchronize()
        elapsed = (time.perf_counter() - start) * 1e3
        if output.cached_tokens != cached or (tier and output.details[tier] != cached):
            raise RuntimeError(
                f"expected {cached} tokens cached ({tier}), found {output.cached_tokens}"
            )
        self.engine.drain()
        return elapsed

    def prefill(self, share: float) -> float:
        """A prompt of which ``share`` is cached on the device."""
        self.engine.flush()
        shared = int(self._length * share) // PAGE * PAGE
        prefix = self._ids(shared + 1) if shared else []
        if shared:
            self._ms(prefix, 0)
        return self._ms(prefix[:shared] + self._ids(self._length - shared), shared)

    def first_token(self, tier: str | None) -> float:
        """A prompt cached up to its last page, in ``tier``; cold without."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.engine.flush()
        boundary = self._length // PAGE * PAGE - PAGE
        ids = self._ids(boundary + TAIL)
        if tier is None:
            return self._ms(ids, 0)
        self._ms(ids, 0)
        if tier == "host":
            self.engine.tree.evict(EvictParams(num_tokens=10**9))
        return self._ms(ids, boundary, tier)

    def reference_share(self) -> float:
        """Share of the GPU's busy time that a cold prompt spends in torch reference ops."""
        import torch
        from sglang_unified_kv.reference.ops.invariant_torch import RANGE

        self.engine.flush()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as trace:
            self._ms(self._ids(self._length), 0)
        events = trace.key_averages()
        total = sum(e.self_device_time_total for e in events if not e.is_user_annotation)
        inside = sum(e.device_time_total for e in events if e.key == RANGE)
        return inside / total if total else 0.0

    def rounds(self, count: int) -> dict[str, list[float]]:
        measures = {f"prefill, {share:.0%} cached": (self.prefill, share) for share in SHARES}
        for tier in (None, "device", "host"):
            name = "cold" if tier is None else f"hit, {tier}"
            measures[f"first token, {name}"] = (self.first_token, tier)
        found: dict[str, list[float]] = {name: [] for name in measures}
        for turn in range(count + 1):
            for name, (measure, argument) in measures.items():
                value = measure(argument)
                if turn:  # the first compiles
                    found[name].append(value)
        return found


def main(
    length: Annotated[int, typer.Option(help="Tokens of a prompt, whole pages.")] = 16_384,
    layers: Annotated[int, typer.Option(min=4)] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of each engine.")] = 4,
    turns: Annotated[int, typer.Option(min=1, help="Engines of each kind, in turn.")] = 2,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures here.")
    ] = None,
) -> None:
    """Measure and print."""
    os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    found: dict[bool, dict[str, list[float]]] = {False: {}, True: {}}
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "model")
        for turn in range(turns):
            for strict in (False, True):
                measured = Measured(model, strict, length, layers, seed=1000 * turn)
                with measured.engine:
                    for name, values in measured.rounds(repeats).items():
                        found[strict].setdefault(name, []).extend(values)
                    share = measured.reference_share() if ON_GPU else 0.0
    table = Table(title=f"{layers} layers, prompts of {length:,} tokens, milliseconds")
    for heading in ("", "stock", "strict", "strict / stock", "quartiles of strict"):
        table.add_column(heading, justify="right")
    figures = {}
    for name in found[True]:
        stock, strict = (statistics.median(found[kind][name]) for kind in (False, True))
        low, _, high = statistics.quantiles(found[True][name], n=4)
        figures[name] = {"stock_ms": stock, "strict_ms": strict, "ratio": strict / stock}
        table.add_row(
            name, f"{stock:.1f}", f"{strict:.1f}", f"{strict / stock:.3f}", f"{low:.1f}-{high:.1f}"
        )
    console = Console(width=120)
    console.print(table)
    console.print(f"share of the GPU's time in torch reference ops: {share:.0%}")
    if json_file is not None:
        json_file.write_text(json.dumps(figures | {"reference_share": share}, indent=1))


if __name__ == "__main__":
    typer.run(main)

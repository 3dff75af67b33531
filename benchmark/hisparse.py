"""HiSparse swap-in on a GPU: ours, SGLang's fused kernel, SGLang's plan with its planned copy, a bare copy.

    python benchmark/hisparse.py [--buffers 2048,4096] [--batches 1,20] [--misses 0.01,0.1,0.5] [--json FILE]

One layer's swap-in of DeepSeek-V4-Pro's rows: 1,024 bytes, 1,024 rows read per request and step. The
variants take turns; each replays CUDA graphs of several steps, every step with other rows. The lower limit is
a copy of the step's bytes from pinned memory in one piece.
"""

from __future__ import annotations

import gc
import json
import statistics
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from sglang_unified_kv.hisparse.rows import HotBuffer
from sglang_unified_kv.hisparse.swap import Residency, Rows, Step, TritonSwap

TOP_K, ROW_BYTES, PAGE = 1024, 1024, 64
POSITIONS = 49152
"""Rows of a sequence of 196,608 tokens."""
STEPS = 16
DEVICE = torch.device("cuda")


def traffic(batch: int, misses: int, steps: int, hot: int) -> np.ndarray:
    """Positions that each step reads, int32 ``[steps, batch, TOP_K]``: ``misses`` of them were never read
    or are long evicted, the others were read in the step before."""
    chance = np.random.default_rng(0)
    read = np.tile(np.arange(TOP_K, dtype=np.int32), (batch, 1))
    found, next_cold = [], hot
    for _ in range(steps):
        cold = hot + (next_cold - hot + np.arange(misses)) % (POSITIONS - 1 - hot)
        next_cold += misses
        kept = chance.permuted(read, axis=1)[:, misses:]
        read = np.concatenate([np.tile(cold, (batch, 1)), kept], axis=1).astype(np.int32)
        read = chance.permuted(read, axis=1)
        found.append(read)
    return np.stack(found)


class Variant:
    """One way to swap in, with residency and hot rows of its own.

    Args:
        host: uint8 ``[batch * POSITIONS, ROW_BYTES]``, pinned.
    """

    def __init__(self, name: str, buffer: HotBuffer, batch: int, host: torch.Tensor):
        self.name, self.batch, padded = name, batch, buffer.padded
        rows = torch.empty(PAGE + batch * padded, ROW_BYTES, dtype=torch.uint8, device=DEVICE)
        places = torch.arange(PAGE, PAGE + batch * padded, dtype=torch.int32, device=DEVICE)
        tokens = torch.full((batch, padded), -1, dtype=torch.int32, device=DEVICE)
        self.residency = Residency.empty(
            tokens[None], places.view(1, batch, padded), buffer.rows, POSITIONS
        )
        for slot in range(batch):
            self.residency.begin(slot)
        self.at = self.residency.layer(0)
        self.order = torch.arange(buffer.rows, dtype=torch.int16, device=DEVICE).repeat(batch, 1)
        self.cold = torch.arange(batch * POSITIONS, device=DEVICE).view(batch, POSITIONS)
        self.rows, self.host = rows, host
        for slot in range(batch):
            cold = host[slot * POSITIONS :][: buffer.rows]
            rows[PAGE + slot * padded :][: buffer.rows] = cold.to(DEVICE)
        self.top_k = torch.zeros(STEPS, batch, TOP_K, dtype=torch.int32, device=DEVICE)
        self.step = Step(
            self.top_k[0],
            torch.full((batch,), POSITIONS, dtype=torch.int32, device=DEVICE),
            torch.arange(batch, device=DEVICE),
            torch.tensor([batch], dtype=torch.int32, device=DEVICE),
        )
        self.run = getattr(self, f"_{name.replace(' ', '_')}")(buffer)

    def _ours(self, buffer: HotBuffer, one_launch=True) -> Callable[[torch.Tensor], torch.Tensor]:
        tables = [
            torch.tensor([x.data_ptr()], dtype=torch.int64, device=DEVICE)
            for x in (self.rows, self.host)
        ]
        parts = [Rows([self.rows], [self.host], *tables)]
        swap = TritonSwap(buffer, parts, TOP_K, self.batch, one_launch=one_launch)
        return lambda top_k: swap.swap_in(0, self.step._replace(top_k=top_k), self.at, self.cold)

    def _ours_in_launches(self, buffer: HotBuffer):
        return self._ours(buffer, one_launch=False)

    def _fused(self, buffer: HotBuffer, **plan):
        from sglang.kernels.ops.kvcache.hisparse import load_cache_to_device_buffer_mla

        out = torch.zeros(self.batch, TOP_K, dtype=torch.int32, device=DEVICE)

        def run(top_k):
            load_cache_to_device_buffer_mla(
                top_k_tokens=top_k,
                device_buffer_tokens=self.at.tokens,
                host_cache_locs=self.cold,
                device_buffer_locs=self.at.locations,
                host_cache=self.host,
                device_buffer=self.rows,
                top_k_device_locs=out,
                req_pool_indices=self.step.slots,
                seq_lens=self.step.lengths,
                lru_slots=self.order,
                item_size_bytes=ROW_BYTES,
                num_top_k=TOP_K,
                hot_buffer_size=buffer.rows,
                page_size=1,
                block_size=960,
                num_real_reqs=self.step.real,
                **plan,
            )
            return out

        return run

    def _planned(self, buffer: HotBuffer, blocks=132):
        from sglang.kernels.ops.kvcache.hisparse import copy_cache_planned_mla

        plan = {
            "miss_src": torch.zeros(self.batch, TOP_K, dtype=torch.int64, device=DEVICE),
            "miss_dst": torch.zeros(self.batch, TOP_K, dtype=torch.int32, device=DEVICE),
            "miss_count": torch.zeros(self.batch, dtype=torch.int32, device=DEVICE),
        }
        fused = self._fused(buffer, **plan, skip_io=True)

        def run(top_k):
            out = fused(top_k)
            copy_cache_planned_mla(
                **plan,
                num_real_reqs=self.step.real,
                host_cache=self.host,
                device_buffer=self.rows,
                item_size_bytes=ROW_BYTES,
                num_blocks=blocks,
            )
            return out

        return run

    def check(self, top_k: torch.Tensor) -> None:
        """One step; every row that it reads must be its row."""
        out = self.run(top_k).clone()
        torch.cuda.synchronize()
        source = torch.gather(self.cold, 1, top_k.long()).flatten().cpu()
        assert torch.equal(self.rows[out.flatten().long()].cpu(), self.host[source]), self.name

    def capture(self) -> None:
        # A graph of an earlier measurement that is freed meanwhile would spoil this one.
        gc.collect()
        gc.disable()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for top_k in self.top_k:
                self.run(top_k)
        gc.enable()


VARIANTS = ("fused", "planned", "ours", "ours in launches")


def measure(hot: int, batch: int, share: float, rounds: int, host: torch.Tensor) -> dict:
    """Microseconds of a step by variant: medians over ``rounds`` replays of ``STEPS`` steps."""
    misses = round(share * TOP_K)
    buffer = HotBuffer(hot, PAGE)
    steps = traffic(batch, misses, 2 + rounds * STEPS, hot)
    variants = [Variant(name, buffer, batch, host) for name in VARIANTS]
    for variant in variants:
        for i in range(2):
            variant.check(torch.from_numpy(steps[i]).to(DEVICE))
        variant.capture()
    spans: dict[str, list[float]] = {name: [] for name in ("copy", *VARIANTS)}
    pinned = host[: batch * misses]
    target = torch.empty(batch * misses, ROW_BYTES, dtype=torch.uint8, device=DEVICE)
    for i in range(rounds):
        top_k = torch.from_numpy(steps[2 + i * STEPS : 2 + (i + 1) * STEPS]).to(DEVICE)
        works = {"copy": lambda: [target.copy_(pinned, non_blocking=True) for _ in range(STEPS)]}
        for variant in variants:
            variant.top_k.copy_(top_k)
            works[variant.name] = variant.graph.replay
        for name, work in works.items():
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            end.synchronize()
            spans[name].append(start.elapsed_time(end) * 1e3 / STEPS)
    # The first replay of a graph loads it.
    return {name: statistics.median(found[1:]) for name, found in spans.items()}


def numbers(kind: type) -> Callable[[str], list]:
    return lambda text: [kind(part) for part in text.split(",")]


def main(
    buffers: Annotated[str, typer.Option(help="Hot rows.")] = "2048,4096,8192,16384",
    batches: Annotated[str, typer.Option(help="Requests.")] = "1,4,20,64",
    misses: Annotated[str, typer.Option(help="Shares of the rows that miss.")] = "0.01,0.1,0.5",
    rounds: Annotated[int, typer.Option(min=2)] = 8,
    out: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Print microseconds per swap-in, and how much longer SGLang's fused kernel takes than ours."""
    table = Table("buffer", "batch", "misses", "copy", *VARIANTS, "fused / ours", "planned / ours")
    sizes = numbers(int)(batches)
    host = torch.randint(0, 256, (max(sizes) * POSITIONS, ROW_BYTES), dtype=torch.uint8)
    host = host.pin_memory()
    rows = []
    for hot, batch, share in product(numbers(int)(buffers), sizes, numbers(float)(misses)):
        us = measure(hot, batch, share, rounds, host)
        rows.append({"buffer": hot, "batch": batch, "misses": share, "us": us})
        table.add_row(
            f"{hot:,}",
            str(batch),
            f"{share:.0%}",
            *(f"{us[name]:.1f}" for name in ("copy", *VARIANTS)),
            f"{us['fused'] / us['ours']:.2f}",
            f"{us['planned'] / us['ours']:.2f}",
        )
    Console(width=120).print(table)
    if out is not None:
        device = torch.cuda.get_device_name()
        out.write_text(json.dumps({"device": device, "rows": rows}, indent=2))


if __name__ == "__main__":
    typer.run(main)

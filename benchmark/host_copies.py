"""HiCache's copies between device and host: each io backend and host layout beside that of the launch lines.

    SGLANG_UNIFIED_KV_REFERENCE_DEVICE=cuda python benchmark/host_copies.py [--pages 64] [--consecutive]

SGLang's host pools and transfer engine with sgl_kernel's copies, on DeepSeek-V4-Pro's compressed pools (one
rank, bf16): pages go to the host (write-through) and come back layer by layer, at random places or at
consecutive ones. The pairs take turns in one process. A time runs from the call to the last byte, the move of
the indices included; "thread" is the part of it that the calling thread was busy. The plain copy is of the
same bytes in one piece.

SGLang is told that there is no CUDA, so page_first is written as on ROCm, without CUDA's staged kernel. On
the CPU it runs too, with torch copies, to be tried out.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

os.environ["SGLANG_UNIFIED_KV_REFERENCE_ENGINE"] = "1"

import torch
import typer
from rich.console import Console
from rich.table import Table
from sglang_unified_kv.engage import HOST_COPIES
from sglang_unified_kv.launches import HOST_LAYOUT
from sglang_unified_kv.reference import harness, upstream_kernels

DEVICE = torch.device(harness.DEFAULTS["device"])
PAGE, LAYERS = 256, 61
POOLS = {"c4": (1, 64 * 512 * 2), "indexer": (1, 64 * 132), "c128": (0, 2 * 512 * 2)}
"""The parity of a pool's layers, and bytes of a page of 256 tokens in one layer."""
PAGE_BYTES = sum(size * len(range(parity, LAYERS, 2)) for parity, size in POOLS.values())
BASE = tuple(HOST_LAYOUT[1::2])


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


class Pair:
    """Device and host pools of twice the pages, copied by one io backend in one layout."""

    def __init__(self, io_backend: str, layout: str, pages: int, consecutive: bool):
        from sglang.srt.mem_cache.l2_transfer import L2Transfer, L2TransferEngine
        from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool

        self._engine = L2TransferEngine(io_backend)
        self._make = L2Transfer
        self._pools = {}
        for name, (parity, size) in POOLS.items():
            layers = [
                torch.randint(0, 256, (2 * pages, size), dtype=torch.uint8, device=DEVICE)
                for _ in range(parity, LAYERS, 2)
            ]
            pool = DeepSeekV4PagedHostPool(
                name, layers, size, 2 * pages, PAGE, layout, page_aligned_only=True
            )
            self._pools[parity, name] = pool
        self._controller = SimpleNamespace(
            io_backend=io_backend, device=DEVICE, mem_pool_host=SimpleNamespace(layout=layout)
        )
        places = torch.arange if consecutive else torch.randperm
        self._host, self._there, self._back = (
            (places(2 * pages)[shift : shift + pages, None] * PAGE + torch.arange(PAGE)).flatten()
            for shift in (0, 0, pages)
        )
        self._there, self._back = self._there.to(DEVICE), self._back.to(DEVICE)

    def write_through(self) -> tuple[float, float]:
        """Milliseconds to the last byte, and of the calling thread."""
        return self._timed(lambda: self._engine.submit_device_to_host(self._transfers(self._there)))

    def load_back(self) -> tuple[float, float]:
        """The same, to other pages of the device than the bytes came from."""
        return self._timed(
            lambda: self._engine.submit_host_to_device(
                self._transfers(self._back), transfer_layer_id_max=LAYERS
            )
        )

    def check(self) -> None:
        """Raise ValueError unless what goes to the host comes back."""
        there, back = (places[::PAGE] // PAGE for places in (self._there, self._back))
        self.write_through()
        buffers = [layer for pool in self._pools.values() for layer in pool.device_buffers]
        written = [layer[there].clone() for layer in buffers]
        for layer in buffers:
            layer.zero_()
        self.load_back()
        for layer, before in zip(buffers, written, strict=True):
            if not torch.equal(layer[back], before):
                raise ValueError(
                    f"{self._controller.io_backend}: a page came back with other bytes"
                )

    def _transfers(self, places: torch.Tensor) -> list:
        from sglang.srt.managers.cache_controller import HiCacheController

        host, device = HiCacheController.move_indices(self._controller, self._host, places)
        return [
            self._make(pool, None, host, device, self._layer_of(parity))
            for (parity, _), pool in self._pools.items()
        ]

    @staticmethod
    def _layer_of(parity: int):
        return lambda layer: layer // 2 if layer % 2 == parity else None

    @staticmethod
    def _timed(submit) -> tuple[float, float]:
        synchronize()
        start = time.perf_counter()
        submit()
        submitted = time.perf_counter()
        synchronize()
        return (time.perf_counter() - start) * 1e3, (submitted - start) * 1e3


def plain_ms(pages: int, repeats: int) -> float:
    """A copy of the same bytes from pinned memory in one piece."""
    gpu = DEVICE.type == "cuda"
    source = torch.empty(pages * PAGE_BYTES, dtype=torch.uint8, pin_memory=gpu)
    target = torch.empty(source.shape, dtype=torch.uint8, device=DEVICE)
    times = [Pair._timed(lambda: target.copy_(source, non_blocking=True)) for _ in range(repeats)]
    return statistics.median(total for total, _ in times)


def main(
    pages: Annotated[int, typer.Option(min=1, help="Pages of 256 tokens in one copy.")] = 64,
    consecutive: Annotated[
        bool, typer.Option("--consecutive", help="Pages that follow each other, on both sides.")
    ] = False,
    repeats: Annotated[int, typer.Option(min=2, help="Rounds of each pair.")] = 15,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures here.")
    ] = None,
) -> None:
    """Measure and print."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    if DEVICE.type == "cuda":
        upstream_kernels.choose([upstream_kernels.SGL_KERNEL])
    pairs = {pair: Pair(*pair, pages, consecutive) for pair in HOST_COPIES}
    directions = ("write_through", "load_back")
    times: dict[tuple, list[tuple[float, float]]] = {
        (pair, direction): [] for pair in pairs for direction in directions
    }
    for copied in pairs.values():
        copied.check()
    for turn in range(repeats):
        for pair, copied in list(pairs.items())[:: 1 if turn % 2 else -1]:
            for direction in directions:
                times[pair, direction].append(getattr(copied, direction)())
    plain = plain_ms(pages, repeats)
    figures: dict[str, dict] = {}
    console = Console()
    console.print(
        f"{pages} pages, {pages * PAGE_BYTES / 1e6:.0f} MB; plain copy {plain:.2f} ms, "
        f"{pages * PAGE_BYTES / plain / 1e6:.1f} GB/s"
    )
    for direction in directions:
        table = Table("", "ms", "ratio", "thread ms", title=direction)
        base = statistics.median(total for total, _ in times[BASE, direction])
        for pair in pairs:
            total, thread = map(statistics.median, zip(*times[pair, direction], strict=True))
            cells = {"ms": total, "ratio": total / base, "thread_ms": thread}
            figures.setdefault("-".join(pair), {})[direction] = cells
            table.add_row(" + ".join(pair), *(f"{cell:.2f}" for cell in cells.values()))
        console.print(table)
    if json_file is not None:
        name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"
        setting = {"pages": pages, "consecutive": consecutive}
        figures |= {"device": name, "plain_ms": plain, **setting}
        json_file.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    typer.run(main)

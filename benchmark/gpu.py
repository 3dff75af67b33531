"""What checkpoints cost on a GPU: DeepSeek-V4-Pro's rings, a calibrated filler of matrix products.

    python benchmark/gpu.py [--json FILE]

The rings, the chunk's rows and the records have the model's shapes (61 layers, 30 of them C4); its attention
and experts are matrix products that take what the published server takes (256 ms for 8,192 tokens). Every
number is of one rank.

Two measures of what a step is longer by: the time of the captures' own kernels on the forward stream, from a
trace, and the difference of whole steps with and without, which run in turn in one process and vary with the
clock of the chip.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from sglang_unified_kv.checkpoint.layout import (
    STATE_KINDS,
    WINDOW_KINDS,
    CheckpointLayout,
    Kind,
)
from sglang_unified_kv.checkpoint.manager import CheckpointManager, Row
from sglang_unified_kv.checkpoint.policy import Grid
from sglang_unified_kv.checkpoint.rings import Ring
from sglang_unified_kv.checkpoint.rows import TorchRows
from sglang_unified_kv.checkpoint.staging import RecordMover, staging_slots
from sglang_unified_kv.checkpoint.store import CheckpointStore

LAYERS, C4_LAYERS, PAGE, WINDOW = 61, 30, 256, 128
WIDTHS = {
    Kind.WINDOW: (LAYERS, 512, torch.bfloat16, WINDOW),
    Kind.ATTENTION_STATE: (C4_LAYERS, 4 * 512, torch.float32, 8),
    Kind.INDEXER_STATE: (C4_LAYERS, 4 * 128, torch.float32, 8),
}
REQUEST_SLOTS = 66
CHUNK_MS = 256.0
"""Milliseconds of a chunk of 8,192 tokens at the published 32,000 tokens per second."""
DEVICE = torch.device("cuda")


class Filler:
    """Matrix products that keep the chip busy for a given time, on inputs that do not fit its cache."""

    def __init__(self, tokens: int = 8192, width: int = 7168):
        shape = (tokens, width), (width, width)
        self._a = [torch.randn(shape[0], device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
        self._b = [torch.randn(shape[1], device=DEVICE, dtype=torch.bfloat16) for _ in range(4)]
        self._out = torch.empty(shape[0], device=DEVICE, dtype=torch.bfloat16)
        self._n = 0
        self(20)
        self.ms = elapsed_ms(lambda: self(100)) / 100

    def __call__(self, products: int) -> None:
        for _ in range(products):
            torch.mm(self._a[self._n % 2], self._b[self._n % 4], out=self._out)
            self._n += 1


def elapsed_ms(work: Callable[[], None], ahead: Callable[[], None] | None = None) -> float:
    """Time on the current stream between what ``work`` queues first and last.

    With ``ahead`` the stream is busy while the host queues it, as it is in a server.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if ahead is not None:
        ahead()
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def own_us(work: Callable[[], None]) -> float:
    """Microseconds of what ``work`` runs on the forward stream: everything but copies to the host."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        work()
        torch.cuda.synchronize()
    return sum(
        event.time_range.elapsed_us()
        for event in trace.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and "DtoH" not in event.name
    )


class Model:
    """Rings of the model, rows of chunks, and a manager on them.

    Args:
        stride: pages between captures.
        chunk: tokens of a prefill forward.
        plain: move rows by torch instead of by the kernels.
    """

    def __init__(self, stride: int, chunk: int, *, plain: bool = False):
        rings = []
        for kind, (layers, width, dtype, size) in WIDTHS.items():
            for layer in range(layers):
                shape = REQUEST_SLOTS * size + PAGE, width
                buffer = torch.randn(shape, device=DEVICE).to(dtype)
                rings.append(Ring.of(kind, layer, buffer, size))
        layout = CheckpointLayout.of(
            [r.spec for r in rings], page_size=PAGE, window=WINDOW, overlap=4
        )
        staging = staging_slots(
            step_tokens=stride * PAGE, chunk_tokens=chunk, context_tokens=1 << 20, override=None
        )
        records = 2 * staging + 8
        host = torch.empty(records, layout.record_bytes, dtype=torch.uint8, pin_memory=True)
        self.mover = RecordMover(layout, host, staging, DEVICE)
        store = CheckpointStore(records, PAGE)
        self.manager = CheckpointManager(
            store, self.mover, rings, Grid(PAGE, stride), strict_provenance=False
        )
        if plain:
            self.manager.rows = TorchRows(layout, rings, self.mover.staging)
        self.record_bytes = layout.record_bytes
        self._rows = {
            kind: [torch.randn(chunk, width, device=DEVICE).to(dtype) for _ in range(2)]
            for kind, (_, width, dtype, _) in WIDTHS.items()
        }
        self._of_layer = [[r for r in rings if r.spec.layer == layer] for layer in range(LAYERS)]
        self._requests = 0

    def prefill(self, chunk: int, between: Callable[[int], None]) -> None:
        """One chunk in the middle of a prompt: every layer hands over its rows, then computes."""
        manager = self.manager
        self._requests += 1
        rid = f"r{self._requests}"
        # A continued row, so that nothing has to be restored.
        manager._generation[0] = 0
        manager.admit(rid, [], 0, 0, 5 * chunk)
        manager.plan([Row(rid, 0, 0, 4 * chunk, 5 * chunk, False)])
        manager.begin_forward()
        for layer, rings in enumerate(self._of_layer):
            for ring in rings:
                rows = self._rows[ring.spec.kind][layer % 2]
                manager.capture_interior(ring.spec.kind, ring.buffer.data_ptr(), rows)
            between(layer)
        self._end(rid)

    def _end(self, *rids: str) -> None:
        manager = self.manager
        for _ in manager.end_waves():
            manager.capture_ends(WINDOW_KINDS)
            manager.capture_ends(STATE_KINDS)
        manager.close_step()
        for rid in rids:
            manager.release(rid)

    def decode(self, position: int, batch: int, between: Callable[[], None]) -> None:
        """One step of ``batch`` requests, spread over the page, so that captures are spread over steps."""
        manager = self.manager
        rows = []
        for slot in range(batch):
            manager._generation[slot] = 0
            end = 4 * PAGE + position + slot * PAGE // batch
            manager.admit(f"d{slot}", [], 0, 0, end - 1)
            rows.append(Row(f"d{slot}", slot, 0, end - 1, end, True))
        manager.plan(rows)
        manager.begin_forward()
        between()
        self._end(*(r.rid for r in rows))

    def restore(self, count: int) -> None:
        """``count`` hits at once, each from its own record into a fresh row."""
        manager = self.manager
        rows = []
        for i in range(count):
            key = f"key{i}"
            if key not in manager.store:
                slot = manager.store.reserve()
                manager.store.publish(key, PAGE, slot, replace=True, mixed=False)
            generation = manager._generation.get(i, 0) + 1
            manager.admit(f"h{i}", [key], PAGE, PAGE, PAGE + 1)
            manager.request_restore(f"h{i}", [key], PAGE)
            rows.append(Row(f"h{i}", i, generation, PAGE, PAGE + 1, False))
        manager.plan(rows)
        manager.begin_forward()
        self._end(*(r.rid for r in rows))


@contextmanager
def no_host_wait() -> Iterator[None]:
    """Any call that makes the host wait for the device is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def timed_copies(mover: RecordMover, into: list[float]) -> Iterator[None]:
    """Note the copy stream's milliseconds of every save."""
    save, spans = mover.save, []

    def timed(staging, host):
        gathered = torch.cuda.current_stream().record_event()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        mover._copy_stream.wait_event(gathered)
        start.record(mover._copy_stream)
        save(staging, host)
        end.record(mover._copy_stream)
        spans.append((start, end))

    mover.save = timed
    try:
        yield
    finally:
        del mover.save
        torch.cuda.synchronize()
        into += [start.elapsed_time(end) for start, end in spans]


def plain_copy_gb_s(nbytes: int) -> float:
    """Rate of one pinned device-to-host copy of that size, nothing else running."""
    source = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
    target = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    times = [elapsed_ms(lambda: target.copy_(source, non_blocking=True)) for _ in range(12)]
    return nbytes / statistics.median(times[2:]) / 1e6


def host_us(work: Callable[[], None], repeats: int = 50) -> float:
    """Median time of the host alone."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def prefill_part(filler: Filler, repeats: int) -> dict:
    """Time that captures add to a chunk, by stride and chunk; copies beside the filler."""
    found = {}
    for chunk in (8192, 32768):
        total = round(CHUNK_MS * chunk / 8192 / filler.ms)
        # As even as whole products allow.
        products = [(i + 1) * total // LAYERS - i * total // LAYERS for i in range(LAYERS)]
        rounds = max(3, repeats * 8192 // chunk)
        variants: dict[str, Model] = {f"stride {s}": Model(s, chunk) for s in (1, 4, 8)}
        if chunk == 8192:
            variants["stride 1, torch"] = Model(1, chunk, plain=True)

        def off(products=products):
            for count in products:
                filler(count)

        def on(model, chunk=chunk, products=products):
            model.prefill(chunk, lambda layer: filler(products[layer]))

        times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
        copies: dict[str, list[float]] = {name: [] for name in variants}
        for round_ in range(rounds + 1):
            for name, model in variants.items():
                # In turn, and the other way round every other time.
                pair = [0.0, 0.0]
                for which in (0, 1) if round_ % 2 else (1, 0):
                    if which == 0:
                        pair[0] = elapsed_ms(off)
                        continue
                    with timed_copies(model.mover, copies[name] if round_ else []):
                        pair[1] = _capturing(lambda m=model: on(m), strict=round_ > 0)
                times[name].append((pair[0], pair[1]))
        for name, model in variants.items():
            base = statistics.median(o for o, _ in times[name][1:])
            added = [t - o for o, t in times[name][1:]]
            saved = model.manager.stats.captured / (rounds + 1)
            alone = host_us(lambda m=model, c=chunk: m.prefill(c, lambda _: None), 12)
            own = own_us(lambda m=model, c=chunk: m.prefill(c, lambda _: None))
            spread = statistics.quantiles(added, n=4)
            found[f"{chunk}, {name}"] = {
                "chunk_ms": base,
                "own_us_per_token": own / chunk,
                "own_percent": own / 10 / base,
                "added_percent": statistics.median(added) / base * 100,
                "quartiles_percent": (spread[2] - spread[0]) / base * 100,
                "host_us_per_chunk": alone,
                "records": saved,
                "copy_gb_s": saved * model.record_bytes * rounds / sum(copies[name]) / 1e6,
            }
        del variants
        torch.cuda.empty_cache()
    return found


def _capturing(work: Callable[[], None], *, strict: bool) -> float:
    """As :func:`elapsed_ms`; with ``strict`` the work may not make the host wait."""

    def guarded():
        with no_host_wait():
            work()

    return elapsed_ms(guarded if strict else work)


def decode_part(filler: Filler, repeats: int) -> dict:
    """Time that captures add to decode steps, averaged over the 256 steps of a page."""
    found = {}
    model, products = Model(1, 8192), max(1, round(4.0 / filler.ms))
    for batch in (1, 32, 64):

        def off():
            for _ in range(PAGE):
                filler(products)

        def on(batch=batch, work=lambda: filler(products)):
            for position in range(PAGE):
                model.decode(position, batch, work)

        pairs = []
        for round_ in range(repeats + 1):
            base = elapsed_ms(off)
            before = model.manager.stats.captured
            pairs.append((base, _capturing(on, strict=round_ > 0)))
            captured = model.manager.stats.captured - before
        added = [(t - o) * 1e3 / PAGE for o, t in pairs[1:]]
        own = own_us(lambda f=on: f(work=lambda: None)) / PAGE
        host = host_us(lambda b=batch: model.decode(1, b, lambda: None))
        found[f"batch {batch}"] = {
            "step_ms": pairs[-1][0] / PAGE,
            "own_us_per_step": own,
            "added_us_per_step": statistics.median(added),
            "captures": captured,
            "host_us_per_step": host,
        }
    return found


def restore_part(filler: Filler, limit_gb_s: float, repeats: int) -> dict:
    """Time of restores on the forward stream, from the pinned host pool to the rings."""
    found = {}
    for count in (1, 8):
        model = Model(1, 8192)
        times = []
        for _ in range(repeats + 2):
            work = elapsed_ms(lambda m=model, n=count: m.restore(n), lambda: filler(10))
            times.append(work * 1e3)
        floor = count * model.record_bytes / limit_gb_s / 1e3
        found[f"{count} at once"] = {
            "us": statistics.median(times[2:]),
            "floor_us": floor,
            "allowed_us": 1.2 * floor + 100,
        }
    return found


def main(
    repeats: Annotated[int, typer.Option(min=2, help="Rounds of each variant.")] = 7,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures here.")
    ] = None,
) -> None:
    """Measure and print."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("this benchmark needs a GPU; torch sees none")
    filler = Filler()
    limit = plain_copy_gb_s(32 * 9_224_192)
    figures = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "filler_product_ms": filler.ms,
        "plain_copy_gb_s": limit,
        "prefill": prefill_part(filler, repeats),
        "decode": decode_part(filler, repeats),
        "restore": restore_part(filler, limit, 20),
    }
    console = Console(width=150)
    console.print(
        f"{figures['device']}, torch {figures['torch']}: pinned copy {limit:.1f} GB/s, "
        f"product {filler.ms:.3f} ms"
    )
    for part in ("prefill", "decode", "restore"):
        rows = figures[part]
        table = Table(title=part)
        table.add_column("")
        for name in next(iter(rows.values())):
            table.add_column(name, justify="right")
        for name, values in rows.items():
            table.add_row(name, *(f"{v:.3f}" for v in values.values()))
        console.print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    typer.run(main)

"""Random captures and restores through a RecordMover, against a model of bytes; on any device.

On a device with streams, delays are put in front of the copies and of the forward: an order that no event
holds then shows as a wrong byte. ``python test/checkpoint/mover_steps.py`` runs it on the GPU.
"""

from __future__ import annotations

import random
import sys

import numpy as np
import torch
from sglang_unified_kv.checkpoint.capture import Capture, EndCapture, InteriorCapture
from sglang_unified_kv.checkpoint.geometry import ring_rows
from sglang_unified_kv.checkpoint.layout import CheckpointLayout, Kind
from sglang_unified_kv.checkpoint.restore import Restore, restore
from sglang_unified_kv.checkpoint.rings import Ring, upload
from sglang_unified_kv.checkpoint.rows import rows_on
from sglang_unified_kv.checkpoint.staging import RecordMover
from sglang_unified_kv.checkpoint.store import Record

PAGE, WINDOW, OVERLAP = 256, 128, 4
SLOTS, HOST, STAGING = 5, 7, 3
WIDTHS = {
    Kind.WINDOW: (512, torch.bfloat16, 131),
    Kind.ATTENTION_STATE: (2048, torch.float32, 8),
    Kind.INDEXER_STATE: (512, torch.float32, 8),
}


class Mirror:
    """Rings on the device, the same bytes in numpy, and what every host slot should hold."""

    def __init__(self, device: torch.device, seed: int, layers: int = 3):
        self.device = device
        self.chance = random.Random(seed)
        self.bytes = np.random.default_rng(seed)
        self.rings, self.model = [], []
        for kind, (width, dtype, size) in WIDTHS.items():
            for layer in range(layers):
                buffer = torch.zeros(SLOTS * size + 9, width, dtype=dtype, device=device)
                self.rings.append(Ring.of(kind, layer, buffer, size))
                self.model.append(np.zeros((len(buffer), width * dtype.itemsize), np.uint8))
        self.layout = CheckpointLayout.of(
            [r.spec for r in self.rings], page_size=PAGE, window=WINDOW, overlap=OVERLAP
        )
        shapes = [(2048, ring.spec.row_bytes) for ring in self.rings]
        self.values = [self.bytes.integers(0, 256, shape, np.uint8) for shape in shapes]
        self.rows = [
            torch.from_numpy(values).to(device).view(ring.buffer.dtype)
            for values, ring in zip(self.values, self.rings, strict=True)
        ]
        pinned = device.type != "cpu"
        host = torch.empty(HOST, self.layout.record_bytes, dtype=torch.uint8, pin_memory=pinned)
        self.mover = RecordMover(self.layout, host, STAGING, device)
        self.moves = rows_on(device, self.layout, self.rings, self.mover.staging)
        self.held: dict[int, tuple[int, list[np.ndarray]]] = {}

    def delay(self, stream=None) -> None:
        """Hold up the current, or another, stream by up to a few milliseconds."""
        if self.device.type == "cpu":
            return
        with torch.cuda.stream(stream or torch.cuda.current_stream()):
            torch.cuda._sleep(self.chance.choice((0, 100_000, 5_000_000)))

    def rows_of(self, tokens: int, i: int) -> tuple[torch.Tensor, np.ndarray]:
        """A chunk's rows of ring ``i``, any bytes: on the device and in numpy.

        Uploaded beforehand: an upload here would make the host wait, and hold the order by itself.
        """
        first = self.chance.randrange(len(self.values[i]) - tokens)
        span = slice(first, first + tokens)
        return self.rows[i][span], self.values[i][span]

    def store(self, i: int, slot: int, start: int, rows: torch.Tensor, values: np.ndarray) -> None:
        """The engine's store: the last rows of a chunk overwrite the ring."""
        ring = self.rings[i]
        kept = min(len(values), WINDOW if ring.size > WINDOW else ring.size)
        end = start + len(values)
        index = ring_rows(slot, ring.size, end - kept, end)
        ring.words[upload(index, self.device)] = rows[-kept:].view(torch.int64)
        self.model[i][index] = values[-kept:]

    def prefill(self) -> None:
        """A chunk with captures inside and at its end; its layers overwrite what was gathered from."""
        slot, start = self.chance.randrange(SLOTS), PAGE * self.chance.randrange(1, 4)
        start -= self.chance.choice((0, 0, 3, 100))
        end = PAGE * (-(-start // PAGE) + self.chance.randrange(1, 3))
        inside = [b for b in range(PAGE, end, PAGE) if start < b][:STAGING]
        hosts = self.chance.sample(range(HOST), len(inside) + 1)
        captures = [Capture("r", slot, b, start, 0, h) for b, h in zip(inside, hosts, strict=False)]
        self.delay()
        gather = InteriorCapture(captures, self.moves, self.mover) if captures else None
        records = {b: [] for b in inside}
        for i, ring in enumerate(self.rings):
            rows, values = self.rows_of(end - start, i)
            if gather is not None:
                gather.gather(i, rows)
            count = self.layout.sections[i].rows
            for boundary in inside:
                old = ring_rows(slot, ring.size, boundary - count, boundary)
                whole = self.model[i][old].copy()
                new = np.arange(boundary - count, boundary) >= start
                whole[new] = values[max(boundary - count, start) - start : boundary - start]
                records[boundary].append(whole)
            self.store(i, slot, start, rows, values)
        if gather is not None:
            self.delay(self.mover._copy_stream)
            gather.finish()
        for capture in captures:
            self.held[capture.host_slot] = (capture.boundary, records[capture.boundary])
        self.decode_end(slot, end, hosts[-1])

    def decode_end(self, slot: int, end: int, host: int) -> None:
        """A capture behind a forward, from the rings; the next forward overwrites them at once."""
        captures = [Capture("r", slot, end, end - 1, 0, host)]
        capture = EndCapture(captures, self.moves, self.mover)
        self.delay()
        capture.gather(frozenset(WIDTHS))
        if self.chance.random() < 0.5:
            self.delay(self.mover._copy_stream)
        capture.finish()
        self.held[host] = (
            end,
            [
                self.model[i][ring_rows(slot, ring.size, end - s.rows, end)].copy()
                for i, (ring, s) in enumerate(zip(self.rings, self.layout.sections, strict=True))
            ],
        )
        for i in range(len(self.rings)):
            self.store(i, slot, end, *self.rows_of(self.chance.randrange(1, 5), i))

    def resume(self) -> None:
        """Restores of several records at once, more than staging holds, each into its own slot."""
        if not self.held:
            return
        hosts = self.chance.choices(list(self.held), k=self.chance.randrange(1, SLOTS + 1))
        slots = self.chance.sample(range(SLOTS), len(hosts))
        restores = [
            Restore("r", slot, Record("k", self.held[host][0], host, False))
            for host, slot in zip(hosts, slots, strict=True)
        ]
        self.delay()
        restore(restores, self.moves, self.mover)
        for item in restores:
            boundary, rows = self.held[item.record.slot]
            for i, ring in enumerate(self.rings):
                count = self.layout.sections[i].rows
                index = ring_rows(item.slot, ring.size, boundary - count, boundary)
                self.model[i][index] = rows[i]

    def check(self) -> None:
        """Every ring byte, and every record on the host, is what the model says."""
        self.mover.synchronize()
        for ring, expected in zip(self.rings, self.model, strict=True):
            found = ring.buffer.view(torch.uint8).cpu().numpy()
            assert np.array_equal(found, expected), ring.spec
        for host, (boundary, rows) in self.held.items():
            payload = self.mover.host[host].numpy()
            for section, expected in zip(self.layout.sections, rows, strict=True):
                found = payload[section.offset : section.offset + section.nbytes]
                assert np.array_equal(found, expected.reshape(-1)), (host, boundary, section.spec)


def run(device: torch.device, seed: int, steps: int) -> None:
    """``steps`` random steps without the host ever waiting, then a check of every byte."""
    mirror = Mirror(device, seed)
    for _ in range(steps):
        mirror.chance.choice((mirror.prefill, mirror.resume))()
    mirror.check()


if __name__ == "__main__":
    for number in range(int(sys.argv[1]) if len(sys.argv) > 1 else 50):
        run(torch.device("cuda"), number, 40)
    print(
        f"{number + 1} runs of 40 steps on {torch.cuda.get_device_name()}: every byte as modelled"
    )

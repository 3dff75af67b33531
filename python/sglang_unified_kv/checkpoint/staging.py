"""Where the bytes of records are: pinned host pool, device staging ring, and the copies between them.

Order is held by stream events alone; the host never waits in a forward. A host slot may be handed to a new
capture at once: its copy is queued behind the gather of a later forward, hence behind every restore that
read it. A storage thread is on no stream, so it waits for a slot's events before it touches the bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .layout import CheckpointLayout


class RecordMover:
    """Copies records between device staging and the host pool.

    Args:
        layout: byte map of a record.
        host: uint8 ``[records, record_bytes]``, pinned where the device has streams; rows contiguous.
        staging_slots: records the device staging ring holds.
        device: where the rings live.

    Attributes:
        waits: times that slots were taken whose last copy was still under way.
    """

    def __init__(
        self,
        layout: CheckpointLayout,
        host: torch.Tensor,
        staging_slots: int,
        device: torch.device,
    ):
        self.layout = layout
        self.host = host
        self.staging_slots = staging_slots
        self.device = device
        self._module = torch.get_device_module(device)
        self._copy_stream = self._module.Stream()
        self.staging = torch.zeros(
            (staging_slots, layout.record_bytes), dtype=torch.uint8, device=device
        )
        # Told (staging slots, host slots) before records are copied to the host; for debugging.
        self.on_save: Callable[[list[int], list[int]], None] | None = None
        self.waits = 0
        self._next = 0
        self._held: set[int] = set()
        self._staging_busy: dict[int, torch.Event] = {}
        self._host_written: dict[int, torch.Event] = {}
        self._host_read: dict[int, torch.Event] = {}

    def take(self, count: int) -> list[int]:
        """Staging slots for the current stream, oldest use first; at most :attr:`staging_slots`.

        They are held until :meth:`save` or :meth:`done_reading`.
        """
        assert count <= self.staging_slots, (count, self.staging_slots)
        slots = [(self._next + i) % self.staging_slots for i in range(count)]
        assert self._held.isdisjoint(slots), "a staging slot is taken while its record is not saved"
        self._held.update(slots)
        self._next = (self._next + count) % self.staging_slots
        events = {id(e): e for s in slots if (e := self._staging_busy.get(s))}.values()
        # Asked for the count alone: what is waited for, and in which order, does not depend on it.
        self.waits += any(not event.query() for event in events)
        for event in events:
            self._module.current_stream().wait_event(event)
        return slots

    def save(self, staging: list[int], host: list[int]) -> None:
        """Copy staged records to host slots, behind what the current stream has gathered so far."""
        if self.on_save is not None:
            self.on_save(staging, host)
        gathered = self._record(self._module.current_stream())
        self._copy_stream.wait_event(gathered)
        with self._module.stream(self._copy_stream):
            for source, target in zip(staging, host, strict=True):
                self.host[target].copy_(self.staging[source], non_blocking=True)
        done = self._record(self._copy_stream)
        self._held.difference_update(staging)
        self._staging_busy.update(dict.fromkeys(staging, done))
        self._host_written.update(dict.fromkeys(host, done))

    def load(self, host: list[int], staging: list[int]) -> None:
        """Copy host records into staging slots on the current stream, behind the copies that wrote them."""
        stream = self._module.current_stream()
        for event in {id(e): e for h in host if (e := self._host_written.get(h))}.values():
            stream.wait_event(event)
        for source, target in zip(host, staging, strict=True):
            self.staging[target].copy_(self.host[source], non_blocking=True)
        self._host_read.update(dict.fromkeys(host, self._record(stream)))

    def wait_written(self, host: int) -> None:
        """Block until the last capture into a host slot has landed. For storage threads only."""
        if (event := self._host_written.get(host)) is not None:
            event.synchronize()

    def wait_unused(self, host: int) -> None:
        """Block until no copy reads or writes a host slot. For storage threads only."""
        self.wait_written(host)
        if (event := self._host_read.get(host)) is not None:
            event.synchronize()

    def done_reading(self, staging: list[int]) -> None:
        """The current stream has queued its last read of these staging slots."""
        self._held.difference_update(staging)
        self._staging_busy.update(
            dict.fromkeys(staging, self._record(self._module.current_stream()))
        )

    def synchronize(self) -> None:
        """Wait for everything that may still read or write a record. For shutdown only."""
        self._module.synchronize()

    def _record(self, stream):
        event = self._module.Event()
        event.record(stream)
        return event


def staging_slots(
    *, step_tokens: int, chunk_tokens: int, context_tokens: int, override: int | None
) -> int:
    """Records the device staging ring must hold.

    Interior boundaries of one chunk are gathered together, ``ceil(chunk / step)``; without chunked
    prefill a chunk is a whole prompt, bounded as published: ``ceil(min(200k, context) / step) + 1``.

    Args:
        step_tokens: tokens between captures, page size times stride.
        chunk_tokens: most tokens of one prefill forward; 0 for no limit.
        context_tokens: longest request.
        override: exact number of slots instead.

    >>> staging_slots(step_tokens=256, chunk_tokens=8192, context_tokens=1 << 20, override=None)
    33
    >>> staging_slots(step_tokens=256, chunk_tokens=0, context_tokens=1 << 20, override=None)
    783
    """
    if override is not None:
        return override
    prefix = -(-min(200_000, context_tokens) // step_tokens) + 1
    return min(-(-chunk_tokens // step_tokens) + 1, prefix) if chunk_tokens else prefix

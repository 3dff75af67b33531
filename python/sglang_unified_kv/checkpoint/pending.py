"""Captures that the tree does not know yet: reserved slots by request and boundary."""

from __future__ import annotations

from dataclasses import dataclass, field

from .store import CheckpointStore

KEPT_DECODE_CAPTURES = 2
"""Latest decode captures kept per request: one step may run past the end of a finished request, and
its capture is then of no use."""


@dataclass
class _Request:
    slots: dict[int, int] = field(default_factory=dict)
    decode: list[int] = field(default_factory=list)


class PendingCaptures:
    """Owns the slots of captures, from their reservation until they are published or discarded."""

    def __init__(self, store: CheckpointStore):
        self._store = store
        self._requests: dict[str, _Request] = {}

    def __bool__(self) -> bool:
        return bool(self._requests)

    def add(self, rid: str, boundary: int, slot: int, *, decode: bool) -> int:
        """Keep a slot; returns how many earlier decode captures of the request it superseded."""
        request = self._requests.setdefault(rid, _Request())
        if boundary in request.slots:
            self._store.discard(request.slots.pop(boundary))
        request.slots[boundary] = slot
        if not decode:
            return 0
        request.decode = [b for b in request.decode if b in request.slots and b != boundary]
        superseded = request.decode[: 1 - KEPT_DECODE_CAPTURES]
        for old in superseded:
            self._store.discard(request.slots.pop(old))
        request.decode = [*request.decode[len(superseded) :], boundary]
        return len(superseded)

    def take_ready(self, rid: str, length: int) -> dict[int, int]:
        """Hand over the request's slots by boundary, as far as ``length`` tokens cover them."""
        request = self._requests.get(rid, _Request())
        ready = {b: request.slots.pop(b) for b in sorted(request.slots) if b <= length}
        if not request.slots:
            self._requests.pop(rid, None)
        return ready

    def drop(self, rid: str, length: int) -> int:
        """Discard the request's captures in ``length`` tokens; returns how many that were."""
        slots = self.take_ready(rid, length)
        for slot in slots.values():
            self._store.discard(slot)
        return len(slots)

    def release(self, rid: str) -> int:
        """Discard what is left of a request; returns how many captures that were."""
        slots = self._requests.pop(rid, _Request()).slots
        for slot in slots.values():
            self._store.discard(slot)
        return len(slots)

    def clear(self) -> None:
        """Forget everything, after the store was cleared."""
        self._requests.clear()

    def check_integrity(self, elsewhere: int) -> None:
        """Raise AssertionError unless these and ``elsewhere`` more are the store's reserved slots."""
        slots = [s for request in self._requests.values() for s in request.slots.values()]
        assert len(slots) == len(set(slots)), "a slot is kept for two captures"
        assert len(slots) + elsewhere == self._store.reserved, "a reserved slot is lost"
        assert all(request.slots for request in self._requests.values()), "an empty request is kept"

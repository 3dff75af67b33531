"""Captures that the tree does not know yet: reserved slots by request and boundary.

A verify step of speculative decoding may or may not reach a boundary, and two steps in flight may both
look as if they did. Each of them captures into a slot of its own; the slot of the step that did is kept
once the result says so.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .store import CheckpointStore

KEPT_DECODE_CAPTURES = 2
"""Latest decode captures kept per request: one step may run past the end of a finished request, and
its capture is then of no use."""


@dataclass
class _Verify:
    """A verify step in flight: tokens it may commit ``[first, end)``, slots by boundary."""

    first: int
    end: int
    slots: dict[int, int]


@dataclass
class _Request:
    slots: dict[int, int] = field(default_factory=dict)
    decode: list[int] = field(default_factory=list)
    verifies: deque[_Verify] = field(default_factory=deque)

    def __bool__(self) -> bool:
        return bool(self.slots or self.verifies)

    def all_slots(self) -> list[int]:
        return [*self.slots.values(), *(s for v in self.verifies for s in v.slots.values())]


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

    def in_flight(self, rid: str) -> int:
        """Verify steps of the request whose results are not known yet."""
        request = self._requests.get(rid)
        return len(request.verifies) if request is not None else 0

    def expect(self, rid: str, first: int, end: int, slots: dict[int, int]) -> None:
        """A verify step was planned that commits within ``[first, end)`` and captures ``slots``."""
        self._requests.setdefault(rid, _Request()).verifies.append(_Verify(first, end, slots))

    def resolve(self, rid: str, start: int, end: int) -> tuple[int, int]:
        """The oldest verify step in flight committed ``[start, end)``.

        Returns how many captures it turned out not to reach, and how many earlier ones it superseded.

        Raises:
            ValueError: no such step was planned.
        """
        request = self._requests.get(rid, _Request())
        if not request.verifies:
            raise ValueError(f"request {rid} verified [{start}, {end}), which was not planned")
        step = request.verifies.popleft()
        if not step.first <= start <= end <= step.end:
            raise ValueError(
                f"request {rid} verified [{start}, {end}), planned was [{step.first}, {step.end})"
            )
        missed = superseded = 0
        for boundary, slot in step.slots.items():
            if start < boundary <= end:
                superseded += self.add(rid, boundary, slot, decode=True)
            else:
                self._store.discard(slot)
                missed += 1
        self._forget_if_empty(rid)
        return missed, superseded

    def _forget_if_empty(self, rid: str) -> None:
        if not self._requests.get(rid, True):
            del self._requests[rid]

    def ready(self, rid: str, length: int) -> list[int]:
        """Boundaries of the request's captures that ``length`` tokens cover, ascending."""
        request = self._requests.get(rid, _Request())
        return sorted(b for b in request.slots if b <= length)

    def take_ready(self, rid: str, length: int) -> dict[int, int]:
        """Hand over the request's slots by boundary, as far as ``length`` tokens cover them."""
        ready = {b: self._requests[rid].slots.pop(b) for b in self.ready(rid, length)}
        self._forget_if_empty(rid)
        return ready

    def drop_outputs(self, rid: str, length: int, keep: int) -> int:
        """Discard decode captures in ``length`` tokens but the last ``keep``; returns how many that were."""
        request = self._requests.get(rid, _Request())
        covered = sorted(b for b in request.decode if b in request.slots and b <= length)
        dropped = covered[: max(len(covered) - keep, 0)]
        for boundary in dropped:
            self._store.discard(request.slots.pop(boundary))
        return len(dropped)

    def release(self, rid: str) -> int:
        """Discard what is left of a request; returns how many captures that were."""
        request = self._requests.pop(rid, _Request())
        for slot in request.all_slots():
            self._store.discard(slot)
        return len(request.slots)

    def clear(self) -> None:
        """Forget everything, after the store was cleared."""
        self._requests.clear()

    def check_integrity(self, elsewhere: int) -> None:
        """Raise AssertionError unless these and ``elsewhere`` more are the store's reserved slots."""
        slots = [s for request in self._requests.values() for s in request.all_slots()]
        assert len(slots) == len(set(slots)), "a slot is kept for two captures"
        assert len(slots) + elsewhere == self._store.reserved, "a reserved slot is lost"
        assert all(self._requests.values()), "an empty request is kept"

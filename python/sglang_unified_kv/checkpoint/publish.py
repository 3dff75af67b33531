"""Which captures become records when the tree takes a request's pages.

Invariant 1 (live equality) is held here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .geometry import page_floor
from .pending import PendingCaptures
from .savings import Savings
from .stats import Stats
from .store import CheckpointStore, Published


class NewRange(NamedTuple):
    """Tokens ``[start, end)`` whose pages an insert put into the tree.

    Attributes:
        leaf: True for a new leaf; False where the tree took the inserting run's pages for tokens that it
            already held (device eviction undone, resident pages re-pointed).
    """

    start: int
    end: int
    leaf: bool


@dataclass
class _Lineage:
    """How far a request's row consists of its own pages.

    Attributes:
        checked: tokens that commits have looked at; starts where the request resumed.
        own: False once the tree kept another run's page in place of one that this request computed.
    """

    checked: int
    own: bool = True


class Publisher:
    """Publishes captures of requests as the tree adopts their pages.

    Args:
        store: gets the records.
        pending: holds the captures.
        stats: counts outcomes.
        strict: publish only what pairs with pages of the same run.
    """

    def __init__(
        self, store: CheckpointStore, pending: PendingCaptures, stats: Stats, *, strict: bool
    ):
        self._store = store
        self._pending = pending
        self._stats = stats
        self._strict = strict
        self._lineage: dict[str, _Lineage] = {}

    def begin(self, rid: str, start: int) -> None:
        """The request got a fresh row and resumes at ``start``."""
        self._lineage[rid] = _Lineage(checked=start)

    def forget(self, rid: str) -> None:
        """The request gave its row back."""
        self._lineage.pop(rid, None)

    def clear(self) -> None:
        self._lineage.clear()

    def check_idle(self) -> None:
        """Raise AssertionError unless no request holds a row."""
        assert not self._lineage, self._lineage

    def commit(
        self,
        rid: str,
        chain: Sequence[str],
        length: int,
        new_ranges: Sequence[NewRange],
        fillers: Collection[int] = (),
    ) -> list[str]:
        """Publish the request's captures in ``[0, length)``; as the manager's ``commit``.

        Args:
            fillers: boundaries that are captured only because there is room.
        """
        page = self._store.page_size
        fresh: set[int] = set()
        adopted: set[int] = set()
        for span in new_ranges:
            inside = range(page_floor(span.start, page) + page, span.end + 1, page)
            (fresh if span.leaf else adopted).update(inside)
        ready = self._pending.take_ready(rid, length)
        void = fresh | adopted if self._strict else fresh
        for boundary in sorted(void - ready.keys()):
            # New pages and no capture: a record of an older run must not pair with them.
            self._stats.removed += self._store.remove(chain[boundary // page - 1])
        own_until = self._own_until(rid, length, fresh)
        attached, savings = [], Savings(self._store, chain)
        for boundary, slot in ready.items():
            key = chain[boundary // page - 1]
            if self._strict and boundary > own_until:
                if boundary in void:
                    self._stats.removed += self._store.remove(key)
                self._store.discard(slot)
                self._stats.dropped_provenance += 1
            else:
                is_fresh, is_adopted = boundary in fresh, boundary in adopted
                worth = {
                    "saves": savings.at(boundary) if self._store.weighed else 0,
                    "filler": boundary in fillers,
                }
                kept = self._publish(key, boundary, slot, worth, fresh=is_fresh, adopted=is_adopted)
                if not kept and not is_fresh:
                    attached.append(key)
        return attached

    def _own_until(self, rid: str, length: int, fresh: set[int]) -> int:
        """Tokens of the request's row that are its own pages or those it resumed from."""
        lineage = self._lineage.setdefault(rid, _Lineage(checked=0))
        page = self._store.page_size
        while lineage.own and lineage.checked + page <= length:
            if lineage.checked + page in fresh:
                lineage.checked += page
            else:
                lineage.own = False
        return lineage.checked

    def _publish(
        self, key: str, boundary: int, slot: int, worth: dict, *, fresh: bool, adopted: bool
    ) -> bool:
        """Returns whether an existing record was kept instead."""
        outcome = self._store.publish(key, boundary, slot, replace=fresh, mixed=not fresh, **worth)
        kept = outcome is Published.KEPT_EXISTING
        self._stats.published += not kept
        self._stats.replaced += outcome is Published.REPLACED
        self._stats.kept_existing += kept
        # An attached record beside older pages, or an older record beside re-pointed pages.
        self._stats.mixed += adopted if kept else not fresh
        return kept

"""A trace through tree and store, one request at a time: what is hit, captured, kept and evicted.

Policy, store, pending captures and publisher are the engine's own; the tree is a model of it. Requests run
one after the other in order of arrival; a prefill is cut into chunks, a decode step computes a token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..checkpoint.geometry import boundaries, page_floor
from ..checkpoint.pending import PendingCaptures
from ..checkpoint.placement import Placement
from ..checkpoint.policy import Path, PlacementPolicy, Span
from ..checkpoint.publish import NewRange, Publisher
from ..checkpoint.savings import Savings
from ..checkpoint.stats import Stats
from ..checkpoint.store import CheckpointStore, Record
from .trace import Request


class PageTree:
    """Names of cached pages; a page is evicted only after those behind it, least recently used path first.

    Args:
        capacity: pages; None for no limit. May be exceeded by the request that runs.
    """

    def __init__(self, capacity: int | None):
        self.capacity = capacity
        self.evictions = 0
        # Oldest first. A path is touched from its end, so that a page is younger than those behind it.
        self._pages: OrderedDict[int | str, None] = OrderedDict()

    def match(self, pages: Sequence, limit: int) -> int:
        """How many of the first ``limit`` pages are there."""
        for count in range(min(limit, len(pages))):
            if pages[count] not in self._pages:
                return count
        return min(limit, len(pages))

    def insert(self, pages: Sequence) -> int:
        """Add a path; returns how many of its pages, from its start, were there."""
        known = self.match(pages, len(pages))
        self._pages.update(dict.fromkeys(pages[known:]))
        return known

    def finish(self, pages: Sequence) -> None:
        """The request of this path has ended: it was used last, and others may have to go."""
        for page in reversed(pages):
            self._pages.move_to_end(page)
        while self.capacity is not None and len(self._pages) > self.capacity:
            self._pages.popitem(last=False)
            self.evictions += 1


class Served(NamedTuple):
    """One request: tokens that the tree held of its prompt, and tokens that it resumed behind."""

    matched: int
    hit: int


@dataclass
class Tally:
    """Sums over a replay, in tokens and records.

    Attributes:
        prompt: tokens of prompts.
        matched: of them in the tree: what a checkpoint at every boundary, for ever, would hit.
        hit: of them resumed behind.
        captured: records copied to the host.
        published: of them given to the store.
        used: of them hit at least once.
        most: records held at a time.
        evictions: by the store.
        page_evictions: by the tree.
    """

    prompt: int = 0
    matched: int = 0
    hit: int = 0
    captured: int = 0
    published: int = 0
    used: int = 0
    most: int = 0
    evictions: int = 0
    page_evictions: int = 0

    @property
    def recomputed(self) -> int:
        """Tokens that were computed although the tree held them."""
        return self.matched - self.hit

    @property
    def unused(self) -> int:
        """Captures that no request resumed from."""
        return self.captured - self.used


class Replay:
    """A cache and its store, with one policy.

    Args:
        policy: chooses boundaries.
        records: capacity of the store.
        pages: capacity of the tree; None for no limit.
        chunk: tokens of a prefill chunk; 0 for no chunks.
    """

    def __init__(
        self, policy: PlacementPolicy, *, records: int, pages: int | None = None, chunk: int = 8192
    ):
        self.policy = policy
        self.page = policy.page_size
        self.store = CheckpointStore(records, self.page, weighed=policy.weighed)
        self.placement = Placement(policy, self.store)
        self.tree = PageTree(pages)
        self.tally = Tally()
        self._chunk = chunk or 1 << 62
        self._stats = Stats()
        self._pending = PendingCaptures(self.store)
        self._publisher = Publisher(self.store, self._pending, self._stats, strict=False)
        self._used: dict[str | int, Record] = {}
        self._served = 0

    def run(self, requests: Iterable[Request]) -> Tally:
        """Serve every request; returns the sums so far."""
        for request in requests:
            self.serve(request)
        return self.tally

    def serve(self, request: Request) -> Served:
        """Match, prefill in chunks, decode, finish."""
        rid, tally = f"{self._served}", self.tally
        # Page numbers are names as good as hashes.
        pages: Sequence = request.pages
        self._served += 1
        # At least the last token of a prompt is computed.
        matched = self.tree.match(pages, (request.prompt - 1) // self.page) * self.page
        hit = self.store.deepest(pages, matched)
        restored = self._hit(pages, hit) if hit else None
        path = self.placement.admit(pages, hit, matched, request.prompt)
        self._publisher.begin(rid, hit)
        for start in range(hit, request.prompt, self._chunk):
            end = min(start + self._chunk, request.prompt)
            self._capture(rid, self.policy.boundaries(Span(start, end), path), decode=False)
            if restored is not None:
                self.store.unpin(restored)
                restored = None
            self._commit(rid, pages, end, path)
        total = request.prompt + request.output - 1
        for boundary in boundaries(request.prompt, total, self.page):
            wanted = self.policy.boundaries(Span(boundary - 1, boundary), path)
            self._capture(rid, wanted, decode=True)
        self._commit(rid, pages, total, path)
        self._pending.release(rid)
        self._publisher.forget(rid)
        self.tree.finish(pages)
        tally.prompt += request.prompt
        tally.matched += matched
        tally.hit += hit
        tally.published = self._stats.published
        tally.most = max(tally.most, len(self.store))
        tally.evictions, tally.page_evictions = self.store.evictions, self.tree.evictions
        return Served(matched, hit)

    def _hit(self, pages: Sequence, boundary: int) -> Record:
        """Use a record, and pin it until the first chunk has restored it."""
        key = pages[boundary // self.page - 1]
        saves = Savings(self.store, pages).at(boundary) if self.store.weighed else None
        self.store.touch(key, saves)
        record = self.store.pin(key)
        assert record is not None, "the store has just found it"
        if self._used.get(key) is not record:
            self._used[key] = record
            self.tally.used += 1
        return record

    def _capture(self, rid: str, wanted: list[int], *, decode: bool) -> None:
        # The engine's order: what the store cannot hold are shallow boundaries.
        for boundary in reversed(wanted):
            slot = self.store.reserve()
            if slot is not None:
                self._pending.add(rid, boundary, slot, decode=decode)
                self.tally.captured += 1

    def _commit(self, rid: str, pages: Sequence, tokens: int, path: Path) -> None:
        length = page_floor(tokens, self.page)
        known = self.tree.insert(pages[: length // self.page]) * self.page
        new = [NewRange(known, length, leaf=True)] if known < length else []
        self._pending.drop_outputs(rid, length, self.policy.output_tails(path))
        ready = self._pending.ready(rid, length)
        fillers = self.placement.commit(pages, path, length, ready)
        self._publisher.commit(rid, pages, length, new, fillers)

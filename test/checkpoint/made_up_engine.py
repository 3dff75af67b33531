"""Rings, slots and chunks of a made-up model, whose rows say which request and position they hold.

A row is ``[rid number, position, section]`` in every ring and in every chunk, so a wrong, stale or foreign
byte names itself. Only the arithmetic of the model is simulated; store, staging and copies are real.
"""

import torch
from sglang_unified_kv.checkpoint.layout import (
    DRAFT_KINDS,
    STATE_KINDS,
    WINDOW_KINDS,
    CheckpointLayout,
    Kind,
)
from sglang_unified_kv.checkpoint.manager import CheckpointManager, Row
from sglang_unified_kv.checkpoint.policy import Grid
from sglang_unified_kv.checkpoint.publish import NewRange
from sglang_unified_kv.checkpoint.rings import Ring
from sglang_unified_kv.checkpoint.staging import RecordMover
from sglang_unified_kv.checkpoint.store import CheckpointStore

PAGE, WINDOW, SLOTS = 256, 128, 5
POISON = 7


class Engine:
    """Rings, slots and chunks of a made-up model; drives a manager the way the edits do."""

    def __init__(
        self,
        records=16,
        staging=4,
        stride=1,
        extra=0,
        strict=False,
        sections=2,
        draft=False,
        policy=None,
    ):
        self.rings = [
            Ring.of(Kind.WINDOW, i, self.buffer(WINDOW + extra), WINDOW + extra)
            for i in range(sections)
        ]
        self.rings.append(Ring.of(Kind.ATTENTION_STATE, 1, self.buffer(8), 8))
        self.rings.append(Ring.of(Kind.INDEXER_STATE, 1, self.buffer(8), 8))
        if draft:
            ring = self.buffer(WINDOW + extra)
            self.rings.append(Ring.of(Kind.DRAFT_WINDOW, 0, ring, WINDOW + extra))
        layout = CheckpointLayout.of(
            [r.spec for r in self.rings], page_size=PAGE, window=WINDOW, overlap=4
        )
        host = torch.full((records, layout.record_bytes), 9, dtype=torch.uint8)
        policy = policy or Grid(PAGE, stride)
        self.manager = CheckpointManager(
            CheckpointStore(records, PAGE, weighed=policy.weighed),
            RecordMover(layout, host, staging, torch.device("cpu")),
            self.rings,
            policy,
            strict_provenance=strict,
        )
        self.generation = [0] * SLOTS

    @staticmethod
    def buffer(size):
        return torch.full((SLOTS * size, 4), POISON, dtype=torch.float32)

    def fresh(self, slot):
        """Allocate a slot: another request's rows are still in it."""
        self.generation[slot] += 1
        for ring in self.rings:
            ring.buffer[slot * ring.size : (slot + 1) * ring.size] = POISON

    def rows(self, rid, section, start, end):
        positions = torch.arange(start, end, dtype=torch.float32)
        fixed = torch.tensor([float(rid[1:]), float(section)]).expand(end - start, 2)
        return torch.stack([fixed[:, 0], positions, fixed[:, 1], positions * 0.5], 1)

    def admit(self, rid, start, prompt, matched=0):
        self.manager.admit(rid, chain(rid), start, max(start, matched), prompt)

    def plan(self, rows):
        """Plan a batch; a request that nobody admitted has its first rows for a prompt."""
        for row in rows:
            if row.slot is not None and row.rid not in self.manager._paths:
                self.admit(row.rid, row.start, row.end)
        self.manager.plan(rows)

    def forward(self, spans, decode=False):
        """Compute ``[(rid, slot, start, end), ...]`` as one batch."""
        rows = [Row(r, s, self.generation[s], a, b, decode) for r, s, a, b in spans]
        self.plan(rows)
        try:
            self.manager.begin_forward()
            for i, ring in enumerate(self.rings):
                flat = torch.cat([self.rows(r, i, a, b) for r, _, a, b in spans])
                self.manager.capture_interior(ring.spec.kind, ring.buffer.data_ptr(), flat)
                offset = 0
                for _, slot, start, end in spans:
                    for p in range(max(start, end - ring.size), end):
                        ring.buffer[slot * ring.size + p % ring.size] = flat[offset + p - start]
                    offset += end - start
            self._capture_ends()
        finally:
            self.manager.close_step()
        self.manager.check_integrity()

    def _capture_ends(self):
        for _ in self.manager.end_waves():
            for kinds in (WINDOW_KINDS, STATE_KINDS, DRAFT_KINDS):
                self.manager.capture_ends(kinds)

    def verify(self, rid, slot, known, start, tokens):
        """One verify step: ``tokens`` rows from ``start`` on; ``known`` tokens were known to be committed."""
        row = Row(rid, slot, self.generation[slot], known, known, True, verify=tokens)
        self.plan([row])
        try:
            self.manager.begin_forward()
            for i, ring in enumerate(self.rings):
                rows = self.rows(rid, i, start, start + tokens)
                for p in range(start, start + tokens):
                    ring.buffer[slot * ring.size + p % ring.size] = rows[p - start]
            self._capture_ends()
        finally:
            self.manager.close_step()
        self.manager.check_integrity()

    def commit(self, rid, length, leaf_from=0, adopted=()):
        ranges = [NewRange(a, b, leaf=False) for a, b in adopted]
        if leaf_from < length:
            ranges.append(NewRange(leaf_from, length, leaf=True))
        self.manager.commit(rid, chain(rid), length // PAGE * PAGE, ranges)
        self.manager.check_integrity()

    def resume(self, rid, other, slot, boundary, length):
        """``other``'s prompt shares ``rid``'s first ``boundary`` tokens; resume and check every row."""
        self.fresh(slot)
        self.admit(other, boundary, length)
        self.manager.request_restore(other, chain(rid), boundary)
        self.manager.plan([Row(other, slot, self.generation[slot], boundary, length, False)])
        self.manager.begin_forward()
        for i, ring in enumerate(self.rings):
            rows = WINDOW if ring.spec.kind in (Kind.WINDOW, Kind.DRAFT_WINDOW) else 4
            found = torch.stack(
                [
                    ring.buffer[slot * ring.size + p % ring.size]
                    for p in range(boundary - rows, boundary)
                ]
            )
            assert torch.equal(found, self.rows(rid, i, boundary - rows, boundary)), (i, boundary)
        self.manager.close_step()
        self.manager.release(other)


def chain(rid, pages=40):
    return [f"{rid}:{i}" for i in range(1, pages + 1)]

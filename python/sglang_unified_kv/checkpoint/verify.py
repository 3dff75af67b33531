"""``SGLANG_SWA_DBG_CHECKSUM=1``: every restore is read back from the device and compared with its capture.

Waits for the device at each capture and restore, so it is for debugging and end-to-end jobs, which look
for these lines in the log::

    [LB-DEV] device landing byte-exact     the record's bytes arrived on the device as they were captured
    [SWA-DBG] restore verified             the window rows of the slot, read back, are those of the capture,
                                           with speculation the draft layers' as well
    [C4-STATE-DBG] state ride bit-exact    the same for the C4 and indexer state rows
    MISMATCH                               any of the three failed; the process ends
    reuse_reject                           the gate cut a match below what the tree holds
    BIND-MISS                              a request ended, and captures within what it gave to the tree
                                           are bound to no pages (an abort or a retraction gives nothing)
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import xxhash

from .layout import STATE_KINDS
from .restore import Restore
from .rings import Ring
from .rows import Places
from .staging import RecordMover

logger = logging.getLogger(__name__)


class Mismatch(RuntimeError):
    """Restored bytes are not the captured ones."""


class Verifier:
    """Digests of captured records by host slot, and the comparisons.

    Args:
        mover: holds the records.
        rings: in the order of the layout's sections.
    """

    def __init__(self, mover: RecordMover, rings: Sequence[Ring]):
        self._mover = mover
        self._rings = list(rings)
        self._captured: dict[int, tuple[str, str]] = {}

    def captured(self, staging: Sequence[int], host: Sequence[int]) -> None:
        """Note what was gathered into staging slots, on its way to host slots."""
        for source, target in zip(staging, host, strict=True):
            self._captured[target] = self._digests(self._staged(source))

    def fetched(self, host: int) -> None:
        """Note a record that storage brought and whose own checksum was verified."""
        self._captured[host] = self._digests(self._sections(self._mover.host[host]))

    def landed(self, staging: Sequence[int], restores: Sequence[Restore]) -> None:
        """Compare records copied to the device with their captures.

        Raises:
            Mismatch: and logs the MISMATCH line.
        """
        for source, item in zip(staging, restores, strict=True):
            self._judge(
                "LB-DEV",
                "device landing byte-exact",
                item,
                self._digests(self._staged(source)) == self._captured[item.record.slot],
            )

    def restored(self, restores: Sequence[Restore]) -> None:
        """Compare the ring rows of slots, read back from the device, with the captures restored there.

        Raises:
            Mismatch: and logs the MISMATCH line.
        """
        for item in restores:
            place = Places([(item.slot, item.record.boundary)], [], self._mover.device)
            sections = zip(self._rings, self._mover.layout.sections, strict=True)
            rows = [ring.words[place.ring_rows(ring, section.rows)] for ring, section in sections]
            found, expected = self._digests(rows), self._captured[item.record.slot]
            self._judge("SWA-DBG", "restore verified", item, found[0] == expected[0])
            self._judge("C4-STATE-DBG", "state ride bit-exact", item, found[1] == expected[1])

    def _judge(self, tag: str, passed: str, item: Restore, ok: bool) -> None:
        where = f"rid={item.rid} boundary={item.record.boundary} request_slot={item.slot}"
        if ok:
            logger.info("[%s] %s %s", tag, passed, where)
            return
        logger.error("[%s] MISMATCH %s", tag, where)
        raise Mismatch(f"[{tag}] MISMATCH {where}: restored bytes are not the captured ones")

    def _staged(self, slot: int) -> list[torch.Tensor]:
        return self._sections(self._mover.staging[slot])

    def _sections(self, record: torch.Tensor) -> list[torch.Tensor]:
        return [record[s.offset : s.offset + s.nbytes] for s in self._mover.layout.sections]

    def _digests(self, sections: Sequence[torch.Tensor]) -> tuple[str, str]:
        """Hex digests of the windows and of the states."""
        window, state = xxhash.xxh3_128(), xxhash.xxh3_128()
        for section, rows in zip(self._mover.layout.sections, sections, strict=True):
            digest = state if section.spec.kind in STATE_KINDS else window
            digest.update(rows.contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return window.hexdigest(), state.hexdigest()

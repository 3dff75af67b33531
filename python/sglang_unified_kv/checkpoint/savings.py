"""What a hit saves: how far the next record lies below it."""

from __future__ import annotations

from collections.abc import Sequence

from .store import CheckpointStore


class Savings:
    """What hits along a chain save, in one walk for all its boundaries, while records are added below.

    Args:
        store: holds the records.
        chain: page hashes of the prefix.
    """

    def __init__(self, store: CheckpointStore, chain: Sequence[str]):
        self._store = store
        self._chain = chain
        # Pages walked, and the deepest record among them, filler or not, and not a filler.
        self._walked = self._record = self._point = 0

    def at(self, boundary: int) -> int:
        """Tokens from the deepest record below ``boundary`` to it; not below the boundary asked for before.

        Fillers below count by :attr:`CheckpointStore.filler_worth`.
        """
        pages = boundary // self._store.page_size
        for walked in range(self._walked + 1, pages):
            record = self._store.get(self._chain[walked - 1])
            if record is not None:
                self._record = walked
                self._point = self._point if record.filler else walked
        self._walked = pages - 1
        return (
            boundary
            - self._point * self._store.page_size
            - self._store.worth((self._record - self._point) * self._store.page_size)
        )

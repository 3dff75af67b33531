"""How densely a store can afford to capture: from how long its records wait to be used. No torch.

By Little's law a store of ``n`` records whose uses come within ``a`` requests can take ``n / a`` records per
request without losing one before its use. The clock counts requests, so that every rank decides alike.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

OTHER_POINTS = 1.5
"""Records per request that a sparse placement takes anyway."""
DENSEST_USE = 16
"""Pages between checkpoints of the coarsest grid that is worth its copies."""
COVERED = 0.99
"""Part of what hits save that comes from uses within the age that is counted with."""
FORGET_AFTER = 4096
"""Requests after which everything counts half."""
REMEMBERED = 1 << 16
"""Records whose last use is remembered, evicted ones included; four times the store if that is more."""


class Density:
    """The grid that a store affords beside other points.

    Args:
        capacity: records of the store.
        page_size: tokens per page.
    """

    def __init__(self, capacity: int, page_size: int):
        self._capacity = capacity
        self._page = page_size
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        # Request that last used or published a record, also of evicted ones: most recent last.
        self._since: OrderedDict[str | int, int] = OrderedDict()
        # Pages saved by hits, by the bit length of the record's age.
        self._saved = [0] * 64
        self._requests = self._counted = self._new_pages = 0

    def publish(self, key: str | int) -> None:
        """A record was published."""
        self._since[key] = self._requests
        self._since.move_to_end(key)
        # Evicted ones are remembered for a while: what was evicted too early must count as well.
        while len(self._since) > max(4 * self._capacity, REMEMBERED):
            self._since.popitem(last=False)

    def admit(self, chain: Sequence[str | int], resumed: int, matched: int, prompt: int) -> int:
        """A request gets a row: pages between the checkpoints that it may take beside others; 0 for none.

        Args:
            chain: page hashes of the prompt, at least of what was matched.
            resumed, matched, prompt: tokens, as :class:`~.policy.Path`.
        """
        deepest = self._deepest(chain, matched // self._page)
        if deepest:
            key = chain[deepest - 1]
            age = self._requests - self._since[key]
            self._saved[age.bit_length()] += deepest - self._deepest(chain, deepest - 1)
            self.publish(key)
        self._requests += 1
        self._counted += 1
        self._new_pages += prompt // self._page - resumed // self._page
        if self._counted >= FORGET_AFTER:
            self._saved = [pages // 2 for pages in self._saved]
            self._counted //= 2
            self._new_pages //= 2
        return self._grid()

    def _deepest(self, chain: Sequence[str | int], limit: int) -> int:
        return next((n for n in range(limit, 0, -1) if chain[n - 1] in self._since), 0)

    @property
    def age(self) -> int:
        """Requests within which nearly all of what hits save is used, a power of two."""
        left = int(sum(self._saved) * (1 - COVERED))
        for bits in range(len(self._saved) - 1, 0, -1):
            left -= self._saved[bits]
            if left < 0:
                return 1 << bits
        return 1

    def _grid(self) -> int:
        room = self._capacity / self.age - OTHER_POINTS
        if room <= 0:
            return 0
        grid = max(-(-self._new_pages // max(int(room * self._counted), 1)), 1)
        return grid if grid <= DENSEST_USE else 0

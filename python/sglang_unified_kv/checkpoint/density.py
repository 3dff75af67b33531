"""How densely a store can afford to capture: from when and where prompts leave known paths. No torch.

By Little's law a store of ``n`` records that takes ``r`` per request keeps one for ``n / r`` requests. How
many uses come within that time, and how far from the likely points prompts leave a path, says which grid
beside these points hits most. The clock counts requests, so that every rank decides alike.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate

GRIDS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Pages between checkpoints that are considered."""
COVERED = 0.99
"""Part of what hits save within whose age records of points are held at least."""
GAIN = 0.03
"""Part by which hits must be expected to grow if fillers take room from points that are still used."""
FORGET_AFTER = 4096
"""Requests after which everything counts half."""
REMEMBERED = 1 << 16
"""Records whose last use is remembered, evicted ones included; four times the store if that is more."""


class Density:
    """The grid that a store affords beside other points.

    A *filler* is a record that only the grid asked for, until it is used; all others are *points*.

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
        # (request that last used or published it, filler), also of evicted ones: most recent last.
        self._since: OrderedDict[str | int, tuple[int, bool]] = OrderedDict()
        # Pages saved by hits, by the bit length of the record's age.
        self._saved = [0.0] * 64
        self._requests = 0
        self._counted = self._new_pages = self._points = 0.0
        # Prompts that left a path at a point and elsewhere; pages that points serve, and each grid more.
        self._at_points = self._elsewhere = self._served = 0.0
        self._more = [0.0] * len(GRIDS)

    def publish(self, key: str | int, *, filler: bool = False) -> None:
        """A record was published. A key that was of use once is no filler any more."""
        filler = filler and self._since.get(key, (0, True))[1]
        self._points += not filler
        self._note(key, filler)

    def _note(self, key: str | int, filler: bool) -> None:
        self._since[key] = self._requests, filler
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
        pages, start = matched // self._page, resumed // self._page
        if start and chain[start - 1] not in self._since:
            # Of storage, or published too long ago to be remembered.
            self.publish(chain[start - 1])
        deepest = self._deepest(chain, pages)
        if pages:
            point = self._deepest(chain, deepest, fillers=False)
            self._at_points += point == pages
            self._elsewhere += point < pages
            self._served += point
            for i, grid in enumerate(GRIDS):
                # On average a grid cuts half a step short.
                self._more[i] += max(pages - point - (grid - 1) / 2, 0)
        if deepest:
            key = chain[deepest - 1]
            age = self._requests - self._since[key][0]
            self._saved[age.bit_length()] += deepest - self._deepest(chain, deepest - 1)
            self._points += self._since[key][1]
            self._note(key, filler=False)
        self._requests += 1
        self._counted += 1
        self._new_pages += prompt // self._page - resumed // self._page
        if self._counted >= FORGET_AFTER:
            self._halve()
        return self._grid()

    def _halve(self) -> None:
        self._saved = [pages / 2 for pages in self._saved]
        self._more = [pages / 2 for pages in self._more]
        self._counted /= 2
        self._new_pages /= 2
        self._points /= 2
        self._at_points /= 2
        self._elsewhere /= 2
        self._served /= 2

    def _deepest(self, chain: Sequence[str | int], limit: int, *, fillers: bool = True) -> int:
        for pages in range(limit, 0, -1):
            found = self._since.get(chain[pages - 1])
            if found is not None and (fillers or not found[1]):
                return pages
        return 0

    @property
    def worth(self) -> float:
        """How likely prompts leave a path at a boundary that is no point, in parts of one that is."""
        others = max(self._new_pages - self._points, 1)
        likely = self._at_points * others
        if not likely:
            return float(self._elsewhere > 0)
        return min(self._elsewhere * self._points / likely, 1.0)

    @property
    def age(self) -> int:
        """Requests within which nearly all of what hits save is used, a power of two."""
        return 1 << next((i for i, part in enumerate(self._used()) if part >= COVERED), 0)

    def _used(self) -> list[float]:
        """Part of what hits save that is used within less than 1, 2, 4... requests."""
        total = sum(self._saved) or 1.0
        return [pages / total for pages in accumulate(self._saved)]

    def _grid(self) -> int:
        """The grid beside points with which hits are expected to be longest."""
        points, new = self._points / self._counted, self._new_pages / self._counted
        used, worth, age_of_all = self._used(), self.worth, self.age
        held = points * age_of_all
        best, chosen = self._served * _within(used, self._capacity / max(points, 1e-9)), 0
        least = best * (1 + GAIN)
        for grid, more in zip(reversed(GRIDS), reversed(self._more), strict=True):
            fillers = max(new / grid, 1e-9)
            # A request's captures wait for its end in slots of their own.
            room = self._capacity - fillers
            age = room / max(points + worth * fillers, 1e-9)
            # Fillers last by their worth, or in what is left beside all points that are still used.
            spare = max(worth * age, (room - held) / fillers)
            value = self._served * _within(used, age) + more * _within(used, spare)
            if value >= (best if room - held >= fillers * age_of_all else max(best, least)):
                best, chosen = value, grid
        return chosen


def _within(used: list[float], age: float) -> float:
    """Part of what hits save that is used within ``age`` requests, between powers of two linear."""
    if age < 1:
        return used[0] * max(age, 0)
    bits = min(int(age).bit_length(), len(used) - 1)
    low = 1 << (bits - 1)
    return used[bits - 1] + (used[bits] - used[bits - 1]) * min((age - low) / low, 1)

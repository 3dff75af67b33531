"""Whether a grid alone hits more than likely points, and which: by replaying all of them beside the store.

As caches let insertion policies duel (Qureshi et al., ISCA 2007), but on every request and not on samples:
a record has 9 MB, its key in a ghost some hundred bytes. No torch. The clock counts requests, so that every
rank decides alike.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from .policy import Grid, Path, PlacementPolicy, Span
from .store import OCTAVES

STRIDES = tuple(1 << octave for octave in range(OCTAVES))
"""Pages between checkpoints of the grids that take part."""
WINDOW = 50
"""Requests over which hits are summed at least; where the store has more than four times as many records, a
quarter of these: what it holds long it must judge by what is used late."""
LIKELY = 0.15
"""Where prompts leave at other boundaries this likely, in parts of a point, the grid counts as the better."""
MARGIN = 0.05
"""Part by which the other one must hit more."""


class Ghost:
    """Keys of what a store would hold under a policy, least recently used first out.

    Args:
        policy: chooses boundaries.
        capacity: records.
    """

    def __init__(self, policy: PlacementPolicy, capacity: int):
        self._policy = policy
        self._page = policy.page_size
        self._capacity = capacity
        self._step = policy.stride if isinstance(policy, Grid) else 1
        self._keys: OrderedDict[str | int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def admit(self, chain: Sequence[str | int], path: Path) -> int:
        """A request gets a row, and its prompt is captured; tokens that it would resume behind."""
        pages = path.matched // self._page // self._step * self._step
        hit = next((n for n in range(pages, 0, -self._step) if chain[n - 1] in self._keys), 0)
        if hit:
            self._keys.move_to_end(chain[hit - 1])
        seen = replace(path, resumed=hit * self._page)
        self._capture(chain, self._policy.boundaries(Span(seen.resumed, path.known), seen))
        return seen.resumed

    def commit(self, chain: Sequence[str | int], path: Path, length: int) -> None:
        """The tree holds ``length`` tokens of the request; what was unknown at admission is captured."""
        path = Path(0, 0, path.prompt, known=path.known)
        found = self._policy.boundaries(Span(path.known, length), path)
        output = [boundary for boundary in found if boundary > path.prompt]
        kept = found[: len(found) - len(output)] + output[-self._policy.output_tails(path) :]
        self._capture(chain, kept)

    def _capture(self, chain: Sequence[str | int], boundaries: list[int]) -> None:
        for boundary in boundaries[-self._capacity :]:
            key = chain[boundary // self._page - 1]
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._capacity:
            self._keys.popitem(last=False)


class Duel:
    """Grids of every stride against points.

    While points are in charge they count by what requests resumed behind, otherwise by a ghost of their own,
    which has no fillers and evicts by use alone.

    Args:
        points: the policy that captures points, without :attr:`~.policy.Path.grid`.
        capacity: records of the store.
    """

    def __init__(self, points: PlacementPolicy, capacity: int):
        self._policy, self._capacity = points, capacity
        self._keep = 1 - 1 / max(WINDOW, capacity // 4)
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        grids = (Grid(self._policy.page_size, stride) for stride in STRIDES)
        self._grids = [Ghost(grid, self._capacity) for grid in grids]
        self._points = Ghost(self._policy, self._capacity)
        # Tokens hit lately.
        self._by_grid = [0.0] * len(STRIDES)
        self._by_points = 0.0
        self._octave: int | None = None

    def admit(self, chain: Sequence[str | int], path: Path, worth: float) -> int:
        """A request gets a row: pages between the checkpoints of a grid alone, 0 for points.

        Args:
            chain: page hashes of the prompt, at least of what was matched.
            path: what is known of the request.
            worth: how likely prompts leave a path at other boundaries, in parts of a point.
        """
        hits = [grid.admit(chain, path) for grid in self._grids]
        by_points = self._points.admit(chain, path)
        by_points = path.resumed if self._octave is None else by_points
        self._by_points = self._keep * self._by_points + by_points
        self._by_grid = [self._keep * a + b for a, b in zip(self._by_grid, hits, strict=True)]
        grid, points = max(self._by_grid), self._by_points
        # Where prompts leave anywhere the points must prove themselves, elsewhere the grid.
        if worth >= LIKELY:
            alone = points <= grid * (1 + MARGIN)
        else:
            alone = grid > points * (1 + MARGIN)
        if not alone:
            self._octave = None
        elif self._octave is None or self._by_grid[self._octave] < grid:
            self._octave = self._by_grid.index(grid)
        return 0 if self._octave is None else STRIDES[self._octave]

    def commit(self, chain: Sequence[str | int], path: Path, length: int) -> None:
        """The tree holds ``length`` tokens of a request."""
        for ghost in (*self._grids, self._points):
            ghost.commit(chain, path, length)

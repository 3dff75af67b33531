"""Which boundaries of a request deserve a checkpoint. Pure functions of scheduler state.

A checkpoint is taken while a forward passes its boundary, so a policy decides from what is known then: how
long the prompt is, where the request resumed, how far the tree knew its tokens. Not how long the output will
be, and not where a later request will leave this path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .geometry import boundaries, page_floor


@dataclass(frozen=True)
class Span:
    """Tokens ``[start, end)`` that one forward computes for one request.

    Attributes:
        start: first position computed.
        end: one past the last position computed.
    """

    start: int
    end: int


@dataclass(frozen=True)
class Path:
    """What is known of a request when it gets a row; it stays so until the row is given back.

    Attributes:
        resumed: tokens that it resumed behind, a boundary or 0.
        matched: tokens that the tree held, with or without a checkpoint: where it leaves a known path.
        prompt: tokens that are computed before the next one is sampled. For a request that comes back after a
            retraction that includes what it had generated.
        grid: pages between checkpoints that the store affords beside others, 0 for none; told to
            policies that fill it.
        alone: the grid is all that is captured.
        known: tokens of the prompt whose page hashes were known when it got its row.
    """

    resumed: int
    matched: int
    prompt: int
    grid: int = 0
    alone: bool = False
    known: int = 0


class PlacementPolicy(Protocol):
    """Chooses boundaries. Must be deterministic: every rank asks it and must get the same answer.

    Attributes:
        page_size: tokens per page.
        weighed: records are evicted by what they save, otherwise least recently used first.
        fills: goes by :attr:`Path.grid`.
    """

    @property
    def page_size(self) -> int: ...
    @property
    def weighed(self) -> bool: ...
    @property
    def fills(self) -> bool: ...

    def boundaries(self, span: Span, path: Path) -> list[int]:
        """Boundaries in ``(span.start, span.end]`` to capture, ascending."""
        ...

    def fillers(self, path: Path) -> set[int]:
        """Boundaries among them that are captured only because there is room."""
        ...

    def output_tails(self, path: Path) -> int:
        """Checkpoints that are kept of a request's output."""
        ...


@dataclass(frozen=True)
class Grid:
    """A checkpoint at every ``stride``-th page boundary.

    Attributes:
        page_size: tokens per page.
        stride: pages between checkpoints, at least 1.

    >>> Grid(page_size=256, stride=2).boundaries(Span(0, 1100), Path(0, 0, 1100))
    [512, 1024]
    """

    page_size: int
    stride: int
    weighed = False
    fills = False

    def boundaries(self, span: Span, path: Path) -> list[int]:
        return boundaries(span.start, span.end, self.stride * self.page_size)

    def fillers(self, path: Path) -> set[int]:
        return set()

    def output_tails(self, path: Path) -> int:
        return 2


@dataclass(frozen=True)
class Sparse:
    """Checkpoints where prompts are likely to leave a path: at its tails, and where one has left it before.

    Attributes:
        page_size: tokens per page.
        spare: tokens at the end of a prompt that are always computed: 1, with bigram keys 2.
        branch: also where the request leaves a path that the tree knows, if no checkpoint is there.
        spacing: also ``spacing``, ``4 * spacing``, ``16 * spacing``... pages before the tail; 0: not.
        least: pages that a tail must save over the checkpoint below it.
        share: and it must save at least its depth divided by this; 0 for no such limit.
        output_every: pages between the boundaries of an output that are captured; the last one stays.
        fills: also at every :attr:`Path.grid`-th page boundary of a prompt; with room for these, every tail
            and every boundary of an output is worth its record. Or at that alone, if
            :attr:`Path.alone`.

    A prompt of 2,700 tokens of which the tree knows 600, with a checkpoint at 256:

    >>> path = Path(resumed=256, matched=512, prompt=2700)
    >>> Sparse(256).boundaries(Span(256, 2700), path)
    [2560]
    >>> Sparse(256, branch=True, spacing=2).boundaries(Span(256, 2700), path)
    [512, 2048, 2560]

    A prompt of exactly 10 pages: the same prompt resumes a page before its end, a longer one at its end.

    >>> Sparse(256).boundaries(Span(0, 2560), Path(0, 0, 2560))
    [2304, 2560]
    >>> Sparse(256, least=2).boundaries(Span(0, 2560), Path(0, 0, 2560))
    [2304]

    With room for a checkpoint at every fourth page:

    >>> Sparse(256, fills=True).boundaries(Span(0, 2700), Path(0, 0, 2700, grid=4))
    [1024, 2048, 2560]
    """

    page_size: int
    spare: int = 1
    branch: bool = False
    spacing: int = 0
    least: int = 1
    share: int = 0
    output_every: int = 1
    fills: bool = False
    weighed = True

    def boundaries(self, span: Span, path: Path) -> list[int]:
        page = self.page_size
        if span.end // page == span.start // page:
            return []
        if path.alone:
            return boundaries(span.start, span.end, path.grid * page)
        points, fillers = self._points(path), self.fillers(path)
        found = [b for b in sorted(fillers.union(points)) if span.start < b <= span.end]
        # Behind the prompt: counted from its deepest checkpoint.
        deepest = max(points, default=path.resumed)
        every = page if self._has_room(path) else self.output_every * page
        output = max(span.start, page_floor(path.prompt, page))
        return found + [b for b in boundaries(output, span.end, page) if (b - deepest) % every == 0]

    def fillers(self, path: Path) -> set[int]:
        if not self._has_room(path):
            return set()
        tail = page_floor(path.prompt, self.page_size)
        grid = boundaries(path.resumed, tail, path.grid * self.page_size)
        return set(grid).difference(self._points(path))

    def output_tails(self, path: Path) -> int:
        # What captures every page, or a grid alone, must not hit less than that grid's own policy.
        return 2 if path.alone or path.grid == 1 else 1

    def _has_room(self, path: Path) -> bool:
        return self.fills and path.grid > 0

    def _points(self, path: Path) -> list[int]:
        """Boundaries of the prompt that are likely to be of use, ascending."""
        page, tail = self.page_size, page_floor(path.prompt, self.page_size)
        found = set()
        if self.branch and path.matched > path.resumed:
            found.add(page_floor(path.matched, page))
        known, back = max(found, default=path.resumed), self.spacing * page
        while back and tail - back > known:
            found.add(tail - back)
            back *= 4
        for boundary in sorted({page_floor(max(path.prompt - self.spare, 0), page), tail}):
            below = max((b for b in found if b < boundary), default=path.resumed)
            saves = max(self.least * page, self.share and boundary / self.share)
            if boundary - below >= (page if self._has_room(path) else saves):
                found.add(boundary)
        return sorted(found)


SPACING, LEAST, SHARE, OUTPUT_EVERY = 64, 2, 32, 2
"""Pages, pages, a ratio and pages: chosen on traces (docs/placement.md)."""
PAGES_PER_RECORD = 16
"""Host pages for which the default budget holds one record."""
FEWEST_RECORDS = 64
"""Records of the default budget, where there are as many pages."""
POLICIES = ("combined", "sparse", "grid", "tails", "branch", "spaced")


def policy_of(name: str, *, page_size: int, spare: int = 1, stride: int = 1) -> PlacementPolicy:
    """The policy that an operator names.

    Args:
        name: one of :data:`POLICIES`.
        page_size: tokens per page.
        spare: as :class:`Sparse`.
        stride: of the grid.
    """
    if name == "grid":
        return Grid(page_size, stride)
    if name == "tails":
        return Sparse(page_size, spare)
    if name == "branch":
        return Sparse(page_size, spare, branch=True)
    if name == "spaced":
        return Sparse(page_size, spare, branch=True, spacing=SPACING)
    if name not in POLICIES:
        raise ValueError(f"no placement policy is called {name!r}, only {', '.join(POLICIES)}")
    return Sparse(
        page_size,
        spare,
        branch=True,
        spacing=SPACING,
        least=LEAST,
        share=SHARE,
        output_every=OUTPUT_EVERY,
        fills=name == "combined",
    )

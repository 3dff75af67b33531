"""Which boundaries of a request deserve a checkpoint. Pure functions of scheduler state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .geometry import boundaries


@dataclass(frozen=True)
class Span:
    """Tokens ``[start, end)`` that one forward computes for one request.

    Attributes:
        start: first position computed.
        end: one past the last position computed.
    """

    start: int
    end: int


class PlacementPolicy(Protocol):
    """Chooses boundaries. Must be deterministic: every rank asks it and must get the same answer."""

    def boundaries(self, span: Span) -> list[int]:
        """Boundaries in ``(span.start, span.end]`` to capture, ascending."""
        ...


@dataclass(frozen=True)
class Grid:
    """A checkpoint at every ``stride``-th page boundary.

    Attributes:
        page_size: tokens per page.
        stride: pages between checkpoints, at least 1.

    >>> Grid(page_size=256, stride=2).boundaries(Span(0, 1100))
    [512, 1024]
    """

    page_size: int
    stride: int

    def boundaries(self, span: Span) -> list[int]:
        return boundaries(span.start, span.end, self.stride * self.page_size)

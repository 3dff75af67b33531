"""How many device rows a request needs, and who has been promised some. No torch.

A row is one compressed C4 position, four tokens. A request is promised the device rows of its whole life when
it is admitted: those of its prompt while it is computed, which shrink to the hot buffer before the first
decode step. So no later allocation of an admitted request can fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

RATIO = 4
"""Tokens of one C4 row."""
LARGEST_BUFFER = 32704
"""Hot rows that the int16 slot numbers of the LRU order can name, in whole pages."""


def region_rows(full_tokens: int, ratio: int, page: int) -> int:
    """Device rows of the C4 region of each layer, in whole pages of ``page`` rows.

    Args:
        full_tokens: logical tokens of the pool.
        ratio: ``host_to_device_ratio``, tokens on the host for each on the device.

    Raises:
        ValueError: the ratio is no integer of at least 1.

    >>> region_rows(full_tokens=65536, ratio=4, page=64)
    4096
    """
    if not isinstance(ratio, int) or ratio < 1:
        raise ValueError(
            f"--hisparse-config host_to_device_ratio={ratio!r}: it must be an integer of at least 1"
        )
    return full_tokens // (RATIO * ratio) // page * page


@dataclass(frozen=True)
class HotBuffer:
    """The device rows that a request keeps while it decodes.

    Attributes:
        rows: rows that are hot, ``device_buffer_size``.
        page: rows of a page; one page more holds the newest row.

    Raises:
        ValueError: the buffer is no whole number of pages, or too large.
    """

    rows: int
    page: int

    def __post_init__(self) -> None:
        found = f"--hisparse-config device_buffer_size={self.rows}"
        if self.rows < 1 or self.rows % self.page:
            raise ValueError(f"{found}: it must be a multiple of {self.page} rows")
        if self.rows > LARGEST_BUFFER:
            raise ValueError(f"{found}: it must be at most {LARGEST_BUFFER}")

    @property
    def padded(self) -> int:
        """Rows of the buffer with the page of the newest row."""
        return self.rows + self.page

    def of_tokens(self, tokens: int) -> int:
        """Rows of a sequence of ``tokens`` that lies on the device as a whole, in whole pages."""
        return -(-(tokens // RATIO) // self.page) * self.page

    def of_life(self, prompt_tokens: int) -> int:
        """Rows that a request holds at most, from its admission to its end.

        >>> HotBuffer(rows=512, page=64).of_life(300)
        576
        >>> HotBuffer(rows=512, page=64).of_life(2400)
        640
        """
        return max(self.of_tokens(prompt_tokens), self.padded)

    def of_decode(self, prompt_tokens: int) -> int:
        """Rows that a request keeps once its prompt is computed.

        The newest row stays in the last page of a longer prompt, and that page with it.

        >>> HotBuffer(rows=512, page=64).of_decode(300)
        576
        >>> HotBuffer(rows=512, page=64).of_decode(50000)
        640
        """
        return min(self.of_life(prompt_tokens), self.padded + self.page)

    def require(self, top_k: int) -> None:
        """
        Raises:
            ValueError: a decode step reads more rows than are hot.
        """
        if self.rows < top_k:
            raise ValueError(
                f"--hisparse-config device_buffer_size={self.rows}: a decode step of this model reads "
                f"index_topk={top_k} rows; set it to at least that"
            )

    def longest_prompt(self, region: int) -> int:
        """Tokens of the longest prompt that ``region`` rows hold; 0 if they hold no buffer."""
        return region // self.page * self.page * RATIO + RATIO - 1 if region >= self.padded else 0


class Prefill(NamedTuple):
    """A request between its admission and its hot buffer.

    Attributes:
        tokens: of its whole prompt, with the output that a retracted request computes again.
        allocated: tokens of it that have their rows.
    """

    tokens: int
    allocated: int


class Promises:
    """Device rows that may still be promised.

    Args:
        buffer: of every request.
        region: rows of the region.
        free: rows that nobody owns.
    """

    def __init__(self, buffer: HotBuffer, region: int, free: Callable[[], int]):
        self.buffer = buffer
        self.region = region
        self.free = free
        self.prefills: Callable[[], Iterable[Prefill]] = tuple
        """Who holds a promise; the scheduler's own state, so that nothing can be forgotten."""

    def outstanding(self) -> int:
        """Rows that are promised and not yet allocated."""
        of = self.buffer
        return sum(
            max(of.of_life(p.tokens) - of.of_tokens(p.allocated), 0) for p in self.prefills()
        )

    def left(self) -> int:
        """Rows that the next request may be promised."""
        return self.free() - self.outstanding()

    @property
    def longest_sequence(self) -> int:
        """Tokens that a request may grow to: it must fit as a prompt again after a retraction."""
        return self.buffer.longest_prompt(self.region)

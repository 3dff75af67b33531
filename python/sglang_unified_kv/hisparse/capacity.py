"""The operator's figures of HiSparse: what the device rows admit, what the host has to hold. One rank."""

from __future__ import annotations

from dataclasses import dataclass

from .rows import RATIO, HotBuffer


def cold_pages(full_tokens: int, page: int) -> int:
    """Host pages of ``page`` rows that hold the C4 row of every logical token."""
    return -(-full_tokens // (RATIO * page))


def tokens_on_host(free: int, page_bytes: int, page: int) -> int:
    """Logical tokens whose C4 rows ``free`` host bytes hold; ``page_bytes`` of all layers."""
    return max(free // page_bytes, 0) * RATIO * page


@dataclass(frozen=True)
class HiSparseSizes:
    """Capacities and bytes, from the functions that size the real pools.

    Attributes:
        ratio: ``host_to_device_ratio``.
        buffer: hot buffer of a request.
        rows: device C4 rows of each layer.
        tables: device bytes of the tables that do not grow with the logical tokens.
        cold_page: host bytes of a page of 256 tokens, all C4 layers.
        cold_pages: pages of the cold pool.
        context: tokens that the model allows.
    """

    ratio: int
    buffer: HotBuffer
    rows: int
    tables: int
    cold_page: int
    cold_pages: int
    context: int

    @property
    def cold_bytes(self) -> int:
        return self.cold_page * self.cold_pages

    @property
    def longest_sequence(self) -> int:
        """Tokens, by the device rows alone; the model may allow fewer."""
        return self.buffer.longest_prompt(self.rows)

    def hot_buffers(self, prompt_tokens: int) -> int:
        """Requests that have been computed and decode, by the rows that they keep."""
        return self.rows // self.buffer.of_decode(prompt_tokens)

    def prefills(self, prompt_tokens: int) -> int:
        """Requests that are computed at once, with all their rows on the device."""
        return self.rows // self.buffer.of_life(prompt_tokens)

    def running(self, prompt_tokens: int) -> int:
        """Requests that run at once: the last one is computed beside the others' hot buffers.

        >>> HiSparseSizes(3, HotBuffer(640, 64), 2176, 0, 0, 0, 10240).running(5888)
        1
        """
        spare = self.rows - self.buffer.of_life(prompt_tokens)
        return spare // self.buffer.of_decode(prompt_tokens) + 1 if spare >= 0 else 0

    def figures(self, prompt_tokens: int) -> dict[str, int]:
        """What follows from the sizes, for requests of ``prompt_tokens``."""
        return {
            "cold_bytes": self.cold_bytes,
            "hot_buffer_rows": self.buffer.padded,
            "longest_sequence": self.longest_sequence,
            "hot_buffers": self.hot_buffers(prompt_tokens),
            "prefills": self.prefills(prompt_tokens),
        }

    @property
    def _lower(self) -> str:
        return "host_to_device_ratio or device_buffer_size of --hisparse-config"

    def refusals(self, host_bytes: int) -> list[str]:
        """Why the start would be refused, and what to change.

        Args:
            host_bytes: that the rank may pin.
        """
        found: list[str] = []
        if self.cold_bytes > host_bytes:
            fitting = tokens_on_host(host_bytes, self.cold_page, self.buffer.page)
            found.append(
                f"HiSparse keeps all C4 rows on the host, {self.cold_bytes / 1e9:.1f} GB of the rank's "
                f"{host_bytes / 1e9:.1f} GB, and the start would be refused; set --max-total-tokens to at "
                f"most {fitting}"
            )
        if self.rows < self.buffer.padded:
            found.append(
                f"the device holds {self.rows:,} C4 rows, one hot buffer is {self.buffer.padded:,}, and the "
                f"start would be refused; lower {self._lower}"
            )
        return found

    def warnings(self, requests: int) -> list[str]:
        """What an operator should change although it would start.

        Args:
            requests: that may run.
        """
        found: list[str] = []
        if self.rows < self.buffer.padded:
            return found
        if (held := self.rows // self.buffer.padded) < requests:
            found.append(
                f"{requests} requests may run, but the device's {self.rows:,} C4 rows are {held} hot buffers "
                f"of {self.buffer.padded:,}; the rest will wait. Lower {self._lower}, or "
                "--max-running-requests"
            )
        if self.longest_sequence < self.context:
            found.append(
                f"the model allows {self.context:,} tokens, but a sequence may grow to "
                f"{self.longest_sequence:,}, and longer prompts are refused; lower host_to_device_ratio of "
                "--hisparse-config"
            )
        return found

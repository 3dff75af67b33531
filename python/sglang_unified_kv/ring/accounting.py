"""What the ring costs and who pays: a request takes one ring at admission and nothing after it."""

from __future__ import annotations

from dataclasses import dataclass

DOMINANT_SHARE = 0.1
"""Share of the KV memory from which rings and states that nobody asked for are worth a warning."""


def prealloc_budget(free_tokens: int, ring_cost: int, retracted: int) -> int:
    """Ring tokens that a decode node may still promise to requests of its prefill nodes.

    Args:
        free_tokens: free request slots times ``ring_cost``.
        ring_cost: tokens that SGLang counts for one ring.
        retracted: requests that wait to come back; each takes a slot before any other.
    """
    return free_tokens - retracted * ring_cost


@dataclass(frozen=True)
class SlotBytes:
    """Device bytes that ``slots`` request slots take before a single token is cached.

    Attributes:
        slots: request slots of a rank.
        fixed: bytes of their rings and compressor states.
        available: bytes for all KV pools.
        per_token: bytes of one cached token.
    """

    slots: int
    fixed: int
    available: int
    per_token: float

    @property
    def dominant(self) -> bool:
        return self.fixed > DOMINANT_SHARE * self.available

    def warning(self) -> str:
        """For an operator who left ``--max-running-requests`` unset."""
        return (
            f"--max-running-requests is unset, so SGLang reserves {self.slots} request slots: their window "
            f"rings and compressor states take {self.fixed / 1e9:.2f} GB of {self.available / 1e9:.2f} GB "
            f"({self.fixed / self.available:.0%}), the room of {int(self.fixed / self.per_token):,} cached "
            f"tokens. Each slot costs {self.fixed / self.slots / 1e6:.2f} MB; set --max-running-requests to "
            "what you serve."
        )

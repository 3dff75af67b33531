"""What a placement policy is told of a request, and what the store: once for the engine and its simulator."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from .density import Density
from .duel import Duel
from .policy import Path, PlacementPolicy
from .store import CheckpointStore


class Placement:
    """A policy, and what it learns from requests if it :attr:`~.policy.PlacementPolicy.fills`.

    Args:
        policy: chooses boundaries.
        store: is told how to evict.
    """

    def __init__(self, policy: PlacementPolicy, store: CheckpointStore):
        self.policy = policy
        self.density = Density(store.capacity, store.page_size)
        self._duel = Duel(policy, store.capacity)
        self._store = store

    def clear(self) -> None:
        """Forget everything, with the store."""
        self.density.clear()
        self._duel.clear()

    def admit(self, chain: Sequence[str | int], resumed: int, matched: int, prompt: int) -> Path:
        """A request gets a row.

        Args:
            chain: page hashes of the prompt, at least of what was matched.
            resumed, matched, prompt: tokens, as :class:`~.policy.Path`.
        """
        path = Path(resumed, matched, prompt)
        if not self.policy.fills:
            return path
        known = min(prompt - 1, len(chain) * self._store.page_size)
        path = replace(path, known=known)
        grid = self.density.admit(chain, resumed, matched, prompt)
        worth = self._store.filler_worth = self.density.worth
        alone = self._store.stride = self._duel.admit(chain, path, worth)
        return replace(path, grid=alone or grid, alone=alone > 0)

    def commit(
        self, chain: Sequence[str | int], path: Path, length: int, ready: Sequence[int]
    ) -> Collection[int]:
        """The tree holds ``length`` tokens of a request, captures at ``ready`` become records.

        Returns those that are captured only because there is room.
        """
        if not self.policy.fills:
            return ()
        fillers = self.policy.fillers(path)
        for boundary in ready:
            key = chain[boundary // self._store.page_size - 1]
            self.density.publish(key, filler=boundary in fillers)
        self._duel.commit(chain, path, length)
        return fillers

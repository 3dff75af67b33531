"""What a placement that decides from what it can see could do, at best: an upper bound for all such policies.

When a page is computed for the first time a policy sees the request and how far the tree knew it, and not
who will come. Boundaries that look alike to it form a *class*. The bound holds for every policy that captures
each boundary of a class with one probability, 0 or 1 or between, drawn in any way that does not know the
future, whatever the probabilities: they may even be chosen when the trace is known. Captures at pages that
the tree held already are granted on top of that with full knowledge of the future. Nothing is ever evicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from .bound import matches, useful_pages
from .trace import PAGE, Request

Observe = Callable[[Request, int, int], Hashable]
"""``(request, pages that the tree held, boundary in pages)`` to the class of a boundary."""

EXACT, SINGLE = 16, (64, 256, 1024)
"""Distances from the prompt's tail, in pages, that are classes of their own; others by bit length."""


def coarse(request: Request, matched: int, boundary: int) -> Hashable:
    """By the distance from the prompt's tail, or how far into the output."""
    back = request.prompt // PAGE - boundary
    if back < 0:
        return "output", min(-back, 4)
    return "prompt", back if back < EXACT or back in SINGLE else EXACT + back.bit_length()


def middle(request: Request, matched: int, boundary: int) -> Hashable:
    """And by whether it is a later turn, and how much of the prompt is new."""
    new = max(request.prompt // PAGE - matched, 0)
    return coarse(request, matched, boundary), matched > 2, new.bit_length()


def fine(request: Request, matched: int, boundary: int) -> Hashable:
    """And by how much the tree held, and whether the boundary is odd: blocks of a trace have two pages."""
    return middle(request, matched, boundary), matched.bit_length(), boundary % 2


OBSERVATIONS: dict[str, Observe] = {"coarse": coarse, "middle": middle, "fine": fine}


@dataclass(frozen=True)
class _Options:
    """Boundaries at which requests could be hit, those of one request together, deepest first.

    Attributes:
        first: index of each request's first option.
        depth: pages, by option.
        choice: class or single page that would have to be captured, by option.
        cost: captures, by choice.
    """

    first: np.ndarray
    depth: np.ndarray
    choice: np.ndarray
    cost: np.ndarray


def _options(requests: Sequence[Request], observe: Observe) -> _Options:
    # A capture on a known path is of most use where a prompt leaves it or paths part.
    useful = useful_pages(requests)
    choices: dict[Hashable, int] = {}
    class_of: dict[int, int] = {}
    cost: Counter[int] = Counter()
    passes: Counter[int] = Counter()
    first: list[int] = []
    depth: list[int] = []
    choice: list[int] = []
    for request, matched in zip(requests, matches(requests), strict=True):
        if matched:
            first.append(len(depth))
        for boundary in range(matched, 0, -1):
            page = request.pages[boundary - 1]
            depth.append(boundary)
            choice.append(class_of[page])
            if page in useful and passes[page] > 1:
                # The second to pass may have captured it.
                single = choices.setdefault(("page", page), len(choices))
                cost[single] = 1
                depth.append(boundary)
                choice.append(single)
        for boundary, page in enumerate(request.pages, 1):
            if page not in class_of:
                seen = ("class", observe(request, matched, boundary))
                class_of[page] = choices.setdefault(seen, len(choices))
                cost[class_of[page]] += 1
        passes.update(request.pages)
    costs = [cost[i] for i in range(len(choices))]
    return _Options(*map(np.array, (first, depth, choice, costs)))


def most_hits_by_class(
    requests: Sequence[Request],
    captures: Sequence[float],
    observe: Observe,
    *,
    rounds: int = 800,
) -> list[float]:
    """Pages that no policy of the module's kind hits more than, for each number of captures.

    Let ``x`` be the part of each class that is captured. A request is hit at a given boundary at most with
    that boundary's ``x``, and at one boundary at most, so that for any price ``p`` of the request it expects
    at most ``p + sum(x * max(depth - p, 0))`` pages over its options. The sum of that over requests is linear
    in ``x``: the best ``x`` that the captures allow fills a fractional knapsack, and any prices give a bound.
    Good ones come from playing ``x`` (gradient steps) against prices (best answers).

    Args:
        captures: numbers of captures, each at least 0.
        observe: the class of a boundary.
        rounds: steps.
    """
    options = _options(requests, observe)
    if not len(options.first):
        return [0.0] * len(captures)
    return [_Game(options, limit).play(rounds) for limit in captures]


class _Game:
    def __init__(self, options: _Options, limit: float):
        self.options, self.limit = options, limit
        lengths = np.diff(np.r_[options.first, len(options.depth)])
        self.owner = np.repeat(np.arange(len(options.first)), lengths)

    def play(self, rounds: int) -> float:
        cost, total = self.options.cost, len(self.options.first)
        taken = np.full(len(cost), min(1.0, self.limit / cost.sum()))
        mean, squares, best = np.zeros(total), np.zeros(len(cost)), np.inf
        for step in range(1, rounds + 1):
            prices = self._answer(taken)
            bound, gain = self._bound(prices)
            mean += (prices - mean) * 2 / (step + 1)
            best = min(best, bound)
            if step % 10 == 0 or step == rounds:
                best = min(best, self._bound(mean)[0])
            squares += (gain / cost) ** 2
            scale = 0.5 / np.sqrt(squares + 1e-9)
            taken = self._afford(taken + scale * gain / cost, scale)
        return float(best)

    def _answer(self, taken: np.ndarray) -> np.ndarray:
        """Best prices: the depth down to which a request's options add up to certainty."""
        first, part = self.options.first, taken[self.options.choice]
        sums = np.cumsum(part)
        sums -= np.r_[0, sums[first[1:] - 1]][self.owner]
        certain = np.flatnonzero(sums >= 1 - 1e-12)
        owners, index = np.unique(self.owner[certain], return_index=True)
        prices = np.zeros(len(first))
        prices[owners] = self.options.depth[certain[index]]
        return prices

    def _bound(self, prices: np.ndarray) -> tuple[float, np.ndarray]:
        """The bound at these prices, and what each choice adds to it if it is taken."""
        options = self.options
        excess = np.maximum(options.depth - prices[self.owner], 0)
        gain = np.bincount(options.choice, excess, len(options.cost))
        order = np.argsort(-gain / options.cost)
        cost = options.cost[order]
        part = np.clip((self.limit - np.cumsum(cost) + cost) / cost, 0, 1)
        return float(prices.sum() + gain[order] @ part), gain

    def _afford(self, wanted: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """The nearest parts between 0 and 1 that the captures allow, in the metric of ``scale``."""
        low, high = 0.0, float((wanted / scale).max())
        for _ in range(40):
            price = (low + high) / 2
            spent = np.clip(wanted - price * scale, 0, 1) @ self.options.cost
            low, high = (price, high) if spent > self.limit else (low, price)
        return np.clip(wanted - high * scale, 0, 1)

"""What a placement that knew the future could do: upper bounds on hits, so that a policy can be judged.

Both bounds are Lagrangian: each price gives one, whatever the price is, and the best of those tried counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .trace import PAGE, Request


def matches(requests: Sequence[Request]) -> list[int]:
    """Pages of each prompt that a cache which never evicts holds when it arrives."""
    seen: set[int] = set()
    found = []
    for request in requests:
        limit = min((request.prompt - 1) // PAGE, len(request.pages))
        found.append(next((i for i in range(limit) if request.pages[i] not in seen), max(limit, 0)))
        seen.update(request.pages)
    return found


@dataclass
class _Node:
    """A place where a checkpoint may be of use: ``depth`` pages, left or ended at by ``visits`` prompts."""

    depth: int
    visits: int
    children: list[int]


class Corner(NamedTuple):
    """The best placement at a price per capture: no other has more ``hits - price * captures``."""

    price: float
    captures: int
    hits: int


def hits_by_captures(requests: Sequence[Request]) -> list[Corner]:
    """The best placements without a memory limit, hits in pages, captures ascending.

    Only boundaries where a prompt leaves a known path or two paths part can matter. With a price per capture
    the best choice among them is found on their tree, for a ladder of prices.
    """
    nodes = _tree(requests)
    total = sum(node.depth * node.visits for node in nodes)
    corners, price = [], float(max(total, 1))
    while price > 0.5:
        corners.append(Corner(price, *_best(nodes, price)))
        price /= 1.25
    return corners


def useful_pages(requests: Sequence[Request]) -> dict[int, int]:
    """Pages at whose end a checkpoint can be of use, and the prompts that leave a known path there.

    These are the ends of what the tree held of a prompt, and where paths part: from any other page a
    checkpoint can be moved down the path without a loss.
    """
    visits: dict[int, int] = {}
    behind: dict[int, int] = {}
    for request, match in zip(requests, matches(requests), strict=True):
        if match:
            page = request.pages[match - 1]
            visits[page] = visits.get(page, 0) + 1
        for page, after in zip(request.pages, request.pages[1:], strict=False):
            if behind.setdefault(page, after) != after:
                visits.setdefault(page, 0)
    return visits


def _tree(requests: Sequence[Request]) -> list[_Node]:
    visits = useful_pages(requests)
    nodes = [_Node(0, 0, [])]
    index: dict[int, int] = {}
    for request in requests:
        above = 0
        for depth, page in enumerate(request.pages, 1):
            if page not in visits:
                continue
            if page not in index:
                index[page] = len(nodes)
                nodes[above].children.append(len(nodes))
                nodes.append(_Node(depth, visits[page], []))
            above = index[page]
    return nodes


def _best(nodes: list[_Node], price: float) -> tuple[int, int]:
    """Captures and hit pages of the placement with the most hits less ``price`` per capture."""
    # By node: best (value, captures, hits) below it for each depth of the deepest checkpoint above.
    above: list[list[int]] = [[0]] + [[] for _ in nodes[1:]]
    order = [0]
    for i in order:
        for child in nodes[i].children:
            above[child] = [*above[i], nodes[i].depth] if i else above[i]
            order.append(child)
    best: list[dict[int, tuple[float, int, int]]] = [{} for _ in nodes]
    for i in reversed(order):
        node = nodes[i]

        def below(depth: int, node=node) -> tuple[float, int, int]:
            parts = [best[child][depth] for child in node.children]
            hits = node.visits * depth
            return (
                hits + sum(p[0] for p in parts),
                sum(p[1] for p in parts),
                hits + sum(p[2] for p in parts),
            )

        taken = None
        if i:
            value, captures, hits = below(node.depth)
            taken = (value - price, captures + 1, hits)
        for depth in above[i]:
            left = below(depth)
            best[i][depth] = max(left, taken) if taken is not None else left
        for child in node.children:
            best[child].clear()
    _, captures, hits = best[0][0]
    return captures, hits


def fewest_captures(corners: Sequence[Corner], hits: float) -> float:
    """Captures below which no placement hits that many pages, from :func:`hits_by_captures`."""
    return max((hits - c.hits) / c.price + c.captures for c in corners)


def _options(requests: Sequence[Request], limits: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """``(request, last pass before it, pages)`` of each boundary that is worth considering for a hit.

    To be hit at a boundary a request needs a record that was there since the last request passed it.
    """
    last: dict[int, int] = {}
    for now, (request, limit) in enumerate(zip(requests, limits, strict=True)):
        deepest: dict[int, int] = {}
        for depth, page in enumerate(request.pages[:limit], 1):
            # Passes get older with depth: of those with the same one the deepest counts.
            deepest[last[page]] = depth
        yield from ((now, passed, depth) for passed, depth in deepest.items())
        last.update(dict.fromkeys(request.pages, now))


def most_hits(
    requests: Sequence[Request],
    records: Sequence[int],
    limits: Sequence[int] | None = None,
    *,
    spans: int = 256,
    rounds: int = 200,
) -> list[int]:
    """Pages that no placement and no eviction hit more than, for each number of records.

    A hit occupies a record from the last pass over its boundary to the hit, and at no time are there more
    than the store holds. Prices of a record over time, found by subgradient steps, bound the hits from above.

    Args:
        records: capacities of the store.
        limits: pages of each prompt that the tree holds; as :func:`matches` unless given.
        spans: pieces of time with a price of their own.
        rounds: steps.
    """
    limits = matches(requests) if limits is None else limits
    options = list(_options(requests, limits))
    if not options:
        return [0] * len(records)
    now, passed, pages = (np.array(column) for column in zip(*options, strict=True))
    first = np.flatnonzero(np.r_[True, now[1:] != now[:-1]])
    edges = np.linspace(0, len(requests), min(spans, len(requests)) + 1)
    lengths, ideal = np.diff(edges), sum(limits)
    bounds = []
    for capacity in records:
        # Start from the best price that is the same all the time.
        candidates = [np.full(len(lengths), p) for p in [0.0, *np.geomspace(1e-4, 1e3, 60)]]
        values = [_dual(c, edges, lengths, now, passed, pages, first, capacity) for c in candidates]
        best, gradient = min(values, key=lambda v: v[0])
        price = candidates[[v[0] for v in values].index(best)]
        for step in range(1, rounds + 1):
            scale = 0.05 * best / max(float(gradient @ gradient), 1e-9) / step**0.5
            price = np.maximum(price - scale * gradient, 0)
            value, gradient = _dual(price, edges, lengths, now, passed, pages, first, capacity)
            best = min(best, value)
        bounds.append(min(int(best), ideal))
    return bounds


def _dual(price, edges, lengths, now, passed, pages, first, capacity):
    """The bound at a price per record and unit of time, and its gradient."""
    paid = np.r_[0, np.cumsum(price * lengths)]
    gain = pages - np.interp(now, edges, paid) + np.interp(passed, edges, paid)
    most = np.maximum.reduceat(gain, first)
    # The option that each request takes, if any is worth its price.
    group = np.repeat(np.arange(len(first)), np.diff(np.r_[first, len(gain)]))
    taken = np.flatnonzero((gain == most[group]) & (gain > 0))
    taken = taken[np.unique(group[taken], return_index=True)[1]]
    starts, ends = passed[taken], now[taken]
    # Records held over each piece of time, times its length.
    held = np.zeros(len(lengths))
    for piece, (low, high) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
        held[piece] = np.maximum(np.minimum(ends, high) - np.maximum(starts, low), 0).sum()
    value = capacity * float(price @ lengths) + float(np.maximum(most, 0).sum())
    return value, capacity * lengths - held

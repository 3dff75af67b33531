"""PromQL over made-up series: the few operators that the alert rules use, for where there is no promtool.

``promtool`` judges the same file where it is installed (test_alerts.py), so this need not be trusted alone.
Increases are not extrapolated to the ends of their window: what is compared is whether one is above 0, and
ratios of rates over the same window.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import promql_parser as promql

STALE_S = 300.0
"""How long a sample answers an instant query."""

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]


class Series(NamedTuple):
    """Samples of one series: ``(seconds, value)``, ascending; ``labels`` without the name."""

    name: str
    labels: Labels
    samples: Sequence[tuple[float, float]]


_BINARY: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda a, b: a / b if b else (math.nan if a == 0 or a != a else math.inf),
}
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}
_AGGREGATE: dict[str, Callable[[list[float]], float]] = {
    "sum": sum,
    "max": max,
    "min": min,
    "count": lambda values: float(len(values)),
}
_MATCH: dict[str, Callable[[str, str], bool]] = {
    "Equal": operator.eq,
    "NotEqual": operator.ne,
    "Re": lambda found, wanted: re.fullmatch(wanted, found) is not None,
    "NotRe": lambda found, wanted: re.fullmatch(wanted, found) is None,
}


def evaluate(expr: str, series: Sequence[Series], at: float) -> Vector:
    """The vector that ``expr`` is at ``at`` seconds.

    Raises:
        ValueError: it is not PromQL.
        NotImplementedError: it uses what is not here.
    """
    value = _value(promql.parse(expr), series, at)
    if isinstance(value, float):
        return {frozenset(): value}
    return value


def _value(node: Any, series: Sequence[Series], at: float) -> Vector | float:
    if isinstance(node, promql.NumberLiteral):
        return float(node.val)
    if isinstance(node, promql.ParenExpr):
        return _value(node.expr, series, at)
    if isinstance(node, promql.VectorSelector):
        found = {}
        for one in _selected(node, series):
            last = [v for t, v in one.samples if at - STALE_S < t <= at][-1:]
            if last:
                found[one.labels | {("__name__", one.name)}] = last[0]
        return found
    if isinstance(node, promql.Call):
        return _increases(node, series, at)
    if isinstance(node, promql.AggregateExpr):
        return _aggregate(node, _value(node.expr, series, at))
    if isinstance(node, promql.BinaryExpr):
        return _binary(node, _value(node.lhs, series, at), _value(node.rhs, series, at))
    raise NotImplementedError(f"{node}: {type(node).__name__}")


def _selected(node: Any, series: Sequence[Series]) -> Iterator[Series]:
    for one in series:
        labels = dict(one.labels)
        if one.name == node.name and all(
            _MATCH[str(m.op).removeprefix("MatchOp.")](labels.get(m.name, ""), m.value)
            for m in node.matchers.matchers
        ):
            yield one


def _increases(node: Any, series: Sequence[Series], at: float) -> Vector:
    if node.func.name not in ("rate", "increase"):
        raise NotImplementedError(node.func.name)
    (window,) = node.args
    seconds = window.range.total_seconds()
    found = {}
    for one in _selected(window.vector_selector, series):
        values = [v for t, v in one.samples if at - seconds < t <= at]
        if len(values) < 2:
            continue
        # A counter that fell began again at 0.
        grown = sum(b - a if b >= a else b for a, b in zip(values, values[1:], strict=False))
        found[one.labels] = grown / seconds if node.func.name == "rate" else grown
    return found


def _kept(labels: Labels, modifier: Any) -> Labels:
    """``labels`` as ``by``, ``without``, ``on`` or ``ignoring`` of ``modifier`` leave them."""
    plain = frozenset(pair for pair in labels if pair[0] != "__name__")
    if modifier is None:
        return plain
    names, kind = set(modifier.labels), str(modifier.type).rpartition(".")[2]
    if kind in ("By", "Include"):
        return frozenset(pair for pair in plain if pair[0] in names)
    if kind in ("Without", "Exclude"):
        return frozenset(pair for pair in plain if pair[0] not in names)
    raise NotImplementedError(kind)


def _aggregate(node: Any, vector: Vector | float) -> Vector:
    assert isinstance(vector, dict), node
    groups: dict[Labels, list[float]] = {}
    for labels, value in vector.items():
        # Without a modifier everything is one group.
        kept = frozenset() if node.modifier is None else _kept(labels, node.modifier)
        groups.setdefault(kept, []).append(value)
    reduce = _AGGREGATE.get(str(node.op))
    if reduce is None:
        raise NotImplementedError(node.op)
    return {labels: reduce(values) for labels, values in groups.items()}


def _binary(node: Any, left: Vector | float, right: Vector | float) -> Vector | float:
    op, matching = str(node.op), node.modifier.matching if node.modifier is not None else None
    if op in ("and", "or", "unless"):
        assert isinstance(left, dict) and isinstance(right, dict), node
        there = {_kept(labels, matching) for labels in right}
        if op == "or":
            mine = {_kept(labels, matching) for labels in left}
            return left | {k: v for k, v in right.items() if _kept(k, matching) not in mine}
        return {k: v for k, v in left.items() if (_kept(k, matching) in there) == (op == "and")}
    if op not in _BINARY and op not in _COMPARE:
        raise NotImplementedError(op)
    if isinstance(left, float) and isinstance(right, float):
        return _BINARY[op](left, right)
    found: Vector = {}
    for labels, mine, other in _pairs(left, right, matching):
        if op in _BINARY:
            found[_kept(labels, matching)] = _BINARY[op](mine, other)
        elif _COMPARE[op](mine, other):
            # A vector that is compared keeps its own values, names and labels.
            found[labels] = mine if isinstance(left, dict) else other
    return found


def _pairs(
    left: Vector | float, right: Vector | float, matching: Any
) -> Iterator[tuple[Labels, float, float]]:
    if isinstance(right, float):
        assert isinstance(left, dict)
        yield from ((labels, value, right) for labels, value in left.items())
    elif isinstance(left, float):
        yield from ((labels, left, value) for labels, value in right.items())
    else:
        others: dict[Labels, float] = {}
        for labels, value in right.items():
            key = _kept(labels, matching)
            assert key not in others, f"many-to-many: {sorted(key)}"
            others[key] = value
        for labels, value in left.items():
            if (key := _kept(labels, matching)) in others:
                yield labels, value, others[key]


# -- rules and their tests, as promtool has them

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds_of(duration: str | int) -> float:
    """
    >>> seconds_of("1h30m")
    5400.0
    """
    parts = re.findall(r"(\d+)([smhd])", str(duration))
    assert "".join(n + u for n, u in parts) == str(duration) or str(duration) == "0", duration
    return float(sum(int(number) * _UNITS[unit] for number, unit in parts))


def series_of(selector: str, values: str, interval: float) -> Series:
    """An entry of ``input_series``: numbers, ``axn`` repeats, ``a+bxn`` grows, ``_`` is no sample."""
    node = promql.parse(selector)
    labels = frozenset((m.name, m.value) for m in node.matchers.matchers)
    samples: list[tuple[float, float]] = []
    number = 0
    for word in values.split():
        made = re.fullmatch(r"(_|-?[\d.]+)(?:([+-])([\d.]+))?(?:x(\d+))?", word)
        assert made, word
        first, sign, step, times = made.groups()
        for i in range(int(times) + 1 if times and first != "_" else int(times or 1)):
            if first != "_":
                grown = float(step or 0) * i * (-1 if sign == "-" else 1)
                samples.append((number * interval, float(first) + grown))
            number += 1
    return Series(node.name, labels, samples)


def firing(
    rules: Sequence[Mapping[str, Any]], series: Sequence[Series], until: float, interval: float
) -> Vector:
    """What the query ``ALERTS{alertstate="firing"}`` answers at ``until``, rules run every ``interval``."""
    since: dict[tuple[str, Labels], float] = {}
    fires: Vector = {}
    for step in range(int(until // interval) + 1):
        at, active, fires = step * interval, {}, {}
        for rule in rules:
            for labels in evaluate(rule["expr"], series, at):
                plain = frozenset(pair for pair in labels if pair[0] != "__name__")
                key = (rule["alert"], plain)
                active[key] = since.get(key, at)
                if at - active[key] >= seconds_of(rule.get("for", 0)):
                    more = {"alertname": rule["alert"], "alertstate": "firing", **rule["labels"]}
                    fires[plain | {("__name__", "ALERTS")} | set(more.items())] = 1.0
        since = active
    return fires

"""The Grafana dashboard's queries, and what they ask for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import promql_parser

FILE = Path(__file__).parents[2] / "docs" / "grafana" / "unified_kv.json"
VARIABLES = {"$__rate_interval": "1m", "$model_name": "tiny"}


class Query(NamedTuple):
    """One line of a panel.

    Attributes:
        panel: its title.
        expr: PromQL, with the dashboard's variables put in.
        legend: labels that the legend shows.
    """

    panel: str
    expr: str
    legend: tuple[str, ...]


class Selector(NamedTuple):
    """A metric that a query reads, with every label that is matched or grouped by."""

    name: str
    labels: frozenset[str]
    values: dict[str, str]


def queries() -> list[Query]:
    found = []
    for panel in json.loads(FILE.read_text())["panels"]:
        for target in panel.get("targets", ()):
            expr = target["expr"]
            for name, value in VARIABLES.items():
                expr = expr.replace(name, value)
            legend = tuple(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            found.append(Query(panel["title"], expr, legend))
    return found


def selectors(expr: str) -> list[Selector]:
    """
    Raises:
        ValueError: it is not PromQL.
    """
    return list(_walk(promql_parser.parse(expr), frozenset()))


def _walk(node: Any, grouped: frozenset[str]) -> Iterator[Selector]:
    if isinstance(node, promql_parser.VectorSelector):
        values = {m.name: m.value for m in node.matchers.matchers}
        yield Selector(node.name, grouped | frozenset(values), values)
    elif isinstance(node, promql_parser.MatrixSelector):
        yield from _walk(node.vector_selector, grouped)
    elif isinstance(node, promql_parser.AggregateExpr):
        by = frozenset(node.modifier.labels) if node.modifier is not None else frozenset()
        yield from _walk(node.expr, grouped | by)
    elif isinstance(node, promql_parser.BinaryExpr):
        yield from _walk(node.lhs, grouped)
        yield from _walk(node.rhs, grouped)
    elif isinstance(node, promql_parser.Call):
        for argument in node.args:
            yield from _walk(argument, grouped)
    elif isinstance(node, promql_parser.ParenExpr):
        yield from _walk(node.expr, grouped)
    else:
        assert isinstance(node, promql_parser.NumberLiteral), type(node)

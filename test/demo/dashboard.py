"""The queries of the Grafana dashboard and of the alert rules, and what they ask for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import promql_parser
import yaml
from sglang_unified_kv.metrics import BY_NAME, SCHEDULER_LABELS, Metric

DOCS = Path(__file__).parents[2] / "docs"
FILE = DOCS / "grafana" / "unified_kv.json"
ALERTS = DOCS / "alerts" / "unified_kv_alerts.yml"
VARIABLES = {"$__rate_interval": "1m", "$model_name": "tiny", "$instance": ".*"}
SCRAPED = frozenset({"instance"})
"""Labels that Prometheus adds to what a server exports."""


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


def alert_rules() -> list[dict[str, Any]]:
    return [
        rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
    ]


def described(name: str) -> tuple[Metric, set[str]] | None:
    """The metric of ours that a name in a query is, with its samples' labels; None for SGLang's own."""
    plain = name
    for suffix in ("_bucket", "_sum", "_count"):
        if name.endswith(suffix) and name.removesuffix(suffix) in BY_NAME:
            plain = name.removesuffix(suffix)
    metric = BY_NAME.get(plain)
    if metric is None:
        assert not name.startswith("sglang:unified_kv"), f"{name} is exported by nobody"
        return None
    assert (plain != name) == (metric.kind == "histogram"), f"{name} is no series of a histogram"
    le = {"le"} if name.endswith("_bucket") else set()
    return metric, {*SCHEDULER_LABELS, "dp_rank", *SCRAPED, *metric.labels, *le}


def shape(expr: str) -> str:
    """``expr`` without what it selects and groups by: two queries of one shape compute the same."""
    plain = re.sub(r"\{[^}]*\}|\[[^]]*\]|\b(by|on|without|ignoring) ?\([^)]*\)", "", expr)
    return re.sub(r"\s", "", plain)


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
        matching = node.modifier.matching if node.modifier is not None else None
        on = frozenset(matching.labels) if matching is not None else frozenset()
        yield from _walk(node.lhs, grouped | on)
        yield from _walk(node.rhs, grouped | on)
    elif isinstance(node, promql_parser.Call):
        for argument in node.args:
            yield from _walk(argument, grouped)
    elif isinstance(node, promql_parser.ParenExpr):
        yield from _walk(node.expr, grouped)
    else:
        assert isinstance(node, promql_parser.NumberLiteral), type(node)

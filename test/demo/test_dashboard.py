"""The Grafana dashboard against the table of metrics; against a real scrape: test_live_server.py."""

import json

import pytest
from dashboard import FILE, queries, selectors
from sglang_unified_kv.metrics import BY_NAME, SCHEDULER_LABELS


def described(name):
    """The metric of ours that a name in a query is, with the labels of its samples; None for SGLang's own."""
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
    return metric, {*SCHEDULER_LABELS, "dp_rank", *metric.labels, *le}


@pytest.mark.parametrize("query", queries(), ids=lambda q: q.panel)
def test_every_query_asks_for_what_is_exported(query):
    found = selectors(query.expr)
    assert found
    for name, labels, values in found:
        assert "model_name" in labels, "it would mix servers"
        metric, known = described(name) or (None, {*SCHEDULER_LABELS, "dp_rank"})
        assert labels <= known, (name, labels - known)
        for label, value in values.items():
            if metric is not None and label in metric.labels:
                assert value in metric.labels[label]
        if metric is not None and metric.kind != "gauge":
            assert "rate(" in query.expr or query.panel.startswith("Verification")
    # The legend shows what is grouped by, and tells the lines apart.
    grouped = set.intersection(*({*s.labels} - {*s.values, "le"} for s in found))
    assert set(query.legend) == grouped, query


def test_a_query_that_nobody_answers_is_found():
    with pytest.raises(AssertionError, match="exported by nobody"):
        described("sglang:unified_kv_no_such_total")
    with pytest.raises(AssertionError, match="no series of a histogram"):
        described("sglang:unified_kv_gate_cut_tokens")
    with pytest.raises(ValueError):
        selectors("sum(rate(x[1m])")


def test_panels_are_what_grafana_needs():
    dashboard = json.loads(FILE.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    rows = [panel["title"] for panel in panels if panel["type"] == "row"]
    assert rows == ["Ranks", "Reuse and the gate", "Tiers", "Storage", "Ring", "HiSparse"]
    taken = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"] and panel["targets"], panel["title"]
    (_, model) = dashboard["templating"]["list"]
    name = model["query"]["query"].removeprefix("label_values(").partition(",")[0]
    assert name in BY_NAME

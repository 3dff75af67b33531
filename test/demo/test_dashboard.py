"""The Grafana dashboard against the table of metrics; against a real scrape: test_live_server.py."""

import json
import re

import pytest
from dashboard import FILE, SCRAPED, described, queries, selectors
from sglang_unified_kv.metrics import BY_NAME, SCHEDULER_LABELS


@pytest.mark.parametrize("query", queries(), ids=lambda q: q.panel)
def test_every_query_asks_for_what_is_exported(query):
    found = selectors(query.expr)
    assert found
    for name, labels, values in found:
        assert {"model_name", "instance"} <= labels, "it would mix servers"
        metric, known = described(name) or (None, {*SCHEDULER_LABELS, "dp_rank", *SCRAPED})
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


def test_the_variables_are_the_model_and_its_instances():
    templating = json.loads(FILE.read_text())["templating"]["list"]
    assert [v["name"] for v in templating] == ["datasource", "model_name", "instance"]
    for variable in templating[1:]:
        query = variable["query"]["query"]
        name, label = re.fullmatch(r"label_values\(([\w:]+)(?:{.*})?, (\w+)\)", query).groups()
        assert name in BY_NAME and label == variable["name"]
    instance = templating[2]
    # Several servers, all of them at first; a series without the label is no server's.
    assert instance["multi"] and instance["includeAll"] and instance["allValue"] == ".*"
    assert 'model_name="$model_name"' in instance["query"]["query"]
    for panel in json.loads(FILE.read_text())["panels"]:
        for target in panel.get("targets", ()):
            asked = re.findall(r"sglang:\w+({[^}]*})?", target["expr"])
            assert asked and all('instance=~"$instance"' in found for found in asked), panel[
                "title"
            ]


def test_no_panel_tells_slots_from_memory_by_what_is_1_in_both_cases():
    names = {s.name for query in queries() for s in selectors(query.expr)}
    assert "sglang:full_token_usage" in names and "sglang:token_usage" not in names

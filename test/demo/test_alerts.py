"""The alert rules of docs/alerts: what they ask for, when they fire, and that docs/metrics.md agrees."""

import re
import shutil
import subprocess

import promql_parser
import pytest
import yaml
from dashboard import ALERTS, DOCS, SCRAPED, alert_rules, described, queries, selectors, shape
from promql_series import evaluate, firing, seconds_of, series_of
from sglang_unified_kv.config import variables
from sglang_unified_kv.metrics import SCHEDULER_LABELS

TESTS = ALERTS.with_name("unified_kv_alerts_test.yml")
SUITE = yaml.safe_load(TESTS.read_text())
RULES = alert_rules()
PAGE = (DOCS / "metrics.md").read_text()
INTERVAL = seconds_of(SUITE["evaluation_interval"])
FIRING = 'ALERTS{alertstate="firing"}'


def named(rule):
    return rule["alert"]


@pytest.mark.parametrize("rule", RULES, ids=named)
def test_every_rule_asks_for_what_is_exported(rule):
    for name, labels, values in selectors(rule["expr"]):
        metric, known = described(name) or (None, {*SCHEDULER_LABELS, "dp_rank", *SCRAPED, "mode"})
        assert {"model_name", "instance"} <= labels, "it would mix servers"
        assert labels <= known, (name, labels - known)
        for label, value in values.items():
            if metric is not None and label in metric.labels:
                assert set(value.split("|")) <= set(metric.labels[label]), (name, label, value)
        if metric is not None and metric.kind != "gauge":
            assert re.search(rf"(rate|increase)\({name}", rule["expr"]), f"{name} never falls"


def expected(sample):
    node = promql_parser.parse(sample["labels"])
    labels = {("__name__", node.name), *((m.name, m.value) for m in node.matchers.matchers)}
    return frozenset(labels), float(sample["value"])


@pytest.mark.parametrize("case", SUITE["tests"], ids=lambda case: case["name"])
def test_alerts_fire_when_they_should_and_no_others(case):
    interval = seconds_of(case["interval"])
    series = [series_of(one["series"], one["values"], interval) for one in case["input_series"]]
    for query in case["promql_expr_test"]:
        assert query["expr"] == FIRING
        found = firing(RULES, series, seconds_of(query["eval_time"]), INTERVAL)
        assert found == dict(map(expected, query["exp_samples"])), query["eval_time"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not on PATH")
@pytest.mark.parametrize("command", [["check", "rules", ALERTS], ["test", "rules", TESTS]])
def test_promtool_agrees(command):
    done = subprocess.run(["promtool", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_rule_fires_somewhere_and_its_texts_can_be_filled_in():
    asked = [q for case in SUITE["tests"] for q in case["promql_expr_test"]]
    fired = [dict(expected(s)[0]) for q in asked for s in q["exp_samples"]]
    assert {labels["alertname"] for labels in fired} == set(map(named, RULES))
    for rule in RULES:
        texts = rule["annotations"]
        assert set(texts) == {"summary", "action"} and rule["labels"].keys() == {"severity"}
        used = set(re.findall(r"\$labels\.(\w+)", " ".join(texts.values())))
        for labels in fired:
            if labels["alertname"] == rule["alert"]:
                assert "instance" in used and used <= labels.keys(), rule["alert"]


def test_what_the_rules_tell_to_do_exists():
    known = {v.name for v in variables()} | {"PROMETHEUS_MULTIPROC_DIR"}
    for rule in RULES:
        action = rule["annotations"]["action"]
        assert set(re.findall(r"\b[A-Z][A-Z0-9]*_[A-Z0-9_]+\b", action)) <= known, rule["alert"]
        for other in re.findall(r"UnifiedKV\w+", action):
            assert other in map(named, RULES)
        if heading := re.search(r"'(.*)' in (docs/\w+\.md)", action):
            assert f"# {heading[1]}\n" in (DOCS.parent / heading[2]).read_text()


def test_the_page_names_every_alert_and_its_severity():
    in_rules = re.findall(r"^\| .* \| ((?:`UnifiedKV\w+`(?:, )?)+) \|$", PAGE, re.M)
    names = [name for cell in in_rules for name in re.findall(r"\w+", cell)]
    listed = dict(re.findall(r"^\| `(UnifiedKV\w+)` \| .* \| (\w+) \|$", PAGE, re.M))
    assert sorted(names) == sorted(listed) == sorted(map(named, RULES))
    assert listed == {rule["alert"]: rule["labels"]["severity"] for rule in RULES}


# -- one cut share


def test_the_cut_share_is_the_same_everywhere():
    (formula,) = re.findall(r"## The cut share\n.*?```text\n(.*?)```", PAGE, re.S)
    defined = shape(formula)
    (panel,) = [q.expr for q in queries() if q.panel == "Cut share"]
    assert shape(panel) == defined
    others = [rule for rule in RULES if "reused_tokens" in rule["expr"]]
    assert [r["alert"] for r in others] == ["UnifiedKVCutShareHigh", "UnifiedKVHostBudgetSmall"]
    for rule in others:
        assert shape(rule["expr"]).startswith(f"{defined}>0.2"), rule["alert"]
    labels = '{model_name="m", instance="a"}'
    counted = [("gate_cut_tokens_sum", 60), ("gate_reused_tokens_total", 180)]
    series = [
        series_of(f"sglang:unified_kv_{name}{labels}", f"0+{step}x9", 60) for name, step in counted
    ]
    # Cut over cut and reused: a quarter, not a third.
    assert evaluate(formula, series, 540) == {frozenset(): 0.25}

"""One exact server over HTTP: ``check``, what it exports of a known workload, and what its answers report."""

import json
import os
import re
import shlex
import subprocess
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
import requests
from dashboard import SCRAPED, alert_rules, queries, selectors
from prometheus_client.parser import text_string_to_metric_families
from sglang_unified_kv.cli import app
from sglang_unified_kv.cli.attest import said_by_ranks, started_by_ranks
from sglang_unified_kv.cli.client import SGLangClient
from sglang_unified_kv.cli.demo import environment, launch_command
from sglang_unified_kv.cli.demo_story import EVICTION_TOKENS, prompt
from sglang_unified_kv.cli.server import ServerProcess, free_port
from sglang_unified_kv.metrics import ANY, EXACT, METRICS, SCHEDULER_LABELS
from typer.testing import CliRunner

SMALL = "--tails 32,160 --rounds 4 --churn 8 --churn-tokens 140 --batch 4 --output-tokens 8"
TEXT = prompt(40, 1100)
PREFIX = "sglang:unified_kv_"


class Served:
    """A server with a checkpoint at every second boundary."""

    def __init__(self, process, port):
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.client = SGLangClient(self.url)
        process.wait_until(self.client.healthy, timeout_s=600)

    def values(self):
        """(name, label value or None) -> exported value, of our metrics."""
        found = {}
        for family in text_string_to_metric_families(self.client.metrics()):
            metric = next(
                (m for m in METRICS if m.name in (family.name, family.name + "_total")), None
            )
            for sample in family.samples if metric else ():
                extra = {k: v for k, v in sample.labels.items() if k in (*metric.labels, "le")}
                label = None if len(extra) != 1 else next(iter(extra.values()))
                assert set(sample.labels) - set(extra) == set(SCHEDULER_LABELS)
                found[sample.name.removeprefix(PREFIX), label] = sample.value
        return found

    def since(self, before, names):
        """What grew, of the named ones, once nothing is left to be told."""
        seen = []

        def settled():
            now = self.values()
            seen.append({key: now[key] - before.get(key, 0) for key in now if key[0] in names})
            return len(seen) > 12 and seen[-1] == seen[-12]

        self.process.wait_until(settled, timeout_s=120)
        return seen[-1]

    def cached(self, ids):
        """Cached tokens of an answer by source; all of them is their sum."""
        answer = self.client.generate(ids, max_new_tokens=2)
        assert answer.cached_tokens == sum(answer.cached_by.values())
        return {source: tokens for source, tokens in answer.cached_by.items() if tokens}


@pytest.fixture(scope="module")
def served(model_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    port = free_port()
    env = environment("exact", os.environ, storage=folder / "storage")
    env |= {"SGLANG_HICACHE_SWA_OFFLOAD_PAGE_STRIDE": "2", "SGLANG_UNIFIED_KV_RING_FIXES": "1"}
    command = [flag for flag in launch_command(model_path, port) if flag != "--skip-tokenizer-init"]
    with ServerProcess(command, env, folder / "log") as process:
        yield Served(process, port)


@pytest.mark.timeout(900)
def test_it_is_deterministic(served, tmp_path):
    unfit = CliRunner().invoke(app, f"check --url {served.url}".split())
    assert unfit.exit_code == 2
    assert "its vocabulary has 1024 tokens; give --token-ids" in " ".join(unfit.output.split())
    arguments = f"check --url {served.url} {SMALL} --token-ids 6-1023 --seed 7 --json".split()
    run = CliRunner().invoke(app, [*arguments, str(tmp_path / "out.json")])
    assert run.exit_code == 0, run.output
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["verdict"] == "deterministic"
    assert document["faults"] == document["doubts"] == []
    assert document["attestation"]["dp0 tp0"]["policy"] == "grid"
    near, far = document["tails"]
    assert [tail["prompt_tokens"] for tail in (near, far)] == [544, 672]
    for tail in (near, far):
        assert tail["outside_majority"] == tail["unlike_cold"] == tail["logprobs_unlike_cold"] == 0
        assert tail["cached_tokens"] == {"512": 4}
        assert sum(tail["cached_by"].values()) == 4 * 512
    # Stock would not have reused the page that the last window begins in.
    assert (near["credit"], far["credit"]) == (256, 0)


def test_the_quick_start_asks_such_a_server(served):
    page = (Path(__file__).parents[2] / "docs" / "quickstart.md").read_text()
    launch = re.search(r"python -m sglang.launch_server (--model-path tiny .*?)\n```", page, re.S)
    shown = shlex.split(launch[1].replace("\\\n", " "))
    run = launch_command(Path("tiny"), 30000)[3:]
    for flag in ("--host", "--hicache-storage-backend", "--hicache-storage-prefetch-policy"):
        del run[run.index(flag) : run.index(flag) + 2]
    assert sorted(shown) == sorted(run)
    asked = re.search(
        r"```bash\n(for again .*?done)\n(sglang-unified-kv check.*?)\n```", page, re.S
    )
    command = asked[1].replace("http://localhost:30000", served.url).replace("done", "echo; done")
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    cached = [json.loads(a)["meta_info"]["cached_tokens"] for a in done.stdout.splitlines() if a]
    assert cached == [0, 512]
    assert shlex.split(asked[2].replace("\\\n", " "))[4:] == f"{SMALL} --token-ids 6-1023".split()


def test_the_rank_says_once_what_is_engaged(served, tmp_path):
    document = tmp_path / "out.json"
    arguments = f"check --url {served.url} --attest-only --json {document}"
    run = CliRunner().invoke(app, arguments.split())
    assert run.exit_code == 0, run.output
    said = json.loads(document.read_text())["attestation"]["dp0 tp0"]
    assert (said["features"], said["stride"], said["storage"]) == ("hicache+ring", "2", "file")
    assert (said["provenance"], said["checksum"], said["records"]) == ("live", "0", "32")
    assert len(said["edits_digest"]) == len(said["layout"]) == 16
    listed = json.loads(CliRunner().invoke(app, ["edits", "--json"]).stdout)
    switches = ["SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE", "SGLANG_UNIFIED_KV_RING_FIXES"]
    (ours,) = [row for row in listed["ranks"] if row["switches"] == switches]
    assert (said["edits"], said["edits_digest"]) == (str(ours["edits"]), ours["edits_digest"])
    (line,) = [line for line in served.process.log.read_text().splitlines() if "Unified KV" in line]
    words = " ".join(f"{name}={value}" for name, value in said.items() if value)
    assert line.endswith(f"Unified KV engaged on dp0 tp0 (dp_size 1, tp_size 1): {words}")
    assert words in " ".join(run.output.split())
    (started,) = started_by_ranks(served.client.metrics()).values()
    assert psutil.Process(served.process.pid).create_time() <= started <= time.time()


def test_a_start_says_what_the_page_explains(served):
    page = (Path(__file__).parents[2] / "docs" / "operating.md").read_text()
    section = page.partition("\n## A good start, line by line\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"^```text\n(.*?)^```$", section, re.M | re.S)
    quoted = block.splitlines()
    explained = re.findall(r"^(\d+)\. ", section, re.M)
    assert explained == [str(1 + i) for i in range(len(quoted))] and len(quoted) > 10
    log = served.process.log
    served.process.wait_until(lambda: quoted[-1] in log.read_text(), timeout_s=60)
    rest = without_numbers(log.read_text())
    for line in quoted:
        pieces = map(re.escape, without_numbers(line).split("..."))
        found = re.search(rf"^\[[^]]*\] {'.*'.join(pieces)}$", rest, re.M)
        assert found, line
        rest = rest[found.end() :]


def without_numbers(text):
    return re.sub(r"\b[0-9a-f]{16,}\b|\d+(\.\d+)*", "#", text)


def test_every_metric_is_exported_from_the_start(served):
    exported = set(served.values())
    for metric in METRICS:
        name = metric.name.removeprefix(PREFIX)
        for labels in metric.labels.values() if len(metric.labels) == 1 else ([None],):
            for label in labels if metric.kind != "histogram" else ():
                found = (name, label) in exported
                assert found == (metric.feature in (ANY, EXACT)), (name, label)
    assert ("gate_cut_tokens_bucket", "65536.0") in exported
    assert ("gate_cut_tokens_bucket", "131072.0") not in exported


def test_dashboard_and_alerts_ask_sglang_for_what_it_exports(served):
    exported = {}
    for family in text_string_to_metric_families(served.client.metrics()):
        for sample in family.samples:
            exported[sample.name] = exported.get(sample.name, set()) | set(sample.labels)
    exprs = [query.expr for query in queries()] + [rule["expr"] for rule in alert_rules()]
    asked = {(s.name, s.labels) for expr in exprs for s in selectors(expr)}
    assert any(not name.startswith(PREFIX) for name, _ in asked)
    for name, labels in asked:
        if not name.startswith(f"{PREFIX}hisparse"):
            assert labels - {"dp_rank"} - SCRAPED <= exported[name], name


def post(served, path, body):
    body |= {"model": "tiny", "temperature": 0}
    return requests.post(f"{served.url}{path}", json=body, timeout=120).json()


def test_text_completions_reuse_their_prefix(served):
    text = "The quick brown fox jumps over the lazy dog. " * 15
    first, second = (
        post(served, "/v1/completions", {"prompt": text, "max_tokens": 6}) for _ in range(2)
    )
    assert first["usage"]["prompt_tokens"] > 600 and first["usage"]["completion_tokens"] == 6
    assert first["choices"][0]["text"] == second["choices"][0]["text"] != ""
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 512


def test_chat(served):
    messages = [{"role": "user", "content": "Bonjour, ça va ?"}]
    answer = post(served, "/v1/chat/completions", {"messages": messages, "max_tokens": 5})
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["usage"]["prompt_tokens"] > 16


@pytest.mark.timeout(900)
def test_a_known_workload_is_what_is_exported_and_what_answers_report(served):
    served.client.flush_cache()
    counters = {m.name.removeprefix(PREFIX) for m in METRICS if m.kind == "counter"}
    counters |= {f"gate_cut_tokens_{part}" for part in ("count", "sum", "bucket")}
    served.since({}, counters)
    before = served.values()
    size = int(said_by(served)["record_bytes"])
    assert served.cached(TEXT) == {}
    assert served.cached(TEXT) == {"device": 1024}
    # The tree has three of its pages, and checkpoints are at every second.
    assert served.cached(TEXT[:900] + prompt(41, 100)) == {"device": 512}
    assert served.cached(TEXT[:400] + prompt(42, 100)) == {}
    for seed in (43, 44):
        assert served.cached(prompt(seed, EVICTION_TOKENS)) == {}
    assert served.cached(TEXT) == {"host": 1024}
    found = served.since(before, counters)
    assert found["storage_saves_total", "saved"] == 10
    served.client.flush_cache()
    # A flush takes nothing back.
    assert served.since(before, counters) == found
    body = {"model": "tiny", "prompt": TEXT, "max_tokens": 2, "temperature": 0}
    body["return_cached_tokens_details"] = True
    answer = requests.post(f"{served.url}/v1/completions", json=body, timeout=300).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 1024
    details = {"device": 0, "host": 0, "storage": 1024, "storage_backend": "HiCacheFile"}
    assert answer["sglext"]["cached_tokens_details"] == details
    found = served.since(before, counters)
    expected = Counter(
        {
            ("gate_results_total", "none"): 3,
            ("gate_results_total", "exact"): 3,
            ("gate_results_total", "cut"): 1,
            ("gate_results_total", "rejected"): 1,
            ("gate_reused_tokens_total", None): 3 * 1024 + 512,
            ("gate_cut_tokens_count", None): 2,
            ("gate_cut_tokens_sum", None): 512,
            ("captures_total", None): 10,
            ("restores_total", None): 4,
            ("checkpoint_bytes_total", "device_to_host"): 10 * size,
            ("checkpoint_bytes_total", "host_to_device"): 4 * size,
            ("checkpoint_bytes_total", "host_to_storage"): 10 * size,
            ("checkpoint_bytes_total", "storage_to_host"): size,
            ("published_records_total", "new"): 10,
            ("storage_saves_total", "saved"): 10,
            ("storage_fetches_total", "published"): 1,
        }
    )
    assert {key: value for key, value in found.items() if key[0] != "gate_cut_tokens_bucket"} == {
        key: expected[key] for key in found if key[0] != "gate_cut_tokens_bucket"
    }
    assert found["gate_cut_tokens_bucket", "256.0"] == 2
    now = served.values()
    assert [now["records", tier] for tier in ("host", "storage")] == [1, 1]
    assert [now["host_slots", s] for s in ("free", "published", "in_flight")] == [31, 1, 0]
    assert [now["ring_slots", state] for state in ("free", "used")] == [4, 0]
    assert now["ring_slot_tokens", None] == 256 and now["staging_slots", None] > 0
    assert now["record_pins", None] == now["suspended", None] == 0
    # The storage hit again, from the device, with its details.
    assert served.cached(TEXT) == {"device": 1024}
    served.client.flush_cache()
    assert served.cached(TEXT) == {"storage": 1024}
    cleared = requests.post(f"{served.url}/hicache/storage-backend/clear", timeout=300)
    assert cleared.status_code == 200
    served.client.flush_cache()
    assert served.cached(TEXT) == {}


def said_by(served):
    (((said,),)) = said_by_ranks(served.client.metrics()).values()
    return vars(said)

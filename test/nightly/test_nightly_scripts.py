"""The scripts, the workflow that calls them, and the plans that they print where nothing is installed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from sglang_unified_kv.nightly import main
from sglang_unified_kv.nightly import run as nightly_run
from sglang_unified_kv.nightly.gsm8k import Gsm8k
from sglang_unified_kv.nightly.jobs import JOBS, Phase
from sglang_unified_kv.nightly.launch import Launch
from sglang_unified_kv.nightly.machine import MI355X, REFERENCE
from sglang_unified_kv.nightly.steps import Attestation, Determinism, Engaged
from sglang_unified_kv.nightly.verdict import Outcome, judge

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts" / "nightly"
WORKFLOW = ROOT / ".github" / "workflows" / "nightly-mi355x.yml"

BARE = (
    "import runpy, sys; sys.modules.update(dict.fromkeys(['sglang', 'torch', 'requests']))\n"
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)


def bare_run(job, *arguments):
    """A script where neither SGLang nor torch can be imported."""
    code = f"import sys; sys.argv = {[str(SCRIPTS / job), *arguments]!r}\n{BARE}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize("where", ["", "--reference"])
def test_every_plan_is_printed_without_sglang_and_nothing_is_written(where, tmp_path):
    for job in JOBS:
        done = bare_run(job, "--dry-run", "--out", str(tmp_path / job), *where.split())
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"{job} on ")
        assert done.stdout.count("\nphase ") == done.stdout.count("sglang.launch_server") > 0
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_sglang_says_what_is_missing(tmp_path):
    done = bare_run("prefill", "--out", str(tmp_path / "out"))
    assert done.returncode == 2 and "This command needs requests and sglang." in done.stdout


def test_a_job_that_breaks_could_not_run_and_keeps_what_it_found(tmp_path, monkeypatch):
    def breaking(job, machine, model, data, out, say, verdict):
        verdict.add("on", [judge("first", True, "found", "needed")])
        raise ZeroDivisionError("float division by zero")

    monkeypatch.setattr(nightly_run, "run", breaking)
    with open(tmp_path / "said", "w") as said:
        console, job = Console(file=said), JOBS["prefill"](REFERENCE)
        assert main._run(console, job, REFERENCE, "model", None, tmp_path / "out") == 2
    assert "breaking" in (tmp_path / "said").read_text(), "the traceback is not shown"
    document = json.loads((tmp_path / "out" / "verdict.json").read_text())
    assert document["verdict"] == Outcome.NOT_RUN.value
    assert [check["outcome"] for check in document["checks"]] == ["passed", "could not run"]
    assert document["checks"][-1]["found"] == "ZeroDivisionError('float division by zero')"


@pytest.mark.parametrize("job", JOBS)
def test_every_job_asks_check_of_our_server(job):
    steps = [step for p in JOBS[job](MI355X).phases if p.name != "off" for step in p.steps]
    assert any(isinstance(step, Engaged) for step in steps)
    assert any(isinstance(step, Attestation | Determinism) for step in steps)
    stock = [step for p in JOBS[job](MI355X).phases if p.name == "off" for step in p.steps]
    assert not any(isinstance(step, Engaged | Attestation | Determinism) for step in stock)


def test_the_guard_of_hisparse_is_for_its_jobs_alone(tmp_path):
    def scores(phase):
        place = phase.place(MI355X, tmp_path, None, "1")
        return [line for line in Gsm8k("thinking").plan(place) if line.startswith("score")]

    for phase in JOBS["hisparse_tp8"](MI355X).phases:
        assert scores(phase) == ["score above 0.91"]
    without_cache = Phase("on", Launch(flags=("--disable-radix-cache",)), ())
    (line,) = scores(without_cache)
    assert "published 0.933" in line


def test_there_is_one_executable_script_per_job():
    assert sorted(path.name for path in SCRIPTS.iterdir()) == sorted(JOBS)
    for job in JOBS:
        assert os.access(SCRIPTS / job, os.X_OK)
        assert f'main("{job}")' in (SCRIPTS / job).read_text()


def test_help_names_the_job_and_the_exit_codes():
    done = bare_run("l3_restart", "--help")
    assert done.returncode == 0
    text = " ".join(done.stdout.split())
    assert "After a restart with empty memory tiers" in text
    assert "0: passed. 1: failed. 2: could not run." in text


@pytest.fixture(scope="module")
def workflow():
    return yaml.safe_load(WORKFLOW.read_text())


def test_the_workflow_runs_every_script(workflow):
    (job,) = workflow["jobs"].values()
    assert sorted(job["strategy"]["matrix"]["job"]) == sorted(JOBS)
    assert job["strategy"]["fail-fast"] is False and job["strategy"]["max-parallel"] == 1
    commands = [step["run"] for step in job["steps"] if "run" in step]
    called = {path for run in commands for path in re.findall(r"scripts/\S+", run)}
    assert called == {"scripts/nightly/${{"}
    assert any("--out nightly-out" in run and "--dry-run" not in run for run in commands)


def test_the_workflow_is_bounded_and_keeps_what_it_found(workflow):
    # YAML 1.1 reads `on` as a boolean.
    assert set(workflow[True]) == {"schedule", "workflow_dispatch"}
    (job,) = workflow["jobs"].values()
    assert "self-hosted" in job["runs-on"]
    *_, run, keep = job["steps"]
    assert 0 < run["timeout-minutes"] < job["timeout-minutes"]
    assert keep["if"] == "always()" and "nightly-out" in keep["with"]["path"]
    for step in job["steps"]:
        assert "run" in step or re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", step["uses"]), step

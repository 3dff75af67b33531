"""The scripts, the workflow that calls them, and the plans that they print where nothing is installed."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from sglang_unified_kv.nightly import dry_run, main
from sglang_unified_kv.nightly import run as nightly_run
from sglang_unified_kv.nightly.benchmark import Benchmark
from sglang_unified_kv.nightly.duration import clock, seconds
from sglang_unified_kv.nightly.gsm8k import Gsm8k
from sglang_unified_kv.nightly.jobs import JOBS, Phase
from sglang_unified_kv.nightly.launch import Launch
from sglang_unified_kv.nightly.machine import MI355X, REFERENCE
from sglang_unified_kv.nightly.steps import (
    STOCK,
    Attestation,
    Determinism,
    Engaged,
    Recall,
    Restart,
    SendAgain,
)
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
        assert done.returncode == 2, done.stderr
        assert done.stdout.startswith(f"{job} on ")
        assert "not asked: SGLang is not installed here" in done.stdout.splitlines()[-1]
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
    steps = [step for p in JOBS[job](MI355X).phases if p.name not in STOCK for step in p.steps]
    assert any(isinstance(step, Engaged) for step in steps)
    assert any(isinstance(step, Attestation | Determinism) for step in steps)
    stock = [step for p in JOBS[job](MI355X).phases if p.name in STOCK for step in p.steps]
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


def free(tmp_path, kilobytes):
    """What the kernel says, to be read as free memory."""
    file = tmp_path / "meminfo"
    file.write_text(f"MemTotal:       99999999999 kB\nMemAvailable:   {kilobytes} kB\n")
    return dry_run.free_host_gb(file)


def test_free_memory_is_what_the_kernel_calls_available(tmp_path):
    assert free(tmp_path, 1_000_000_000) == 1024.0
    assert dry_run.free_host_gb() > 0


@pytest.mark.parametrize("job", JOBS)
def test_every_launch_says_its_host_memory(job, tmp_path):
    for phase in JOBS[job](MI355X).phases:
        launch = phase.launch
        need = launch.ranks * launch.rank_host_gb
        assert (need == 0) is (phase.name == "off" and job not in ("prefill", "decode"))
        enough = need + dry_run.RESERVE_GB
        (said,) = dry_run.host_memory(launch, enough)
        assert said.startswith(f"host memory: {need:.0f} GB pinned at most ({launch.ranks} ranks ")
        _, *warned = dry_run.host_memory(launch, enough - 1)
        assert len(warned) == (need > 0)
        assert all(f"this host has {enough - 1:.0f} GB free" in line for line in warned)
        # Another machine than that of the job tells nothing.
        assert list(dry_run.host_memory(launch, None)) == [said]


def test_a_machine_that_is_elsewhere_is_not_short_of_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(dry_run, "free_host_gb", lambda: 1.0)
    here = replace(MI355X, device=None)
    assert any("too little" in line for line in plan_of("prefill", here, tmp_path))
    elsewhere = replace(MI355X, device=tmp_path / "kfd")
    assert not any("too little" in line for line in plan_of("prefill", elsewhere, tmp_path))


def plan_of(job, machine, out):
    return list(dry_run.lines(JOBS[job](machine), machine, "model", None, out))


@pytest.mark.parametrize("machine", [MI355X, REFERENCE], ids=lambda machine: machine.name)
@pytest.mark.parametrize("job", JOBS)
def test_the_work_of_a_benchmark_is_what_its_client_is_told(job, machine, tmp_path):
    for phase in JOBS[job](machine).phases:
        place = phase.place(machine, tmp_path, None, "1")
        for step in phase.steps:
            if not isinstance(step, Benchmark):
                continue
            words = step.command(place, 0, 0)
            told = {
                name: int(words[words.index(name) + 1])
                for name in words
                if name.startswith(("--gsp-", "--warmup")) and name != "--gsp-send-routing-key"
            }
            prompts = told["--gsp-prompts-per-group"] + told["--warmup-requests"]
            tokens = told["--gsp-system-prompt-len"] + told["--gsp-question-len"]
            work, repeats = step.work(place), machine.sizes.repeats
            assert work.programs == repeats and work.prompt_tokens == repeats * prompts * tokens
            assert work.steps >= repeats * told["--gsp-output-len"]


def test_the_work_of_the_other_steps(tmp_path):
    def work(step, machine, phase="verify"):
        place = Phase(phase, JOBS["prefill"](machine).phases[0].launch, ())
        return step.work(place.place(machine, tmp_path, None, "1"))

    assert work(Engaged(), MI355X) == (0, 0, 0, 0)
    assert work(Attestation(), MI355X) == (0, 1, 0, 0)
    assert work(SendAgain(6), MI355X) == (0, 0, 300_000, 96)
    assert work(Restart(), MI355X) == (1, 0, 2_400, 16)
    # One tail of 32 after 512 tokens, sent 5 times; 4 others of 140 tokens with one new one each.
    assert work(Determinism(), REFERENCE) == (0, 1, 5 * 544 + 4 * 140, 5 * 8 + 4)
    assert work(Determinism(), MI355X)[3] == 7 * 65 * 32 + 7 * 500
    # 1,311 questions, 64 in a step.
    assert work(Gsm8k("thinking"), MI355X) == (0, 1, 1_311_000, 21 * 1_500)
    assert work(Gsm8k("non-thinking"), MI355X) == (0, 1, 1_311_000, 21 * 150)
    asked, made = (work(Gsm8k("thinking"), REFERENCE, phase) for phase in ("on", "off"))
    assert made.steps == 3 * asked.steps
    assert work(Recall(), MI355X)[3] == 1_024


@pytest.mark.parametrize("job", JOBS)
def test_a_plan_says_how_long_it_takes_in_all_and_where_that_comes_from(job, tmp_path, workflow):
    plan = plan_of(job, MI355X, tmp_path)
    phases = JOBS[job](MI355X).phases
    works = [phase.work(phase.place(MI355X, tmp_path, None, "1")) for phase in phases]
    each = [line for line in plan if line.startswith("  expected: ")]
    assert each == [f"  expected: {clock(seconds(work, MI355X.pace))}" for work in works]
    # Each has a server; one of them starts again.
    assert sum(work.starts for work in works) == len(phases) + (job == "l3_restart")
    whole = sum(seconds(work, MI355X.pace) for work in works)
    assert f"\nexpected: {clock(whole)}" in plan
    assert any(
        line.startswith(f"  server starts: {sum(w.starts for w in works)} ") for line in plan
    )
    assert f"  {MI355X.pace.source}" in plan
    (nightly,) = workflow["jobs"].values()
    assert whole < 60 * nightly["steps"][-2]["timeout-minutes"]


def test_the_page_says_how_long_all_jobs_take(tmp_path):
    phases = [phase for job in JOBS.values() for phase in job(MI355X).phases]
    works = [phase.work(phase.place(MI355X, tmp_path, None, "1")) for phase in phases]
    whole = clock(sum(seconds(work, MI355X.pace) for work in works))
    page = " ".join((SCRIPTS.parents[1] / "docs" / "nightly.md").read_text().split())
    assert f"By their own sums they take {whole}." in page


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

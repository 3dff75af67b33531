"""The scripts, the workflow that calls them, and the plans that they print where nothing is installed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from sglang_unified_kv.nightly.jobs import JOBS

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

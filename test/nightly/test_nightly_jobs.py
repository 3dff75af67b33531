"""The nightly jobs on the reference engine, from the script to the verdict, and with faults injected."""

import json
import os
import re
import select
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from sglang_unified_kv.nightly.jobs import JOBS, Job, Phase
from sglang_unified_kv.nightly.launch import Launch
from sglang_unified_kv.nightly.machine import REFERENCE
from sglang_unified_kv.nightly.run import run
from sglang_unified_kv.nightly.steps import (
    Attestation,
    Determinism,
    Engaged,
    Place,
    Restart,
    SendAgain,
)
from sglang_unified_kv.nightly.verdict import Outcome, Verdict

SCRIPTS = Path(__file__).parents[2] / "scripts" / "nightly"
FAULTY = Path(__file__).with_name("faulty_server.py")


def script(job, *arguments):
    return [sys.executable, "-W", "ignore", str(SCRIPTS / job), *map(str, arguments)]


def ended_run(command, timeout_s):
    """A program that ran to its end, or was told to end itself: its servers live in sessions of their own.

    Raises:
        TimeoutExpired: it took longer, and has ended now, with its servers.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, **pipes) as running:
        try:
            output, _ = running.communicate(timeout=timeout_s)
        finally:
            # pytest's own timeout comes through here as well.
            if running.poll() is None:
                running.terminate()
                running.communicate()
    return subprocess.CompletedProcess(command, running.returncode, output)


def test_a_run_that_takes_too_long_is_told_to_end_itself(tmp_path):
    told = tmp_path / "told"
    code = (
        "import pathlib, signal, sys\n"
        "signal.sigwait([signal.SIGTERM])\n"
        "pathlib.Path(sys.argv[1]).touch()"
    )
    # Blocked from the start, so that it cannot come too early.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            ended_run([sys.executable, "-c", code, str(told)], timeout_s=0.1)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    assert told.exists()


def reference_run(job, out, timeout_s):
    """Exit code, outcomes by check, and the document, of a job on the reference engine."""
    done = ended_run(script(job, "--reference", "--out", out), timeout_s)
    assert (out / "verdict.json").exists(), done.stdout
    document = json.loads((out / "verdict.json").read_text())
    assert f"verdict: {document['verdict']}" in done.stdout
    return done, document


def outcomes(document, phase):
    return {c["name"]: c["outcome"] for c in document["checks"] if c["phase"] == phase}


COMPARED = {
    "every rank is engaged",
    "cached_tokens",
    "restores are compared",
    "log of these requests",
    "answers alike",
    "sglang-unified-kv check",
    "log verify.log",
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_l3_restart(tmp_path):
    done, document = reference_run("l3_restart", tmp_path / "out", 1700)
    assert done.returncode == 0, done.stdout
    found = outcomes(document, "verify")
    assert set(found) == COMPARED | {
        "first request after the restart",
        "prefetch",
        "answer as the cold one",
    }
    assert set(found.values()) == {"passed"}
    assert document["figures"]["verify"]["cached_tokens"] == [0] + [1280] * 5
    assert "not judged on the reference engine" in " ".join(done.stdout.split())


MADE = {"made set, non-thinking", "made set, thinking"}
PREFILL = {"prefill 60% cached", "prefill 80% cached"}
SWAPPED = {
    "every rank is engaged",
    "attestation",
    "answer as without HiSparse",
    "rows that swap",
}
MEASURED = {
    "prefill": (MADE | PREFILL, {f"{name}: prompt tokens per second" for name in PREFILL}),
    "decode": (
        MADE | {"decode batch 2"},
        {"decode batch 2: time per output token", "decode batch 2: output tokens per second"},
    ),
    "radix_only": ({"made set, non-thinking"}, set()),
    "hisparse_tp8": (MADE | SWAPPED, {"capacity"}),
    "hisparse_tp8_dp8": (MADE | SWAPPED, {"capacity"}),
}
"""By job: the checks of ``on`` that the reference engine passes, and those that say nothing there."""


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("job", MEASURED)
def test_a_job_passes(job, tmp_path):
    done, document = reference_run(job, tmp_path / "out", 7100)
    assert done.returncode == 0, done.stdout
    passed, shown = MEASURED[job]
    costs = {name for name in shown if name != "capacity"}
    found = outcomes(document, "on")
    assert found == dict.fromkeys(passed | {"log on.log"}, "passed") | dict.fromkeys(
        shown - costs, "not judged"
    )
    timed = {name for name in passed if any(cost.startswith(f"{name}: ") for cost in costs)}
    logged = {"log off-again.log"} if costs else set()
    assert outcomes(document, "off-again") == dict.fromkeys(timed | logged, "passed") | (
        dict.fromkeys(costs, "not judged")
    )
    if not job.startswith("hisparse"):
        assert outcomes(document, "verify") == dict.fromkeys(COMPARED, "passed")
    assert set(JOBS) == set(MEASURED) | {"l3_restart"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_stock_sglang_in_our_place_fails(model_path, tmp_path):
    (verify, *_) = JOBS["radix_only"](REFERENCE).phases
    stock = Job("stock", "", (replace(verify, launch=verify.launch.off()),))
    verdict = Verdict("stock", "")
    run(stock, REFERENCE, str(model_path), None, tmp_path, print, verdict)
    found = {check.name: check.outcome for _, check in verdict.checks}
    assert verdict.exit_code == 1
    for name in ("every rank is engaged", "restores are compared", "answers alike"):
        assert found[name] is Outcome.FAILED
    assert found["sglang-unified-kv check"] is Outcome.FAILED


@dataclass(frozen=True)
class Faulty(Launch):
    fault: str = ""

    def command(self, model, port):
        return [sys.executable, str(FAULTY), self.fault, "--port", str(port)]


def faulty_run(fault, out, *steps, machine=REFERENCE):
    steps = steps or (SendAgain(3),)
    phase = Phase("verify", Faulty(flags=(), fault=fault), steps)
    job = Job("faulty", "", (phase, replace(phase, name="later")))
    said: list[str] = []
    verdict = Verdict("faulty", "")
    run(job, machine, "model", None, out, said.append, verdict)
    (out / "said").write_text("\n".join(said))
    return verdict, {check.name: check for phase, check in verdict.checks if phase == "verify"}


def test_a_server_that_reuses_nothing_fails(tmp_path):
    verdict, found = faulty_run("cold", tmp_path, Engaged(), SendAgain(3))
    assert (verdict.outcome, verdict.exit_code) == (Outcome.FAILED, 1)
    failed = {name for name, check in found.items() if check.outcome is Outcome.FAILED}
    assert failed == {"every rank is engaged", "cached_tokens", "restores are compared"}
    assert "the last reused 0, not 1280" in found["cached_tokens"].found
    assert [phase for phase in verdict.seconds] == ["verify", "later"]


def test_a_mismatch_in_the_log_fails(tmp_path):
    verdict, found = faulty_run("wrong", tmp_path)
    assert verdict.exit_code == 1
    assert found["cached_tokens"].outcome is Outcome.PASSED
    for name in ("log of these requests", "log verify.log"):
        assert found[name].outcome is Outcome.FAILED and "MISMATCH" in found[name].found


def test_a_restart_that_finds_nothing_fails(tmp_path):
    verdict, found = faulty_run("cold", tmp_path, SendAgain(3), Restart())
    assert verdict.exit_code == 1
    for name in ("first request after the restart", "prefetch"):
        assert found[name].outcome is Outcome.FAILED
    assert found["first request after the restart"].needed == "1280, from storage"


def test_a_server_that_dies_could_not_run_and_names_its_log(tmp_path):
    verdict, found = faulty_run("dead", tmp_path)
    assert (verdict.outcome, verdict.exit_code) == (Outcome.NOT_RUN, 2)
    assert str(tmp_path / "verify.log") in found["server"].found
    assert (
        f"The last lines of {tmp_path / 'verify.log'}:\nno weights"
        in (tmp_path / "said").read_text()
    )
    assert list(verdict.seconds) == ["verify"], "the next server was started all the same"


def ended(pid):
    """Whether a process that was killed is gone; an orphan may not be reaped yet."""
    try:
        return bool(select.select([os.pidfd_open(pid)], [], [], 60)[0])
    except ProcessLookupError:
        return True


@dataclass(frozen=True)
class Endless(Determinism):
    """A client program that starts another one, tells both ids, and never ends."""

    def command(self, place: Place):
        child = "import signal; signal.pause()"
        code = (
            "import os, signal, subprocess, sys\n"
            f"child = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
            "print(os.getpid(), child.pid, flush=True)\n"
            "signal.pause()"
        )
        return [sys.executable, "-c", code]


def test_a_client_that_never_ends_is_ended_with_its_children(tmp_path):
    verdict, found = faulty_run(
        "cold", tmp_path, Endless(), machine=replace(REFERENCE, program_s=2.0)
    )
    assert verdict.exit_code == 2
    log = tmp_path / "verify-check.log"
    assert f"check took longer than 2 s, see {log}" in found["server"].found
    assert all(map(ended, map(int, log.read_text().split())))


@dataclass(frozen=True)
class Differing(Attestation):
    def command(self, place: Place):
        return [sys.executable, "-c", "raise SystemExit(1)"]


def test_ranks_that_differ_fail_the_job(tmp_path):
    verdict, found = faulty_run("cold", tmp_path, Differing())
    assert verdict.exit_code == 1
    assert found["attestation"].found.startswith("1: the ranks differ")


@dataclass(frozen=True)
class Killing(Determinism):
    """A client program whose request ends the server, and that never ends itself."""

    def command(self, place: Place):
        code = (
            "import signal, sys, urllib.request\n"
            "try: urllib.request.urlopen(sys.argv[1], b'{}')\n"
            "except OSError: signal.pause()"
        )
        return [sys.executable, "-c", code, f"{place.url}/generate"]


def test_a_server_that_dies_ends_the_client(tmp_path):
    verdict, found = faulty_run("dead", tmp_path, Killing())
    assert verdict.exit_code == 2
    assert "the server ended with exit code 3" in found["server"].found


@dataclass(frozen=True)
class Failing(Determinism):
    def command(self, place: Place):
        return [sys.executable, "-c", "raise SystemExit(1)"]


def test_a_check_that_fails_fails_the_job(tmp_path):
    verdict, found = faulty_run("cold", tmp_path, Failing())
    assert verdict.exit_code == 1
    assert found["sglang-unified-kv check"].found.startswith("1: not deterministic")


def test_a_server_gets_its_own_variables_and_none_of_sglangs_from_outside(tmp_path):
    (phase,) = JOBS["l3_restart"](REFERENCE).phases
    base = {"PATH": "/bin", "SGLANG_IS_IN_CI": "1", "SGLANG_UNIFIED_KV_PROVENANCE": "strict"}
    assert phase.launch.environment(base, tmp_path) == {"PATH": "/bin"} | REFERENCE.env | {
        "SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE": "1",
        "SGLANG_SWA_DBG_CHECKSUM": "1",
        "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path / "storage"),
    }


def test_an_interrupted_job_leaves_no_server(tmp_path):
    running = subprocess.Popen(
        script("l3_restart", "--reference", "--out", tmp_path / "out"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    begin = running.stdout.readline()
    server = os.pidfd_open(int(re.search(r"process (\d+)", begin)[1]))
    running.send_signal(signal.SIGTERM)
    output, _ = running.communicate(timeout=120)
    assert running.returncode == 128 + signal.SIGTERM, begin + output
    assert select.select([server], [], [], 60)[0]
    assert "verdict" not in output
    document = json.loads((tmp_path / "out" / "verdict.json").read_text())
    assert document["verdict"] == "could not run"
    assert document["checks"][-1]["found"] == "interrupted"


def test_a_folder_with_something_in_it_is_not_written_into(tmp_path):
    (tmp_path / "verdict.json").write_text("yesterday's")
    done = subprocess.run(
        script("l3_restart", "--reference", "--out", tmp_path), capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "is not empty; give another --out" in " ".join(done.stdout.split())
    assert (tmp_path / "verdict.json").read_text() == "yesterday's"

"""``--dry-run``: what a job will do, its time, its host memory, and what ``doctor`` says of each launch."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from ..cli.signals import signals_unwind
from ..launches import shell
from ..plan.capacity import GB, HOST_RESERVE
from .duration import clock, reasons, seconds, total
from .jobs import Job
from .launch import Launch
from .machine import ANSWER_S, Machine, write_model
from .steps import STOCK

DOCTOR_S = 900.0
RESERVE_GB = HOST_RESERVE / GB
NEEDS_CONFIG = (
    "it reads {model}'s config.json, from the cache of Hugging Face or from the network. Where neither "
    "has it, give --model DIR; `sglang-unified-kv plan --write-config DIR` writes a stand-in for Pro's"
)


Ask = Callable[[list[str], dict[str, str]], tuple[int, str, str]]
"""Runs a command in an environment: exit code, stdout, stderr."""


def run(
    console: Console,
    job: Job,
    machine: Machine,
    model: str | None,
    data: str | None,
    out: Path,
    ask: Ask | None = None,
) -> int:
    """Print the plan and what doctor says; start nothing and write nothing.

    Args:
        ask: in place of :func:`ask_doctor`.

    Returns:
        0: every launch would start. 1: doctor refuses one. 2: doctor could not be asked, or gave no answer.
    """

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    for line in lines(job, machine, model or str(out / "model"), data, out):
        say(line)
    say("\ndoctor")
    if find_spec("sglang") is None:
        say("  not asked: SGLang is not installed here, and nobody else knows its flags")
        return 2
    if not machine.here:
        say(
            f"  no {machine.device} here: asked with --device cpu, which checks the flags alone, as for ROCm"
        )
    if model and not Path(model, "config.json").is_file():
        say(f"  {NEEDS_CONFIG.format(model=model)}")
    refused: list[str] = []
    unasked: list[str] = []
    with signals_unwind(), tempfile.TemporaryDirectory() as folder:
        asked = model or str(write_model(Path(folder) / "model"))
        for opinion in opinions(job, machine, asked, out, ask or ask_doctor):
            say(f"  {opinion.phase}: {opinion}")
            if opinion.reasons:
                (refused if opinion.answered else unasked).append(opinion.phase)
    if unasked:
        say(f"\ndoctor gave no answer for {', '.join(unasked)}")
    if refused:
        say(f"\ndoctor refuses {len(refused)} of {len(job.phases)} launches: {', '.join(refused)}")
    return 1 if refused else 2 if unasked else 0


def lines(job: Job, machine: Machine, model: str, data: str | None, out: Path) -> Iterator[str]:
    """The plan: commands with their environment, what is checked, thresholds, time and host memory."""
    yield f"{job.name} on {machine.name}: {job.purpose}"
    works, free = [], free_host_gb() if machine.here else None
    for phase in job.phases:
        place = phase.place(machine, out, data, "PORT")
        work = phase.work(place)
        works.append(work)
        yield f"\nphase {phase.name}"
        launch = phase.launch
        yield f"  $ {shell(launch.command(model, 'PORT'), launch.variables(out))}"
        yield f"  healthy within {machine.start_s:.0f} s"
        yield from (f"  {line}" for line in host_memory(launch, free))
        yield f"  expected: {clock(seconds(work, machine.pace))}"
        for step in phase.steps:
            yield from (f"  {line}" for line in step.plan(place))
    work = total(works)
    yield f"\nexpected: {clock(seconds(work, machine.pace))}"
    yield f"  {reasons(work, machine.pace)}"
    yield f"  {machine.pace.source}"
    yield (
        f"  given up: a server that is not healthy after {machine.start_s:.0f} s, a client program after "
        f"{machine.program_s:.0f} s, an answer after {ANSWER_S:.0f} s"
    )
    yield f"\nlogs and verdict.json: {out}"


def free_host_gb(meminfo: Path = Path("/proc/meminfo")) -> float:
    """Host memory that is free for a new process, 1e9 bytes, as the kernel estimates it."""
    rows = dict(row.split(":") for row in meminfo.read_text().splitlines())
    return int(rows["MemAvailable"].split()[0]) * 1024 / GB


def host_memory(launch: Launch, free_gb: float | None) -> Iterator[str]:
    """What a launch pins on its host, and a warning where ``free_gb`` (1e9 bytes) is too little.

    None: the machine is not here.
    """
    if launch.rank_host_gb is None:
        yield "host memory: not planned, the caches are small"
        return
    need = launch.ranks * launch.rank_host_gb
    yield (
        f"host memory: {need:.0f} GB pinned at most ({launch.ranks} ranks of {launch.rank_host_gb:g} GB, by "
        "`sglang-unified-kv plan`)"
    )
    if need and free_gb is not None and need + RESERVE_GB > free_gb:
        yield (
            f"warning: this host has {free_gb:.0f} GB free, of which SGLang leaves {RESERVE_GB:.1f} GB "
            "alone: too little"
        )


class Opinion(NamedTuple):
    """What doctor says of a launch.

    Attributes:
        phase: of the job.
        verdict: in words.
        reasons: why it would not start as it should; none if it would.
        answered: doctor ended with a report.
    """

    phase: str
    verdict: str
    reasons: list[str]
    answered: bool = True

    def __str__(self) -> str:
        return "\n    - ".join([self.verdict, *self.reasons])


def opinions(job: Job, machine: Machine, model: str, out: Path, ask: Ask) -> Iterator[Opinion]:
    """Ask doctor about every launch, in its environment; launches that are alike once."""
    said: dict[str, dict[str, Any]] = {}
    for phase in job.phases:
        command = phase.launch.doctor(model, machine.here)
        line = shell(command, phase.launch.variables(out))
        if line not in said:
            said[line] = report_of(*ask(command, phase.launch.environment(os.environ, out)))
        yield opinion(phase.name, said[line])


def ask_doctor(command: list[str], env: dict[str, str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``command``, with ``env`` as its whole environment."""
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    try:
        done = subprocess.run(command, env=env, timeout=DOCTOR_S, **pipes)
    except subprocess.TimeoutExpired:
        return 124, "", f"no answer within {DOCTOR_S:.0f} s"
    return done.returncode, done.stdout, done.stderr


def report_of(code: int, stdout: str, stderr: str) -> dict[str, Any]:
    """Doctor's report; without one, only how it ``ended``."""
    last = stderr.strip().splitlines()[-1:]
    try:
        report: dict[str, Any] = json.loads(stdout)
    except ValueError:
        return {"ended": " ".join([f"it ended with exit code {code}:", *last])}
    for found in report["checks"].values():
        if any("stderr" in reason for reason in found):
            found += last
    return report


def opinion(phase: str, report: Mapping[str, Any]) -> Opinion:
    """Judge a report: ours has to engage; of stock SGLang, whether it takes the flags and we stay out."""
    if ended := report.get("ended"):
        return Opinion(phase, "doctor gave no answer", [ended], answered=False)
    checks: Mapping[str, list[str]] = report["checks"]
    stock = phase in STOCK
    if stock and "launch flags" in checks:
        why = list(checks["launch flags"])
        if not checks["requested"]:
            why.append("the environment turns one of our features on")
    else:
        why = [f"{name}: {reason}" for name, found in checks.items() for reason in found]
    if why:
        return Opinion(phase, "refused", why)
    if stock:
        return Opinion(phase, "stock SGLang takes the flags", [])
    where = "here" if report["platform_checked"] else "on ROCm; the machine was not checked"
    return Opinion(phase, f"{report['feature']} would engage {where}", [])

"""Runs a job: its servers one after the other, its steps, and what they found."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ..cli.client import ClientError
from ..cli.server import ServerFailed, free_port
from . import rules
from .jobs import Job, Phase
from .machine import Machine
from .server import Server, serve
from .verdict import Check, Outcome, Verdict, judge

LAST_LINES = 40


def run(
    job: Job,
    machine: Machine,
    model: str,
    data: str | None,
    out: Path,
    say: Callable[[str], None],
    verdict: Verdict,
) -> None:
    """Run every phase of ``job``; a server that fails ends it.

    Args:
        model: path or name of what is served.
        data: GSM8K as JSON lines; None lets SGLang's client fetch it.
        out: folder for logs and results.
        say: told what is going on.
        verdict: gets every check as it is made.
    """
    for phase in job.phases:
        begun = time.monotonic()
        whole = _run(phase, machine, model, data, out, verdict, say)
        verdict.seconds[phase.name] = time.monotonic() - begun
        if not whole:
            break


def _run(
    phase: Phase,
    machine: Machine,
    model: str,
    data: str | None,
    out: Path,
    verdict: Verdict,
    say: Callable[[str], None],
) -> bool:
    """Run one phase; whether it came to its end."""
    place = phase.place(machine, out, data, str(free_port()))
    earlier = dict(verdict.figures)
    log = out / f"{phase.name}.log"
    whole = True
    try:
        with serve(place, model, earlier, say) as server:
            verdict.figures[phase.name] = server.figures
            _ask(phase, server, verdict)
    except (ClientError, ServerFailed) as error:
        whole = False
        found = f"{error}; the server's log is {log}"
        verdict.add(phase.name, [Check("server", Outcome.NOT_RUN, found, "answers")])
        if log.exists():
            last = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
            say(f"The last lines of {log}:\n" + "\n".join(last))
    if log.exists():
        verdict.add(phase.name, [trouble(log)])
    return whole


def _ask(phase: Phase, server: Server, verdict: Verdict) -> None:
    for step in phase.steps:
        # One by one: a server that fails leaves what was found before.
        for check in step.run(server):
            verdict.add(phase.name, [check])


def trouble(log: Path) -> Check:
    """No line of a server's whole log tells of bytes that differ or of lost captures."""
    wrong = rules.lines_of(log.read_text(errors="replace"), *rules.TROUBLE)
    needed = "no " + ", ".join(rules.TROUBLE)
    return judge(f"log {log.name}", not wrong, wrong[0] if wrong else "clean", needed)

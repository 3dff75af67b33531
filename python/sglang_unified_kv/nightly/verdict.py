"""What a job found: checks, a table, a JSON document, an exit code. Knows nothing of servers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


class Outcome(str, Enum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "could not run"
    NOT_JUDGED = "not judged"


_COLORS = {
    Outcome.PASSED: "green",
    Outcome.FAILED: "red",
    Outcome.NOT_RUN: "yellow",
    Outcome.NOT_JUDGED: "dim",
}


@dataclass(frozen=True)
class Check:
    """One line of the verdict.

    Attributes:
        name: what was looked at.
        outcome: ``NOT_JUDGED`` is a figure without a threshold on this machine.
        found: as text.
        needed: the rule, as text.
    """

    name: str
    outcome: Outcome
    found: str
    needed: str


def judge(name: str, ok: bool, found: object, needed: str) -> Check:
    """A check that passed or failed."""
    return Check(name, Outcome.PASSED if ok else Outcome.FAILED, str(found), needed)


@dataclass
class Verdict:
    """All checks of one job, by phase.

    Attributes:
        job, machine: names.
        checks: pairs of phase and check, in the order they were made.
        figures: by phase, what was measured: JSON's types and dataclasses of them.
        seconds: wall time by phase.
    """

    job: str
    machine: str
    checks: list[tuple[str, Check]] = field(default_factory=list)
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, phase: str, checks: Iterable[Check]) -> None:
        self.checks += [(phase, check) for check in checks]

    @property
    def outcome(self) -> Outcome:
        """``FAILED`` outweighs ``NOT_RUN``; a job in which nothing passed could not run."""
        found = {check.outcome for _, check in self.checks}
        if Outcome.FAILED in found:
            return Outcome.FAILED
        if Outcome.NOT_RUN in found or Outcome.PASSED not in found:
            return Outcome.NOT_RUN
        return Outcome.PASSED

    @property
    def exit_code(self) -> int:
        """0: passed. 1: failed. 2: could not run."""
        return {Outcome.PASSED: 0, Outcome.FAILED: 1}.get(self.outcome, 2)

    def as_json(self) -> dict[str, Any]:
        return {
            "job": self.job,
            "machine": self.machine,
            "verdict": self.outcome.value,
            "checks": [{"phase": phase} | asdict(check) for phase, check in self.checks],
            "figures": self.figures,
            "seconds": {phase: round(s, 1) for phase, s in self.seconds.items()},
        }

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.as_json(), indent=2, default=asdict) + "\n")

    def print(self, console: Console) -> None:
        table = Table(title=f"{self.job} on {self.machine}", title_justify="left")
        for header in ("phase", "check", "outcome", "found", "needed"):
            table.add_column(header, no_wrap=header in ("phase", "outcome"), overflow="fold")
        for phase, check in self.checks:
            color = _COLORS[check.outcome]
            table.add_row(
                phase,
                escape(check.name),
                f"[{color}]{check.outcome.value}[/{color}]",
                escape(check.found),
                escape(check.needed),
            )
        console.print(table)
        color = _COLORS[self.outcome]
        console.print(f"verdict: [{color}]{self.outcome.value}[/{color}]")

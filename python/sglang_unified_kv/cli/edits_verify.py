"""``sglang-unified-kv edits --verify``: what an SGLang has that the edits do not expect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from ..hooking.series import SGLANG_VERSION, Series
from ..hooking.upstream import Finding, Problem

Found = Mapping[str, list[Finding]]
"""Title of a series -> what is not as it expects."""


def verify_edits(listed: Mapping[str, Series], as_json: bool) -> int:
    """Print what is not as the edits expect; the exit code."""
    try:
        installed = version("sglang")
    except PackageNotFoundError:
        typer.echo(f"sglang is not installed; install sglang=={SGLANG_VERSION}", err=True)
        return 2
    found = {title: series.findings() for title, series in listed.items()}
    if as_json:
        typer.echo(json.dumps(_findings_as_json(installed, listed, found), indent=2))
    else:
        _print_findings(Console(highlight=False, soft_wrap=True), installed, listed, found)
    expected_release = installed.partition("+")[0] == SGLANG_VERSION
    return 0 if expected_release and not any(found.values()) else 1


def _findings_as_json(installed: str, listed: Mapping[str, Series], found: Found) -> dict[str, Any]:
    def row(finding: Finding) -> dict[str, Any]:
        return {
            "target": finding.edit.target,
            "kind": finding.edit.kind.value,
            "problem": finding.problem.value,
            "expected": finding.expected,
            "found": finding.found,
            "place": finding.place,
            "why": finding.edit.why,
        }

    series = {
        one.name: {"edits": len(one), "findings": [row(finding) for finding in found[title]]}
        for title, one in listed.items()
    }
    return {"installed": installed, "expected": SGLANG_VERSION, "series": series}


def _print_findings(
    console: Console, installed: str, listed: Mapping[str, Series], found: Found
) -> None:
    for title, findings in found.items():
        for problem in Problem:
            group = [finding for finding in findings if finding.problem is problem]
            if group:
                console.print(
                    f"{title}: {problem.value} ({len(group)})", style="bold", markup=False
                )
                console.print(f"  to do: {problem.remedy}", markup=False)
            for finding in group:
                for line in _lines(finding):
                    console.print(line, markup=False)
    _print_counts(console, listed, found)
    console.print(f"installed: sglang {installed}; the edits are written for {SGLANG_VERSION}")


def _lines(finding: Finding) -> list[str]:
    edit = finding.edit
    lines = [f"  - {edit.target}", f"      {edit.kind.value}: {edit.why}"]
    if finding.problem is Problem.MISSING:
        return [*lines, f"      {finding.text}"]
    return [
        *lines,
        f"      expected {finding.expected}",
        f"      found    {finding.found}" + (f" at {finding.place}" if finding.place else ""),
    ]


def _print_counts(console: Console, listed: Mapping[str, Series], found: Found) -> None:
    seen = [p for p in Problem if any(f.problem is p for one in found.values() for f in one)]
    table = Table("series", "edits", "as expected", *(problem.value for problem in seen))
    for title, series in listed.items():
        counts = [sum(f.problem is problem for f in found[title]) for problem in seen]
        as_expected = len(series) - len(found[title])
        table.add_row(title, *map(str, (len(series), as_expected, *counts)))
    console.print(table)

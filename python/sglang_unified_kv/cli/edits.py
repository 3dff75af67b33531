"""``sglang-unified-kv edits``: the series of edits, readable without SGLang, and checked against it."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..edit import SGLANG_VERSION, Edit, Series
from .edits_verify import verify_edits


def edits(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Compare every edit with the SGLang installed here, whatever its release.",
        ),
    ] = False,
) -> None:
    """List every edit of SGLang: the product's series, and the reference engine's apart.

    Listing needs no SGLang; --verify does. The reference engine's edits are torch functions; without torch
    they are left out, and the output says so.

    Exit code of --verify: 0 if SGLang is the release and the source that the edits were written for, 1 if it
    is not, 2 if there is none.
    """
    listed = _series()
    if verify:
        raise typer.Exit(verify_edits(listed, as_json))
    if as_json:
        series = {s.name: [_row(edit) for edit in s] for s in listed.values()}
        typer.echo(json.dumps({"sglang": SGLANG_VERSION, "series": series}, indent=2))
        return
    console = Console()
    for title, one in listed.items():
        _print(console, one, title)


def _series() -> dict[str, Series]:
    from ..edits import HISPARSE_SERIES, RING, SERIES

    listed = {"Exact reuse": SERIES, "Ring accounting": RING, "HiSparse": HISPARSE_SERIES}
    if find_spec("torch") is not None:
        from ..reference.edits import SERIES as reference

        listed["Reference engine (tests and demos only)"] = reference
    else:
        typer.echo("The reference engine's edits are not listed: torch is not installed.", err=True)
    return listed


def _row(edit: Edit) -> dict[str, Any]:
    return {
        "target": edit.target,
        "kind": edit.kind.value,
        "feature": edit.feature,
        "why": edit.why,
        "ours": edit.ours_name,
        "params": edit.params,
        "fingerprint": edit.fingerprint,
    }


def _print(console: Console, series: Series, title: str) -> None:
    table = Table(
        "kind",
        "target / ours",
        "feature",
        "why",
        title=f"{title}: {len(series)} edits of sglang {SGLANG_VERSION}",
        show_lines=True,
    )
    for edit in series:
        target = edit.target.replace(":", ":\u200b")
        ours = "" if edit.ours is None else f"\n[dim]{edit.ours_name}[/dim]"
        table.add_row(edit.kind.value, f"{target}{ours}", edit.feature, edit.why)
    console.print(table)

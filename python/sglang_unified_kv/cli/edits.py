"""``sglang-unified-kv edits``: the series of edits, readable without SGLang, and checked against it."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from ..edit import SGLANG_VERSION, Edit, Series
from .edits_verify import verify_edits


def edits(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
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
    for title, one in listed.items():
        _print(one, title)


def _series() -> dict[str, Series]:
    from ..edits import HISPARSE_SERIES, REPORT, RING, SERIES

    listed = {
        "Exact reuse": SERIES,
        "Ring accounting": RING,
        "HiSparse": HISPARSE_SERIES,
        "Attestation and metrics": REPORT,
    }
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


def _print(series: Series, title: str) -> None:
    """One paragraph per edit, whose lines are whole however wide the terminal is."""
    typer.echo(f"{title}: {len(series)} edits of sglang {SGLANG_VERSION}\n")
    for edit in series:
        typer.echo(f"{edit.kind.value}: {edit.target}")
        if edit.ours is not None:
            typer.echo(f"  ours: {edit.ours_name}")
        typer.echo(f"  for {edit.feature}: {edit.why}\n")

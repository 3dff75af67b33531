"""``sglang-unified-kv edits``: the series of edits, readable without SGLang, and checked against it."""

from __future__ import annotations

import json
from importlib.util import find_spec
from itertools import combinations
from typing import Annotated, Any

import typer

from ..attestation import digest
from ..hooking.series import SGLANG_VERSION, Edit, Series
from ..names import BIT_EXACT_HICACHE, BIT_EXACT_RADIX, HISPARSE, RING_FIXES
from ..plugin import requested_series
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

    Last, for every choice of switches, the number and the digest that a rank says of itself (edits= and
    edits_digest= in its log): those of all series that the switches ask for.

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
        document = {"sglang": SGLANG_VERSION, "series": series, "ranks": _said_by_ranks()}
        typer.echo(json.dumps(document, indent=2))
        return
    for title, one in listed.items():
        _print(one, title)
    typer.echo(f"What a rank says, by the switches that are on; {BIT_EXACT_RADIX} counts as")
    typer.echo(f"{BIT_EXACT_HICACHE}:\n")
    for said in _said_by_ranks():
        switches = " and ".join(said["switches"])
        typer.echo(f"edits={said['edits']} edits_digest={said['edits_digest']}  {switches}")


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


def _said_by_ranks() -> list[dict[str, Any]]:
    """What ranks say of their edits, for every choice of switches that asks for other series."""
    switches = (BIT_EXACT_HICACHE, RING_FIXES, HISPARSE)
    found: dict[str, dict[str, Any]] = {}
    for count in range(1, len(switches) + 1):
        for on in combinations(switches, count):
            edits, fingerprints = digest(requested_series(dict.fromkeys(on, "1")))
            said = {"switches": list(on), "edits": edits, "edits_digest": fingerprints}
            found.setdefault(fingerprints, said)
    return list(found.values())


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

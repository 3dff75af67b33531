"""The command line that every script of ``scripts/nightly`` is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from ..cli.extra import require_extra
from ..cli.signals import signals_unwind
from . import dry_run as dry
from .jobs import JOBS, Job
from .machine import MI355X, REFERENCE, Machine, default_model, write_model
from .verdict import Check, Outcome, Verdict


def main(name: str) -> None:
    """Run the command line of one job."""
    typer.run(command(name))


def command(name: str) -> Callable[..., None]:
    """The command of one job, for typer."""

    def job(
        dry_run: Annotated[
            bool,
            typer.Option(
                "--dry-run", help="Print the plan, ask doctor about every launch, start nothing."
            ),
        ] = False,
        reference: Annotated[
            bool,
            typer.Option("--reference", help="On the CPU reference engine, everything small."),
        ] = False,
        out: Annotated[
            Path | None,
            typer.Option(metavar="DIR", help="Logs and verdict. Default: ./nightly-JOB."),
        ] = None,
        model: Annotated[
            str | None,
            typer.Option(
                help="Default: $SGLANG_UNIFIED_KV_NIGHTLY_MODEL, or deepseek-ai/DeepSeek-V4-Pro."
            ),
        ] = None,
        gsm8k: Annotated[
            Path | None,
            typer.Option(metavar="FILE", help="GSM8K's test.jsonl. Default: fetched."),
        ] = None,
    ) -> None:
        """Exit code 0: passed. 1: failed. 2: could not run.

        With --dry-run 0: every launch would start. 1: doctor refuses one. 2: it could not be asked.
        """
        machine = REFERENCE if reference else MI355X
        out = (out or Path(f"nightly-{name}")).absolute()
        served = model or default_model(machine)
        data = str(gsm8k.absolute()) if gsm8k else None
        plan = JOBS[name](machine)
        console = Console(highlight=False)
        if dry_run:
            raise typer.Exit(dry.run(console, plan, machine, served, data, out))
        require_extra(console, "requests", "sglang")
        raise typer.Exit(_run(console, plan, machine, served, data, out))

    job.__doc__ = (
        f"{JOBS[name](MI355X).purpose[0].upper()}{JOBS[name](MI355X).purpose[1:]}.\n\n{job.__doc__}"
    )
    return job


def _run(
    console: Console, job: Job, machine: Machine, model: str | None, data: str | None, out: Path
) -> int:
    if out.exists() and any(out.iterdir()):
        console.print(f"{escape(str(out))} is not empty; give another --out")
        return 2
    out.mkdir(parents=True, exist_ok=True)
    from .run import run

    verdict, broken = Verdict(job.name, machine.name), "interrupted"
    try:
        with signals_unwind():
            if model is None:
                model = str(write_model(out / "model"))
            run(job, machine, model, data, out, lambda t: console.print(escape(t)), verdict)
        broken = ""
    except Exception as error:  # a job that breaks, at whatever, has not failed: it could not run
        broken = repr(error)
        console.print_exception()
    finally:
        if broken:
            verdict.add("job", [Check("job", Outcome.NOT_RUN, broken, "comes to its end")])
        verdict.write(out / "verdict.json")
    verdict.print(console)
    if machine.reference:
        console.print(
            "Scores, costs and capacities are not judged on the reference engine: they say nothing of a GPU."
        )
    return verdict.exit_code

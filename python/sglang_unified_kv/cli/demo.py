"""``sglang-unified-kv demo``: stock and exact SGLang side by side, on the CPU, over HTTP."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..config import BIT_EXACT_HICACHE
from ..reference.plugin import ENV as REFERENCE_ENGINE
from .demo_verdict import SERVERS, Case, as_json, shortcomings
from .server import ServerFailed, ServerProcess, free_port

if TYPE_CHECKING:
    from .demo_story import Outcome

_EXTRA = ("matplotlib", "requests")
_START_TIMEOUT_S = 300.0


def demo(
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write cases and verdict as JSON.")
    ] = None,
    picture: Annotated[
        Path, typer.Option(metavar="FILE.png", help="Where the picture goes.")
    ] = Path("dlogprob.png"),
    keep_logs: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the servers' logs here.")
    ] = None,
) -> None:
    """Serve a tiny DeepSeek-V4 twice, stock and exact, and compare every hit with its cold run.

    Exit code 0: every exact hit equals its cold run bit for bit, and stock shows the fault. 1: not
    so. 2: it could not be run.
    """
    console = Console(highlight=False)
    _require_extra(console)
    _require_folders(console, json_file, picture)
    with ExitStack() as stack:
        stack.enter_context(_signals_unwind())
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sglang-unified-kv-")))
        logs = work if keep_logs is None else keep_logs
        logs.mkdir(parents=True, exist_ok=True)
        sglang, outcomes = _run(console, work / "model", logs)
    cases = [case for outcome in outcomes for case in outcome.cases]
    cold = {name: n for outcome in outcomes for name, n in outcome.cold_cached_tokens.items()}
    reasons = shortcomings(cold, cases)
    _write_picture(console, cases, sglang, picture)
    if json_file is not None:
        json_file.write_text(json.dumps(as_json(sglang, cases, reasons), indent=2) + "\n")
    _print(console, cases, reasons)
    raise typer.Exit(1 if reasons else 0)


def _require_extra(console: Console) -> None:
    missing = [name for name in _EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        console.print(
            f"The demo needs {' and '.join(missing)}. Install the extra that brings them: "
            "pip install 'sglang-unified-kv[demo]'",
            markup=False,
        )
        raise typer.Exit(2)


def _require_folders(console: Console, *files: Path | None) -> None:
    # Now, not after minutes of work.
    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            console.print(f"{escape(str(file))}: its folder does not exist; create it")
            raise typer.Exit(2)


@contextmanager
def _signals_unwind() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that servers are ended."""

    def unwind(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    previous = {n: signal.signal(n, unwind) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _run(console: Console, model: Path, logs: Path) -> tuple[str, list[Outcome]]:
    """Both servers, one after the other. Returns SGLang's version and what they did."""
    from ..reference.model import write_tiny_model
    from .demo_story import STEPS

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("writing the tiny model", total=1 + len(SERVERS) * (1 + STEPS))
        write_tiny_model(model)
        outcomes = []
        for server in SERVERS:
            sglang, outcome = _serve(progress, task, server, model, logs / f"{server}.log")
            outcomes.append(outcome)
    return sglang, outcomes


def _serve(progress: Progress, task, server: str, model: Path, log: Path) -> tuple[str, Outcome]:
    from .client import ClientError, SGLangClient
    from .demo_story import tell

    say = progress.console.print

    def step(text: str) -> None:
        progress.update(task, description=f"{server}: {text}", advance=1)

    port = free_port()
    process = ServerProcess(launch_command(model, port), environment(server, os.environ), log)
    with process, closing(SGLangClient(f"http://127.0.0.1:{port}")) as client:
        step(f"starting sglang.launch_server (process {process.pid})")
        say(f"{server}: sglang.launch_server is process {process.pid} on port {port}")
        try:
            begun = time.monotonic()
            process.wait_until(client.healthy, timeout_s=_START_TIMEOUT_S)
            healthy = time.monotonic()
            version = client.server_info()["version"]
            outcome = tell(server, client, step)
            told = time.monotonic()
        except (ClientError, ServerFailed) as error:
            say(f"[red]{server}: {escape(str(error))}[/red]", soft_wrap=True)
            say(f"The last lines of its log ({escape(str(log))}):")
            say(escape(process.tail()), soft_wrap=True)
            raise typer.Exit(2) from error
    say(f"{server}: started in {healthy - begun:.1f} s, story took {told - healthy:.1f} s")
    return version, outcome


def environment(server: str, base: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of a server: ``base`` without SGLang's variables, then ours."""
    env = {name: value for name, value in base.items() if not name.startswith("SGLANG_")}
    env[REFERENCE_ENGINE] = "1"
    # Spinning OpenMP threads take the cores from the processes that have work.
    env["OMP_WAIT_POLICY"] = "PASSIVE"
    if server == "exact":
        env[BIT_EXACT_HICACHE] = "1"
    return env


def launch_command(model: Path, port: int) -> list[str]:
    """The launch of both servers; they differ in the environment alone."""
    from .demo_story import POOL_TOKENS, SLOTS

    flags = f"""
        --attention-backend dsv4 --page-size 256 --swa-full-tokens-ratio 0.1 --enable-cache-report
        --enable-hierarchical-cache --hicache-write-policy write_through --hicache-ratio 4
        --hicache-io-backend direct --hicache-mem-layout layer_first
        --device cpu --skip-tokenizer-init --enable-fp32-lm-head --chunked-prefill-size 512
        --max-total-tokens {POOL_TOKENS} --max-running-requests {SLOTS}
        --host 127.0.0.1 --port {port}
    """.split()
    return [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), *flags]


def _write_picture(console: Console, cases: Sequence[Case], sglang: str, path: Path) -> None:
    from .demo_picture import draw

    draw(cases, sglang, path)
    console.print(f"picture: {escape(str(path))}")


def _print(console: Console, cases: Sequence[Case], reasons: Sequence[str]) -> None:
    table = Table(
        "case",
        "cached tokens",
        "tokens equal",
        "logprobs equal, bit for bit",
        "largest |dlogprob|",
        title="Each hit against the cold run of the same prompt on the same server",
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for case in cases:
        comparison = case.comparison
        table.add_row(
            case.name,
            str(case.cached_tokens),
            _yes_or_no(comparison.tokens_equal),
            _yes_or_no(comparison.logprobs_equal),
            f"{comparison.max_abs_dlogprob:.3g}",
        )
    console.print(table)
    console.print(
        "dlogprob compares output_token_logprobs position by position, up to and including the "
        "first differing token."
    )
    for reason in reasons:
        console.print(f"- {escape(reason)}")
    console.print("verdict: [red]not exact[/red]" if reasons else "verdict: [green]exact[/green]")


def _yes_or_no(value: bool) -> str:
    return "[green]yes[/green]" if value else "[red]no[/red]"

"""``sglang-unified-kv demo``: stock and exact SGLang side by side, on the CPU, over HTTP."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing
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
from .extra import require_extra
from .server import ServerFailed, ServerProcess, free_port
from .signals import signals_unwind

if TYPE_CHECKING:
    from .demo_story import Outcome

_START_TIMEOUT_S = 600.0


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
    require_extra(console, "matplotlib", "requests")
    _require_folders(console, json_file, picture)
    with ExitStack() as stack:
        stack.enter_context(signals_unwind())
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sglang-unified-kv-")))
        logs = work if keep_logs is None else keep_logs
        logs.mkdir(parents=True, exist_ok=True)
        sglang, outcomes = _run(console, work, logs)
    cases = [case for outcome in outcomes for case in outcome.cases]
    cold = {name: n for outcome in outcomes for name, n in outcome.cold_cached_tokens.items()}
    reasons = shortcomings(cold, cases)
    _write_picture(console, cases, sglang, picture)
    if json_file is not None:
        json_file.write_text(json.dumps(as_json(sglang, cases, reasons), indent=2) + "\n")
    _print(console, cases, reasons)
    raise typer.Exit(1 if reasons else 0)


def _require_folders(console: Console, *files: Path | None) -> None:
    # Now, not after minutes of work.
    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            console.print(f"{escape(str(file))}: its folder does not exist; create it")
            raise typer.Exit(2)


class _Failed(Exception):
    """A server or its story failed; the last lines of ``process``'s log tell why."""

    def __init__(self, server: str, process: ServerProcess, reason: Exception) -> None:
        super().__init__(f"{server}: {reason}")
        self.process = process


def _run(console: Console, work: Path, logs: Path) -> tuple[str, list[Outcome]]:
    """Both servers, side by side. Returns SGLang's version and what they did.

    Raises:
        typer.Exit: status 2, one of them failed and that was printed.
    """
    from ..reference.model import write_tiny_model

    with console.status("writing the tiny model"):
        model = write_tiny_model(work / "model")
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    try:
        with (
            Progress(*columns, console=console, transient=True) as progress,
            ThreadPoolExecutor(len(SERVERS)) as threads,
            # Left first: ending the servers is what ends a thread that waits for an answer.
            ExitStack() as servers,
        ):
            stories = []
            for server in SERVERS:
                port = free_port()
                command = launch_command(model, port)
                env = environment(server, os.environ, storage=work / f"{server}-storage")
                process = ServerProcess(command, env, logs / f"{server}.log")
                servers.enter_context(process)
                console.print(f"{server}: sglang.launch_server is process {process.pid}")
                stories.append(threads.submit(_story, progress, server, process, port))
            for story in as_completed(stories):
                story.result()
    except _Failed as failed:
        console.print(f"[red]{escape(str(failed))}[/red]", soft_wrap=True)
        console.print(f"The last lines of its log ({escape(str(failed.process.log))}):")
        console.print(escape(failed.process.tail()), soft_wrap=True)
        raise typer.Exit(2) from failed
    (sglang, _), *_ = results = [story.result() for story in stories]
    return sglang, [outcome for _, outcome in results]


def _story(
    progress: Progress, server: str, process: ServerProcess, port: int
) -> tuple[str, Outcome]:
    """Wait for one server and tell it the story. Runs in a thread of its own."""
    from .client import ClientError, SGLangClient
    from .demo_story import STEPS, tell, tell_on

    steps = 1 + STEPS[server]
    task = progress.add_task(f"{server}: starting sglang.launch_server", total=steps)

    def step(text: str) -> None:
        if not progress.console.is_terminal:
            progress.console.print(f"{server}: {text}")
        progress.update(task, description=f"{server}: {text}", advance=1)

    with closing(SGLangClient(f"http://127.0.0.1:{port}")) as client:
        try:
            begun = time.monotonic()
            process.wait_until(client.healthy, timeout_s=_START_TIMEOUT_S)
            healthy = time.monotonic()
            sglang = client.server_info()["version"]
            outcome = tell(server, client, step)
            if server == "exact":
                step("stopped and started again")
                process.restart()
                process.wait_until(client.healthy, timeout_s=_START_TIMEOUT_S)
                step("healthy again")
                tell_on(server, client, step, outcome)
        except (ClientError, ServerFailed) as error:
            raise _Failed(server, process, error) from error
    told = time.monotonic()
    progress.update(task, description=f"{server}: done", completed=steps)
    progress.console.print(
        f"{server}: started in {healthy - begun:.1f} s, story took {told - healthy:.1f} s"
    )
    # Leaves its core to the other one.
    process.stop()
    return sglang, outcome


def environment(server: str, base: Mapping[str, str], *, storage: Path) -> dict[str, str]:
    """The whole environment of a server: ``base`` without SGLang's variables, then ours.

    Args:
        storage: folder of the file storage backend.
    """
    env = {name: value for name, value in base.items() if not name.startswith("SGLANG_")}
    env[REFERENCE_ENGINE] = "1"
    env["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(storage)
    # The two servers share the machine, and such small tensors gain nothing from a second thread.
    env["OMP_NUM_THREADS"] = "1"
    if server == "exact":
        env[BIT_EXACT_HICACHE] = "1"
    return env


def launch_command(model: Path, port: int) -> list[str]:
    """The launch of both servers; they differ in the environment alone."""
    from .demo_story import LINE

    return LINE.here(str(model), port)


def _write_picture(console: Console, cases: Sequence[Case], sglang: str, path: Path) -> None:
    from .demo_picture import draw

    draw(cases, sglang, path)
    console.print(f"picture: {escape(str(path))}")


def _print(console: Console, cases: Sequence[Case], reasons: Sequence[str]) -> None:
    table = Table(title="Each hit against the cold run of the same prompt on the same server")
    table.add_column("case", no_wrap=True)
    for header in ("cached tokens", "tokens equal", "logprobs bit-equal", "largest |dlogprob|"):
        table.add_column(header, justify="right")
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

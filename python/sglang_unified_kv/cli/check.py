"""``sglang-unified-kv check``: do a live server's ranks run the same, and is prefix reuse deterministic?"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .determinism import PAGE_TOKENS, TAILS, Plan, Report, requests_of, run
from .extra import require_extra

if TYPE_CHECKING:
    from .client import SGLangClient

    Connect = Callable[[], closing[SGLangClient]]


def check(
    url: Annotated[str, typer.Option(help="The server, http://host:port.")],
    tails: Annotated[
        str, typer.Option(help="Tokens behind two cached pages, one prompt each.")
    ] = ",".join(map(str, TAILS)),
    rounds: Annotated[int, typer.Option(min=1, help="Times each prompt is sent again.")] = 64,
    churn: Annotated[
        int, typer.Option(min=0, help="Other requests in between, so that slots are recycled.")
    ] = 500,
    churn_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each of them.")] = PAGE_TOKENS,
    output_tokens: Annotated[int, typer.Option(min=1, help="Generated per repetition.")] = 32,
    batch: Annotated[int, typer.Option(min=1, help="Requests sent together.")] = 16,
    token_ids: Annotated[
        str, typer.Option(metavar="LOW-HIGH", help="Range of the random prompts' token ids.")
    ] = "1000-100000",
    seed: Annotated[
        int | None, typer.Option(help="Of the random prompts. Default: another one every time.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write results as JSON.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds to wait for an answer.")] = 300.0,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="OPENAI_API_KEY", help="If the server was launched with --api-key."),
    ] = None,
    attestation: Annotated[
        bool, typer.Option(help="First compare what the server's ranks say that they run.")
    ] = True,
    attest_only: Annotated[
        bool, typer.Option("--attest-only", help="Do that alone; no prompt is sent.")
    ] = False,
) -> None:
    """Compare what the ranks run, then the answers to identical prompts whose prefix is cached.

    Nothing is flushed: the prompts are random, so that each one's first run is cold. Other traffic
    does no harm but may evict what is to be reused.

    Exit code 0: every rank runs the same, and all answers of every prompt are its cold run's. 1: not so.
    2: it could not be run, or too little was reused to tell.
    """
    console = Console(highlight=False)
    require_extra(console, "requests", "prometheus_client")
    if attest_only and not attestation:
        raise typer.BadParameter("--attest-only and --no-attestation exclude each other")
    plan = Plan(
        tails=_tails(tails),
        rounds=rounds,
        churn=churn,
        churn_tokens=churn_tokens,
        output_tokens=output_tokens,
        batch=batch,
        token_ids=_token_ids(token_ids),
        seed=secrets.randbits(32) if seed is None else seed,
    )
    if not url.startswith(("http://", "https://")):
        raise typer.BadParameter(f"--url {url}: give http://host:port")
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise typer.BadParameter(f"--json {json_file}: its folder does not exist; create it")
    if json_file is not None and json_file.is_dir():
        raise typer.BadParameter(f"--json {json_file}: is a folder; name a file")
    connect = partial(_connected, url, timeout, api_key)
    document = _attest(console, connect) if attestation else {}
    if attest_only or document.get("reasons"):
        _write(json_file, document)
        raise typer.Exit(1 if document.get("reasons") else 0)
    report = _run(console, plan, connect)
    _print(console, report)
    _write(json_file, document | report.as_json())
    raise typer.Exit({"deterministic": 0, "not deterministic": 1}.get(report.verdict, 2))


def _write(json_file: Path | None, document: dict[str, Any]) -> None:
    if json_file is not None:
        json_file.write_text(json.dumps(document, indent=2) + "\n")


def _connected(url: str, timeout: float, api_key: str | None) -> closing[SGLangClient]:
    from .client import SGLangClient

    return closing(SGLangClient(url, timeout_s=timeout, api_key=api_key))


def _attest(console: Console, connect: Connect) -> dict[str, Any]:
    """What each rank says and, if the ranks disagree, ``reasons``; for the results, and printed.

    Raises:
        typer.Exit: status 2, they cannot be asked. It was printed.
    """
    from .attest import attest
    from .client import ClientError, NoMetrics

    try:
        with connect() as client:
            found, started, reasons, node, nodes = attest(client)
    except (ClientError, ValueError) as error:
        console.print(f"[red]{escape(str(error))}[/red]", soft_wrap=True)
        if isinstance(error, NoMetrics):
            console.print("--no-attestation leaves the comparison of the ranks out.")
        raise typer.Exit(2) from error
    where = f" of this node ({node + 1} of {nodes})" if nodes > 1 else ""
    if reasons:
        for reason in reasons:
            console.print(f"- {escape(reason)}", soft_wrap=True)
        console.print(f"attestation{where}: [red]failed[/red]")
        several = {str(rank): [asdict(one) for one in found[rank]] for rank in sorted(found)}
        # As when nothing is wrong, but for a rank that contradicts itself.
        said = {rank: ones[0] if len(ones) == 1 else ones for rank, ones in several.items()}
        return {"attestation": said, "reasons": reasons}
    first = found[min(found)][0]
    since = datetime.fromtimestamp(max(started.values()), UTC)
    console.print(
        f"attestation: {len(found)} of {len(found)} ranks{where}, started {since:%Y-%m-%d %H:%M:%S} UTC: "
        f"{escape(str(first))}",
        soft_wrap=True,
    )
    return {"attestation": {str(rank): asdict(found[rank][0]) for rank in sorted(found)}}


def _tails(text: str) -> tuple[int, ...]:
    try:
        tails = tuple(int(part) for part in text.split(","))
    except ValueError:
        tails = ()
    if not tails or min(tails) < 1 or len(set(tails)) < len(tails):
        raise typer.BadParameter(
            f"--tails {text!r}: give different positive numbers, as in 16,127,220"
        )
    return tails


def _token_ids(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    if not (low.isdecimal() and high.isdecimal() and int(low) < int(high)):
        raise typer.BadParameter(f"--token-ids {text!r}: give LOW-HIGH, as in 1000-100000")
    return int(low), int(high)


def _vocabulary(model_path: str) -> int:
    """Tokens of the model at ``model_path``; DeepSeek-V4's own number if it cannot be read from here."""
    try:
        return int(json.loads((Path(model_path) / "config.json").read_text())["vocab_size"])
    except (OSError, ValueError, KeyError):
        return 129_280


def _run(console: Console, plan: Plan, connect: Connect) -> Report:
    from .client import ClientError

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console.print(f"{requests_of(plan):,} requests; --rounds, --churn and --tails make it fewer.")
    with (
        Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress,
        connect() as client,
    ):
        task = progress.add_task("waiting for the server", total=requests_of(plan))

        def sent(what: str, count: int) -> None:
            progress.update(task, description=what, advance=count)

        url = client.base_url
        try:
            info = client.server_info()
            if info.get("disable_radix_cache"):
                raise ClientError(
                    f"{url}: runs with --disable-radix-cache and reuses no prefix, so there is nothing "
                    "to try; give --attest-only to compare what its ranks run"
                )
            page = info.get("page_size")
            if page != PAGE_TOKENS:
                raise ClientError(
                    f"{url}: its page size is {page}, this check is for {PAGE_TOKENS}"
                )
            vocabulary = _vocabulary(client.model_info().get("model_path", ""))
            if plan.token_ids[1] >= vocabulary:
                # SGLang does not check ids that it is given, and dies of one that it has no row for.
                raise ClientError(
                    f"{url}: its vocabulary has {vocabulary} tokens; give --token-ids within it, "
                    f"for instance --token-ids 6-{vocabulary - 1}"
                )
            return run(plan, client, sent)
        except ClientError as error:
            console.print(f"[red]{escape(str(error))}[/red]", soft_wrap=True)
            raise typer.Exit(2) from error


def _print(console: Console, report: Report) -> None:
    plan = report.plan
    table = Table(
        title=f"{plan.rounds} identical prompts per tail, seed {plan.seed}", title_justify="left"
    )
    headers = ("tail", "outside majority", "unlike cold", "other logprobs", "cached tokens")
    for header in (*headers, "credit against stock"):
        table.add_column(header, justify="right")
    for result in report.results:
        cached = ", ".join(f"{tokens} x{n}" for tokens, n in result.cached_tokens.items())
        table.add_row(
            str(result.tail),
            *(
                _count(n)
                for n in (
                    result.outside_majority,
                    result.unlike_cold,
                    result.logprobs_unlike_cold,
                )
            ),
            cached,
            f"{result.credit:+.0f}",
        )
    console.print(table)
    for reason in report.faults() + report.doubts():
        console.print(f"- {escape(reason)}")
    color = {"deterministic": "green", "not deterministic": "red"}.get(report.verdict, "yellow")
    console.print(f"verdict: [{color}]{report.verdict}[/{color}]")


def _count(count: int) -> str:
    return f"[red]{count}[/red]" if count else "0"

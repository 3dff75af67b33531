"""Command line ``sglang-unified-kv``: one module per command."""

from importlib.metadata import version
from typing import Annotated

import typer

from ..hooking.series import SGLANG_VERSION
from .check import check
from .demo import demo
from .doctor import doctor
from .edits import edits
from .plan import plan

app = typer.Typer(
    help="Exact prefix reuse of DeepSeek-V4 on SGLang's unified_kv backend.",
    no_args_is_help=True,
    add_completion=False,
)


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sglang-unified-kv {version('sglang-unified-kv')}, for sglang {SGLANG_VERSION}")
        raise typer.Exit


@app.callback()
def main(
    wanted: Annotated[
        bool,
        typer.Option(
            "--version", callback=_say_version, is_eager=True, help="Print versions and exit."
        ),
    ] = False,
) -> None:
    pass


app.command()(edits)
app.command()(doctor)
app.command()(plan)
app.command()(check)
app.command()(demo)

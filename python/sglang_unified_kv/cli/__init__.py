"""Command line ``sglang-unified-kv``: one module per command."""

import typer

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
app.command()(edits)
app.command()(doctor)
app.command()(plan)
app.command()(check)
app.command()(demo)

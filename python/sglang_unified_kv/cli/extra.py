"""What the core package does not depend on."""

from __future__ import annotations

import importlib.util

import typer
from rich.console import Console


def require_extra(console: Console, *modules: str) -> None:
    """End the command with status 2 if one of ``modules`` is not installed.

    Raises:
        typer.Exit: told which are missing and what brings them.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        console.print(
            f"This command needs {' and '.join(missing)}. Install the extra that brings them: "
            "pip install 'sglang-unified-kv[demo]', from a clone: pip install '.[demo]'",
            markup=False,
        )
        raise typer.Exit(2)

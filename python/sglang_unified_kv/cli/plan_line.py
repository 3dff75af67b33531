"""The launch line that a plan ends with: environment, flags as given, and what the plan chose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..launches import BACKEND, SERVER
from ..names import PREFIX, SETTINGS, SWITCHES


def line_of(
    environ: Mapping[str, str],
    switches: Sequence[str],
    flags: Sequence[str],
    variables: Mapping[str, str],
    added: Sequence[str],
) -> tuple[list[str], dict[str, str]]:
    """Words and variables of a plan's launch, as :func:`~..launches.block` takes them.

    Args:
        environ: the environment that the plan was asked in; SGLang's variables and ours of it stay.
        switches: ours that take effect.
        flags: as given.
        variables, added: what the plan chose.
    """
    kept = {
        name: value
        for name, value in sorted(environ.items())
        if value
        and name.startswith("SGLANG_")
        and name not in SWITCHES
        # What scripts, jobs and the reference engine read is not the launch's.
        and (name in SETTINGS or not name.startswith(PREFIX))
    }
    env = BACKEND | dict.fromkeys(switches, "1") | dict(variables)
    return [*SERVER, *flags, *added], env | kept

"""The launch line that a plan ends with: environment, flags as given, and what the plan chose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..config import NOT_SETTINGS, PREFIX
from ..nightly.launch import shell
from ..plugin import SWITCHES

BACKEND = {"SGLANG_HACK_FLASHMLA_BACKEND": "unified_kv_triton"}
SERVER = ("python", "-m", "sglang.launch_server")
WIDTH = 116


@dataclass(frozen=True)
class Line:
    """A launch.

    Attributes:
        env: its variables, over those of the machine.
        command: its words.
    """

    env: dict[str, str]
    command: list[str]

    def __str__(self) -> str:
        """As a shell takes it, in lines of at most :data:`WIDTH` characters where words allow it.

        >>> print(Line({"A": "1"}, ["python", "-m", "server", "--config", '{"a": 1}']))
        A=1 \\
        python -m server --config '{"a": 1}'
        """
        variables = [shell([], {name: value}).strip() for name, value in self.env.items()]
        return " \\\n".join([*_filled(variables, ""), *_filled(_flags(self.command), "    ")])


def _flags(command: Sequence[str]) -> list[str]:
    """The words of a command, quoted, each flag together with its values."""
    found: list[str] = []
    for word in command:
        if found and not word.startswith("--"):
            found[-1] += " " + shell([word])
        else:
            found.append(shell([word]))
    return found


def _filled(pieces: Sequence[str], indent: str) -> list[str]:
    """Pieces side by side; ``indent`` before every line but the first."""
    lines: list[str] = []
    for piece in pieces:
        if lines and len(lines[-1]) + 1 + len(piece) <= WIDTH - 2:
            lines[-1] += " " + piece
        else:
            lines.append(indent + piece if lines else piece)
    return lines


def line_of(
    environ: Mapping[str, str],
    switches: Sequence[str],
    flags: Sequence[str],
    variables: Mapping[str, str],
    added: Sequence[str],
) -> Line:
    """The line of a plan.

    Args:
        environ: the environment that the plan was asked in; SGLang's variables and ours of it stay.
        switches: ours that take effect.
        flags: as given.
        variables, added: what the plan chose.
    """
    kept = {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith("SGLANG_") and value and name not in SWITCHES and _is_setting(name)
    }
    env = BACKEND | dict.fromkeys(switches, "1") | dict(variables)
    return Line(env | kept, [*SERVER, *flags, *added])


def _is_setting(name: str) -> bool:
    rest = name.removeprefix(PREFIX)
    return rest == name or not NOT_SETTINGS.fullmatch(rest)

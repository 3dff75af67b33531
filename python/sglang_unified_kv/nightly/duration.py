"""How long a job takes, as far as that is known before it runs. Arithmetic over what its steps ask for."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import NamedTuple


class Work(NamedTuple):
    """What is asked of a server.

    Attributes:
        starts: of the server.
        programs: client programs, each with its own imports and prompts to make.
        prompt_tokens: of all prompts, cached or not.
        steps: decode steps, one after another.
    """

    starts: int = 0
    programs: int = 0
    prompt_tokens: int = 0
    steps: int = 0


class Pace(NamedTuple):
    """What a machine is expected to need.

    Attributes:
        start_s: seconds of a server's start.
        program_s: seconds of a client program's start.
        prompt_tokens_s: prompt tokens in a second.
        step_s: seconds of a decode step.
        source: where the figures come from.
    """

    start_s: float
    program_s: float
    prompt_tokens_s: float
    step_s: float
    source: str


def total(works: Iterable[Work]) -> Work:
    """The sum of all.

    >>> total([Work(starts=1), Work(starts=1, steps=3)])
    Work(starts=2, programs=0, prompt_tokens=0, steps=3)
    """
    return Work(*map(sum, zip(Work(), *works, strict=True)))


def seconds(work: Work, pace: Pace) -> float:
    """Expected seconds of ``work``.

    >>> seconds(Work(1, 2, 300, 4), Pace(100.0, 10.0, 30.0, 0.5, ""))
    132.0
    """
    return (
        work.starts * pace.start_s
        + work.programs * pace.program_s
        + work.prompt_tokens / pace.prompt_tokens_s
        + work.steps * pace.step_s
    )


def clock(seconds: float) -> str:
    """Hours and minutes, rounded up.

    >>> clock(59), clock(60.5), clock(36_000)
    ('0 h 01 min', '0 h 02 min', '10 h 00 min')
    """
    hours, minutes = divmod(ceil(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min"


def reasons(work: Work, pace: Pace) -> str:
    """The sum behind :func:`seconds`, in words."""
    return (
        f"server starts: {work.starts} of {pace.start_s:g} s; starts of clients: {work.programs} of "
        f"{pace.program_s:g} s; prompt tokens: {work.prompt_tokens:,}, {pace.prompt_tokens_s:,.0f} in a "
        f"second; decode steps: {work.steps:,} of {1000 * pace.step_s:g} ms"
    )

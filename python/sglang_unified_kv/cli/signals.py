"""Signals that end a command unwind its stack, so that what it started is ended."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def signals_unwind() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP unwind the stack, so that servers are ended."""
    received: list[int] = []

    def unwind(number: int, _frame: object) -> None:
        received.append(number)
        raise SystemExit(128 + number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {n: signal.signal(n, unwind) for n in numbers}
    try:
        yield
    except Exception as error:
        if received:
            # It came while a lock was being taken or left, whose complaint is no news.
            raise SystemExit(128 + received[0]) from error
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

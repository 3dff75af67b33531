"""A server process of our own: started with an exact environment, logged, and always ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_TERM_GRACE_S = 10.0


class ServerFailed(Exception):
    """The process ended, or was not healthy in time."""


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class ServerProcess:
    """Runs ``command`` while the ``with`` block does; leaving it ends the whole process group.

    Another thread may restart the process; once the block is left, nothing starts any more.

    Args:
        command: program and arguments.
        env: the complete environment of the child; nothing is added to it.
        log: file that receives stdout and stderr. Overwritten, continued by a restart.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.log = log
        self._command = list(command)
        self._env = dict(env)
        self._process: subprocess.Popen[bytes]
        self._stopped = True
        self._left = False
        self._lock = threading.Lock()

    def __enter__(self) -> ServerProcess:
        self._start("wb")
        return self

    def restart(self) -> None:
        """End the process group and start the command again.

        Raises:
            ServerFailed: the ``with`` block was left.
        """
        with self._lock:
            self._end()
            if self._left:
                raise ServerFailed("the server was stopped for good")
            self._start("ab")

    def _start(self, mode: str) -> None:
        with self.log.open(mode) as log:
            # Its own session: Ctrl-C reaches us alone, and we end the group.
            self._process = subprocess.Popen(
                self._command,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._stopped = False

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._left = True
            self._end()

    def stop(self) -> None:
        """End the process group now: SIGTERM to the server, SIGKILL to whatever is left."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        process = self._process
        if self._stopped:
            # Its id may belong to somebody else by now.
            return
        try:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(_TERM_GRACE_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # The id stays taken as long as a member of the group lives.
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
            self._stopped = True

    @property
    def pid(self) -> int:
        """Process id, and the id of the process group."""
        return self._process.pid

    def check(self) -> None:
        """Raise :class:`ServerFailed` if the process has ended."""
        code = self._process.poll()
        if code is not None:
            raise ServerFailed(f"the server ended with exit code {code}")

    def poll(self, timeout_s: float) -> int | None:
        """Exit code once the process ends within ``timeout_s`` seconds, None if it runs on."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def wait_until(self, healthy: Callable[[], bool], *, timeout_s: float) -> None:
        """Return once ``healthy()`` holds.

        Raises:
            ServerFailed: the process ended first, or ``timeout_s`` seconds passed.
        """
        deadline = time.monotonic() + timeout_s
        while not healthy():
            self.check()
            if time.monotonic() >= deadline:
                raise ServerFailed(f"the server was not healthy within {timeout_s:.0f} s")
            time.sleep(0.25)

    def tail(self, lines: int = 40) -> str:
        """Last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

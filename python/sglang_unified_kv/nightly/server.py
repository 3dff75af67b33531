"""A live server of a job: what steps ask, read and run. Everything it starts ends with it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from ..cli.client import Generation, SGLangClient
from ..cli.server import ServerFailed, ServerProcess
from .launch import without_sglang
from .machine import ANSWER_S
from .steps import OFF, Place, file_name


class Server:
    """What a step sees.

    Attributes:
        place: machine, launch, addresses, output folder.
        client: of its HTTP API.
        figures: what was measured here.
        earlier: what was measured in the phases before, by their names.
        sent: prompt and first answer of the prompt that was sent again and again.
    """

    def __init__(
        self,
        place: Place,
        client: SGLangClient,
        process: ServerProcess,
        earlier: Mapping[str, dict[str, Any]],
        say: Callable[[str], None],
    ) -> None:
        self.place = place
        self.client = client
        self.figures: dict[str, Any] = {}
        self.earlier = earlier
        self.sent: tuple[list[int], Generation]
        self._process = process
        self._say = say
        self._started = 0

    @property
    def off(self) -> dict[str, Any]:
        """What was measured on stock SGLang."""
        return self.earlier.get(OFF, {})

    def wait_until_healthy(self) -> None:
        """
        Raises:
            ServerFailed: it ended, or took too long.
        """
        self._process.wait_until(self.client.healthy, timeout_s=self.place.machine.start_s)

    def restart(self) -> None:
        """End the server and start it again; its log goes on.

        Raises:
            ServerFailed: it ended, or took too long.
        """
        self._process.stop()
        self._started = self.log_size()
        self._process.restart()
        self.wait_until_healthy()

    # -- its log

    def log_size(self) -> int:
        """Bytes that the log has now."""
        return self._process.log.stat().st_size

    def log_since(self, start: int) -> str:
        """The log behind its first ``start`` bytes."""
        with self._process.log.open("rb") as log:
            log.seek(start)
            return log.read().decode(errors="replace")

    def log_since_start(self) -> str:
        """The log of the process that runs now."""
        return self.log_since(self._started)

    # -- programs that ask it

    def program_log_path(self, name: str) -> Path:
        return self.place.out / f"{self.place.phase}-{file_name(name)}.log"

    def program_log(self, name: str) -> str:
        return self.program_log_path(name).read_text(errors="replace")

    def program(self, name: str, command: Sequence[str]) -> int:
        """Run a client program to its end; its output is in :meth:`program_log_path`.

        Returns:
            Its exit code.

        Raises:
            ServerFailed: the server ended meanwhile, or the program took too long.
        """
        self._say(f"{self.place.phase}: {name}")
        log, limit = self.program_log_path(name), self.place.machine.program_s
        with ServerProcess(command, without_sglang(os.environ), log) as program:
            deadline = time.monotonic() + limit
            while (code := program.poll(1.0)) is None:
                self._process.check()
                if time.monotonic() >= deadline:
                    raise ServerFailed(f"{name} took longer than {limit:.0f} s, see {log}")
        return code


@contextmanager
def serve(
    place: Place,
    model: str,
    earlier: Mapping[str, dict[str, Any]],
    say: Callable[[str], None],
) -> Iterator[Server]:
    """The server of a phase, healthy; it ends with the block.

    Raises:
        ServerFailed: it did not become healthy.
    """
    log = place.out / f"{place.phase}.log"
    command = place.launch.command(model, place.port)
    environment = place.launch.environment(os.environ, place.out)
    with (
        ServerProcess(command, environment, log) as process,
        closing(SGLangClient(place.url, timeout_s=ANSWER_S)) as client,
    ):
        say(f"{place.phase}: sglang.launch_server is process {process.pid}, log {log}")
        server = Server(place, client, process, earlier, say)
        server.wait_until_healthy()
        yield server

"""The jobs: which servers they start, in which order, and what they ask of them. Data, nothing runs here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import launch
from .benchmark import Decode, Prefill
from .duration import Work, total
from .gsm8k import Gsm8k
from .launch import Launch
from .machine import Machine
from .rules import PREFILL_COST
from .steps import (
    AGAIN,
    OFF,
    ON,
    Attestation,
    Capacity,
    Determinism,
    Engaged,
    Place,
    Recall,
    Restart,
    SendAgain,
    Step,
)


@dataclass(frozen=True)
class Phase:
    """One server and what is asked of it.

    Attributes:
        name: ``off`` is stock SGLang; the steps of ``on`` compare with those of the same name in ``off``.
            ``off-again`` is ``off`` once more: it shows what the machine drifted, and judges what is timed.
    """

    name: str
    launch: Launch
    steps: tuple[Step, ...]

    def place(self, machine: Machine, out: Path, data: str | None, port: str) -> Place:
        url = f"http://127.0.0.1:{port}"
        return Place(machine, self.name, self.launch, url, port, out, data)

    def work(self, place: Place) -> Work:
        """All that it asks of its server."""
        return total([Work(starts=1), *(step.work(place) for step in self.steps)])


@dataclass(frozen=True)
class Job:
    name: str
    purpose: str
    phases: tuple[Phase, ...]


def _off_and_on(
    server: Launch, steps: tuple[Step, ...], timed: tuple[Step, ...] = ()
) -> tuple[Phase, ...]:
    """``off`` and ``on``, and with ``timed`` steps ``off-again`` for these."""
    stock, asked = server.off(), (*steps, *timed)
    again = (Phase(AGAIN, stock, timed),) if timed else ()
    return (Phase(OFF, stock, asked), Phase(ON, server, asked), *again)


def _accuracy() -> tuple[Step, ...]:
    return Gsm8k("non-thinking"), Gsm8k("thinking")


def prefill(machine: Machine) -> Job:
    server = launch.prefill(machine)
    timed = tuple(Prefill(share) for share in PREFILL_COST)
    verify = (Engaged(), SendAgain(6), Determinism())
    return Job(
        "prefill",
        "exact hits at TP4 with attention DP4, GSM8K, and what they cost prefill",
        (Phase("verify", server.verified(), verify), *_off_and_on(server, _accuracy(), timed)),
    )


def decode(machine: Machine) -> Job:
    server = launch.decode(machine)
    timed = tuple(Decode(batch) for batch in machine.sizes.decode)
    verify = (Engaged(), SendAgain(20), Determinism())
    return Job(
        "decode",
        "exact hits at TP8 with attention DP8 and EAGLE, GSM8K, and what they cost decode",
        (Phase("verify", server.verified(), verify), *_off_and_on(server, _accuracy(), timed)),
    )


def l3_restart(machine: Machine) -> Job:
    steps = (Engaged(), SendAgain(6, restart_prompt=True), Restart(), Engaged(), Determinism())
    return Job(
        "l3_restart",
        "after a restart with empty memory tiers the first request hits storage",
        (Phase("verify", launch.storage(machine).verified(), steps),),
    )


def radix_only(machine: Machine) -> Job:
    server = launch.radix_only(machine)
    verify = (Engaged(), SendAgain(6), Determinism())
    steps = (Gsm8k("non-thinking"),)
    return Job(
        "radix_only",
        "exact hits of the device tree, without HiCache",
        (Phase("verify", server.verified(), verify), *_off_and_on(server, steps)),
    )


def _hisparse(machine: Machine, name: str, dp: int) -> Job:
    server = launch.hisparse(machine, dp)
    steps = (Capacity(), Recall(), *_accuracy())
    attested = (Engaged(), Attestation())
    return Job(
        name,
        f"HiSparse on the unified pool at TP8{' with attention DP8' if dp > 1 else ''}: swap-in and GSM8K",
        (Phase(OFF, server.off(), steps), Phase(ON, server, (*attested, *steps))),
    )


def hisparse_tp8(machine: Machine) -> Job:
    return _hisparse(machine, "hisparse_tp8", dp=1)


def hisparse_tp8_dp8(machine: Machine) -> Job:
    return _hisparse(machine, "hisparse_tp8_dp8", dp=8)


JOBS: dict[str, Callable[[Machine], Job]] = {
    job.__name__: job
    for job in (prefill, decode, l3_restart, radix_only, hisparse_tp8, hisparse_tp8_dp8)
}

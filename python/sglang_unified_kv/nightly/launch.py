"""Launch lines of the jobs, from the table of all lines, and what a job does with one."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..config import DBG_CHECKSUM
from ..launches import LINES, STORAGE_DIR, reduced
from ..names import PREFIX
from .machine import Machine

DOCTOR_PORT = 30000
"""Nobody listens on it."""


@dataclass(frozen=True)
class Launch:
    """One server.

    Attributes:
        flags: behind ``sglang.launch_server --model-path MODEL``, without host and port.
        env: its variables, over an environment without any of SGLang's.
        ranks: of tensor parallelism.
        dp: ranks of data-parallel attention, 1 without.
        storage: whether it gets a folder for the file storage backend.
        hisparse: whether it is for HiSparse, or what that is compared with.
        rank_host_gb: host memory that a rank pins at most, 1e9 bytes; None where nobody planned it.
    """

    flags: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    ranks: int = 1
    dp: int = 1
    storage: bool = False
    hisparse: bool = False
    rank_host_gb: float | None = None

    def with_env(self, **values: str) -> Launch:
        return replace(self, env=self.env | values)

    def off(self) -> Launch:
        """The same launch of stock SGLang."""
        env = {n: v for n, v in self.env.items() if not _ours(n)}
        host = self.rank_host_gb
        flags = list(self.flags)
        if "--enable-hisparse" in flags:
            at = flags.index("--hisparse-config")
            del flags[at : at + 2]
            flags.remove("--enable-hisparse")
        if "--enable-hierarchical-cache" not in flags and host is not None:
            host = 0.0
        return replace(self, flags=tuple(flags), env=env, rank_host_gb=host)

    def verified(self) -> Launch:
        """The same launch with every restore compared; it waits for the device, so it is not measured."""
        return self.with_env(**{DBG_CHECKSUM: "1"})

    def variables(self, out: Path) -> dict[str, str]:
        """What :meth:`environment` adds."""
        return self.env | ({STORAGE_DIR: str(out / "storage")} if self.storage else {})

    def environment(self, base: Mapping[str, str], out: Path) -> dict[str, str]:
        """The whole environment of the server: ``base`` without SGLang's variables, then its own."""
        return without_sglang(base) | self.variables(out)

    def command(self, model: str, port: int | str) -> list[str]:
        return [sys.executable, "-m", "sglang.launch_server", *self._words(model, port)]

    def doctor(self, model: str, here: bool) -> list[str]:
        """The command that asks ``doctor`` about this launch.

        Args:
            here: on its machine; elsewhere the flags alone are checked.
        """
        elsewhere = () if here else ("--device", "cpu")
        doctor = [sys.executable, "-m", "sglang_unified_kv.cli", "doctor", "--json", "--"]
        return [*doctor, *self._words(model, DOCTOR_PORT), *elsewhere]

    def _words(self, model: str, port: int | str) -> list[str]:
        address = ("--host", "127.0.0.1", "--port", str(port))
        return ["--model-path", model, *self.flags, *address]


def without_sglang(base: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in base.items() if not name.startswith("SGLANG_")}


def _ours(name: str) -> bool:
    """Whether a variable is the product's; the reference engine's are the machine's."""
    product = name.startswith(PREFIX) and not name.startswith(f"{PREFIX}REFERENCE_")
    return product or name == DBG_CHECKSUM


def launch_of(machine: Machine, name: str, most_ranks: int | None = None) -> Launch:
    """The line ``nightly NAME``, on the reference engine in small.

    Args:
        most_ranks: there; those of the machine otherwise.
    """
    line = LINES[f"nightly {name}"]
    env = line.env
    if machine.reference:
        most = most_ranks or machine.most_ranks
        line = reduced(line, min(line.ranks, most), min(line.size("--attn-dp-size"), most))
        env = line.env | machine.env
    return Launch(
        flags=line.flags,
        env=env,
        ranks=line.ranks,
        dp=line.size("--attn-dp-size"),
        storage=line.storage,
        hisparse=line.hisparse,
        rank_host_gb=line.rank_host_gb,
    )


def prefill(machine: Machine) -> Launch:
    """TP4, attention DP4."""
    return launch_of(machine, "prefill")


def decode(machine: Machine) -> Launch:
    """TP8, attention DP8, EAGLE 3-1-4."""
    return launch_of(machine, "decode")


def storage(machine: Machine) -> Launch:
    """As :func:`prefill`, with the file storage backend; one rank on the reference engine."""
    return launch_of(machine, "storage", most_ranks=1)


def radix_only(machine: Machine) -> Launch:
    """As :func:`prefill`, without HiCache; one rank on the reference engine."""
    return launch_of(machine, "radix_only", most_ranks=1)


def hisparse(machine: Machine, dp: int) -> Launch:
    """TP8, without a radix cache; every decode step is logged."""
    return launch_of(machine, "hisparse_tp8_dp8" if dp > 1 else "hisparse_tp8")

"""Launch lines of the jobs: flags and environment, as data."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..config import BIT_EXACT_HICACHE, BIT_EXACT_RADIX, DBG_CHECKSUM, HISPARSE
from .machine import Machine

COMMON = (
    *("--attention-backend", "dsv4", "--page-size", "256"),
    *("--swa-full-tokens-ratio", "0.1", "--enable-cache-report", "--enable-metrics"),
)
HICACHE = (
    *("--enable-hierarchical-cache", "--hicache-write-policy", "write_through"),
    *("--hicache-io-backend", "direct", "--hicache-mem-layout", "layer_first"),
)
L3 = (
    *("--hicache-storage-backend", "file"),
    *("--hicache-storage-prefetch-policy", "wait_complete"),
)
EAGLE = (
    *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3"),
    *("--speculative-num-draft-tokens", "4", "--speculative-eagle-topk", "1"),
)
# A host pool of four times so few tokens; on a real machine SGLang's own ratio.
REFERENCE_HICACHE = ("--hicache-ratio", "4")
CHUNK = {False: 8192, True: 512}
"""Prefill chunk of one data-parallel rank, by whether it is the reference engine's."""
STORAGE_DIR = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"


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
    """

    flags: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    ranks: int = 1
    dp: int = 1
    storage: bool = False
    hisparse: bool = False

    def with_env(self, **values: str) -> Launch:
        return replace(self, env=self.env | values)

    def off(self) -> Launch:
        """The same launch of stock SGLang."""
        switches = (BIT_EXACT_HICACHE, BIT_EXACT_RADIX, HISPARSE, DBG_CHECKSUM)
        env = {name: value for name, value in self.env.items() if name not in switches}
        flags = list(self.flags)
        if "--enable-hisparse" in flags:
            at = flags.index("--hisparse-config")
            del flags[at : at + 2]
            flags.remove("--enable-hisparse")
        return replace(self, flags=tuple(flags), env=env)

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
        server = [sys.executable, "-m", "sglang.launch_server", "--model-path", model]
        return [*server, *self.flags, "--host", "127.0.0.1", "--port", str(port)]


def without_sglang(base: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in base.items() if not name.startswith("SGLANG_")}


def shell(command: list[str], env: Mapping[str, str] | None = None) -> str:
    """A line that a shell takes."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in (env or {}).items()]
    return " ".join([*variables, shlex.join(command)])


def _launch(machine: Machine, ranks: int, dp: int, *flags: str, env: dict[str, str]) -> Launch:
    ranks, dp = machine.ranks(ranks), machine.ranks(dp)
    parallel = ["--tp-size", str(ranks)] + (["--attn-dp-size", str(dp)] if dp > 1 else [])
    # SGLang divides it by the ranks of data parallelism.
    chunk = ["--chunked-prefill-size", str(CHUNK[machine.reference] * dp)]
    return Launch(
        flags=(*parallel, *COMMON, *flags, *chunk, *machine.flags),
        env=machine.env | env,
        ranks=ranks,
        dp=dp,
    )


def _hicache(machine: Machine) -> tuple[str, ...]:
    return HICACHE + (REFERENCE_HICACHE if machine.reference else ())


def prefill(machine: Machine) -> Launch:
    """TP4, attention DP4."""
    return _launch(machine, 4, 4, *_hicache(machine), env={BIT_EXACT_HICACHE: "1"})


def decode(machine: Machine) -> Launch:
    """TP8, attention DP8, EAGLE 3-1-4."""
    return _launch(machine, 8, 8, *_hicache(machine), *EAGLE, env={BIT_EXACT_HICACHE: "1"})


def storage(machine: Machine) -> Launch:
    """As :func:`prefill`, with the file storage backend; one rank on the reference engine."""
    ranks = 1 if machine.reference else 4
    flags = (*_hicache(machine), *L3)
    launch = _launch(machine, ranks, ranks, *flags, env={BIT_EXACT_HICACHE: "1"})
    return replace(launch, storage=True)


def radix_only(machine: Machine) -> Launch:
    """As :func:`prefill`, without HiCache; one rank on the reference engine."""
    ranks = 1 if machine.reference else 4
    return _launch(machine, ranks, ranks, env={BIT_EXACT_RADIX: "1"})


def hisparse(machine: Machine, dp: int) -> Launch:
    """TP8, without a radix cache; every decode step is logged."""
    config = {
        "top_k": machine.top_k,
        "device_buffer_size": machine.hot_rows,
        "host_to_device_ratio": machine.ratio,
    }
    flags = ("--disable-radix-cache", "--decode-log-interval", "1", "--enable-hisparse")
    config_flags = ("--hisparse-config", json.dumps(config))
    launch = _launch(machine, 8, dp, *flags, *config_flags, env={HISPARSE: "1"})
    return replace(launch, hisparse=True)

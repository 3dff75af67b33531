"""Every launch line that README, docs and the nightly jobs print, as data.

A line has to start as it is printed. Tests ask of each: does SGLang's parser take it, does ``doctor`` say
that it engages, is it what ``sglang-unified-kv plan`` ends with, and does an engine that is started from its
flags hit its cache. On a CPU only :data:`REPLACED` may differ, :func:`reduced` does that.

No sglang, no torch.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from .config import (
    BIT_EXACT_HICACHE,
    BIT_EXACT_RADIX,
    CHECKPOINT_HOST_GB,
    HISPARSE,
    RING_FIXES,
)

MODEL = "deepseek-ai/DeepSeek-V4-Pro"
SERVER = ("python", "-m", "sglang.launch_server")
STORAGE_DIR = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
BACKEND = {"SGLANG_HACK_FLASHMLA_BACKEND": "unified_kv_triton"}
REFERENCE_ENGINE = {"SGLANG_UNIFIED_KV_REFERENCE_ENGINE": "1"}
WIDTH = 114

ATTENTION = ("--attention-backend", "dsv4", "--page-size", "256", "--swa-full-tokens-ratio", "0.1")
REPORTS = ("--enable-cache-report", "--enable-metrics")
# AMD's published recipe for MI355X.
HOST_LAYOUT = ("--hicache-io-backend", "direct", "--hicache-mem-layout", "page_first_direct")
HICACHE = (
    *("--enable-hierarchical-cache", "--hicache-write-policy", "write_through"),
    *HOST_LAYOUT,
)
L3 = (
    *("--hicache-storage-backend", "file"),
    *("--hicache-storage-prefetch-policy", "wait_complete"),
)
EAGLE = (
    *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3"),
    *("--speculative-num-draft-tokens", "4", "--speculative-eagle-topk", "1"),
)
EAGER_PREFILL = ("--cuda-graph-backend-prefill", "disabled")
MI355X_FLAGS = (
    *("--trust-remote-code", "--disable-shared-experts-fusion"),
    *("--reasoning-parser", "deepseek-v4"),
    *("--mem-fraction-static", "0.90", "--max-running-requests", "256"),
    *EAGER_PREFILL,
)
MI355X_ENV = {
    # SGLang's own nightly environment for this model there, with the unified backend.
    **BACKEND,
    "SGLANG_DEFAULT_THINKING": "1",
    "SGLANG_DSV4_REASONING_EFFORT": "max",
    "SGLANG_USE_AITER": "1",
    "SGLANG_USE_ROCM700A": "1",
    "SGLANG_OPT_DEEPGEMM_HC_PRENORM": "false",
    "SGLANG_OPT_FP8_WO_A_GEMM": "false",
    "SGLANG_OPT_USE_JIT_INDEXER_METADATA": "false",
    "SGLANG_OPT_USE_TOPK_V2": "false",
    "SGLANG_OPT_USE_AITER_INDEXER": "true",
    "SGLANG_OPT_USE_TILELANG_INDEXER": "false",
    "SGLANG_OPT_USE_TILELANG_MHC_PRE": "false",
    "SGLANG_OPT_USE_TILELANG_MHC_POST": "false",
    "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": "1",
    "SGLANG_OPT_USE_MULTI_STREAM_OVERLAP": "false",
    "SGLANG_ROCM_USE_MULTI_STREAM": "false",
    "SGLANG_EAGER_INPUT_NO_COPY": "true",
    "AITER_BF16_FP8_MOE_BOUND": "0",
}

HBM_GB = 288.0
"""Memory of one MI355X, 1e9 bytes: a cautious figure, the driver reports 309."""
WEIGHTS_GB = {8: 125.0, 4: 216.0}
"""Weights of one GPU by ranks of tensor parallelism, 1e9 bytes: an assumption."""


@dataclass(frozen=True)
class Line:
    """One launch of a server.

    Attributes:
        name: of the line, in :data:`LINES`.
        purpose: what it is for.
        env: its variables.
        flags: after ``--model-path``, without the host, on a GPU without the port.
        model: what is served.
        host_gb: memory of the host that it is planned for, free for the caches of all ranks, 1e9 bytes; None
            where the machine is no MI355X.
        rank_host_gb: of it what one rank pins.
    """

    name: str
    purpose: str
    flags: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    model: str = MODEL
    host_gb: float | None = None
    rank_host_gb: float | None = None

    def value(self, flag: str) -> str | None:
        """The value of a flag, None without it.

        >>> Line("a", "", ("--tp-size", "8", "--enable-metrics")).value("--tp-size")
        '8'
        """
        return self.flags[self.flags.index(flag) + 1] if flag in self.flags else None

    def size(self, flag: str) -> int:
        """The value of a size, 1 without it."""
        return int(self.value(flag) or 1)

    @property
    def ranks(self) -> int:
        return self.size("--tp-size")

    @property
    def on_reference_engine(self) -> bool:
        """It starts on any CPU."""
        return REFERENCE_ENGINE.items() <= self.env.items()

    @property
    def hicache(self) -> bool:
        return "--enable-hierarchical-cache" in self.flags

    @property
    def storage(self) -> bool:
        return "--hicache-storage-backend" in self.flags

    @property
    def hisparse(self) -> bool:
        return "--enable-hisparse" in self.flags

    @property
    def drafts(self) -> bool:
        return "--speculative-algorithm" in self.flags

    @property
    def command(self) -> list[str]:
        return [*SERVER, "--model-path", self.model, *self.flags]

    def here(self, model: str, port: int) -> list[str]:
        """The command with this interpreter, another model and another port, for this machine alone."""
        flags = [word for pair in pairs(self.flags) if pair[0] != "--port" for word in pair]
        own = ("--model-path", model, "--host", "127.0.0.1", "--port", str(port))
        return [sys.executable, *SERVER[1:], *flags, *own]

    @property
    def plan(self) -> list[str]:
        """The command that finds its ratio, and for exact reuse its memory of checkpoints."""
        flags = [
            word for pair in pairs(self.flags) if pair[0] != "--hicache-ratio" for word in pair
        ]
        weights, host = f"{WEIGHTS_GB[self.ranks]:g}", f"{self.host_gb:g}"
        machine = ("--hbm-gb", f"{HBM_GB:g}", "--weights-gb", weights, "--host-gb", host)
        return ["sglang-unified-kv", "plan", *machine, "--", "--model-path", self.model, *flags]

    @property
    def plan_env(self) -> dict[str, str]:
        """The variables that it is asked with."""
        return {name: value for name, value in self.env.items() if name != CHECKPOINT_HOST_GB}

    @property
    def doctor(self) -> list[str]:
        """The command that asks whether it would engage."""
        return ["sglang-unified-kv", "doctor", "--", *self.command[len(SERVER) :]]


def _pieces(words: Sequence[str]) -> list[str]:
    """Quoted words, each flag with its value."""
    found: list[str] = []
    for word in words:
        quoted = shlex.quote(word)
        if found and not word.startswith("-") and found[-1].startswith("--"):
            found[-1] += f" {quoted}"
        else:
            found.append(quoted)
    return found


def _filled(pieces: Iterable[str], indent: str) -> list[str]:
    lines: list[str] = []
    for piece in pieces:
        if lines and len(lines[-1]) + 1 + len(piece) <= WIDTH - 2:
            lines[-1] += f" {piece}"
        else:
            lines.append((indent if lines else "") + piece)
    return lines


def shell(command: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """A line that a shell takes.

    >>> shell(["echo", "a b"], {"A": "1"})
    "A=1 echo 'a b'"
    """
    variables = [f"{name}={shlex.quote(value)}" for name, value in (env or {}).items()]
    return " ".join([*variables, shlex.join(command)])


def block(command: Sequence[str], env: Mapping[str, str]) -> str:
    """:func:`shell` in lines that a page holds, a flag beside its value.

    >>> block(["python", "-m", "server", "--port", "1"], {"A": "1"}).splitlines()
    ['A=1 \\\\', 'python -m server --port 1']
    """
    variables = _filled([f"{name}={shlex.quote(value)}" for name, value in env.items()], "")
    head = next((i for i, word in enumerate(command) if word.startswith("--")), len(command))
    words = [shlex.join(command[:head]), *_pieces(command[head:])]
    return " \\\n".join([*variables, *_filled(words, "    ")])


def _parallel(ranks: int, dp: int) -> tuple[str, ...]:
    return ("--tp-size", str(ranks), *(("--attn-dp-size", str(dp)) if dp > 1 else ()))


class HiSparse(NamedTuple):
    """Sizes of HiSparse: C4 rows that a step reads, rows of a hot buffer, host rows for each device row."""

    top_k: int
    hot_rows: int
    ratio: int

    @property
    def config(self) -> str:
        """For ``--hisparse-config``."""
        names = ("top_k", "device_buffer_size", "host_to_device_ratio")
        return json.dumps(dict(zip(names, self, strict=True)))


MI355X_HISPARSE = HiSparse(1024, 2048, 2)
TINY_HISPARSE = HiSparse(512, 512, 3)


def _ratio(value: float) -> tuple[str, ...]:
    return "--hicache-ratio", f"{value:g}"


def _chunk(tokens: int, dp: int) -> tuple[str, ...]:
    # SGLang divides it by the ranks of data parallelism.
    return "--chunked-prefill-size", str(tokens * dp)


HISPARSE_FLAGS = ("--disable-radix-cache", "--enable-hisparse")
_SIZES = ("--max-running-requests", "1024", *_chunk(8192, 8), "--mem-fraction-static", "0.85")
_GPU = (*_parallel(8, 8), *ATTENTION, *_SIZES, *EAGER_PREFILL)
_TINY = (
    *("--device", "cpu", "--skip-tokenizer-init", "--enable-fp32-lm-head", "--port", "30000"),
    *ATTENTION,
)
_EXACT = {BIT_EXACT_HICACHE: "1"}


def _tiny(
    name: str,
    purpose: str,
    *flags: str,
    ranks: int = 1,
    tokens: int = 4096,
    switch: str = BIT_EXACT_HICACHE,
) -> Line:
    """A line of the reference engine, which runs as it stands."""
    return Line(
        f"tiny {name}",
        purpose,
        (
            *(*_TINY, *(_parallel(ranks, ranks) if ranks > 1 else ()), "--enable-metrics", *flags),
            *(*_chunk(512, ranks), "--max-total-tokens", str(tokens)),
            # Divided as well.
            *("--max-running-requests", str(4 * ranks)),
        ),
        REFERENCE_ENGINE | {switch: "1", "OMP_NUM_THREADS": "1"},
        model="tiny",
    )


def _nightly(
    name: str,
    purpose: str,
    ranks: int,
    dp: int,
    *flags: str,
    env: dict[str, str],
    host_gb: float,
    rank_host_gb: float,
) -> Line:
    """A line of the nightly jobs: its own flags between those that all of them have."""
    common = (*ATTENTION, *REPORTS)
    return Line(
        f"nightly {name}",
        purpose,
        (*_parallel(ranks, dp), *common, *flags, *_chunk(8192, dp), *MI355X_FLAGS),
        MI355X_ENV | env,
        host_gb=host_gb,
        rank_host_gb=rank_host_gb,
    )


_NIGHTLY_HISPARSE = (
    *("--decode-log-interval", "1", *HISPARSE_FLAGS),
    *("--hisparse-config", MI355X_HISPARSE.config),
)
_TINY_HICACHE = ("--enable-cache-report", *HICACHE, *_ratio(4))
_LINES = (
    Line(
        "hicache",
        "exact reuse with HiCache on 8x MI355X",
        (*_GPU, *REPORTS, *HICACHE, *_ratio(1.43)),
        BACKEND | _EXACT | {CHECKPOINT_HOST_GB: "10.11"},
        host_gb=1500.0,
        rank_host_gb=176.0,
    ),
    Line(
        "everything",
        "EAGLE, HiCache, storage, ring accounting and metrics on 8x MI355X",
        (*_GPU, *REPORTS, *HICACHE, *L3, *EAGLE, *_ratio(1.46)),
        BACKEND
        | _EXACT
        | {RING_FIXES: "1", CHECKPOINT_HOST_GB: "10.23", STORAGE_DIR: "/data/hicache"},
        host_gb=1500.0,
        rank_host_gb=176.0,
    ),
    Line(
        "hisparse",
        "HiSparse on 8x MI355X",
        (
            *(*_GPU, "--enable-metrics", *HISPARSE_FLAGS),
            *("--hisparse-config", HiSparse(1024, 4096, 2).config),
        ),
        BACKEND | {HISPARSE: "1"},
        host_gb=1500.0,
        rank_host_gb=172.1,
    ),
    _tiny("hicache", "exact reuse with HiCache on the reference engine", *_TINY_HICACHE),
    _tiny("eagle", "the same with EAGLE", *_TINY_HICACHE, *EAGLE),
    _tiny("storage", "the same with storage", *_TINY_HICACHE, *L3),
    _tiny(
        *("ranks", "two data-parallel ranks with EAGLE and storage", *_TINY_HICACHE, *L3, *EAGLE),
        ranks=2,
    ),
    _tiny(
        *("hisparse", "HiSparse on the reference engine", *HISPARSE_FLAGS),
        *("--hisparse-config", TINY_HISPARSE.config),
        tokens=24576,
        switch=HISPARSE,
    ),
    _nightly(
        "prefill",
        "exact reuse at TP4 with attention DP4",
        4,
        4,
        *HICACHE,
        *_ratio(4.29),
        env=_EXACT | {CHECKPOINT_HOST_GB: "10.75"},
        host_gb=800.0,
        rank_host_gb=187.2,
    ),
    _nightly(
        "decode",
        "the same at TP8 with attention DP8 and EAGLE",
        8,
        8,
        *(*HICACHE, *_ratio(1.27), *EAGLE),
        env=_EXACT | {CHECKPOINT_HOST_GB: "10.2"},
        host_gb=1500.0,
        rank_host_gb=175.5,
    ),
    _nightly(
        "storage",
        "as prefill, with the file storage backend",
        4,
        4,
        *(*HICACHE, *_ratio(4.29), *L3),
        env=_EXACT | {CHECKPOINT_HOST_GB: "10.75"},
        host_gb=800.0,
        rank_host_gb=187.2,
    ),
    _nightly(
        "radix_only",
        "as prefill, without HiCache",
        4,
        4,
        env={BIT_EXACT_RADIX: "1", CHECKPOINT_HOST_GB: "10.39"},
        host_gb=800.0,
        rank_host_gb=10.4,
    ),
    _nightly(
        "hisparse_tp8",
        "HiSparse at TP8",
        8,
        1,
        *_NIGHTLY_HISPARSE,
        env={HISPARSE: "1"},
        host_gb=1800.0,
        rank_host_gb=185.2,
    ),
    _nightly(
        "hisparse_tp8_dp8",
        "HiSparse at TP8 with attention DP8",
        8,
        8,
        *_NIGHTLY_HISPARSE,
        env={HISPARSE: "1"},
        host_gb=1800.0,
        rank_host_gb=200.6,
    ),
)
LINES = {line.name: line for line in _LINES}
"""All lines by name."""


TINY_FLAGS = (
    *("--device", "cpu", "--enable-fp32-lm-head", "--random-seed", "1", "--skip-server-warmup"),
    *("--context-length", "8192", "--max-total-tokens", "24576"),
)
"""What the reference engine adds: its device and sizes that are not given on a GPU."""
TINY_VALUES = {
    "--mem-fraction-static": "0.5",
    "--max-running-requests": "8",
    "--hicache-ratio": "4",
    "--hisparse-config": TINY_HISPARSE.config,
}
"""Sizes that it replaces, besides ``--tp-size``, ``--attn-dp-size`` and ``--chunked-prefill-size``."""
TINY_CHUNK = 512
"""Prefill chunk of one of its data-parallel ranks."""
NO_TINY_FLAGS = ("--trust-remote-code", "--reasoning-parser")
"""Of the served model: the tiny one has no code of its own and does not reason."""
NO_TINY_ENV = tuple(MI355X_ENV)
"""Kernels of ROCm, and the served model's way to think."""
REPLACED = frozenset(
    flag
    for flag in (
        *("--model-path", "--port", "--tp-size", "--attn-dp-size", "--chunked-prefill-size"),
        *(*TINY_FLAGS, *TINY_VALUES, *NO_TINY_FLAGS),
    )
    if flag.startswith("--")
)
"""Flags that may differ between a line and what is started from it on the reference engine."""


def reduced(line: Line, ranks: int = 1, dp: int = 1) -> Line:
    """What the reference engine starts from a line: other sizes, the CPU, and no more.

    Args:
        ranks, dp: parallel sizes.
    """
    if line.on_reference_engine:
        return line
    values = TINY_VALUES | {"--chunked-prefill-size": str(TINY_CHUNK * dp)}
    flags: list[str] = []
    for flag, *value in pairs(line.flags):
        if flag in ("--tp-size", "--attn-dp-size", *NO_TINY_FLAGS):
            continue
        flags += (flag, values[flag]) if flag in values else (flag, *value)
    env = {name: value for name, value in line.env.items() if name not in NO_TINY_ENV}
    if CHECKPOINT_HOST_GB in env:
        env[CHECKPOINT_HOST_GB] = "0.1"
    return replace(
        line,
        flags=(*_parallel(ranks, dp), *flags, *TINY_FLAGS),
        env=REFERENCE_ENGINE | env,
        model="tiny",
        host_gb=None,
        rank_host_gb=None,
    )


def pairs(flags: Sequence[str]) -> list[list[str]]:
    """Flags with their values.

    >>> pairs(("--a", "1", "--b"))
    [['--a', '1'], ['--b']]
    """
    found: list[list[str]] = []
    for word in flags:
        if word.startswith("--"):
            found.append([word])
        else:
            found[-1].append(word)
    return found

"""The two machines a job runs on: the real one, and the reference engine with everything small."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..config import CHECKPOINT_HOST_GB
from ..launches import MI355X_ENV, MI355X_HISPARSE, MODEL, TINY_HISPARSE
from ..reference.plugin import ENV as REFERENCE_ENGINE


@dataclass(frozen=True)
class Sizes:
    """How much of everything a job sends.

    Attributes:
        prompt: tokens of the prompt that is sent again and again.
        restart_prompt: of the one that storage keeps over a restart.
        recall_prompt: characters behind the passcode that HiSparse has to swap in.
        check: options of ``sglang-unified-kv check``.
        questions: of GSM8K.
        threads: that ask them.
        answer: most tokens of an answer, without and with thinking.
        input: tokens of a benchmark's prompts.
        prefill: prompts and concurrency of the prefill benchmark.
        decode: concurrencies of the decode benchmark; twice as many prompts each.
        output: tokens that the decode benchmark generates.
        repeats: of a benchmark; the median counts.
    """

    prompt: int
    restart_prompt: int
    recall_prompt: int
    check: tuple[str, ...]
    questions: int
    threads: int
    answer: tuple[int, int]
    input: int
    prefill: tuple[int, int]
    decode: tuple[int, ...]
    output: int
    repeats: int


@dataclass(frozen=True)
class Machine:
    """What is particular to a machine.

    Attributes:
        name: as the verdict prints it.
        env: of every server, over its line's.
        sizes: how much is sent.
        token_ids: lowest and highest id of random prompts.
        hot_rows: HiSparse's buffer, in rows.
        top_k: C4 rows that a step reads.
        most_ranks: ranks of a server at most.
        start_s: seconds that a server may take to start.
        program_s: seconds that a client program may take.
        reference: costs and published scores say nothing here, but answers are equal to the bit.
    """

    name: str
    env: dict[str, str]
    sizes: Sizes
    token_ids: tuple[int, int]
    hot_rows: int
    top_k: int
    most_ranks: int
    start_s: float
    program_s: float
    reference: bool


MI355X = Machine(
    name="8x MI355X",
    env=MI355X_ENV,
    sizes=Sizes(
        prompt=50_000,
        restart_prompt=2_400,
        recall_prompt=80_000,
        check=("--batch", "1", "--timeout", "900"),
        questions=1311,
        threads=128,
        answer=(512, 16_384),
        input=50_000,
        prefill=(128, 16),
        decode=(32, 48, 64),
        output=1_024,
        repeats=3,
    ),
    token_ids=(1_000, 100_000),
    hot_rows=MI355X_HISPARSE.hot_rows,
    top_k=MI355X_HISPARSE.top_k,
    most_ranks=8,
    start_s=5_400.0,
    program_s=7_200.0,
    reference=False,
)

REFERENCE = Machine(
    name="the reference engine",
    env={
        REFERENCE_ENGINE: "1",
        CHECKPOINT_HOST_GB: "0.1",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    },
    sizes=Sizes(
        prompt=1_300,
        restart_prompt=1_300,
        recall_prompt=2_600,
        check=(
            *("--tails", "32", "--rounds", "4", "--churn", "4", "--churn-tokens", "140"),
            *("--batch", "1", "--output-tokens", "8", "--token-ids", "6-1023"),
        ),
        questions=4,
        threads=1,
        answer=(12, 12),
        input=1_000,
        prefill=(6, 2),
        decode=(2,),
        output=8,
        repeats=1,
    ),
    token_ids=(6, 1_023),
    hot_rows=TINY_HISPARSE.hot_rows,
    top_k=TINY_HISPARSE.top_k,
    most_ranks=2,
    start_s=900.0,
    program_s=900.0,
    reference=True,
)


def default_model(machine: Machine) -> str | None:
    """The model that is served unless told otherwise; None where it has to be written first."""
    return None if machine.reference else os.environ.get("SGLANG_UNIFIED_KV_NIGHTLY_MODEL", MODEL)


def write_model(folder: Path) -> Path:
    """The reference engine's model, with a layer that drafts."""
    from ..reference.model import write_tiny_model

    return write_tiny_model(folder, next_n=True)

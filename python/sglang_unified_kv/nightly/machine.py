"""The two machines a job runs on: the real one, and the reference engine with everything small."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from ..config import CHECKPOINT_HOST_GB
from ..launches import MI355X_ENV, MI355X_HISPARSE, MODEL, TINY_HISPARSE
from ..reference.plugin import ENV as REFERENCE_ENGINE
from .duration import Pace

ANSWER_S = 1800.0
"""Seconds that an answer may take."""


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
        usual_answer: tokens that one is expected to have.
        example: tokens that a question is expected to have, with the examples before it.
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
    usual_answer: tuple[int, int]
    example: int
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
        pace: what it is expected to need for what is sent.
        batch: requests that a decode step of that pace computes at most.
        device: file that is there on such a machine alone; None: any machine will do.
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
    pace: Pace
    batch: int
    device: Path | None
    reference: bool

    @property
    def here(self) -> bool:
        """Whether a job can run on the machine that we are on."""
        return self.device is None or self.device.exists()

    def steps(self, requests: int, at_once: int, tokens: int) -> int:
        """Decode steps, one after another, of so many requests with so many output tokens each."""
        return math.ceil(requests / min(at_once, self.batch)) * tokens


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
        usual_answer=(150, 1_500),
        example=1_000,
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
    # TP4 with attention DP4, stock SGLang: 31.4k/s with 80 % cached, and 96.8 ms with 64 requests.
    pace=Pace(
        *(1_200.0, 60.0, 31_400.0, 0.0968),
        source="prompt tokens and steps as published of stock SGLang (docs/nightly.md), with at most 64 "
        "requests in a step; starts and the length of answers are assumed: no MI355X has run a job yet",
    ),
    batch=64,
    device=Path("/dev/kfd"),
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
        usual_answer=(12, 12),
        example=1_500,
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
    pace=Pace(
        *(80.0, 20.0, 500.0, 0.05),
        source="l3_restart as measured on 2 busy cores (214 s); the other jobs are guessed from it",
    ),
    batch=1,
    device=None,
    reference=True,
)


def default_model(machine: Machine) -> str | None:
    """The model that is served unless told otherwise; None where it has to be written first."""
    return None if machine.reference else os.environ.get("SGLANG_UNIFIED_KV_NIGHTLY_MODEL", MODEL)


def write_model(folder: Path) -> Path:
    """The reference engine's model, with a layer that drafts."""
    from ..reference.model import write_tiny_model

    return write_tiny_model(folder, next_n=True)

"""Do identical prompts get identical answers when their prefix is cached? Asked of a live server.

A prompt of ``PREFIX_TOKENS + tail`` tokens is run cold, which it is because its tokens were never sent
before; then other requests take the request slots, and the prompt is sent many times again. The tail
decides how much of the prefix stock SGLang reuses: it keeps the last window out. This module knows
numbers, not HTTP or terminals.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import Generation, SGLangClient

PAGE_TOKENS = 256
WINDOW_TOKENS = 128
PREFIX_TOKENS = 2 * PAGE_TOKENS
TAILS = (16, 32, 64, 96, 127, 160, 220)
"""Five below the window, two above it."""


@dataclass(frozen=True)
class Plan:
    """What is sent.

    Attributes:
        tails: tokens behind ``PREFIX_TOKENS``, one prompt each.
        rounds: times each prompt is sent again.
        churn: other requests between a prompt's first run and its repetitions.
        churn_tokens: tokens of each of them.
        output_tokens: generated for every repetition.
        batch: requests sent together.
        token_ids: lowest and highest token id of random prompts.
        seed: of all random prompts; a seed used before finds its prompts cached.
    """

    tails: tuple[int, ...] = TAILS
    rounds: int = 64
    churn: int = 500
    churn_tokens: int = PAGE_TOKENS
    output_tokens: int = 32
    batch: int = 16
    token_ids: tuple[int, int] = (1000, 100_000)
    seed: int = 0


@dataclass(frozen=True)
class TailResult:
    """How the repetitions of one prompt compare with each other and with its cold run.

    Attributes:
        tail: as in :class:`Plan`.
        prompt_tokens: length of the prompt.
        rounds: repetitions.
        hits: repetitions that reused anything.
        outside_majority: repetitions whose tokens are not those of the most frequent answer.
        hits_outside_majority: the same among those that reused anything.
        unlike_cold: repetitions whose tokens are not the cold run's.
        logprobs_unlike_cold: repetitions with the cold run's tokens but other logprobs.
        cached_tokens: reused prompt tokens -> repetitions.
        cached_by: reused prompt tokens of all repetitions, by source.
        credit: mean of reused tokens above (or below) what stock SGLang grants this prompt.
    """

    tail: int
    prompt_tokens: int
    rounds: int
    hits: int
    outside_majority: int
    hits_outside_majority: int
    unlike_cold: int
    logprobs_unlike_cold: int
    cached_tokens: dict[int, int]
    cached_by: dict[str, int]
    credit: float


@dataclass
class Report:
    """All tails of one run.

    Attributes:
        plan: what was sent.
        results: one entry per tail.
        cold_cached_tokens: reused tokens of runs that had to be cold, by tail.
    """

    plan: Plan
    results: list[TailResult] = field(default_factory=list)
    cold_cached_tokens: dict[int, int] = field(default_factory=dict)

    def faults(self) -> list[str]:
        """Answers that are not alike, a line for each kind and tail."""
        found = []
        for result in self.results:
            of = f"of {result.rounds} answers"
            if result.outside_majority:
                found.append(
                    f"tail {result.tail}: {result.outside_majority} {of} are outside the majority"
                )
            if result.unlike_cold:
                found.append(
                    f"tail {result.tail}: {result.unlike_cold} {of} differ from the cold run's"
                )
        return found

    def doubts(self) -> list[str]:
        """Why alike answers would say little."""
        found = [
            f"tail {tail}: its first run reused {tokens} tokens, so it was not cold: "
            "use another --seed"
            for tail, tokens in self.cold_cached_tokens.items()
            if tokens
        ]
        for result in self.results:
            # Each data-parallel rank computes what another one has cached.
            if 2 * result.hits < result.rounds:
                found.append(
                    f"tail {result.tail}: only {result.hits} of {result.rounds} answers reused "
                    "anything: is the prefix cache on and large enough for --churn, and are "
                    "--rounds enough for every data-parallel rank?"
                )
        return found

    @property
    def verdict(self) -> str:
        """``not deterministic``, ``inconclusive`` or ``deterministic``."""
        if self.faults():
            return "not deterministic"
        return "inconclusive" if self.doubts() else "deterministic"

    def as_json(self) -> dict[str, Any]:
        """Plan, results and the verdict with its reasons, in JSON's types."""
        return {
            "plan": asdict(self.plan),
            "tails": [asdict(result) for result in self.results],
            "verdict": self.verdict,
            "faults": self.faults(),
            "doubts": self.doubts(),
        }


def stock_credit(prompt_tokens: int) -> int:
    """Tokens stock SGLang reuses of a wholly cached prompt: whole pages outside the last window."""
    return max(prompt_tokens - WINDOW_TOKENS, 0) // PAGE_TOKENS * PAGE_TOKENS


def compare(tail: int, cold: Generation, repeated: Sequence[Generation]) -> TailResult:
    """The repetitions of the prompt with ``tail`` against each other and against ``cold``."""
    hits = [answer for answer in repeated if answer.cached_tokens]
    same = [answer for answer in repeated if answer.output_ids == cold.output_ids]
    length = PREFIX_TOKENS + tail
    reused = sum(answer.cached_tokens for answer in repeated)
    return TailResult(
        tail=tail,
        prompt_tokens=length,
        rounds=len(repeated),
        hits=len(hits),
        outside_majority=_outside_majority(repeated),
        hits_outside_majority=_outside_majority(hits),
        unlike_cold=len(repeated) - len(same),
        logprobs_unlike_cold=sum(answer.logprobs != cold.logprobs for answer in same),
        cached_tokens=dict(sorted(Counter(a.cached_tokens for a in repeated).items())),
        cached_by={source: sum(a.cached_by[source] for a in repeated) for source in cold.cached_by},
        credit=reused / len(repeated) - stock_credit(length),
    )


def _outside_majority(answers: Sequence[Generation]) -> int:
    """How many have other tokens than the most frequent answer."""
    counts = Counter(answer.output_ids for answer in answers)
    return len(answers) - max(counts.values(), default=0)


def requests_of(plan: Plan) -> int:
    """Requests that :func:`run` sends."""
    return len(plan.tails) * (1 + plan.churn + plan.rounds)


def run(plan: Plan, client: SGLangClient, sent: Callable[[str, int], None]) -> Report:
    """Try every tail of ``plan`` in turn.

    Args:
        sent: called with what is going on and the number of requests answered since the last call.

    Raises:
        ClientError: the server failed.
    """
    source = random.Random(plan.seed)

    def prompt(tokens: int) -> list[int]:
        return [source.randint(*plan.token_ids) for _ in range(tokens)]

    report = Report(plan)
    for tail in plan.tails:
        ids = prompt(PREFIX_TOKENS + tail)
        cold = client.generate(ids, max_new_tokens=plan.output_tokens)
        report.cold_cached_tokens[tail] = cold.cached_tokens
        sent(f"tail {tail}: cold run", 1)
        for size in _batches(plan.churn, plan.batch):
            others = [prompt(plan.churn_tokens) for _ in range(size)]
            client.generate_batch(others, max_new_tokens=1)
            sent(f"tail {tail}: other requests", size)
        repeated: list[Generation] = []
        for size in _batches(plan.rounds, plan.batch):
            repeated += client.generate_batch([ids] * size, max_new_tokens=plan.output_tokens)
            sent(f"tail {tail}: the same prompt again", size)
        report.results.append(compare(tail, cold, repeated))
    return report


def _batches(total: int, size: int) -> Iterable[int]:
    return (min(size, total - start) for start in range(0, total, size))

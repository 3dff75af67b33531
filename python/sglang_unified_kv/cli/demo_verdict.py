"""What the demo compares and when it counts as passed. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SERVERS = ("stock", "exact")
HITS = {"device": "device", "host": "host", "restart": "storage"}
"""Each kind of hit to the source its tokens must come from. The exact server alone is restarted."""
CACHED_TOKENS = {700: 512, 2700: 2560}
"""Prompt length to the deepest page boundary that leaves a token to compute, both in tokens."""


@dataclass(frozen=True)
class Comparison:
    """A continuation after a hit against the cold one.

    Attributes:
        tokens_equal: every output token is the same.
        logprobs_equal: every logprob has the same bits, and every token is the same.
        dlogprobs: absolute logprob differences, position by position up to and including the first
            differing token; behind it the two texts have nothing in common to compare.
    """

    tokens_equal: bool
    logprobs_equal: bool
    dlogprobs: tuple[float, ...]

    @property
    def max_abs_dlogprob(self) -> float:
        return max(self.dlogprobs)


@dataclass(frozen=True)
class Case:
    """One hit.

    Attributes:
        server: one of ``SERVERS``.
        hit: one of ``HITS``, where the story wants the prefix to come from.
        prompt: its length in tokens.
        cached_tokens, cached_by: what the server reported: all, and by source.
    """

    server: str
    hit: str
    prompt: int
    cached_tokens: int
    cached_by: Mapping[str, int]
    comparison: Comparison

    @property
    def name(self) -> str:
        return f"{self.server}/{self.hit}/{self.prompt}"


CASE_NAMES = tuple(
    f"{server}/{hit}/{prompt}"
    for server in SERVERS
    for hit in HITS
    for prompt in CACHED_TOKENS
    if (server, hit) != ("stock", "restart")
)


def compare(
    cold: tuple[Sequence[int], Sequence[float]], warm: tuple[Sequence[int], Sequence[float]]
) -> Comparison:
    """Compare two continuations, each given as output tokens and their finite logprobs.

    Raises:
        ValueError: they are empty or differ in length.

    >>> compare(([5, 6, 7], [-1.0, -2.0, -3.0]), ([5, 9, 7], [-1.0, -2.5, -9.0]))
    Comparison(tokens_equal=False, logprobs_equal=False, dlogprobs=(0.0, 0.5))
    """
    (cold_ids, cold_logprobs), (warm_ids, warm_logprobs) = cold, warm
    lengths = {len(part) for part in (cold_ids, cold_logprobs, warm_ids, warm_logprobs)}
    if len(lengths) != 1 or lengths == {0}:
        raise ValueError(f"continuations of lengths {sorted(lengths)} cannot be compared")
    total = len(cold_ids)
    first = next((i for i in range(total) if cold_ids[i] != warm_ids[i]), total)
    tokens_equal = first == total
    return Comparison(
        tokens_equal=tokens_equal,
        # hex() tells -0.0 from 0.0, which == does not.
        logprobs_equal=tokens_equal
        and [x.hex() for x in cold_logprobs] == [x.hex() for x in warm_logprobs],
        dlogprobs=tuple(
            abs(warm_logprobs[i] - cold_logprobs[i]) for i in range(min(first + 1, total))
        ),
    )


def shortcomings(cold_cached_tokens: Mapping[str, int], cases: Sequence[Case]) -> list[str]:
    """Everything that keeps the demo from passing, one line each; nothing means it passed.

    Args:
        cold_cached_tokens: cached tokens of every cold run, by ``server/prompt length``.
        cases: every hit of the story.
    """
    reasons = []
    for server in SERVERS:
        for prompt in CACHED_TOKENS:
            cached = cold_cached_tokens.get(f"{server}/{prompt}")
            if cached != 0:
                reasons.append(f"{server}/cold/{prompt}: cached_tokens is {cached}, not 0")
    names = [case.name for case in cases]
    if sorted(names) != sorted(CASE_NAMES):
        reasons.append(f"cases are {names}, not {list(CASE_NAMES)}")
    for case in cases:
        reasons += _hit_reasons(case)
        if case.server == "exact":
            reasons += _exact_reasons(case)
    if all(case.comparison.logprobs_equal for case in cases if case.server == "stock"):
        reasons.append("no stock case differs from its cold run: the fault does not show here")
    return reasons


def _hit_reasons(case: Case) -> list[str]:
    if case.cached_tokens <= 0:
        return [f"{case.name}: nothing was cached, this was no hit"]
    wanted = HITS[case.hit]
    found = {source: tokens for source, tokens in case.cached_by.items() if tokens}
    if found != {wanted: case.cached_tokens}:
        return [
            f"{case.name}: {case.cached_tokens} cached tokens came from {found}, not all from {wanted}"
        ]
    return []


def _exact_reasons(case: Case) -> list[str]:
    reasons = []
    expected = CACHED_TOKENS.get(case.prompt)
    if case.cached_tokens != expected:
        reasons.append(f"{case.name}: cached_tokens is {case.cached_tokens}, not {expected}")
    if not case.comparison.tokens_equal:
        reasons.append(f"{case.name}: output tokens differ from the cold run")
    elif not case.comparison.logprobs_equal:
        reasons.append(f"{case.name}: logprobs differ from the cold run")
    return reasons


def as_json(sglang: str, cases: Sequence[Case], reasons: Sequence[str]) -> dict:
    """The document of ``--json``."""
    return {
        "sglang": sglang,
        "cases": [
            {
                "name": case.name,
                "cached_tokens": case.cached_tokens,
                "tokens_equal": case.comparison.tokens_equal,
                "logprobs_equal": case.comparison.logprobs_equal,
                "max_abs_dlogprob": case.comparison.max_abs_dlogprob,
            }
            for case in cases
        ],
        "verdict": "not exact" if reasons else "exact",
    }

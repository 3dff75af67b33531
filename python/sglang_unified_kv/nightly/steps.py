"""What a job asks of a server, step by step. Each step tells its plan and, on a live server, its checks."""

from __future__ import annotations

import json
import random
import re
import secrets
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..cli.determinism import PREFIX_TOKENS, Plan
from ..launches import shell
from . import rules
from .duration import Work
from .launch import Launch
from .machine import Machine
from .verdict import Check, Outcome, judge

if TYPE_CHECKING:
    from ..cli.client import Generation
    from .server import Server

OFF, ON, AGAIN = "off", "on", "off-again"
"""Phases: stock SGLang, ours, and where speed is compared stock SGLang once more."""
STOCK = (OFF, AGAIN)
PASSCODE = "K9-TANGO-2306"
NEW_TOKENS = 16
CHARACTERS = 4
"""Of a token of English, about."""


def file_name(text: str) -> str:
    """``text`` as a part of a file's name.

    >>> file_name("prefill 60% cached")
    'prefill-60-cached'
    """
    return re.sub(r"\W+", "-", text)


class Place(NamedTuple):
    """Where a step runs, as far as it is known before anything has started."""

    machine: Machine
    phase: str
    launch: Launch
    url: str
    port: str
    out: Path
    data: str | None

    def shell(self, command: list[str]) -> str:
        """A client program's line."""
        return shell(command)


class Step(ABC):
    """One question to a server."""

    @abstractmethod
    def plan(self, place: Place) -> Iterator[str]:
        """What :meth:`run` will do, a line each; a line that starts with ``$`` is a command."""

    def work(self, place: Place) -> Work:
        """What it asks of the server, for the time that it is expected to take."""
        return Work()

    @abstractmethod
    def run(self, server: Server) -> Iterator[Check]:
        """Ask, and judge the answers.

        Raises:
            ClientError, ServerFailed: could not be asked.
        """


@dataclass(frozen=True)
class Engaged(Step):
    """Every rank of the server says that it is engaged."""

    def plan(self, place: Place) -> Iterator[str]:
        yield f"the log says once for each of {place.launch.ranks} ranks what is engaged"

    def run(self, server: Server) -> Iterator[Check]:
        found = len(rules.lines_of(server.log_since_start(), rules.ENGAGED))
        ranks = server.place.launch.ranks
        yield judge("every rank is engaged", found == ranks, found, f"{ranks} ranks say so")


@dataclass(frozen=True)
class SendAgain(Step):
    """One prompt, sent ``times`` times: reuse climbs from 0, and every restore is compared."""

    times: int
    restart_prompt: bool = False

    def tokens(self, machine: Machine) -> int:
        sizes = machine.sizes
        return sizes.restart_prompt if self.restart_prompt else sizes.prompt

    def work(self, place: Place) -> Work:
        prompts = self.times * self.tokens(place.machine)
        return Work(prompt_tokens=prompts, steps=self.times * NEW_TOKENS)

    def plan(self, place: Place) -> Iterator[str]:
        tokens = self.tokens(place.machine)
        deepest = rules.boundary(tokens)
        yield f"send one random prompt of {tokens} tokens {self.times} times"
        yield (
            f"cached_tokens climbs from 0 to {deepest}: at most {place.launch.dp} misses, never falls"
        )
        yield from _plan_of_log()
        if place.machine.reference:
            yield "every answer is the first one's, to the bit"

    def run(self, server: Server) -> Iterator[Check]:
        machine, start = server.place.machine, server.log_size()
        tokens = self.tokens(machine)
        source = random.Random(secrets.randbits(32))
        ids = [source.randint(*machine.token_ids) for _ in range(tokens)]
        answers = [
            server.client.generate(ids, max_new_tokens=NEW_TOKENS) for _ in range(self.times)
        ]
        cached = [answer.cached_tokens for answer in answers]
        server.sent = (ids, answers[0])
        server.figures["cached_tokens"] = cached
        faults = rules.climb_faults(cached, rules.boundary(tokens), server.place.launch.dp)
        needed = f"climbs from 0 to {rules.boundary(tokens)}"
        yield judge("cached_tokens", not faults, "; ".join(faults) or cached, needed)
        yield from _log_checks(server.log_since(start))
        alike = sum(_bits(answer) == _bits(answers[0]) for answer in answers)
        yield from _equal(machine, "answers alike", alike, self.times)


def _bits(answer: Generation) -> tuple[tuple[int, ...], tuple[float, ...]]:
    return answer.output_ids, answer.logprobs


def _equal(machine: Machine, name: str, alike: int, total: int) -> Iterator[Check]:
    found, needed = f"{alike} of {total}", "all, tokens and logprobs"
    if machine.reference:
        yield judge(name, alike == total, found, needed)
    else:
        # Kernels may round otherwise for the shapes of a hit.
        yield Check(name, Outcome.NOT_JUDGED, found, needed)


def _plan_of_log() -> Iterator[str]:
    yield f"the log has {', '.join(map(repr, rules.REQUIRED))}"
    yield f"the log has no {', '.join(map(repr, (*rules.TROUBLE, rules.REJECTED)))}"


def _log_checks(log: str) -> Iterator[Check]:
    missing = rules.absent(log, rules.REQUIRED)
    found = f"not in the log: {', '.join(missing)}" if missing else "in the log"
    yield judge("restores are compared", not missing, found, "LB-DEV, SWA-DBG, C4-STATE-DBG")
    wrong = rules.lines_of(log, *rules.TROUBLE, rules.REJECTED)
    needed = "no " + ", ".join((*rules.TROUBLE, rules.REJECTED))
    yield judge("log of these requests", not wrong, wrong[0] if wrong else "clean", needed)


@dataclass(frozen=True)
class Restart(Step):
    """The server ends and starts again: the first request finds its prefix in storage alone."""

    def work(self, place: Place) -> Work:
        tokens = place.machine.sizes.restart_prompt
        return Work(starts=1, prompt_tokens=tokens, steps=NEW_TOKENS)

    def plan(self, place: Place) -> Iterator[str]:
        deepest = rules.boundary(place.machine.sizes.restart_prompt)
        yield "wait until everything is stored (/flush_cache), end the server, start it again"
        yield f"the same prompt: cached_tokens={deepest}, all of it from storage"
        yield f"the log has `HiCache prefetch success ... matched=0 loaded={deepest}`"
        yield from _plan_of_log()
        if place.machine.reference:
            yield "its answer is the cold one's, to the bit"

    def run(self, server: Server) -> Iterator[Check]:
        ids, cold = server.sent
        server.client.flush_cache(timeout_s=300.0)
        server.restart()
        answer = server.client.generate(ids, max_new_tokens=NEW_TOKENS)
        log, deepest = server.log_since_start(), rules.boundary(len(ids))
        found = f"{answer.cached_tokens}, by source {answer.cached_by}"
        ok = answer.cached_tokens == answer.cached_by["storage"] == deepest
        yield judge("first request after the restart", ok, found, f"{deepest}, from storage")
        fetched = rules.prefetches(log)
        needed = f"matched=0 loaded={deepest}"
        yield judge("prefetch", (0, deepest) in fetched, fetched or "none", needed)
        yield from _log_checks(log)
        yield from _equal(
            server.place.machine, "answer as the cold one", int(_bits(answer) == _bits(cold)), 1
        )


@dataclass(frozen=True)
class Determinism(Step):
    """``sglang-unified-kv check``.

    On a GPU the answers of hits have to be alike; whether they are the cold run's is shown.
    """

    def command(self, place: Place) -> list[str]:
        options = [*place.machine.sizes.check, "--json", str(self._report(place))]
        return [*_check_of(place), *options]

    def _report(self, place: Place) -> Path:
        return place.out / f"{place.phase}-check.json"

    def work(self, place: Place) -> Work:
        sent = _sent_by_check(place.machine.sizes.check)
        again = len(sent.tails) * (1 + sent.rounds)
        others = len(sent.tails) * sent.churn
        repeated = (1 + sent.rounds) * sum(PREFIX_TOKENS + tail for tail in sent.tails)
        return Work(
            programs=1,
            prompt_tokens=repeated + others * sent.churn_tokens,
            steps=again * sent.output_tokens + others,
        )

    def plan(self, place: Place) -> Iterator[str]:
        yield f"$ {place.shell(self.command(place))}"
        if place.machine.reference:
            yield "it exits with 0"
        else:
            yield "the ranks run the same, answers that reused are alike; unlike cold: not judged"

    def run(self, server: Server) -> Iterator[Check]:
        place, name = server.place, "sglang-unified-kv check"
        code, report = server.program("check", self.command(place)), self._report(place)
        log = server.program_log_path("check")
        # Where the ranks disagree there is no report.
        if place.machine.reference or code != 1 or not report.exists():
            yield _exited(name, code, "not deterministic", log)
            return
        document = json.loads(report.read_text())
        faults = rules.check_faults(document)
        yield judge(name, not faults, f"{'; '.join(faults) or 'alike'} ({log})", "hits are alike")
        total = sum(tail["rounds"] for tail in document["tails"])
        unlike = sum(tail["unlike_cold"] for tail in document["tails"])
        yield from _equal(place.machine, "answers of check as the cold ones", total - unlike, total)


def _sent_by_check(options: Sequence[str]) -> Plan:
    """The plan of ``sglang-unified-kv check`` with these options, one request at a time.

    >>> _sent_by_check(("--tails", "32,64", "--rounds", "4", "--batch", "1")).tails
    (32, 64)
    """
    given = dict(zip(options[::2], options[1::2], strict=True))
    plan = Plan()

    def number(flag: str, default: int) -> int:
        return int(given.get(flag, default))

    return Plan(
        tails=tuple(map(int, given["--tails"].split(","))) if "--tails" in given else plan.tails,
        rounds=number("--rounds", plan.rounds),
        churn=number("--churn", plan.churn),
        churn_tokens=number("--churn-tokens", plan.churn_tokens),
        output_tokens=number("--output-tokens", plan.output_tokens),
    )


def _check_of(place: Place) -> list[str]:
    return [sys.executable, "-m", "sglang_unified_kv.cli", "check", "--url", place.url]


def _exited(name: str, code: int, failed: str, log: Path) -> Check:
    found = {0: "0", 1: f"1: {failed}"}.get(code, f"{code}: it could not tell")
    return judge(name, code == 0, f"{found} ({log})", "exit code 0")


@dataclass(frozen=True)
class Attestation(Step):
    """``sglang-unified-kv check --attest-only``: every rank runs the same."""

    def command(self, place: Place) -> list[str]:
        return [*_check_of(place), "--attest-only"]

    def work(self, place: Place) -> Work:
        return Work(programs=1)

    def plan(self, place: Place) -> Iterator[str]:
        yield f"$ {place.shell(self.command(place))}"
        yield "it exits with 0"

    def run(self, server: Server) -> Iterator[Check]:
        code = server.program("attestation", self.command(server.place))
        log = server.program_log_path("attestation")
        yield _exited("attestation", code, "the ranks differ", log)


@dataclass(frozen=True)
class Capacity(Step):
    """Full tokens with HiSparse against without."""

    def plan(self, place: Place) -> Iterator[str]:
        yield "read max_total_num_tokens from /server_info"
        if place.phase == ON:
            yield f"at least {rules.CAPACITY_GAIN} times that of off{_unjudged(place.machine)}"

    def run(self, server: Server) -> Iterator[Check]:
        tokens = server.client.server_info()["max_total_num_tokens"]
        server.figures["full_tokens"] = tokens
        if server.place.phase == ON:
            gain = tokens / server.off["full_tokens"]
            needed = f"at least {rules.CAPACITY_GAIN}"
            yield figure(
                server.place.machine, "capacity", gain >= rules.CAPACITY_GAIN, f"{gain:.2f}", needed
            )


def _unjudged(machine: Machine) -> str:
    return " (not judged on the reference engine)" if machine.reference else ""


def figure(machine: Machine, name: str, ok: bool, found: str, needed: str) -> Check:
    """A check of a figure that says nothing on the reference engine, where it is only shown."""
    if machine.reference:
        return Check(name, Outcome.NOT_JUDGED, found, needed)
    return judge(name, ok, found, needed)


def yardstick(phase: str, name: str, ok: bool, found: object, needed: str) -> Check:
    """A check that fails the job where our code ran; stock SGLang that falls short is no yardstick."""
    if phase in STOCK and not ok:
        return Check(name, Outcome.NOT_RUN, str(found), needed)
    return judge(name, ok, found, needed)


def nothing_to_compare(name: str, phase: str = OFF) -> Check:
    """A check whose counterpart of another phase is missing."""
    return Check(name, Outcome.NOT_RUN, f"{phase} has no such figure", f"a figure of {phase}")


@dataclass(frozen=True)
class Recall(Step):
    """A passcode at the top of a prompt that HiSparse keeps on the host."""

    new_tokens: int = 256

    def text(self, machine: Machine) -> str:
        sentences: list[str] = []
        while sum(map(len, sentences)) < machine.sizes.recall_prompt:
            sentences.append(f"Note {len(sentences)}: nothing happened on this day either. ")
        return (
            f"The passcode is {PASSCODE}. Keep it in mind.\n\n{''.join(sentences)}\n\n"
            "What is the passcode? Answer with the passcode alone."
        )

    def tokens(self, machine: Machine) -> int:
        """Most tokens of an answer."""
        return NEW_TOKENS if machine.reference else self.new_tokens * 4

    def work(self, place: Place) -> Work:
        machine = place.machine
        prompt = len(self.text(machine)) // CHARACTERS
        return Work(prompt_tokens=prompt, steps=self.tokens(machine))

    def plan(self, place: Place) -> Iterator[str]:
        machine = place.machine
        yield f"ask for a passcode at the top of a prompt of {len(self.text(machine))} characters"
        if place.phase == OFF:
            return
        yield (
            "the answer is that of off"
            if machine.reference
            else f"the answer, or the thinking before it, has {PASSCODE}"
        )
        pages = (machine.hot_rows + rules.ROWS_PAGE, machine.hot_rows + 2 * rules.ROWS_PAGE)
        yield (
            f"more C4 rows than the buffer of {machine.hot_rows}; decode log: #gpu token "
            f"{pages[0]} or {pages[1]}, #cpu token every row of the request, in pages"
        )

    def run(self, server: Server) -> Iterator[Check]:
        machine, start = server.place.machine, server.log_size()
        tokens = self.tokens(machine)
        answer = server.client.chat(self.text(machine), max_tokens=tokens)
        server.figures["recall"] = answer._asdict()
        if server.place.phase == OFF:
            return
        if machine.reference:
            off = server.off["recall"]["text"]
            yield judge("answer as without HiSparse", answer.text == off, answer.text, off)
        else:
            yield judge("passcode", PASSCODE in answer.text, answer.text[-200:], PASSCODE)
        seen = rules.hisparse_tokens(server.log_since(start))
        faults = rules.swap_faults(seen, answer.prompt_tokens, tokens, machine.hot_rows)
        needed = f"hot buffer of {machine.hot_rows} on the device, every row on the host"
        yield judge("rows that swap", not faults, "; ".join(faults) or max(seen), needed)

"""Prefill and decode benchmarks through SGLang's own client, ``sglang.bench_serving``.

One system prompt is shared by all prompts, which share nothing else: that part of each prompt is cached, the
rest is not. The warm-up requests bring it to every data-parallel rank.
"""

from __future__ import annotations

import json
import statistics
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import rules
from .duration import Work
from .steps import (
    AGAIN,
    OFF,
    ON,
    Place,
    Step,
    figure,
    file_name,
    nothing_to_compare,
    yardstick,
)
from .verdict import Check, Outcome

if TYPE_CHECKING:
    from .server import Server

HIT_SHORTFALL = 5.0
"""Percentage points that the cached share may fall short: each rank computes what it sees first."""
DECODE_SHARE = 0.8


class NoResult(ValueError):
    """The client's result file cannot be used."""


def measured(path: Path) -> dict[str, float]:
    """The last result that the client wrote.

    Keys: ``completed``, ``input`` and ``output`` in tokens per second, ``tpot`` in ms, ``hits`` in percent.

    Raises:
        NoResult: the file is empty or cut, or a figure is missing.
    """
    try:
        result: dict[str, Any] = json.loads(path.read_text().splitlines()[-1])
        return {
            "completed": int(result["completed"]),
            "input": float(result["input_throughput"]),
            "output": float(result["output_throughput"]),
            "tpot": float(result["median_tpot_ms"]),
            "hits": float(result["cache_report"]["cache_hit_rate_pct"]),
        }
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise NoResult(f"{path}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Benchmark(Step):
    """A load of prompts of the same length of which a share is cached."""

    @property
    def name(self) -> str:
        raise NotImplementedError

    @property
    def share(self) -> float:
        raise NotImplementedError

    def load(self, place: Place) -> tuple[int, int, int]:
        """Prompts, concurrency, output tokens."""
        raise NotImplementedError

    def limits(self) -> Iterator[tuple[str, str, float]]:
        """Figure of :func:`measured`, its name, and the share by which it may get worse."""
        raise NotImplementedError

    def command(self, place: Place, repeat: int | str, seed: int | str) -> list[str]:
        prompts, concurrency, output = self.load(place)
        cached = round(self.share * place.machine.sizes.input)
        client = [sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang"]
        options = {
            "--host": "127.0.0.1",
            "--port": place.port,
            "--dataset-name": "generated-shared-prefix",
            "--gsp-num-groups": 1,
            "--gsp-prompts-per-group": prompts,
            "--gsp-system-prompt-len": cached,
            "--gsp-question-len": place.machine.sizes.input - cached,
            "--gsp-output-len": output,
            "--max-concurrency": concurrency,
            "--warmup-requests": 2 * place.launch.dp,
            "--seed": seed,
            "--output-file": self._results(place, repeat),
        }
        # With a routing key the client makes its prompts anew instead of taking them from its cache.
        switches = (
            "--tokenize-prompt",
            "--cache-report",
            "--gsp-send-routing-key",
            "--disable-tqdm",
        )
        return [*client, *(str(part) for item in options.items() for part in item), *switches]

    def _results(self, place: Place, repeat: int | str) -> Path:
        return place.out / f"{place.phase}-{file_name(self.name)}-{repeat}.jsonl"

    def _seed(self, repeat: int) -> int:
        # Another one for each benchmark: the same seed begins with the same prompt.
        return zlib.crc32(self.name.encode()) % 10**6 + repeat

    def work(self, place: Place) -> Work:
        machine, (prompts, concurrency, output) = place.machine, self.load(place)
        warm = 2 * place.launch.dp
        repeats = machine.sizes.repeats
        steps = machine.steps(prompts, concurrency, output) + machine.steps(warm, warm, output)
        return Work(
            programs=repeats,
            prompt_tokens=repeats * (prompts + warm) * machine.sizes.input,
            steps=repeats * steps,
        )

    def plan(self, place: Place) -> Iterator[str]:
        for repeat in range(place.machine.sizes.repeats):
            yield f"$ {place.shell(self.command(place, repeat, self._seed(repeat)))}"
        if place.machine.reference:
            yield "every prompt is answered and some of it is cached; its times are not judged"
            return
        yield f"{100 * self.share - HIT_SHORTFALL:.0f} % of the prompts are cached or more"
        if place.phase == AGAIN:
            for _, name, limit in self.limits():
                yield (
                    f"{name}: on costs less than {limit:.1%} against the mean of both runs of off, "
                    "medians of the repeats"
                )

    def run(self, server: Server) -> Iterator[Check]:
        place, runs = server.place, []
        for repeat in range(place.machine.sizes.repeats):
            name = f"{self.name} {repeat}"
            results = self._results(place, repeat)
            code = server.program(name, self.command(place, repeat, self._seed(repeat)))
            if code or not results.exists():
                found = f"exit code {code}, no result ({server.program_log_path(name)})"
                yield Check(self.name, Outcome.NOT_RUN, found, "a result")
                return
            try:
                runs.append(measured(results))
            except NoResult as error:
                yield Check(self.name, Outcome.NOT_RUN, str(error), "a result")
                return
        server.figures[self.name] = median = {
            key: statistics.median(run[key] for run in runs) for key in runs[0]
        }
        yield from self._plumbing(place, min(run["completed"] for run in runs), median["hits"])
        if place.phase == AGAIN:
            yield from self._costs(server, median)

    def _plumbing(self, place: Place, completed: float, hits: float) -> Iterator[Check]:
        prompts, *_ = self.load(place)
        least = 0.0 if place.machine.reference else 100 * self.share - HIT_SHORTFALL
        found = f"{completed} of {prompts} answered, {hits:.1f} % cached"
        ok = completed == prompts and hits > least
        yield yardstick(place.phase, self.name, ok, found, f"all, more than {least:.0f} % cached")

    def _costs(self, server: Server, again: dict[str, float]) -> Iterator[Check]:
        place, costs = server.place, {}
        for phase in (OFF, ON):
            if self.name not in server.earlier.get(phase, {}):
                yield nothing_to_compare(f"{self.name}: cost", phase)
                return
        off, on = (server.earlier[phase][self.name] for phase in (OFF, ON))
        for key, name, limit in self.limits():
            name, needed = f"{self.name}: {name}", f"costs less than {limit:.1%}"
            runs = f"{off[key]:.1f} off, {on[key]:.1f} on, {again[key]:.1f} off again"
            cost = rules.cost(off[key], on[key], again[key], time=key == "tpot")
            if cost is None:
                files = place.out / f"*-{file_name(self.name)}-*.jsonl"
                found = f"{runs}: nothing to divide by ({files})"
                yield Check(name, Outcome.NOT_RUN, found, needed)
                continue
            costs[key] = cost
            found = f"{cost.lost:+.1%} ({runs}: {cost.drift:+.1%})"
            if not cost.steady(limit) and not place.machine.reference:
                found += (
                    "; the two runs of off differ by more than the limit, and one of them says no"
                )
                yield Check(name, Outcome.NOT_RUN, found, needed)
                continue
            yield figure(place.machine, name, cost.lost < limit, found, needed)
        server.figures[f"{self.name}, against off"] = costs


@dataclass(frozen=True)
class Prefill(Benchmark):
    """Throughput of prompts, ``cached`` being the share of each that is cached."""

    cached: float

    @property
    def name(self) -> str:
        return f"prefill {self.cached:.0%} cached"

    @property
    def share(self) -> float:
        return self.cached

    def load(self, place: Place) -> tuple[int, int, int]:
        return (*place.machine.sizes.prefill, 1)

    def limits(self) -> Iterator[tuple[str, str, float]]:
        yield "input", "prompt tokens per second", rules.PREFILL_COST[self.cached]


@dataclass(frozen=True)
class Decode(Benchmark):
    """Time per output token with ``batch`` requests at a time."""

    batch: int

    @property
    def name(self) -> str:
        return f"decode batch {self.batch}"

    @property
    def share(self) -> float:
        return DECODE_SHARE

    def load(self, place: Place) -> tuple[int, int, int]:
        return 2 * self.batch, self.batch, place.machine.sizes.output

    def limits(self) -> Iterator[tuple[str, str, float]]:
        yield "tpot", "time per output token", rules.TPOT_COST
        yield "output", "output tokens per second", rules.OUTPUT_COST

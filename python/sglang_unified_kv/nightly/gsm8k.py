"""GSM8K through SGLang's own client, ``sglang.test.run_eval``, with 8 examples before each question.

The reference engine's model knows no arithmetic. It gets a made set of the same format, whose answers are
its own cold ones: what a hit answers is right if it is what a cold run answers.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import rules
from .duration import Work
from .rules import Score
from .steps import OFF, ON, Place, Step, nothing_to_compare, yardstick
from .verdict import Check, Outcome, judge

if TYPE_CHECKING:
    from .server import Server

SHOTS = 8
MODES = ("non-thinking", "thinking")


def score_of(log: str, questions: int) -> Score | None:
    """What the client printed, None if it did not.

    >>> score_of("Total latency: 9 s\\nScore: 0.937\\n", 1311)
    Score(right=1228, questions=1311)
    """
    found = re.findall(r"^Score: ([0-9.]+)$", log, re.MULTILINE)
    return Score(round(float(found[-1]) * questions), questions) if found else None


def accuracy(
    mode: str, phase: str, score: Score, off: Score | None, guard: bool
) -> Iterator[Check]:
    """The rule for real answers.

    Args:
        score: of ``phase``, ``off`` or ``on``.
        off: of stock SGLang, None where it could not be had.
        guard: HiSparse's guard instead of the published score.
    """
    published = rules.GSM8K_PUBLISHED[mode]
    least = rules.HISPARSE_GUARD if guard else rules.floor(published, score.questions)
    why = "guard" if guard else f"published {published}, less noise"
    name, needed = f"GSM8K {mode}", f"above {least:.3f} ({why})"
    ok = score.share > least
    if phase == OFF:
        yield yardstick(phase, name, ok, score, needed)
        return
    yield judge(name, ok, str(score), needed)
    if off is None:
        yield nothing_to_compare(f"{name} against off")
        return
    least = off.share - rules.noise(score, off)
    needed = f"at least {least:.3f} (off: {off}, less noise)"
    yield judge(f"{name} against off", score.share >= least, str(score), needed)


@dataclass(frozen=True)
class Gsm8k(Step):
    """Score of one mode. ``off`` is the yardstick, ``on`` may not fall below it beyond noise."""

    mode: str

    def command(self, place: Place) -> list[str]:
        sizes = place.machine.sizes
        client = [sys.executable, "-m", "sglang.test.run_eval", "--eval-name", "gsm8k"]
        api = {"non-thinking": ["--api", "completion"]}.get(
            self.mode, ["--api", "chat", "--thinking-mode", "deepseek-v3"]
        )
        asked = ["--num-shots", SHOTS, "--num-examples", sizes.questions]
        asked += ["--num-threads", sizes.threads, "--max-tokens", sizes.answer[self._thinking]]
        data = self._made_set(place) if place.machine.reference else place.data
        data_path = ["--gsm8k-data-path", data] if data else []
        return [*client, "--base-url", place.url, *api, *map(str, asked + data_path)]

    @property
    def _thinking(self) -> bool:
        return self.mode == "thinking"

    def _made_set(self, place: Place) -> Path:
        return place.out / f"made-{self.mode}.jsonl"

    def work(self, place: Place) -> Work:
        machine, sizes = place.machine, place.machine.sizes
        asked = sizes.questions
        if machine.reference and place.phase == OFF:
            # The set is made first; about every second answer has a number.
            asked *= 3
        steps = machine.steps(asked, sizes.threads, sizes.usual_answer[self._thinking])
        return Work(programs=1, prompt_tokens=asked * sizes.example, steps=steps)

    def plan(self, place: Place) -> Iterator[str]:
        machine, questions = place.machine, place.machine.sizes.questions
        if machine.reference and place.phase == OFF:
            yield (
                f"make a set of {questions} questions whose answers are this server's own cold ones: "
                f"{self._made_set(place)}"
            )
        yield f"$ {place.shell(self.command(place))}"
        if machine.reference:
            if place.phase == ON:
                yield f"all {questions} answers are the cold ones"
            return
        if place.launch.hisparse:
            yield f"score above {rules.HISPARSE_GUARD}"
        else:
            published = rules.GSM8K_PUBLISHED[self.mode]
            least = rules.floor(published, questions)
            yield f"score above {least:.3f}: published {published}, less noise (one-sided, 1 %)"
        if place.phase == ON:
            yield "not below off: one-sided two-proportion z-test, 1 %"

    def run(self, server: Server) -> Iterator[Check]:
        place, questions = server.place, server.place.machine.sizes.questions
        if place.machine.reference and place.phase == OFF:
            make_set(server, self._made_set(place), self._thinking)
        code = server.program(self.mode, self.command(place))
        score = score_of(server.program_log(self.mode), questions)
        if code or score is None:
            found = f"exit code {code}, no score ({server.program_log_path(self.mode)})"
            yield Check(f"GSM8K {self.mode}", Outcome.NOT_RUN, found, "a score")
            return
        server.figures[self.mode] = score
        if not place.machine.reference:
            off = server.off.get(self.mode)
            yield from accuracy(self.mode, place.phase, score, off, place.launch.hisparse)
            return
        name, needed = f"made set, {self.mode}", "every answer is the cold one"
        if place.phase == OFF:
            # Stock SGLang's hits need not be exact.
            yield Check(name, Outcome.NOT_JUDGED, str(score), needed)
        else:
            yield judge(name, score.right == questions, str(score), needed)


def _questions(count: int) -> list[dict[str, str]]:
    """Of GSM8K's form: a question, and an answer that ends with a number."""
    return [
        {
            "question": f"A farmer has {n + 3} fields with {2 * n + 5} trees each and sells {n} trees. "
            "How many trees are left in all of the fields?",
            "answer": f"He has {(n + 3) * (2 * n + 5)} and sells {n}. #### {(n + 3) * (2 * n + 5) - n}",
        }
        for n in range(count)
    ]


def make_set(server: Server, path: Path, thinking: bool) -> None:
    """Write examples and questions; the questions' answers are cold answers of ``server``.

    Raises:
        ClientError: the server failed.
    """
    from sglang.test.simple_eval_mixed_prefix_gsm8k import (
        INVALID,
        GSM8KEval,
        get_answer_value,
        get_one_example,
    )

    sizes = server.place.machine.sizes
    # An answer without a number is none; some are left over.
    lines = _questions(SHOTS + 4 * sizes.questions)
    _write(path, lines)
    client = GSM8KEval(num_shots=SHOTS, data_path=str(path))
    kept: list[dict[str, str]] = []
    for index, line in enumerate(lines[SHOTS:]):
        if len(kept) == sizes.questions:
            break
        asked = client._build_prefix(index) + get_one_example(lines[SHOTS:], index, False)
        server.client.flush_cache()
        tokens = sizes.answer[thinking]
        if thinking:
            answer = server.client.chat(asked, max_tokens=tokens, thinking=True).text
        else:
            answer = server.client.complete(asked, max_tokens=tokens)
        if get_answer_value(answer) != INVALID:
            kept.append(line | {"answer": answer})
    _write(path, lines[:SHOTS] + kept)


def _write(path: Path, lines: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))

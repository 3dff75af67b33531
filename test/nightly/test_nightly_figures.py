"""Scores, costs and capacities as the real machine is judged by them: the clients print given figures."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from sglang_unified_kv.nightly import benchmark, gsm8k
from sglang_unified_kv.nightly.jobs import Job, Phase
from sglang_unified_kv.nightly.launch import Launch
from sglang_unified_kv.nightly.machine import MI355X, REFERENCE
from sglang_unified_kv.nightly.run import run
from sglang_unified_kv.nightly.steps import AGAIN, OFF, ON, Capacity, Determinism, Recall
from sglang_unified_kv.nightly.verdict import Outcome, Verdict

SERVER = Path(__file__).with_name("faulty_server.py")
PASSED, FAILED = Outcome.PASSED, Outcome.FAILED
NOT_RUN, NOT_JUDGED = Outcome.NOT_RUN, Outcome.NOT_JUDGED


@dataclass(frozen=True)
class Stub(Launch):
    fault: str = "cold"

    def command(self, model, port):
        return [sys.executable, str(SERVER), self.fault, "--port", str(port)]


def checked(step, out, machine=MI355X, faults=("cold", "cold")):
    """Checks by phase and name, without those of the log; with a third fault ``off`` runs again."""
    phases = [
        Phase(name, Stub(flags=(), fault=fault), (step,))
        for name, fault in zip((OFF, ON, AGAIN), faults, strict=False)
    ]
    verdict = Verdict("job", machine.name)
    job = Job("job", "", tuple(phases))
    run(job, machine, "model", None, out, lambda text: None, verdict)
    verdict.write(out / "verdict.json")
    found = {phase.name: {} for phase in phases}
    for phase, check in verdict.checks:
        if not check.name.startswith("log "):
            found[phase][check.name] = check
    return list(found.values())


def judged(*asked, **how):
    """Outcomes of :func:`checked`."""
    return tuple(
        {name: check.outcome for name, check in checks.items()} for checks in checked(*asked, **how)
    )


def timed(*asked):
    """:func:`judged` for a benchmark: ``off``, ``on``, and what ``off`` once more says of both."""
    return judged(*asked, faults=("cold", "cold", "cold"))


def printing(text):
    return [sys.executable, "-c", f"print({text!r})"]


@dataclass(frozen=True)
class Scored(gsm8k.Gsm8k):
    scores: tuple[float, float] = (0.0, 0.0)

    def command(self, place):
        return printing(f"Score: {self.scores[place.phase == 'on']:.3f}")


@pytest.mark.parametrize(
    ("scores", "off", "on"),
    [
        ((0.940, 0.941), PASSED, (PASSED, PASSED)),
        ((0.960, 0.930), PASSED, (PASSED, FAILED)),
        ((0.940, 0.920), PASSED, (FAILED, PASSED)),
        ((0.900, 0.941), NOT_RUN, (PASSED, PASSED)),
    ],
)
def test_gsm8k_on_against_off(scores, off, on, tmp_path):
    step = Scored("non-thinking", scores)
    names = ("GSM8K non-thinking", "GSM8K non-thinking against off")
    assert judged(step, tmp_path) == ({names[0]: off}, dict(zip(names, on, strict=True)))


@dataclass(frozen=True)
class Silent(gsm8k.Gsm8k):
    def command(self, place):
        return printing("no questions were found")


@dataclass(frozen=True)
class OnAlone(Scored):
    def command(self, place):
        return super().command(place) if place.phase == "on" else printing("no questions")


def test_gsm8k_without_its_yardstick_could_not_run(tmp_path):
    _, on = judged(OnAlone("thinking", (0.0, 0.9)), tmp_path)
    assert on == {"GSM8K thinking": FAILED, "GSM8K thinking against off": NOT_RUN}


def test_gsm8k_without_a_score_could_not_run(tmp_path):
    off, on = judged(Silent("thinking"), tmp_path)
    assert off == on == {"GSM8K thinking": NOT_RUN}


def result(on, output, tpot, hits=80.0, completed=64):
    """What SGLang's client writes, as far as it is read."""
    return {
        "completed": completed,
        "input_throughput": on,
        "output_throughput": output,
        "median_tpot_ms": tpot,
        "cache_report": {"cache_hit_rate_pct": hits},
    }


def writing(path, line):
    code = f"open({str(path)!r}, 'w').write({json.dumps(line)!r} + chr(10))"
    return [sys.executable, "-c", code]


@dataclass(frozen=True)
class Decoded(benchmark.Decode):
    """Three repeats of each phase, of which the middle one counts."""

    results: tuple[tuple[dict, ...], tuple[dict, ...]] = ()

    def command(self, place, repeat, seed):
        results = self.results[place.phase == ON]
        return writing(self._results(place, repeat), results[repeat])


STOCK = tuple(result(100, 400, tpot) for tpot in (60.0, 70.0, 90.0))
TIME, OUTPUT = "decode batch 32: time per output token", "decode batch 32: output tokens per second"


@pytest.mark.parametrize(
    ("tpots", "output", "time_outcome", "output_outcome"),
    [
        ((71.0, 71.3, 99.0), 390, PASSED, PASSED),
        ((71.0, 71.5, 72.0), 390, FAILED, PASSED),
        ((70.0, 70.0, 70.0), 380, PASSED, FAILED),
    ],
)
def test_decode_costs(tpots, output, time_outcome, output_outcome, tmp_path):
    on = tuple(result(100, output, tpot) for tpot in tpots)
    _, on, found = timed(Decoded(32, results=(STOCK, on)), tmp_path)
    assert on == {"decode batch 32": PASSED}
    assert found == {"decode batch 32": PASSED, TIME: time_outcome, OUTPUT: output_outcome}


@dataclass(frozen=True)
class Prefilled(benchmark.Prefill):
    off: float = 100.0
    on: float = 100.0
    again: float = 100.0
    hits: float = 60.0
    completed: int = 128

    def command(self, place, repeat, seed):
        rate = {OFF: self.off, ON: self.on, AGAIN: self.again}[place.phase]
        return writing(self._results(place, repeat), result(rate, 1, 0, self.hits, self.completed))


@pytest.mark.parametrize(
    ("cached", "on", "outcome"),
    [(0.6, 94.3, PASSED), (0.6, 94.1, FAILED), (0.8, 92.8, PASSED), (0.8, 92.6, FAILED)],
)
def test_prefill_costs(cached, on, outcome, tmp_path):
    step = Prefilled(cached, on=on, hits=100 * cached)
    _, _, found = timed(step, tmp_path)
    assert found == {
        step.name: PASSED,
        f"{step.name}: prompt tokens per second": outcome,
    }


RATE = "prefill 60% cached: prompt tokens per second"


@pytest.mark.parametrize(
    ("off", "on", "again", "outcome"),
    [
        # Against the first run alone it would pass, against the mean it fails, and the other way round.
        (100.0, 94.5, 102.0, FAILED),
        (100.0, 94.0, 98.0, PASSED),
        # The machine drifts by more than the limit: only what both runs of off agree on is known.
        (100.0, 94.5, 106.0, NOT_RUN),
        (100.0, 93.0, 92.0, NOT_RUN),
        (100.0, 99.0, 92.0, PASSED),
        (100.0, 80.0, 92.0, FAILED),
    ],
)
def test_on_is_judged_against_both_runs_of_off(off, on, again, outcome, tmp_path):
    step = Prefilled(0.6, off=off, on=on, again=again)
    *_, found = checked(step, tmp_path, faults=("cold", "cold", "cold"))
    assert found[RATE].outcome is outcome
    runs = f"({off:.1f} off, {on:.1f} on, {again:.1f} off again: {again / off - 1:+.1%})"
    assert runs in found[RATE].found
    figures = json.loads((tmp_path / "verdict.json").read_text())["figures"]
    assert [figures[phase][step.name]["input"] for phase in (OFF, ON, AGAIN)] == [off, on, again]
    cost = figures[AGAIN][f"{step.name}, against off"]["input"]
    assert cost["drift"] == pytest.approx(again / off - 1)
    assert cost["lost"] == pytest.approx(1 - on / ((off + again) / 2))


@pytest.mark.parametrize("wrong", [{"hits": 54.9}, {"completed": 127}])
def test_a_benchmark_whose_prompts_were_not_cached_or_not_answered_fails(wrong, tmp_path):
    step = Prefilled(0.6, **wrong)
    off, on, again = timed(step, tmp_path)
    # Stock SGLang that falls short is no yardstick, and no fault of ours.
    assert off == {step.name: NOT_RUN} and on[step.name] is FAILED
    assert again[step.name] is NOT_RUN


def test_costs_are_shown_and_not_judged_on_the_reference_engine(tmp_path):
    results = (result(100, 400, 70.0, completed=4),), (result(50, 200, 700.0, completed=4),)
    _, _, found = timed(Decoded(2, results=results), tmp_path, REFERENCE)
    assert set(found.values()) == {PASSED, NOT_JUDGED} and len(found) == 3


@dataclass(frozen=True)
class Without(Prefilled):
    """Whose client fails in one phase."""

    phase: str = ""

    def command(self, place, repeat, seed):
        if place.phase == self.phase:
            return printing("All requests failed.")
        return super().command(place, repeat, seed)


@pytest.mark.parametrize("phase", [OFF, ON])
def test_a_benchmark_without_its_yardstick_could_not_run(phase, tmp_path):
    *_, found = checked(Without(0.6, phase=phase), tmp_path, faults=("cold", "cold", "cold"))
    name, cost = found
    assert found[name].outcome is PASSED and found[cost].outcome is NOT_RUN
    assert (name, cost) == ("prefill 60% cached", "prefill 60% cached: cost")
    assert found[cost].found == f"{phase} has no such figure"


@dataclass(frozen=True)
class Lost(benchmark.Prefill):
    def command(self, place, repeat, seed):
        return printing("All requests failed.")


def test_a_benchmark_without_a_result_could_not_run(tmp_path):
    off, on = judged(Lost(0.6), tmp_path)
    assert off == on == {"prefill 60% cached": NOT_RUN}


@dataclass(frozen=True)
class Broken(benchmark.Prefill):
    """A client that ends well and leaves this file."""

    text: str = ""

    def command(self, place, repeat, seed):
        code = f"open({str(self._results(place, repeat))!r}, 'w').write({self.text!r})"
        return [sys.executable, "-c", code]


UNCACHED = {key: value for key, value in result(100, 1, 0).items() if key != "cache_report"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        json.dumps(result(100, 1, 0))[:30],
        json.dumps(UNCACHED),
        "[]",
        json.dumps(result(*3 * [None])),
    ],
    ids=["empty", "cut", "no cache report", "no object", "no numbers"],
)
def test_a_result_that_cannot_be_read_could_not_run_and_names_its_file(text, tmp_path):
    off, on = judged(Broken(0.6, text), tmp_path)
    assert off == on == {"prefill 60% cached": NOT_RUN}
    first, *_ = json.loads((tmp_path / "verdict.json").read_text())["checks"]
    assert str(tmp_path / "off-prefill-60-cached-0.jsonl") in first["found"]


@pytest.mark.parametrize("phase", ["off", "again"])
def test_an_off_run_in_which_every_request_failed_is_no_yardstick(phase, tmp_path):
    step = Prefilled(0.6, **{phase: 0.0})
    *_, found = checked(step, tmp_path, faults=("cold", "cold", "cold"))
    assert found[RATE].outcome is NOT_RUN
    assert str(tmp_path / "*-prefill-60-cached-*.jsonl") in found[RATE].found


@dataclass(frozen=True)
class Checked(Determinism):
    """``check`` of a server whose answers are these."""

    code: int = 1
    hits_outside: int = 0
    unlike_cold: int = 0
    doubts: tuple[str, ...] = ()

    def command(self, place):
        tail = {"tail": 16, "rounds": 64, "hits": 60, "unlike_cold": self.unlike_cold}
        tail["hits_outside_majority"] = self.hits_outside
        text = json.dumps({"tails": [tail], "doubts": self.doubts})
        code = f"open({str(self._report(place))!r}, 'w').write({text!r}); raise SystemExit({self.code})"
        return [sys.executable, "-c", code]


CHECK, COLD = "sglang-unified-kv check", "answers of check as the cold ones"


@pytest.mark.parametrize(
    ("step", "outcome"),
    [
        (Checked(unlike_cold=60), PASSED),
        (Checked(unlike_cold=60, hits_outside=1), FAILED),
        (Checked(unlike_cold=60, doubts=("only 1 of 64 answers reused anything",)), FAILED),
    ],
)
def test_check_on_a_gpu_judges_hits_and_shows_what_is_unlike_cold(step, outcome, tmp_path):
    off, on = judged(step, tmp_path)
    assert off == on == {CHECK: outcome, COLD: NOT_JUDGED}


def test_check_on_the_reference_engine_judges_both(tmp_path):
    off, on = judged(Checked(unlike_cold=60), tmp_path, REFERENCE)
    assert off == on == {CHECK: FAILED}


@dataclass(frozen=True)
class Differing(Determinism):
    """``check`` of ranks that differ ends before it asks, without results."""

    def command(self, place):
        return [sys.executable, "-c", "raise SystemExit(1)"]


def test_ranks_that_differ_fail_on_a_gpu_too(tmp_path):
    _, on = judged(Differing(), tmp_path)
    assert on == {CHECK: FAILED}


def test_capacity_of_hisparse(tmp_path):
    (tmp_path / "more").mkdir()
    assert judged(Capacity(), tmp_path / "more", faults=("cold", "swaps"))[1] == {
        "capacity": PASSED
    }
    (tmp_path / "same").mkdir()
    assert judged(Capacity(), tmp_path / "same", faults=("cold", "small"))[1] == {
        "capacity": FAILED
    }


def test_a_passcode_comes_back_from_rows_that_swap(tmp_path):
    off, on = judged(Recall(), tmp_path, faults=("swaps", "swaps"))
    assert (off, on) == ({}, {"passcode": PASSED, "rows that swap": PASSED})


@dataclass(frozen=True)
class Forgotten(Recall):
    def text(self, machine):
        return "The word is HELLO. What is the passcode?"


def test_a_passcode_that_does_not_come_back_fails(tmp_path):
    _, on = judged(Forgotten(), tmp_path)
    assert on["passcode"] is FAILED

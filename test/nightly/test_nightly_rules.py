"""The rules of the nightly jobs, on the lines that real servers log and on made-up scores."""

import doctest
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from sglang_unified_kv.nightly import duration, gsm8k, rules, steps
from sglang_unified_kv.nightly.rules import Score
from sglang_unified_kv.nightly.verdict import Check, Outcome, Verdict, judge

# As a server of the reference engine wrote them.
RESTORED = """\
[2026-11-30 12:06:28] HiCache prefetch success req=a37a completed=1280 matched=0 loaded=1280 occupied=0
[2026-11-30 12:06:28] [LB-DEV] device landing byte-exact rid=a37a#2 boundary=1280 request_slot=8
[2026-11-30 12:06:28] [SWA-DBG] restore verified rid=a37a#2 boundary=1280 request_slot=8
[2026-11-30 12:06:28] [C4-STATE-DBG] state ride bit-exact rid=a37a#2 boundary=1280 request_slot=8
"""
DECODE = (
    "[2026-11-30 12:20:31 TP0] Decode batch, #running-req: 1, #full token: 2816, full token usage: 0.11, "
    "#swa token: 256, swa token usage: 0.12, #gpu token: 640, gpu token usage: 0.31, #cpu token: {host}, "
    "cpu token usage: 0.11, cpu graph: False, gen throughput (token/s): 3.04, #queue-req: 0"
)
TROUBLE = {
    "[SWA-DBG] MISMATCH rid=a37a#2 boundary=1280 request_slot=8": "MISMATCH",
    "[DP1 TP1] BIND-MISS rid=a37a#2 captures=2": "BIND-MISS",
    "reuse_reject rid=a37a#2 tree=512 used=256": "reuse_reject",
}


@pytest.mark.parametrize("module", [rules, gsm8k, steps, duration])
def test_examples(module):
    ran = doctest.testmod(module)
    assert ran.attempted and not ran.failed


def outcomes(log):
    return [check.outcome for check in steps._log_checks(log)]


def test_a_clean_log_passes_and_each_line_of_it_is_needed():
    assert outcomes(RESTORED) == [Outcome.PASSED, Outcome.PASSED]
    for text in rules.REQUIRED:
        log = RESTORED.replace(text, "")
        compared, trouble = steps._log_checks(log)
        assert compared.outcome is Outcome.FAILED and compared.found == f"not in the log: {text}"
        assert trouble.outcome is Outcome.PASSED


@pytest.mark.parametrize("line", TROUBLE)
def test_a_line_of_trouble_fails_and_is_shown(line):
    compared, trouble = steps._log_checks(RESTORED + line)
    assert compared.outcome is Outcome.PASSED
    assert trouble.outcome is Outcome.FAILED and trouble.found == line
    assert TROUBLE[line] in trouble.needed


def test_prefetches_are_read_from_the_log():
    assert rules.prefetches(RESTORED) == [(0, 1280)]
    dropped = RESTORED.replace("prefetch success", "prefetch dropped")
    assert rules.prefetches(dropped) == []


def test_rows_of_hisparse_are_read_from_the_log():
    seen = rules.hisparse_tokens(DECODE.format(host=704))
    assert seen == [(640, 704)]
    assert rules.swap_faults(seen, prompt_tokens=2800, new_tokens=12, buffer=512) == []
    low = rules.hisparse_tokens(DECODE.format(host=640))
    assert rules.swap_faults(low, 2800, 12, 512) == ["#cpu token 640: not between 704 and 704"]
    assert "nothing swaps" in rules.swap_faults(seen, 2048, 12, 512)[0]
    assert rules.swap_faults([], 2800, 12, 512) == ["no decode step tells of rows on the host"]
    assert rules.swap_faults([(960, 704)], 2800, 12, 512) == [
        "#gpu token 960: not 512 and one or two pages of 64"
    ]


@pytest.mark.parametrize(
    ("cached", "ranks", "fault"),
    [
        ([256, 512], 1, "the first reused 256, so it was not cold"),
        ([0, 0, 512], 1, "2 answers reused nothing, there is 1 cache"),
        ([0, 0, 0, 512], 2, "3 answers reused nothing, there are 2 caches"),
        ([0, 512, 256, 512], 1, "reuse fell from 512 to 256"),
        ([0, 256], 1, "the last reused 256, not 512"),
    ],
)
def test_what_does_not_climb_is_said(cached, ranks, fault):
    assert rules.climb_faults(cached, 512, ranks) == [fault]


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_round_robin_over_ranks_climbs(ranks):
    times = {1: 6, 2: 6, 8: 20}[ranks]
    assert rules.climb_faults([0] * ranks + [512] * (times - ranks), 512, ranks) == []


scores = st.builds(
    lambda share, questions: Score(round(share * questions), questions),
    st.floats(0, 1),
    st.integers(10, 2000),
)


@given(scores)
def test_noise_is_that_of_two_halves_at_most(score):
    assert rules.noise(score, score) >= 0
    assert (
        rules.noise(score, score) <= rules.ONE_PERCENT * 0.5 * (2 / score.questions) ** 0.5 + 1e-9
    )


def accuracy(mode, on, off=None, guard=False):
    score = Score(round(on * 1311), 1311)
    stock = None if off is None else Score(round(off * 1311), 1311)
    phase = "off" if off is None else "on"
    return [c.outcome for c in gsm8k.accuracy(mode, phase, score, stock, guard)]


def test_gsm8k_against_what_is_published_and_against_off():
    passed, failed = Outcome.PASSED, Outcome.FAILED
    assert accuracy("thinking", 0.942, 0.933) == [passed, passed]
    assert accuracy("non-thinking", 0.938, 0.941) == [passed, passed]
    assert accuracy("non-thinking", 0.92, 0.941) == [failed, passed]
    assert accuracy("non-thinking", 0.926, 0.96) == [passed, failed]
    # HiSparse's guard is a fixed number.
    assert accuracy("thinking", 0.911, 0.93, guard=True) == [passed, passed]
    assert accuracy("thinking", 0.909, 0.91, guard=True) == [failed, passed]
    # A stock server below what is published is no yardstick, and no fault of ours.
    assert accuracy("thinking", 0.933) == [passed]
    assert accuracy("thinking", 0.9) == [Outcome.NOT_RUN]


def test_a_client_that_printed_no_score_has_none():
    assert gsm8k.score_of("Traceback (most recent call last):", 1311) is None


def verdict_of(*found):
    verdict = Verdict("job", "machine")
    verdict.add("on", [Check(o.value, o, "found", "needed") for o in found])
    return verdict


@pytest.mark.parametrize(
    ("found", "outcome", "code"),
    [
        ([Outcome.PASSED, Outcome.NOT_JUDGED], "passed", 0),
        ([Outcome.PASSED, Outcome.FAILED], "failed", 1),
        ([Outcome.FAILED, Outcome.NOT_RUN], "failed", 1),
        ([Outcome.PASSED, Outcome.NOT_RUN], "could not run", 2),
        ([Outcome.NOT_JUDGED], "could not run", 2),
        ([], "could not run", 2),
    ],
)
def test_the_worst_check_is_the_verdict(found, outcome, code, tmp_path):
    verdict = verdict_of(*found)
    assert (verdict.outcome.value, verdict.exit_code) == (outcome, code)
    verdict.write(tmp_path / "verdict.json")
    document = json.loads((tmp_path / "verdict.json").read_text())
    assert document["verdict"] == outcome
    assert [check["outcome"] for check in document["checks"]] == [o.value for o in found]
    text = io.StringIO()
    verdict.print(Console(file=text, width=100))
    assert text.getvalue().splitlines()[-1] == f"verdict: {outcome}"


def test_judge():
    assert judge("a", True, 1, "b") == Check("a", Outcome.PASSED, "1", "b")
    assert judge("a", False, 1, "b").outcome is Outcome.FAILED

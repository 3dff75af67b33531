"""The strict gate on a model of the tree: both ends are checkpoints, and nothing deeper would do."""

from hypothesis import given
from hypothesis import strategies as st
from sglang_unified_kv.checkpoint.reuse import GatedMatch, TreeMatch, gate

pages = st.integers(0, 12)


@given(stored=st.sets(pages), device=pages, host=pages, length=st.integers(0, 12 * 256 + 255))
def test_both_ends_are_checkpoints_and_the_deepest_ones(stored, device, host, length):
    stored = {p * 256 for p in stored if p}
    on_device, in_tree = device * 256, (device + host) * 256
    calls = []

    def match(cut):
        calls.append(cut)
        total = min(cut, in_tree)
        return TreeMatch(min(total, on_device), max(0, total - on_device), cut)

    def deepest(limit):
        return max((b for b in stored if b <= limit), default=0)

    found = gate(match, deepest, length)
    usable = deepest(min(length, in_tree))
    assert found.total == usable
    assert found.device == (usable if usable <= on_device else deepest(on_device))
    assert found.at_total == found.total and found.at_device in (found.device, found.total)
    assert found.device in stored | {0} and found.total in stored | {0}
    assert len(calls) <= 2 + len(stored) + 2


def test_an_agreeing_match_costs_one_question():
    calls = []

    def match(cut):
        calls.append(cut)
        return TreeMatch(cut, 0, "r")

    assert gate(match, lambda n: 512 if n >= 512 else 0, 700) == GatedMatch(512, 512, "r", "r")
    assert calls == [512]

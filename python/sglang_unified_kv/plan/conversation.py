"""What a request holds while it runs, and what it leaves: pages and checkpoints of a conversation."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from ..checkpoint.policy import Path, PlacementPolicy, Span

PAGE = 256


def running_pages(length: int, new: int, ahead: int) -> int:
    """Pages that a running request holds at its end.

    Under the overlap schedule the step after the last token is already allocated.

    >>> running_pages(700, 68, 0), running_pages(700, 69, 0), running_pages(700, 61, 8)
    (3, 4, 4)
    """
    return ceil((length + new + ahead) / PAGE)


def stored_pages(length: int, new: int, pairs: bool) -> int:
    """Whole pages that a finished request leaves in the tree.

    Its last token was never computed, and an entry of the tree may be a pair of tokens. What speculation
    accepted beyond ``new`` is stored too, a few tokens at most.

    >>> stored_pages(700, 68, pairs=False), stored_pages(700, 69, pairs=False)
    (2, 3)
    """
    return (length + new - 1 - pairs) // PAGE


@dataclass(frozen=True)
class Conversation:
    """Turns that grow: each one sends all that was said before and some tokens more.

    Turn ``t`` has a prompt of ``prompt + (t - 1) * (new + added)`` tokens and generates ``new``. Of what the
    turn before left, it computes the rest of the last page again and no more. So a conversation has one path
    in the tree: at its end it holds the pages of its last turn, not the sum over its turns, and what
    checkpoints each turn added to the path.

    Attributes:
        prompt: tokens of the first turn's prompt.
        new: tokens that each turn generates.
        turns: 1 for prompts that nobody continues.
        added: tokens that each later turn adds to what was said: the next question.

    Three turns of 1,000, 1,600 and 2,200 tokens hold eight pages at the end; prompts of these lengths that
    share nothing would hold 4 + 6 + 8.

    >>> talk = Conversation(prompt=1000, new=100, turns=3, added=500)
    >>> [talk.prompt_of(turn) for turn in (1, 2, 3)], talk.last
    ([1000, 1600, 2200], 2200)
    >>> [stored_pages(talk.prompt_of(turn), 100, pairs=False) for turn in (1, 2, 3)]
    [4, 6, 8]
    >>> talk.pages(pairs=False), talk.running_pages(ahead=0)
    (8, 9)

    With a checkpoint at every boundary each of the 8 pages has one. Those of ``tails``, which keeps the ends
    of prompts and outputs: 768 of the first prompt and 1,024 of its output, 1,536 of the second prompt, and
    2,048 of the third.

    >>> from sglang_unified_kv.checkpoint.policy import policy_of
    >>> talk.checkpoints(False, policy_of("grid", page_size=PAGE))
    8
    >>> talk.checkpoints(False, policy_of("tails", page_size=PAGE))
    4
    """

    prompt: int
    new: int
    turns: int = 1
    added: int = 0

    def prompt_of(self, turn: int) -> int:
        """Tokens of the prompt of a turn; the first is 1."""
        return self.prompt + (turn - 1) * (self.new + self.added)

    @property
    def last(self) -> int:
        """Tokens of the last turn's prompt, the longest."""
        return self.prompt_of(self.turns)

    def running_pages(self, ahead: int) -> int:
        """Pages that the last turn holds while it runs, at its end; ``ahead`` as of :func:`running_pages`."""
        return running_pages(self.last, self.new, ahead)

    def pages(self, pairs: bool) -> int:
        """Pages that the conversation holds in the tree at its end."""
        return stored_pages(self.last, self.new, pairs)

    def checkpoints(self, pairs: bool, policy: PlacementPolicy) -> int:
        """Checkpoints that it holds at its end, if it shares nothing with others and none was evicted.

        What a store with room to spare takes beside them is not counted.

        >>> from sglang_unified_kv.checkpoint.policy import policy_of
        >>> grid, tails = (policy_of(name, page_size=PAGE) for name in ("grid", "tails"))
        >>> one = Conversation(300, 800)
        >>> one.checkpoints(False, grid), one.checkpoints(False, tails)
        (3, 2)
        """
        held: set[int] = set()
        known = 0
        for turn in range(1, self.turns + 1):
            prompt = self.prompt_of(turn)
            end = stored_pages(prompt, self.new, pairs) * PAGE
            resumed = max(held, default=0)
            path = Path(resumed, known, prompt)
            ends = policy.boundaries(Span(prompt, end), path) if end > prompt else []
            held.update(b for b in policy.boundaries(Span(resumed, prompt), path) if b <= end)
            held.update(ends[-policy.output_tails(path) :])
            known = end
        return len(held)

    def __str__(self) -> str:
        if self.turns == 1:
            return f"{self.prompt:,} + {self.new:,} tokens"
        return f"{self.turns} turns to {self.last:,} + {self.new:,} tokens"

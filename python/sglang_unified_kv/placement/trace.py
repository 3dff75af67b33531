"""Requests as pages: from a Mooncake trace, or made up.

A page is named so that equal names mean equal tokens from the start of the prompt to the end of the page, as
the engine's page hashes do.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PAGE = 256
BLOCK_PAGES = 2
"""Pages of a block of a Mooncake trace, 512 tokens."""


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        prompt: tokens.
        output: tokens, at least 1. The last one is never computed.
        pages: names of its full pages, of prompt and output.
    """

    prompt: int
    output: int
    pages: list[int]


def mooncake(path: Path, *, outputs: bool = True) -> list[Request]:
    """Requests of a Mooncake trace, in order of arrival.

    The trace names whole blocks of prompts by what is before and in them, names a partial last block like one
    that nobody continues, and does not name outputs. What a request shares with an earlier one behind their
    common blocks is therefore inferred: if these end with the last whole block of the earlier prompt (the
    latest such request, two blocks or more, since every prompt begins with the same one), the request
    *continues* it. It then shares its prompt to the end, and its output as well if it is at least as long as
    both together, as a next turn is. Otherwise it shares whole blocks alone.

    Args:
        outputs: False if prompts do not hold the outputs of earlier turns, as where reasoning is left out.
    """
    names: dict[tuple[int, int], int] = {}
    seen: set[int] = set()
    ends: dict[int, Request] = {}
    requests: list[Request] = []
    fresh = iter(range(1 << 62))
    with open(path) as lines:
        for line in lines:
            item = json.loads(line)
            blocks, prompt = item["hash_ids"], item["input_length"]
            output = max(item["output_length"], 1)
            known = next((i for i, b in enumerate(blocks) if b not in seen), len(blocks))
            continued: list[int] = []
            if 2 <= known < len(blocks) and (earlier := ends.get(blocks[known - 1])):
                if outputs and prompt >= earlier.prompt + earlier.output:
                    continued = earlier.pages
                elif prompt >= earlier.prompt:
                    continued = earlier.pages[: earlier.prompt // PAGE]
            pages = []
            for page in range(prompt // PAGE):
                place = (blocks[page // BLOCK_PAGES], page % BLOCK_PAGES)
                if place not in names:
                    names[place] = continued[page] if page < len(continued) else next(fresh)
                pages.append(names[place])
            total = (prompt + output - 1) // PAGE
            pages += [next(fresh) for _ in range(prompt // PAGE, total)]
            seen.update(blocks)
            requests.append(Request(prompt, output, pages))
            if whole := prompt // (PAGE * BLOCK_PAGES):
                ends[blocks[whole - 1]] = requests[-1]
    return requests


Text = tuple[tuple[int, int], ...]
"""Pieces of a text: what it is cut from, and how many tokens from its start."""


class Writer:
    """Names the pages of texts. A piece is new unless it is passed on."""

    def __init__(self, seed: int):
        self.chance = random.Random(seed)
        self._pieces = 0
        self._names: dict[object, int] = {}

    def new(self, tokens: int) -> Text:
        self._pieces += 1
        return ((self._pieces, tokens),)

    def between(self, low: int, high: int) -> int:
        """A length, as often near ``low`` as its logarithm is."""
        return round(low * (high / low) ** self.chance.random())

    def request(self, prompt: Text, output: Text) -> Request:
        asked, answered = (sum(n for _, n in text) for text in (prompt, output))
        return Request(asked, answered, self._pages((*prompt, *output), asked + answered - 1))

    def _pages(self, text: Text, tokens: int) -> list[int]:
        pages: list[int] = []
        before, inside, room = -1, [], PAGE
        for piece, length in text:
            start = 0
            while start < length:
                taken = min(room, length - start)
                inside.append((piece, start, taken))
                start, room = start + taken, room - taken
                if room == 0:
                    before = self._names.setdefault((before, *inside), len(self._names))
                    pages.append(before)
                    inside, room = [], PAGE
        return pages[: tokens // PAGE]


def cut(text: Text, tokens: int) -> Text:
    """The first ``tokens`` tokens of a text."""
    kept = []
    for piece, length in text:
        if tokens <= 0:
            break
        kept.append((piece, min(length, tokens)))
        tokens -= length
    return tuple(kept)


def chat(count: int, seed: int = 1) -> Iterator[Request]:
    """Conversations that grow turn by turn, many at a time, half of them over a document."""
    writer = Writer(seed)
    chance, system = writer.chance, writer.new(600)
    going: list[tuple[Text, int]] = []
    for _ in range(count):
        if not going or chance.random() < 0.25:
            document = writer.between(2000, 60000) if chance.random() < 0.5 else 1
            going.append(((*system, *writer.new(document)), writer.between(1, 16)))
        text, turns = going.pop(chance.randrange(len(going)))
        prompt = (*text, *writer.new(writer.between(20, 1000)))
        output = writer.new(writer.between(20, 1500))
        yield writer.request(prompt, output)
        if turns > 1:
            going.append(((*prompt, *output), turns - 1))


def shared(count: int, seed: int = 2) -> Iterator[Request]:
    """Questions behind system prompts with examples: few of the first, some of the second for each."""
    writer = Writer(seed)
    systems = [writer.new(writer.between(500, 20000)) for _ in range(12)]
    examples = [[writer.new(writer.between(200, 5000)) for _ in range(6)] for _ in systems]
    for _ in range(count):
        which = min(int(writer.chance.expovariate(0.4)), len(systems) - 1)
        text = (*systems[which], *writer.chance.choice(examples[which]))
        prompt = (*text, *writer.new(writer.between(30, 2000)))
        yield writer.request(prompt, writer.new(writer.between(10, 800)))


def agents(count: int, seed: int = 3) -> Iterator[Request]:
    """Loops of tool calls: short outputs, results behind them, up to eighty steps, sixteen at a time."""
    writer = Writer(seed)
    system = writer.new(6000)
    going: list[tuple[Text, int]] = []
    for _ in range(count):
        if len(going) < 16:
            start = (*system, *writer.new(writer.between(100, 4000)))
            going.append((start, writer.between(5, 80)))
        text, steps = going.pop(writer.chance.randrange(len(going)))
        output = writer.new(writer.between(30, 400))
        yield writer.request(text, output)
        if steps > 1:
            result = writer.new(writer.between(50, 6000))
            going.append(((*text, *output, *result), steps - 1))


def cuts(count: int, seed: int = 4) -> Iterator[Request]:
    """Prompts that leave an earlier one anywhere: no place is likelier than another."""
    writer = Writer(seed)
    texts = [writer.new(20000)]
    for _ in range(count):
        text = writer.chance.choice(texts[-200:])
        length = sum(n for _, n in text)
        prompt = (
            *cut(text, writer.chance.randrange(length)),
            *writer.new(writer.between(100, 12000)),
        )
        output = writer.new(writer.between(10, 500))
        yield writer.request(prompt, output)
        texts.append((*prompt, *output))


MADE_UP = {"chat": chat, "shared": shared, "agents": agents, "cuts": cuts}


def made_up(name: str, count: int) -> list[Request]:
    """``count`` requests of one of :data:`MADE_UP`."""
    return list(MADE_UP[name](count))


def distinct_pages(requests: Iterable[Request]) -> int:
    """Pages that a cache would hold if it never evicted."""
    return len({page for request in requests for page in request.pages})

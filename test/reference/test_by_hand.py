"""The lines of docs/by_hand.md, from the page's own text."""

import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
from sglang_unified_kv.cli.client import SGLangClient
from sglang_unified_kv.cli.server import ServerProcess, free_port
from sglang_unified_kv.reference.harness import InProcessEngine

PAGE = (Path(__file__).parents[2] / "docs" / "by_hand.md").read_text()
BLOCKS = dict.fromkeys(re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S))
SERVERS = [block for block in BLOCKS if "launch_server" in block]
PROMPT = list(range(100, 800))


def block(having: str) -> str:
    (found,) = [text for text in BLOCKS if having in text]
    return found


def flags_of(server: str) -> list[str]:
    words = shlex.split(server.replace("\\\n", " "))
    return words[words.index("sglang.launch_server") + 1 :]


def test_the_page_has_three_servers():
    assert len(SERVERS) == 3
    for text, flags in zip(SERVERS, map(flags_of, SERVERS), strict=True):
        assert flags[flags.index("--port") + 1] == "30000"
        assert ("STORAGE_DIR" in text) == ("--hicache-storage-backend" in flags)
        # What the reference engine sets by itself.
        assert not re.search(r"cuda-graph|all-reduce|THREADS_BIND=|NCCL", text)


@pytest.mark.parametrize("server", [0, 1], ids=["EAGLE", "storage"])
def test_engines_from_the_flags_of_the_page(next_n_path, monkeypatch, tmp_path, server):
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "new" / "storage"))
    answers = []
    for _ in range(1 + server):
        with InProcessEngine(next_n_path, flags=flags_of(SERVERS[server])) as engine:
            if not answers:
                answers.append(engine.run(PROMPT, 8))
                assert answers[0].cached_tokens == 0
                engine.drain()
                if server:
                    continue
            answers.append(engine.run(PROMPT, 8))
    cold, hit = answers
    assert hit.cached_tokens == 512 and hit.output_ids == cold.output_ids
    assert hit.details["storage"] == (512 if server else 0)

"""docs/by_hand.md from the page's own text; ``test_launch_engines.py`` starts engines from its lines."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from sglang_unified_kv.cli.client import SGLangClient
from sglang_unified_kv.cli.server import ServerProcess, free_port

PAGE = (Path(__file__).parents[2] / "docs" / "by_hand.md").read_text()
BLOCKS = dict.fromkeys(re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S))
SERVERS = [block for block in BLOCKS if "launch_server" in block]


def block(having: str) -> str:
    (found,) = [text for text in BLOCKS if having in text]
    return found


def flags_of(server: str) -> list[str]:
    words = shlex.split(server.replace("\\\n", " "))
    return words[words.index("sglang.launch_server") + 1 :]


def test_the_page_has_three_servers():
    assert len(SERVERS) == 3
    rest = PAGE
    for text, flags in zip(SERVERS, map(flags_of, SERVERS), strict=True):
        section, _, rest = rest.partition(text)
        assert flags[flags.index("--port") + 1] == "30000"
        assert ("export SGLANG_HICACHE_FILE" in section) == ("--hicache-storage-backend" in flags)
        # What the reference engine sets by itself.
        assert not re.search(r"cuda-graph|all-reduce|THREADS_BIND=|NCCL", text)


def test_the_ranks_are_launched_as_one_is_with_drafts_and_storage():
    eagle, storage, ranks = (set(flags_of(server)) for server in SERVERS)
    assert ranks - eagle - storage == {"--tp-size", "--attn-dp-size", "2", "1024", "8"}
    assert not (eagle | storage) - ranks - {"512"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a reader of the page would be, with the model that it has written."""
    folder = tmp_path_factory.mktemp("by hand")
    run_block(block("write_tiny_model"), folder, 30000)
    return folder


def setup() -> str:
    """What the page has every shell export, but for the environment that the tests run in already."""
    first, *exports = block("export PATH").splitlines(keepends=True)
    assert "scripts/env" in first
    return "".join(exports)


def script(text: str, folder: Path, port: int) -> list[str]:
    """A shell that runs a block of the page, in ``folder`` and on another port."""
    text = text.replace("30000", str(port)).replace("python -m sglang", "exec python -m sglang")
    return ["bash", "-ec", f"cd {shlex.quote(str(folder))}\n{setup()}{text}"]


def run_block(text: str, folder: Path, port: int) -> str:
    return subprocess.run(
        script(text, folder, port), env=plain(), check=True, capture_output=True, text=True
    ).stdout


def plain() -> dict[str, str]:
    """The environment without what the tests put into it."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    return found | {"PATH": f"{Path(sys.executable).parent}:{found['PATH']}"}


class Server:
    """A server of the page, while the ``with`` block runs."""

    def __init__(self, text: str, folder: Path, log: Path):
        self.port, self._folder = free_port(), folder
        self._process = ServerProcess(script(text, folder, self.port), plain(), log)

    def __enter__(self):
        self._process.__enter__()
        client = SGLangClient(f"http://127.0.0.1:{self.port}")
        self._process.wait_until(client.healthy, timeout_s=500)
        return self

    def __exit__(self, *exception):
        self._process.__exit__(*exception)

    def run(self, having: str) -> str:
        return run_block(block(having), self._folder, self.port)

    def send(self) -> dict:
        """The answer to the page's prompt."""
        return json.loads(self.run("curl"))

    def log(self) -> str:
        return self._process.log.read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_eagle_over_http(folder, tmp_path):
    with Server(SERVERS[0], folder, tmp_path / "log") as server:
        cold, hit = server.send(), server.send()
    assert cold["meta_info"]["cached_tokens"] == 0 and hit["meta_info"]["cached_tokens"] == 512
    assert hit["output_ids"] == cold["output_ids"]
    assert hit["meta_info"]["spec_accept_length"] >= 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_storage_and_a_restart_over_http(folder, tmp_path):
    answers = []
    for _ in range(2):
        with Server(SERVERS[1], folder, tmp_path / "log") as server:
            answers.append(server.send())
    cold, hit = answers
    assert cold["meta_info"]["cached_tokens"] == 0 and hit["meta_info"]["cached_tokens"] == 512
    assert hit["meta_info"]["cached_tokens_details"]["storage"] == 512
    assert hit["output_ids"] == cold["output_ids"]
    assert list((folder / "storage").iterdir())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_over_http(folder, tmp_path):
    with Server(SERVERS[2], folder, tmp_path / "log") as server:
        answers = [server.send() for _ in range(4)]
        attested = server.run("--attest-only")
    cached = [answer["meta_info"]["cached_tokens"] for answer in answers]
    assert cached[0] == 0 and cached[1] in (0, 512) and cached[2:] == [512, 512]
    assert all(answer["output_ids"] == answers[0]["output_ids"] for answer in answers)
    assert "attestation: 2 of 2 ranks" in attested, attested
    assert {answer["meta_info"]["dp_rank"] for answer in answers} == {0, 1}

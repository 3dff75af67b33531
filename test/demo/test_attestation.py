"""``check`` on what ranks say: the real text of two ranks, as it is and with one thing changed at a time."""

import http.server
import json
import os
import re
import threading
from pathlib import Path

import pytest
from sglang_unified_kv.attestation import (
    ALIKE,
    ALIKE_IN_GROUP,
    Attestation,
    Rank,
    digest,
    disagreements,
    expected_ranks,
)
from sglang_unified_kv.cli import app
from sglang_unified_kv.cli.attest import said_by_ranks
from sglang_unified_kv.cli.client import SGLangClient
from sglang_unified_kv.cli.demo import environment, launch_command
from sglang_unified_kv.cli.server import ServerProcess, free_port
from sglang_unified_kv.edit import Series
from typer.testing import CliRunner

SCRAPE = Path(__file__).with_name("two_ranks.metrics").read_text()
"""Of a server with two tensor-parallel ranks; other metrics left out."""
INFO = {
    "tp_size": 2,
    "dp_size": 1,
    "pp_size": 1,
    "nnodes": 1,
    "node_rank": 0,
    "attn_dp_size": 1,
}
TWO = expected_ranks(INFO)


def on_rank(rank: int, change, scrape: str = SCRAPE) -> str:
    """``scrape`` with ``change`` made to the line of one rank's attestation."""
    lines = scrape.splitlines(keepends=True)
    (at,) = [
        i
        for i, line in enumerate(lines)
        if line.startswith("sglang:unified_kv_engaged{") and f'tp_rank="{rank}"' in line
    ]
    lines[at] = change(lines[at])
    return "".join(lines)


def with_label(name: str, value: str):
    return lambda line: re.sub(rf'\b{name}="[^"]*"', f'{name}="{value}"', line)


@pytest.fixture
def answer():
    """``answer(scrape, **info)``: a server that answers with these; returns its address."""
    answers = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = answers.get(self.path)
            self.send_response(404 if body is None else 200)
            self.end_headers()
            self.wfile.write((body or "not found").encode())

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    def serve(scrape, **info):
        answers.update({"/server_info": json.dumps(INFO | info), "/metrics": scrape})
        return f"http://127.0.0.1:{server.server_port}"

    yield serve
    server.shutdown()
    thread.join()
    server.server_close()


def attest(url: str):
    """Exit code and output of ``check --attest-only``, the output on one line."""
    run = CliRunner().invoke(app, ["check", "--url", url, "--attest-only"])
    return run.exit_code, " ".join(run.output.split())


def test_ranks_that_agree(answer):
    code, said = attest(answer(SCRAPE))
    assert code == 0, said
    assert said.startswith("attestation: 2 of 2 ranks: features=hicache ")
    assert "edits=70 edits_digest=2cd7c1ec09e97dfe policy=combined records=64" in said


@pytest.mark.parametrize("name", ALIKE + ALIKE_IN_GROUP)
def test_a_rank_that_disagrees(answer, name):
    code, said = attest(answer(on_rank(1, with_label(name, "999"))))
    assert code == 1
    ours = getattr(said_by_ranks(SCRAPE)[Rank(0, 0)][0], name) or "none"
    assert f"the ranks disagree on {name}: {ours} on dp0 tp0; 999 on dp0 tp1" in said
    assert said.count("disagree") == 1 and said.endswith("attestation: failed")


def test_a_rank_that_is_missing(answer):
    code, said = attest(answer(on_rank(1, lambda line: "")))
    assert code == 1 and "- dp0 tp1: no attestation, so SGLang runs as released there" in said


def test_a_server_that_runs_as_released(answer):
    nobody = on_rank(0, lambda line: "", on_rank(1, lambda line: ""))
    code, said = attest(answer(nobody))
    assert code == 1 and "no scheduler rank says that anything is engaged" in said


def test_what_an_earlier_server_left(answer):
    stale = on_rank(0, lambda line: line + with_label("records", "63")(line))
    code, said = attest(answer(stale))
    assert code == 1 and "dp0 tp0 says 2 different things: PROMETHEUS_MULTIPROC_DIR" in said


def test_a_server_without_metrics(answer):
    code, said = attest(answer(None))
    assert code == 2
    assert "the server exports no metrics; launch it with --enable-metrics" in said
    assert "--no-attestation leaves the comparison of the ranks out" in said


def test_what_cannot_be_compared(answer):
    code, said = attest(answer(SCRAPE, pp_size=2))
    assert code == 2 and "--pp-size 2: ranks of pipeline stages are not compared" in said
    url = answer(SCRAPE)
    run = CliRunner().invoke(app, ["check", "--url", url, "--attest-only", "--no-attestation"])
    assert run.exit_code == 2 and "exclude each other" in " ".join(run.output.split())


def test_data_parallel_ranks_size_their_own_pools():
    found = said_by_ranks(SCRAPE)
    said, other = (
        found[Rank(0, 0)][0],
        Attestation(**vars(found[Rank(0, 0)][0]) | {"records": "32"}),
    )
    apart = {Rank(0, 0): [said], Rank(1, 1): [other]}
    assert disagreements(apart, apart) == []
    together = {Rank(0, 0): [said], Rank(0, 1): [other]}
    assert len(disagreements(together, together)) == 1


@pytest.mark.parametrize(
    "info, ranks",
    [
        (dict(tp_size=1), [(0, 0)]),
        (dict(tp_size=2), [(0, 0), (0, 1)]),
        (dict(tp_size=2, dp_size=2), [(0, 0), (0, 1), (1, 0), (1, 1)]),
        (dict(tp_size=2, attn_dp_size=2), [(0, 0), (1, 1)]),
        (
            dict(tp_size=4, attn_dp_size=2),
            [(0, 0), (0, 1), (1, 2), (1, 3)],
        ),
        (
            dict(tp_size=4, attn_dp_size=2, nnodes=2, node_rank=1),
            [(1, 2), (1, 3)],
        ),
    ],
)
def test_the_scheduler_processes_of_a_server(info, ranks):
    assert expected_ranks(INFO | info) == [Rank(*rank) for rank in ranks]


def test_the_digest_is_of_what_was_verified():
    def edits(**fields):
        series = Series("made up")
        series.relies_on("a:b", **({"feature": "f", "why": "w", "fingerprint": "1"} | fields))
        return digest([series])

    assert edits() == edits(why="another") and edits()[0] == 1
    assert edits() != edits(fingerprint="2")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "flags, ranks",
    [
        ("--tp-size 2", {"dp0 tp0", "dp0 tp1"}),
        ("--tp-size 2 --dp-size 2 --enable-dp-attention", {"dp0 tp0", "dp1 tp1"}),
    ],
    ids=["tp2", "dp attention"],
)
def test_real_ranks(model_path, tmp_path, flags, ranks):
    port = free_port()
    env = environment("exact", os.environ, storage=tmp_path / "storage")
    # Two ranks on two cores; SGLang asks which cores, and looks for a GPU's NCCL otherwise.
    env |= {"SGLANG_CPU_OMP_THREADS_BIND": "0|0", "SGLANG_NCCL_SO_PATH": "/nonexistent"}
    command = [*launch_command(model_path, port), *flags.split(), "--disable-custom-all-reduce"]
    document = tmp_path / "out.json"
    with ServerProcess(command, env, tmp_path / "log") as process:
        url = f"http://127.0.0.1:{port}"
        process.wait_until(SGLangClient(url).healthy, timeout_s=1500)
        arguments = f"check --url {url} --attest-only --json {document}"
        run = CliRunner().invoke(app, arguments.split())
        assert run.exit_code == 0, run.output
        exported = SGLangClient(url).metrics()
    # One rank of each attention group exports the counters, as with SGLang's own.
    counting = re.findall(r'^sglang:unified_kv_captures_total{.*tp_rank="(\d)"', exported, re.M)
    assert len(counting) == (2 if "attention" in flags else 1)
    assert json.loads(document.read_text())["attestation"].keys() == ranks
    log = (tmp_path / "log").read_text()
    for rank in ranks:
        assert log.count(f"Unified KV engaged on {rank} (") == 1

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
    START_SPREAD_S,
    Attestation,
    Rank,
    digest,
    disagreements,
    expected_ranks,
)
from sglang_unified_kv.cli import app
from sglang_unified_kv.cli.attest import said_by_ranks, started_by_ranks
from sglang_unified_kv.cli.client import SGLangClient
from sglang_unified_kv.cli.demo import environment, launch_command
from sglang_unified_kv.cli.server import ServerProcess, free_port
from sglang_unified_kv.hooking.series import Series
from typer.testing import CliRunner

SCRAPE = Path(__file__).with_name("two_ranks.metrics").read_text()
"""Of a server with two tensor-parallel ranks; other metrics left out."""
INFO = {
    "tp_size": 2,
    "dp_size": 1,
    "attn_dp_size": 1,
    "pp_size": 1,
    "nnodes": 1,
    "node_rank": 0,
}


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
    """``answer(scrape, **info)``: a server that answers with these, None for nothing; returns its address."""
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
        told = {name: value for name, value in (INFO | info).items() if value is not None}
        answers.update({"/server_info": json.dumps(told), "/metrics": scrape})
        return f"http://127.0.0.1:{server.server_port}"

    yield serve
    server.shutdown()
    thread.join()
    server.server_close()


def started(rank: int, when: float, scrape: str = SCRAPE) -> str:
    """``scrape`` of a server one rank of which started then."""
    return on_rank(rank, lambda line: f"{line.rpartition(' ')[0]} {when}\n", scrape)


def attest(url: str, *more: str):
    """Exit code and output of ``check --attest-only``, the output on one line."""
    run = CliRunner().invoke(app, ["check", "--url", url, "--attest-only", *more])
    return run.exit_code, " ".join(run.output.split())


def test_ranks_that_agree(answer):
    code, said = attest(answer(SCRAPE))
    assert code == 0, said
    assert said.startswith(
        "attestation: 2 of 2 ranks, started 2026-11-30 12:00:07 UTC: features=hicache "
    )
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
    assert (
        code == 1 and "- dp0 tp0 says 2 different things, so one is an earlier server's: " in said
    )
    assert "empty PROMETHEUS_MULTIPROC_DIR before the start" in said


def test_a_rank_of_another_server(answer):
    foreign = SCRAPE + "".join(
        line.replace('tp_rank="1"', 'tp_rank="2"') + "\n"
        for line in SCRAPE.splitlines()
        if 'tp_rank="1"' in line
    )
    code, said = attest(answer(foreign))
    assert code == 1 and said.startswith("- dp0 tp2: no rank of this server, so another one's: ")


@pytest.mark.parametrize("old", [0, 1])
def test_a_rank_that_an_earlier_server_left(answer, old):
    (latest,) = {said_at for rank, said_at in started_by_ranks(SCRAPE).items() if rank.tp != old}
    code, said = attest(answer(started(old, latest - START_SPREAD_S - 1)))
    assert code == 1
    assert said.startswith(f"- dp0 tp{old}: started more than 30 minutes before the latest rank")
    code, said = attest(answer(started(old, latest - START_SPREAD_S)))
    assert code == 0, said


def test_a_failure_is_written_too(answer, tmp_path):
    document = tmp_path / "out.json"
    url = answer(on_rank(1, with_label("records", "63")))
    # Without --attest-only too: no prompt is sent.
    for more in (["--attest-only"], []):
        arguments = ["check", "--url", url, "--json", str(document), *more]
        assert CliRunner().invoke(app, arguments).exit_code == 1
        written = json.loads(document.read_text())
        document.unlink()
        assert written.keys() == {"attestation", "reasons"}
        (reason,) = written["reasons"]
        assert reason.startswith("the ranks disagree on records: ")
        said = {rank: one["records"] for rank, one in written["attestation"].items()}
        assert said == {"dp0 tp0": "64", "dp0 tp1": "63"}
    twice = on_rank(0, lambda line: line + with_label("records", "63")(line))
    assert attest(answer(twice), "--json", str(document))[0] == 1
    several = json.loads(document.read_text())["attestation"]["dp0 tp0"]
    assert [one["records"] for one in several] == ["64", "63"]


def test_a_node_of_several(answer):
    url = answer(SCRAPE, tp_size=4, nnodes=2)
    code, said = attest(url)
    assert code == 0, said
    assert said.startswith("attestation: 2 of 2 ranks of this node (1 of 2), started ")
    code, said = attest(answer(SCRAPE, tp_size=4, nnodes=2, node_rank=1))
    assert code == 1 and said.endswith("attestation of this node (2 of 2): failed")


def test_a_server_goes_by_the_data_parallel_rank_that_it_was_given(answer):
    def numbered(*ranks):
        given = dict(zip((0, 1), ranks, strict=True))
        scrape = SCRAPE
        for tp, dp in given.items():
            scrape = on_rank(
                tp, lambda line, dp=dp: line.replace("{", f'{{dp_rank="{dp}",'), scrape
            )
        return attest(answer(scrape))

    assert numbered(3, 3)[0] == 0
    code, said = numbered(3, 4)
    assert code == 1 and "- dp0 tp0, dp0 tp1: no attestation" in said


def test_a_server_without_a_prefix_cache_is_asked_what_it_runs_alone(answer):
    url = answer(SCRAPE, disable_radix_cache=True, page_size=256)
    run = CliRunner().invoke(app, ["check", "--url", url])
    said = " ".join(run.output.split())
    assert run.exit_code == 2 and "attestation: 2 of 2 ranks" in said
    assert "runs with --disable-radix-cache and reuses no prefix" in said
    assert "give --attest-only to compare what its ranks run" in said
    assert attest(url)[0] == 0


@pytest.mark.parametrize("name", INFO)
def test_an_answer_that_lacks_a_size_is_no_servers(answer, name):
    code, said = attest(answer(SCRAPE, **{name: None}))
    assert code == 2 and f"/server_info: {name} is not there; give the address of a server" in said


def test_an_attestation_without_a_rank_is_no_servers(answer):
    code, said = attest(answer(SCRAPE.replace("tp_rank=", "other_rank=")))
    assert code == 2 and "/metrics: tp_rank is not there; give the address of a server" in said


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
    assert disagreements(apart, apart, dict.fromkeys(apart, 0.0)) == []
    together = {Rank(0, 0): [said], Rank(0, 1): [other]}
    assert len(disagreements(together, together, dict.fromkeys(together, 0.0))) == 1


TWO_NODES = dict(nnodes=2, node_rank=1, dist_init_addr="127.0.0.1:9")


@pytest.mark.parametrize(
    "options, ranks",
    [
        (dict(tp_size=1), [(0, 0)]),
        (dict(tp_size=2), [(0, 0), (0, 1)]),
        (dict(tp_size=2, dp_size=2), [(0, 0), (0, 1), (1, 0), (1, 1)]),
        (dict(tp_size=2, dp_size=2, enable_dp_attention=True), [(0, 0), (1, 1)]),
        (dict(tp_size=4, attn_dp_size=2), [(0, 0), (0, 1), (1, 2), (1, 3)]),
        (dict(tp_size=4, attn_dp_size=2, **TWO_NODES), [(1, 2), (1, 3)]),
        (dict(tp_size=4, **TWO_NODES), [(0, 2), (0, 3)]),
    ],
)
def test_the_scheduler_processes_of_a_server(model_path, options, ranks):
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils.common import build_server_info

    args = ServerArgs(
        model_path=str(model_path), device="cpu", page_size=256, skip_tokenizer_init=True, **options
    )
    args.resolve_once()
    assert expected_ranks(build_server_info(args, {})) == [Rank(*rank) for rank in ranks]


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
    command = [*launch_command(model_path, port), *flags.split()]
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

"""The arithmetic of ``check``, and its options; against real servers: test_live_server.py, test_server.py."""

import socket
import threading
from pathlib import Path

import pytest
import uvicorn
from fastapi import FastAPI
from sglang_unified_kv.cli import app
from sglang_unified_kv.cli.client import SOURCES, Generation
from sglang_unified_kv.cli.determinism import Plan, Report, compare, requests_of, stock_credit
from sglang_unified_kv.cli.server import free_port
from typer.testing import CliRunner


def generation(*tokens, cached=512, logprob=-1.0):
    sources = dict.fromkeys(SOURCES, 0) | {"device": cached}
    return Generation(tokens, (logprob,) * len(tokens), cached, sources)


def test_answers_are_counted_against_their_majority_and_against_the_cold_run():
    cold = generation(1, 2, cached=0)
    repeated = [generation(1, 3)] * 3 + [generation(1, 2)] + [generation(1, 2, logprob=-2.0)]
    result = compare(32, cold, repeated)
    assert (result.prompt_tokens, result.rounds) == (544, 5)
    assert (result.outside_majority, result.unlike_cold, result.logprobs_unlike_cold) == (2, 3, 1)
    assert result.hits_outside_majority == 2
    # A repetition that reused nothing is another cold run.
    missed = compare(32, cold, [*repeated[:3], generation(1, 2, cached=0)])
    assert (missed.outside_majority, missed.hits_outside_majority) == (1, 0)
    assert result.cached_tokens == {512: 5} and result.credit == 256
    assert result.cached_by == {"device": 5 * 512, "host": 0, "storage": 0}


def test_stock_keeps_the_last_window_out_of_a_hit():
    assert [stock_credit(n) for n in (100, 383, 384, 544, 639, 640, 672)] == [
        *(0, 0, 256, 256, 256, 512, 512),
    ]


def test_a_verdict_needs_hits_and_a_cold_first_run():
    def verdict(first_run, *repeated):
        result = compare(32, generation(1, cached=0), repeated)
        report = Report(Plan(), [result], {32: first_run})
        return report.verdict, [line.split(": ")[1][:12] for line in report.doubts()]

    hit, miss = generation(1), generation(1, cached=0)
    assert verdict(0, hit, miss) == ("deterministic", [])
    assert verdict(0, hit, miss, miss) == ("inconclusive", ["only 1 of 3 "])
    assert verdict(512, hit) == ("inconclusive", ["its first ru"])
    assert verdict(512, generation(2), miss, miss)[0] == "not deterministic"


def test_requests_are_counted_before_they_are_sent():
    assert requests_of(Plan(tails=(1, 2), churn=10, rounds=3)) == 28
    page = (Path(__file__).parents[2] / "docs" / "operating.md").read_text()
    assert f"`check` sends {requests_of(Plan()):,} requests unless told otherwise" in page


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--tails 16,x", "--tails '16,x': give different positive numbers"),
        ("--tails 16,16", "--tails '16,16': give different"),
        ("--token-ids ²-³", "--token-ids '²-³': give LOW-HIGH"),
        ("--json .", "--json .: is a folder"),
        ("--timeout 0", "--timeout"),
        ("--tails 0", "--tails '0'"),
        ("--token-ids 9-5", "--token-ids '9-5': give LOW-HIGH"),
        ("--json no/such/folder.json", "its folder does not exist"),
        ("--rounds 0", "--rounds"),
        ("--url localhost:9", "--url localhost:9: give http://host:port"),
    ],
)
def test_bad_options_are_named(arguments, words):
    run = CliRunner().invoke(app, ["check", "--url", "http://127.0.0.1:9", *arguments.split()])
    flat = " ".join(run.output.replace("│", " ").split())
    assert run.exit_code == 2 and words in flat, flat


@pytest.fixture
def locked():
    """URL of a web server behind SGLang's own check of API keys, and what got through."""
    let_through = []
    web = FastAPI()

    @web.get("/server_info")
    def server_info():
        let_through.append(True)
        return {"disable_radix_cache": True}

    from sglang.srt.utils.auth import add_api_key_middleware

    add_api_key_middleware(web, api_key="secret", admin_api_key=None)
    server = uvicorn.Server(uvicorn.Config(web, log_level="error"))
    # It listens before the thread runs, so requests wait.
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", let_through
        server.should_exit = True
        thread.join()


@pytest.mark.parametrize(
    "arguments, env, passes",
    [
        ([], {}, False),
        (["--api-key", "wrong"], {}, False),
        (["--api-key", "secret"], {}, True),
        ([], {"OPENAI_API_KEY": "secret"}, True),
    ],
)
def test_a_server_with_an_api_key_is_asked_with_it(locked, arguments, env, passes):
    url, let_through = locked
    command = ["check", "--url", url, "--no-attestation", "--tails", "16", "--rounds", "1"]
    run = CliRunner(env={"OPENAI_API_KEY": None} | env).invoke(app, [*command, *arguments])
    flat = " ".join(run.output.split())
    assert run.exit_code == 2 and bool(let_through) == passes
    remedy = "status 401" in flat and "give the --api-key that it was launched with" in flat
    assert remedy == (not passes), flat


def test_no_server_is_status_2():
    url = f"http://127.0.0.1:{free_port()}"
    for more in ("--attest-only", "--no-attestation"):
        run = CliRunner().invoke(
            app, ["check", "--url", url, "--tails", "16", "--rounds", "1", more]
        )
        assert run.exit_code == 2 and url in run.output

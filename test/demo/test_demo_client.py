"""The client against a scripted server: what it must retry, and what it must not accept."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from sglang_unified_kv.cli.client import SOURCES, ClientError, Generation, SGLangClient


@pytest.fixture
def server():
    """Answers with ``script``: (status, text) in turn; ``seen`` holds (method, path, body)."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.server.seen.append((self.command, self.path, body))
            status, text = self.server.script.pop(0)
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_POST = _answer

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.script, server.seen = [], []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def client(server):
    client = SGLangClient(f"http://127.0.0.1:{server.server_port}", timeout_s=60)
    yield client
    client.close()


def answer(logprobs=(-0.5, -2.384185791015625e-07), cached=0, details=None):
    entries = [[logprob, 10 + i, None] for i, logprob in enumerate(logprobs)]
    meta = {"output_token_logprobs": entries, "cached_tokens": cached}
    return {"meta_info": meta | ({"cached_tokens_details": details} if details else {})}


def test_generate_keeps_every_bit_and_tells_the_sources(server, client):
    logprob = -0.30000001192092896
    hit = answer(
        (logprob, -1.401298464324817e-45), cached=768, details={"device": 512, "host": 256}
    )
    server.script = [(200, json.dumps([hit, answer()]))]
    cached_by = {"device": 512, "host": 256, "storage": 0}
    first, second = client.generate_batch([[1, 2], [3]], max_new_tokens=2)
    assert first == Generation((10, 11), (logprob, -1.401298464324817e-45), 768, cached_by)
    assert second.cached_tokens == 0 and second.cached_by == dict.fromkeys(SOURCES, 0)
    ((method, path, body),) = server.seen
    assert (method, path) == ("POST", "/generate")
    assert json.loads(body) == {
        "input_ids": [[1, 2], [3]],
        "sampling_params": {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True},
        "return_logprob": True,
    }


@pytest.mark.parametrize(
    "bad",
    [
        [{"meta_info": {}}],
        [answer((-1.0,))],
        [answer((-1.0, float("nan")))],
        [answer((-1.0, None))],
        [answer((-1.0, -0.3))],
        [answer((-1.0, -1e300))],
        {"error": "busy"},
    ],
    ids=["no logprobs", "too short", "nan", "none", "rounded", "huge", "error"],
)
def test_generate_accepts_nothing_else(server, client, bad):
    server.script = [(200, json.dumps(bad))]
    with pytest.raises(ClientError, match="/generate"):
        client.generate([1], max_new_tokens=2)


def test_flush_is_asked_until_the_server_is_idle(server, client):
    server.script = [(400, "busy"), (400, "busy"), (200, "flushed")]
    client.flush_cache()
    assert [path.split("?")[0] for _, path, _ in server.seen] == ["/flush_cache"] * 3


def test_flush_that_is_never_done_is_an_error_with_the_servers_words(server, client):
    server.script = [(400, "requests are running")]
    with pytest.raises(ClientError, match="status 400: requests are running"):
        client.flush_cache(timeout_s=0)


def test_a_refusal_carries_status_and_text(server, client):
    server.script = [(500, "out of pages")]
    with pytest.raises(ClientError, match="/server_info: status 500: out of pages"):
        client.server_info()


def test_health_is_a_yes_or_a_no(server, client):
    server.script = [(503, ""), (200, "")]
    assert [client.healthy(), client.healthy()] == [False, True]
    server.shutdown()
    server.server_close()
    assert client.healthy() is False
    with pytest.raises(ClientError):
        client.server_info()


def test_proxies_of_the_environment_are_not_asked(server, client, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    server.script = [(200, "{}")]
    assert client.server_info() == {}

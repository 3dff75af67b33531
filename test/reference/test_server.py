"""The reference engine behind SGLang's own HTTP server: processes, tokenizer, OpenAI endpoints."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from sglang_unified_kv.reference.plugin import ENV

START_S = 300


@pytest.fixture(scope="module")
def post(model_path, tmp_path_factory):
    """``post(path, body)`` to a server of this module's own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log.txt"
    command = [sys.executable, "-W", "ignore", "-m", "sglang.launch_server"]
    command += ["--model-path", str(model_path), "--device", "cpu", "--disable-cuda-graph"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--page-size", "256"]
    command += ["--max-total-tokens", "4096", "--context-length", "4096"]
    command += ["--max-running-requests", "4", "--enable-cache-report", "--skip-server-warmup"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_UNIFIED_KV_")}
    with log.open("w") as output:
        server = subprocess.Popen(
            command, env={**environment, ENV: "1"}, stdout=output, stderr=subprocess.STDOUT
        )

    def post(path, body=None, timeout=120):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return json.loads(response.read() or "null")

    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                post("/model_info", timeout=5)
                break
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                assert server.poll() is None, log.read_text()[-4000:]
                assert time.monotonic() < deadline, log.read_text()[-4000:]
                time.sleep(0.5)
        yield post
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def test_text_completions_reuse_their_prefix(post):
    text = "The quick brown fox jumps over the lazy dog. " * 15
    body = {"model": "tiny", "prompt": text, "max_tokens": 6, "temperature": 0}
    first, second = post("/v1/completions", body), post("/v1/completions", body)
    assert first["usage"]["prompt_tokens"] > 600 and first["usage"]["completion_tokens"] == 6
    assert first["choices"][0]["text"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 512


def test_chat(post):
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Bonjour, ça va ?"}],
        "max_tokens": 5,
        "temperature": 0,
    }
    answer = post("/v1/chat/completions", body)
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["usage"]["prompt_tokens"] > 16

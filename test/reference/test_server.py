"""The reference engine behind SGLang's own HTTP server: processes, tokenizer, OpenAI endpoints."""

import collections
import json
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest
from sglang_unified_kv.cli import app
from sglang_unified_kv.reference.plugin import ENV
from typer.testing import CliRunner


@pytest.fixture(scope="module")
def url(model_path):
    """A stock server of this module's own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-m", "sglang.launch_server"]
    command += ["--model-path", str(model_path), "--device", "cpu"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--page-size", "256"]
    command += ["--max-total-tokens", "8192", "--context-length", "4096"]
    command += ["--max-running-requests", "4", "--enable-cache-report", "--skip-server-warmup"]
    command += ["--enable-fp32-lm-head"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_UNIFIED_KV_")}
    server = subprocess.Popen(
        command,
        env={**environment, ENV: "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )

    try:
        log = []
        for line in server.stdout:
            log.append(line)
            if "Uvicorn running on" in line:
                break
        else:
            pytest.fail("the server ended:\n" + "".join(log[-40:]))
        # Nobody reads the rest, but a full pipe would stop the server.
        drain = threading.Thread(target=collections.deque, args=(server.stdout, 0), daemon=True)
        drain.start()
        yield f"http://127.0.0.1:{port}"
    finally:
        # With its children: the session is the server's own.
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.mark.slow
def test_check_finds_the_fault_of_stock(url, tmp_path):
    arguments = (
        f"check --url {url} --tails 32,160 --rounds 4 --churn 4 --churn-tokens 140 --batch 1 "
        "--no-attestation"
    )
    arguments += f" --output-tokens 8 --token-ids 6-1023 --seed 7 --json {tmp_path / 'out.json'}"
    run = CliRunner().invoke(app, arguments.split())
    assert run.exit_code == 1 and "not deterministic" in run.output, run.output
    document = json.loads((tmp_path / "out.json").read_text())
    near, far = document["tails"]
    # Stock keeps the last window out of a hit, and still reads rows of whoever had the slot.
    assert (near["cached_tokens"], far["cached_tokens"]) == ({"256": 4}, {"512": 4})
    assert (near["credit"], far["credit"]) == (0, 0)
    assert near["unlike_cold"] == far["unlike_cold"] == 4
    assert document["verdict"] == "not deterministic" and len(document["faults"]) >= 2
    arguments = f"check --url {url} --tails 32 --rounds 1 --churn 0 --token-ids 6-1023 --seed 7"
    without = CliRunner().invoke(app, arguments.split())
    assert without.exit_code == 2 and "launch it with --enable-metrics" in without.output
    arguments += " --no-attestation"
    again = CliRunner().invoke(app, arguments.split())
    assert again.exit_code in (1, 2) and "use another --seed" in " ".join(again.output.split())

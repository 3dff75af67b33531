"""The ``demo`` command: the real thing from end to end, and every way to leave it early."""

import importlib
import json
import os
import re
import select
import signal
import subprocess
import sys

import pytest
from sglang_unified_kv.cli import app
from sglang_unified_kv.cli.demo_verdict import CASE_NAMES
from sglang_unified_kv.cli.signals import signals_unwind
from sglang_unified_kv.config import BIT_EXACT_HICACHE
from typer.testing import CliRunner

# The package's attribute of this name is the command.
demo = importlib.import_module("sglang_unified_kv.cli.demo")
DEMO = [sys.executable, "-m", "sglang_unified_kv.cli", "demo"]
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


@pytest.mark.timeout(1800)
def test_the_demo_shows_the_fault_of_stock_and_exact_without_it(tmp_path):
    run = subprocess.run(
        [*DEMO, "--json", "out.json", "--picture", "out.png", "--keep-logs", "logs"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert run.returncode == 0, run.stdout
    assert run.stdout.strip().splitlines()[-1] == "verdict: exact"
    document = json.loads((tmp_path / "out.json").read_text())
    assert sorted(document) == ["cases", "sglang", "verdict"]
    assert (document["sglang"], document["verdict"]) == ("0.5.23", "exact")
    cases = {case.pop("name"): case for case in document["cases"]}
    assert sorted(cases) == sorted(CASE_NAMES)
    for name, case in cases.items():
        assert name in run.stdout
        if name.startswith("exact"):
            assert case == {
                "cached_tokens": 512 if name.endswith("/700") else 2560,
                "tokens_equal": True,
                "logprobs_equal": True,
                "max_abs_dlogprob": 0.0,
            }
    stock = [case for name, case in cases.items() if name.startswith("stock")]
    assert any(case["max_abs_dlogprob"] > 0 and not case["logprobs_equal"] for case in stock)
    picture = (tmp_path / "out.png").read_bytes()
    assert picture.startswith(PNG_MAGIC) and len(picture) > 20_000
    assert sorted(p.name for p in (tmp_path / "logs").iterdir()) == ["exact.log", "stock.log"]
    assert "Bit-exact HiCache is engaged" not in (tmp_path / "logs/stock.log").read_text()
    log = (tmp_path / "logs/exact.log").read_text()
    assert "Bit-exact HiCache is engaged" in log and "Unified KV engaged on dp0 tp0" in log
    assert "matched=0 loaded=2560" in log
    assert "Traceback" not in log, "it did not shut down cleanly"


def server_pids(text):
    return [int(pid) for pid in re.findall(r"sglang.launch_server is process (\d+)", text)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_no_server(tmp_path, number):
    run = subprocess.Popen(
        DEMO,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A test run in the background of a script ignores SIGINT, and what it starts would as well.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    begin = run.stdout.readline() + run.stdout.readline()
    servers = [os.pidfd_open(pid) for pid in server_pids(begin)]
    assert len(servers) == 2, begin + run.stdout.read()
    run.send_signal(number)
    output, _ = run.communicate(timeout=120)
    assert run.returncode != 0 and "verdict" not in output and "Traceback" not in output
    assert all(select.select([server], [], [], 60)[0] for server in servers)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_comes_inside_a_lock_is_still_a_signal(number):
    with pytest.raises(SystemExit) as ended, signals_unwind():
        try:
            signal.raise_signal(number)
        finally:
            raise RuntimeError("release unlocked lock")
    assert ended.value.code == 128 + number


def test_a_server_that_dies_ends_the_demo_and_the_other_server(tmp_path, monkeypatch):
    code = (
        "import os, signal\n"
        f"if {BIT_EXACT_HICACHE!r} in os.environ: signal.pause()\n"
        "raise SystemExit('the [loader] found no weights')"
    )
    command = [sys.executable, "-c", code]
    monkeypatch.setattr(demo, "launch_command", lambda model, port: command)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["demo", "--json", "out.json"])
    assert result.exit_code == 2
    assert "stock: the server ended with exit code 1" in result.output
    assert "the [loader] found no weights" in result.output
    assert len(server_pids(result.output)) == 2
    for pid in server_pids(result.output):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["requests", "matplotlib"])
def test_a_missing_library_names_the_extra(tmp_path, name):
    code = (
        f"import sys; sys.modules[{name!r}] = None; from sglang_unified_kv.cli import app; "
        "app(['demo'])"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 2, run.stderr
    assert f"This command needs {name}." in run.stdout
    assert "pip install 'sglang-unified-kv[demo]'" in " ".join(run.stdout.split())


@pytest.mark.parametrize("option", ["--json", "--picture"])
def test_a_missing_folder_is_refused_before_any_work(tmp_path, monkeypatch, option):
    monkeypatch.setattr(demo, "_run", None)
    result = CliRunner().invoke(app, ["demo", option, str(tmp_path / "none" / "file")])
    assert result.exit_code == 2
    assert "its folder does not exist" in " ".join(result.output.split())


def test_servers_differ_in_the_product_flag_alone():
    base = {"PATH": "/bin", "SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE": "1", "SGLANG_PLUGINS": "other"}
    stock, exact = (
        demo.environment(server, base, storage="/storage") for server in ("stock", "exact")
    )
    assert stock == {
        "PATH": "/bin",
        "OMP_NUM_THREADS": "1",
        "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": "/storage",
        "SGLANG_UNIFIED_KV_REFERENCE_ENGINE": "1",
    }
    assert exact == stock | {"SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE": "1"}

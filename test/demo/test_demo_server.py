"""Servers are started as told, their failures are shown, and nothing of them is left running."""

import os
import select
import subprocess
import sys

import pytest
from sglang_unified_kv.cli.server import ServerFailed, ServerProcess, free_port

# Starts a child that ignores SIGTERM, tells its id, and lives on.
PARENT = """
import signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c",
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); "
    "signal.pause()"], stdout=subprocess.PIPE)
child.stdout.readline()
print(f"child {child.pid}", flush=True)
signal.pause()
"""


def running(code, log, env=None):
    return ServerProcess([sys.executable, "-c", code], os.environ if env is None else env, log)


def ends(pidfd):
    """Whether the process ends; a killed one does at once, whoever reaps it."""
    return bool(select.select([pidfd], [], [], 60)[0])


def test_a_server_that_dies_is_reported_with_its_code_and_last_lines(tmp_path):
    code = "print(*range(100), sep='\\n'); raise SystemExit('no such model')"
    with running(code, tmp_path / "log") as server:
        with pytest.raises(ServerFailed, match="ended with exit code 1"):
            server.wait_until(lambda: False, timeout_s=60)
        lines = server.tail(3).splitlines()
    assert lines == ["98", "99", "no such model"]


def test_a_server_that_is_never_healthy_is_given_up(tmp_path):
    with running("import signal; signal.pause()", tmp_path / "log") as server:
        leader = os.pidfd_open(server.pid)
        with pytest.raises(ServerFailed, match="not healthy within 0 s"):
            server.wait_until(lambda: False, timeout_s=0)
    assert ends(leader)


@pytest.mark.parametrize("leave", [None, KeyboardInterrupt])
def test_leaving_the_block_ends_the_whole_group(tmp_path, leave):
    log = tmp_path / "log"
    try:
        with running(PARENT, log) as server:
            server.wait_until(lambda: log.read_text().endswith("\n"), timeout_s=60)
            group = [os.pidfd_open(pid) for pid in (server.pid, int(log.read_text().split()[1]))]
            if leave is not None:
                raise leave
    except KeyboardInterrupt:
        assert leave is KeyboardInterrupt
    assert all(map(ends, group))


def test_a_restarted_server_is_another_process_with_the_same_log(tmp_path):
    log = tmp_path / "log"
    with running("print('up', flush=True); import signal; signal.pause()", log) as server:
        server.wait_until(lambda: log.read_text() == "up\n", timeout_s=60)
        first = os.pidfd_open(server.pid)
        server.restart()
        assert ends(first)
        server.wait_until(lambda: log.read_text() == "up\nup\n", timeout_s=60)
        second = os.pidfd_open(server.pid)
    assert ends(second)
    with pytest.raises(ServerFailed, match="stopped for good"):
        server.restart()


def test_the_environment_is_exactly_the_one_given(tmp_path):
    code = "import os; print(sorted(os.environ))"
    log = tmp_path / "log"
    env = {"LC_ALL": "C.UTF-8", "ONLY": "this"}
    with running(code, log, env) as server:
        server.wait_until(lambda: log.read_text().endswith("\n"), timeout_s=60)
    assert log.read_text().strip() == "['LC_ALL', 'ONLY']"


def test_a_free_port_can_be_listened_on():
    code = "import socket, sys; socket.create_server(('127.0.0.1', int(sys.argv[1])))"
    subprocess.run([sys.executable, "-c", code, str(free_port())], check=True)

"""``sglang-unified-kv edits --verify``: what differs, on a doctored SGLang and on real releases."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from zipfile import ZipFile

import pytest

from scripts import BREAK, INERT, LOAD, ON

VERIFY = "import sys; from sglang_unified_kv.cli import app; app(sys.argv[1:])"
JSON = ["x", "edits", "--verify", "--json"]

# One difference of each kind.
DOCTORED = BREAK + (
    "from sglang.srt.beam_search.coordinator import BeamCoordinator\n"
    "from sglang.srt.plugins.hook_registry import HookRegistry, HookType\n"
    "import sglang.srt.mem_cache.common as common, torch\n"
    "del arg_utils.add_cli_args_from_dataclass\n"
    "rewrite(server_args.ServerArgs, 'check_server_args', '(self)', '(self, strict)')\n"
    "rewrite(BeamCoordinator, 'validate_and_init', 'page_size > 1', 'page_size > 512')\n"
    "common.touch_waiting_prefix = torch.ops.aten.add\n"
    "HookRegistry.register('sglang.srt.model_executor.model_runner.ModelRunner.forward',\n"
    "                      print, HookType.AFTER)\n"
)
EXPECTED = {
    "sglang.srt.arg_groups.arg_utils:add_cli_args_from_dataclass": "missing",
    "sglang.srt.model_executor.model_runner:ModelRunner.forward": "superseded by another hook",
    "sglang.srt.mem_cache.common:touch_waiting_prefix": "no Python function any more",
    "sglang.srt.server_args:ServerArgs.check_server_args": "signature changed",
    "sglang.srt.beam_search.coordinator:BeamCoordinator.validate_and_init": "body changed",
}


def findings(report):
    return {row["target"]: row for one in report["series"].values() for row in one["findings"]}


def test_every_kind_of_difference_is_told_apart(forks):
    ended = forks.run(DOCTORED + VERIFY, argv=JSON)
    assert ended.rc == 1, ended.stderr
    report = json.loads(ended.stdout)
    found = findings(report)
    assert {target: row["problem"] for target, row in found.items()} == EXPECTED
    row = found["sglang.srt.server_args:ServerArgs.check_server_args"]
    assert (row["expected"], row["found"]) == ("(self)", "(self, strict)")
    assert row["place"].startswith("sglang/srt/server_args.py:")
    assert report["series"]["sglang_unified_kv"]["edits"] > len(found)


def test_in_words_findings_are_grouped_and_say_what_to_do(forks):
    ended = forks.run(DOCTORED + VERIFY, {"COLUMNS": "200"}, argv=JSON[:-1])
    assert ended.rc == 1, ended.stderr
    text = ended.stdout
    heads = [text.index(f"Exact reuse: {problem} (1)") for problem in EXPECTED.values()]
    assert heads == sorted(heads)
    for target in EXPECTED:
        assert f"  - {target}\n" in text
    assert text.count("  to do: ") == len(EXPECTED)
    assert (
        "      expected (self)\n      found    (self, strict) at sglang/srt/server_args.py:" in text
    )
    assert "installed: sglang 0.5.23; the edits are written for 0.5.23" in text


def test_the_pinned_release_is_as_expected(forks):
    ended = forks.run(VERIFY, argv=JSON)
    assert ended.rc == 0, ended.stdout
    assert findings(json.loads(ended.stdout)) == {}


def test_the_same_source_under_another_version_is_not(forks, tmp_path):
    info = tmp_path / "sglang-0.5.24.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.24\n")
    ended = forks.run(VERIFY, path=[tmp_path], argv=JSON)
    assert (ended.rc, json.loads(ended.stdout)["installed"]) == (1, "0.5.24")


def test_without_sglang(forks, tmp_path):
    script = (
        "import importlib.metadata as m\n"
        "def version(name): raise m.PackageNotFoundError(name)\n"
        "m.version = version\n"
    )
    ended = forks.run(script + VERIFY, argv=JSON)
    assert (ended.rc, ended.stdout) == (2, "")
    assert "sglang is not installed; install sglang==0.5.23" in ended.stderr


@pytest.fixture(scope="module", params=["0.5.22", "0.5.21"])
def release(request, tmp_path_factory):
    """(version, folder) of a release that is unpacked but not installed."""
    folder = tmp_path_factory.mktemp(request.param)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    done = subprocess.run(
        [*pip, f"sglang=={request.param}"], capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        pytest.skip(f"the registry does not give sglang {request.param}: {done.stderr[-300:]}")
    (wheel,) = folder.glob("*.whl")
    with ZipFile(wheel) as packed:
        packed.extractall(folder)
    return request.param, folder


def in_release(folder, script, environ=None, argv=()):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_")}
    path = os.pathsep.join([str(folder), *filter(None, [clean.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, *argv],
        env=clean | {"PYTHONPATH": path} | (environ or {}),
        capture_output=True,
        text=True,
        timeout=500,
    )


PROBLEMS = ("missing", "no Python function any more", "signature changed", "body changed")


def counted(report):
    """Of each series: edits as expected, then those of each problem."""
    found = {}
    for name, one in report["series"].items():
        problems = Counter(row["problem"] for row in one["findings"])
        counts = [problems.pop(problem, 0) for problem in PROBLEMS]
        assert not problems
        found[name] = [one["edits"] - sum(counts), *counts]
    return list(found.values())


def rehearsed(version):
    """The rows of docs/upgrading.md, which has the series in the same order."""
    text = (Path(__file__).parents[2] / "docs" / "upgrading.md").read_text()
    rows = re.findall(rf"^\| .*\| {re.escape(version)} \| ([\d |]+) \|$", text, re.M)
    return [[int(count) for count in row.split("|")] for row in rows]


def test_the_pages_excerpt_counts_as_its_table_does():
    text = (Path(__file__).parents[2] / "docs" / "upgrading.md").read_text()
    shown = re.findall(r"^(\w[\w ]+): ([a-z][\w ]+) \((\d+)\)$", text, re.M)
    assert len(shown) > 2
    for name, problem, count in shown:
        (row,) = re.findall(rf"^\| {name} \| \d+ \| 0.5.22 \| ([\d |]+) \|$", text, re.M | re.I)
        assert row.split(" | ")[1 + PROBLEMS.index(problem)] == count, (name, problem)


@pytest.mark.slow
def test_an_older_release_is_told_apart_and_refused(release):
    version, folder = release
    done = in_release(folder, VERIFY, argv=JSON[1:])
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert report["installed"] == version
    assert counted(report) == rehearsed(version)

    script = (
        "from sglang.srt.plugins import load_plugins\n"
        "from sglang.srt.plugins.hook_registry import HookRegistry\n"
        "try:\n    load_plugins()\nfinally:\n"
        "    print([t for t, hooks in HookRegistry._hooks.items() for _, _, s in hooks\n"
        "           if s and s.dist_name == 'sglang-unified-kv'])"
    )
    switches = ON | {"SGLANG_UNIFIED_KV_RING_FIXES": "1", "SGLANG_UNIFIED_KV_HISPARSE": "1"}
    done = in_release(folder, script, switches)
    assert (done.returncode, done.stdout) == (1, "[]\n"), done.stderr
    assert f"sglang {version} is installed, the edits are written for 0.5.23" in done.stderr
    product = [one for name, one in report["series"].items() if not name.endswith("reference")]
    for row in (row for one in product for row in one["findings"]):
        assert f"{row['kind']} {row['target']}: " in done.stderr


@pytest.mark.slow
def test_off_an_older_release_is_left_alone(release):
    _, folder = release
    script = LOAD + (
        "import sys\n"
        "print(sorted(m for m in sys.modules if m.startswith('sglang_unified_kv') and 'reference' not in m))"
    )
    done = in_release(folder, script)
    assert done.returncode == 0, done.stderr
    assert done.stdout == INERT

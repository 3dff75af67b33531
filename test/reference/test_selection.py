"""The engine is chosen by its variable and by nothing else; what cannot start ends the process."""

import json
import os
import subprocess
import sys

import pytest
from sglang_unified_kv.hooking import series as hooking
from sglang_unified_kv.reference.edits import SERIES
from sglang_unified_kv.reference.ops import arithmetic
from sglang_unified_kv.reference.plugin import (
    CHUNK_INVARIANT_ENV,
    ENV,
    REQUIRED_ENVIRONMENT,
    register,
)

LOAD = "from sglang.srt.plugins import load_plugins; load_plugins()"


def run(code, **environment):
    """``code`` in a fresh interpreter whose environment knows nothing of this package but what is given."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SGLANG_") and name not in REQUIRED_ENVIRONMENT
    }
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_off_every_target_is_upstreams_own(forks):
    """With every plugin loaded, in a process that then imports all that the engine would replace."""
    code = f"""
{LOAD}
import json, os, sys
from pathlib import Path
import sglang
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang_unified_kv.hooking.upstream import ABSENT, foreign_layer, resolve
ours = sorted(m for m in sys.modules if m.startswith("sglang_unified_kv.reference"))
hooked = [t for t, hooks in HookRegistry._hooks.items()
          if any("reference" in source.plugin_name for _, _, source in hooks)]
replaced = []
for target in {[edit.target for edit in SERIES]!r}:
    found = resolve(target).get()
    if found is not ABSENT and foreign_layer(found, Path(sglang.__file__).parent):
        replaced.append(target)
changed = sorted(set({list(REQUIRED_ENVIRONMENT)!r}) & set(os.environ))
print(json.dumps([ours, changed, hooked, replaced]))
"""
    result = forks.run(code)
    assert result.rc == 0, result.stderr
    ours, changed, hooked, replaced = json.loads(result.stdout.splitlines()[-1])
    assert ours == ["sglang_unified_kv.reference", "sglang_unified_kv.reference.plugin"]
    assert (changed, hooked, replaced) == ([], [], [])


@pytest.mark.parametrize("environment", [{}, {ENV: "0"}])
def test_off_the_entry_imports_the_standard_library_only(environment):
    code = """
import sys
before = set(sys.modules)
from sglang_unified_kv.reference.plugin import register
register()
new = {m.partition(".")[0] for m in set(sys.modules) - before}
print(sorted(new - set(sys.stdlib_module_names)))
"""
    result = run(code, **environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "['sglang_unified_kv']"


def test_on_every_edit_is_live(make_engine):
    assert os.environ[ENV] == "1"
    assert SERIES.audit() == []
    assert REQUIRED_ENVIRONMENT.items() <= os.environ.items()


@pytest.mark.parametrize(("value", "invariant"), [(None, True), ("1", True), ("0", False)])
def test_chunk_invariance_switch(monkeypatch, value, invariant):
    monkeypatch.setattr(SERIES, "apply", lambda: None)
    monkeypatch.setenv(ENV, "1")
    monkeypatch.delenv(CHUNK_INVARIANT_ENV, raising=False)
    if value is not None:
        monkeypatch.setenv(CHUNK_INVARIANT_ENV, value)
    try:
        register()
        assert arithmetic.chunk_invariant() is invariant
    finally:
        arithmetic.set_chunk_invariant(True)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({ENV: "yes"}, f"{ENV}='yes': must be 0 or 1"),
        ({ENV: ""}, f"{ENV}='': must be 0 or 1"),
        ({ENV: "1", CHUNK_INVARIANT_ENV: "on"}, f"{CHUNK_INVARIANT_ENV}='on': must be 0 or 1"),
        (
            {ENV: "1", "SGLANG_HACK_FLASHMLA_BACKEND": "triton"},
            "SGLANG_HACK_FLASHMLA_BACKEND='triton': the reference engine needs 'unified_kv_triton'",
        ),
    ],
)
def test_a_value_it_cannot_serve_is_named(environment, message):
    code = "from sglang_unified_kv.reference.plugin import register; register(); print('on')"
    result = run(code, **environment)
    assert (result.returncode, result.stdout) == (1, "")
    assert message in result.stderr


def test_sglang_cannot_go_on_without_it(forks):
    """SGLang swallows a plugin's exceptions and does not load plugins twice; this ends it both times."""
    code = """
from sglang.srt.plugins import load_plugins
try:
    load_plugins()
except SystemExit as stop:
    assert stop.code == 1
    load_plugins()
print("served without the engine")
"""
    result = forks.run(code, {ENV: "yes"})
    assert result.rc == 1
    assert result.stderr.count("must be 0 or 1") == 2
    assert "served" not in result.stdout


def test_a_changed_sglang_is_refused_with_every_reason(monkeypatch, capsys):
    findings = ["replace a:b: source fingerprint is 1, expected 2", "wrap c:d: target is missing"]
    monkeypatch.setattr(hooking, "preflight", lambda series: findings)
    for name in REQUIRED_ENVIRONMENT:
        monkeypatch.setenv(name, REQUIRED_ENVIRONMENT[name])
    monkeypatch.setenv(ENV, "1")
    from sglang.srt import plugins

    monkeypatch.setattr(plugins, "_plugins_loaded", True)
    with pytest.raises(SystemExit) as stop:
        register()
    assert stop.value.code == 1
    assert plugins._plugins_loaded is False
    message = capsys.readouterr().err
    assert all(finding in message for finding in findings)


def test_every_edit_says_what_it_was_written_against():
    for one in SERIES:
        assert one.fingerprint, one.target
        assert one.why and one.feature
    assert len({edit.target for edit in SERIES}) == len(SERIES)


def test_it_leaves_the_products_targets_alone():
    """Both plugins may be active in one process."""
    owned = (
        "_forward_unified_kv",
        "_forward_compress_all_in_one",
        "ModelRunner.",
        "Scheduler.",
        "ServerArgs.",
        "UnifiedRadixCache",
        "create_unified_radix_cache",
    )
    assert not [e.target for e in SERIES if any(name in e.target for name in owned)]
